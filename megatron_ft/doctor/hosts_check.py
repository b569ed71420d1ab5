"""``megatron-ft doctor`` on all hosts of a run: host 0 collects, compares and names the hosts that must not take part.

Every host examines itself, connects to host 0 and answers its orders; host 0 does so over a connection to itself and
can be found faulty like any other host. Failures assumed: a host is missing, ends, freezes or is cut off at any moment.
Every order has a time limit, and a host that exceeds it is named and left out of the following orders.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Console

from megatron_ft.auth.handshake import Door
from megatron_ft.auth.secret import Secret
from megatron_ft.doctor import bandwidth, disk, local, meeting, outliers, versions
from megatron_ft.doctor.doctor_report import BROKEN, MISSING, Report, listed, rate
from megatron_ft.doctor.meeting import Channel, Meeting, Message
from megatron_ft.types import given
from megatron_ft.utils import shared_file
from megatron_ft.utils.terminal import printable

SEND = "doctor sends"
"""Purpose of the key for the connections of the bandwidth test."""
_POLL_S = 0.1
_HELLO_S = 5.0
_EXAMINE_S = 900.0
"""Host 0 may import torch from a slow file system before it gives its first order."""
_ORDER_S = 60.0
"""Longest time between two later orders."""
_ANSWER_S = 5.0
_CLOCK_READINGS = 8
_SKEW_S = 0.5
_REPEATS = 2
"""Slow connections are measured again: a short disturbance must not name a host."""
_FREE_BYTES = 1 << 30
_CARD = {"name", "address", "port"}


def run_together(where: Meeting, console: Console, as_json: bool, factor: float) -> int:
    """Runs this host's part. Returns 0 when all hosts are ready, else 1; the same on all hosts."""
    if where.rank != 0:
        code, line = attend(where, examine())
        print(printable(f"host {where.rank}: {line}"), file=sys.stderr if as_json else console.file, flush=True)
        return code
    report = _lead(where, factor)
    if as_json:
        print(json.dumps(report.to_json(), indent=1), file=console.file)
    else:
        report.table().show(console)
        print(printable(report.verdict()), file=console.file)
    return 0 if report.ready else 1


# --- every host -------------------------------------------------------------------------------------------------------


def examine() -> Message:
    """Returns what this host reports about itself."""
    findings = local.examine()
    return {
        "findings": [asdict(finding) for finding in findings],
        "versions": versions.here(findings),
    }


def attend(where: Meeting, examined: Message) -> tuple[int, str]:
    """Answers orders until host 0 ends the check. Returns the exit code and the last line; raises ``LaunchError``."""
    receivers: list[tuple[bandwidth.Receiver, Secret]] = []

    def hello(own: str, secret: Secret) -> Message:
        for receiver, _ in receivers:  # of an earlier attempt
            receiver.close()
        receivers[:] = [(bandwidth.Receiver(own, secret.of(SEND)), secret)]
        card = {"name": socket.gethostname(), "address": own, "port": receivers[0][0].port}
        return {"rank": where.rank, "hosts": where.hosts, "job": where.job, "card": card}

    channel = meeting.reach(where, hello)
    try:
        return (1, channel) if isinstance(channel, str) else _serve(where, channel, receivers[0][1], examined)
    finally:
        for receiver, _ in receivers:
            receiver.close()


def _serve(where: Meeting, channel: Channel, secret: Secret, examined: Message) -> tuple[int, str]:
    limit_s = _EXAMINE_S
    try:
        while True:
            order = channel.receive(limit_s)
            limit_s = _ORDER_S
            match order["do"]:
                case "examine":
                    answer = examined
                case "clock":
                    answer = {"time": time.time()}
                case "disk":
                    answer = _disk(where, order["token"])
                case "send":
                    answer = _send(order["to"], secret)
                case _:
                    return order["code"], order["line"]
            with contextlib.suppress(OSError):  # host 0 may have given this host up, and says so in its next message
                channel.send(answer)
    except TimeoutError:
        return 1, f"host 0 ({channel.peer}) has been silent for {limit_s:g} s: it is frozen or cut off"
    except OSError:
        return 1, f"host 0 ({channel.peer}) has ended before the check was complete; see its output"
    finally:
        channel.close()


def _disk(where: Meeting, token: str) -> Message:
    if where.directory is None:
        return {"error": "--directory is missing on this host and given on host 0"}
    return disk.try_out(where.directory, token)


def _send(to: Mapping[str, Any] | None, secret: Secret) -> Message:
    if to is None:
        return {}
    try:
        return {"bytes_s": bandwidth.send_rate(to["address"], to["port"], secret.of(SEND))}
    except OSError as error:
        return {"bytes_s": 0.0, "error": error.strerror or str(error)}


# --- host 0 -----------------------------------------------------------------------------------------------------------


class Hub:
    """Host 0's connections to all hosts.

    Attributes:
        cards: name, address and port of each host that has connected.
        gone: reason for each host that takes part no longer.
    """

    def __init__(self, listener: socket.socket, where: Meeting, secret: Secret) -> None:
        self.cards: dict[int, dict[str, Any]] = {}
        self.gone: dict[int, str] = {}
        self._where = where
        self._channels: dict[int, Channel] = {}
        self._lock = threading.Lock()
        self._open = True
        self._door = Door(listener, secret.of(meeting.MEET), self._welcome, "megatron_ft-doctor-hub", _HELLO_S)

    @property
    def present(self) -> list[int]:
        return sorted(self._channels.keys() - self.gone.keys())

    def wait(self, patience_s: float) -> None:
        """Waits until all hosts have connected, at most ``patience_s``. Hosts that connect later are refused."""
        end = time.monotonic() + patience_s
        while len(self._channels) < self._where.hosts and time.monotonic() < end:
            time.sleep(_POLL_S)
        with self._lock:
            self._open = False

    def ask(self, orders: Mapping[int, Message], timeout_s: float) -> dict[int, Message]:
        """Gives the orders and returns the answers. A host that does not answer within ``timeout_s`` is gone."""
        answers: dict[int, Message] = {}
        end = time.monotonic() + timeout_s
        for host in set(orders) & set(self.present):
            with self._leaving(host, timeout_s, orders[host]["do"]):
                self._channels[host].send(orders[host])
        for host in set(orders) & set(self.present):
            with self._leaving(host, timeout_s, orders[host]["do"]):
                answers[host] = self._channels[host].receive(max(_POLL_S, end - time.monotonic()))
        return answers

    def ask_all(self, order: Message, timeout_s: float) -> dict[int, Message]:
        return self.ask(dict.fromkeys(self.present, order), timeout_s)

    def end(self, code: int, line: str) -> None:
        """Tells all hosts the verdict and closes all connections."""
        for host in self.present:
            with contextlib.suppress(OSError):
                self._channels[host].send({"do": "end", "code": code, "line": line})
        self.close()

    def close(self) -> None:
        self._door.close()
        for channel in list(self._channels.values()):
            channel.close()

    @contextlib.contextmanager
    def _leaving(self, host: int, timeout_s: float, doing: str) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            why = f"its {self._where.command} has ended (order: {doing})"
            if isinstance(error, TimeoutError):
                why = f"no answer within {timeout_s:g} s (order: {doing}): it is frozen or cut off"
            self.gone[host] = why
            line = f"host 0 has continued without this host: {why}"
            with contextlib.suppress(OSError):
                self._channels[host].send({"do": "end", "code": 1, "line": line})

    def _welcome(self, connection: socket.socket, hello: Message) -> None:
        rank, card = hello["rank"], hello["card"]
        if not isinstance(rank, int) or not isinstance(card, dict) or not card.keys() >= _CARD:
            raise ValueError("the first message has no rank or no card")
        channel = Channel(connection)
        with self._lock:
            refused = self._refusal(rank, hello)
            if not refused:
                self._channels[rank], self.cards[rank] = channel, card
                try:
                    channel.send({"welcome": True})  # wait() takes the lock, so no order can precede it
                except OSError:  # the host connects again
                    del self._channels[rank], self.cards[rank]
                    raise
        if refused:
            channel.send({"refused": refused})
            channel.close()

    def _refusal(self, rank: int, hello: Message) -> str:
        hosts, job = self._where.hosts, self._where.job
        if hello.get("job") != job:
            return f"--job-id is {hello.get('job')} on this host and {job} on host 0; give all hosts the same"
        if hello.get("hosts") != hosts or rank not in range(hosts):
            return f"--hosts is {hello.get('hosts')} on this host and {hosts} on host 0; give all hosts the same"
        if rank in self._channels:
            card = self.cards[rank]
            return f"--host-rank {rank} is taken by {card['name']} ({card['address']}); give each host its own"
        return "" if self._open else "host 0 has begun without this host; start it on all hosts at the same time"


def _lead(where: Meeting, factor: float) -> Report:
    where = meeting.with_secret(where)
    listener = meeting.listen(where)
    address, port = listener.getsockname()[:2]
    hub = Hub(listener, where, given(where.secret))
    itself = Meeting(
        where.hosts, 0, (address, port), where.job, where.directory, where.address or address, secret=where.secret
    )
    try:
        with meeting.announced(where, listener):
            examined = examine()
            own = threading.Thread(target=attend, args=(itself, examined), name="megatron_ft-doctor-own", daemon=True)
            own.start()
            hub.wait(where.patience_s)
        report = Report(_names(where, hub.cards))
        report.raw["hosts"] = {str(rank): card for rank, card in sorted(hub.cards.items())}
        _present(report, hub, where, address)
        _own(report, hub.ask_all({"do": "examine"}, _ANSWER_S))
        _clocks(report, hub)
        if where.directory is not None:
            _disks(report, hub, where)
        if len(hub.present) > 1:
            _bandwidth(report, hub, factor)
        for rank, reason in sorted(hub.gone.items()):
            report.bad("present", [rank], reason, "see the output of doctor on that host")
        hub.end(0 if report.ready else 1, report.verdict())
        return report
    finally:
        hub.close()


def _names(where: Meeting, cards: Mapping[int, Mapping[str, Any]]) -> dict[int, str]:
    """Host names; with the address where several hosts, such as containers, have the same name."""
    count = Counter(card["name"] for card in cards.values())
    names = {rank: where.name(rank) for rank in range(where.hosts)}
    for rank, card in cards.items():
        names[rank] = card["name"] if count[card["name"]] == 1 else f"{card['name']}({card['address']})"
    return names


def _present(report: Report, hub: Hub, where: Meeting, address: str) -> None:
    absent = [rank for rank in range(where.hosts) if rank not in hub.cards]
    within = f"within {where.patience_s:g} s"
    if where.hosts > 2 and len(absent) == where.hosts - 1:
        remedy = f"start doctor on hosts {absent[0]} to {absent[-1]}, and check that they can connect to {address}"
        if address.startswith("127.") or address == "::1":
            remedy = f"{address} is reachable from this machine only: check --store and /etc/hosts"
        report.bad("present", [0], f"none of the other {len(absent)} hosts has connected {within}", remedy)
        return
    for rank in absent:
        remedy = f"start doctor there with --host-rank {rank}, and check that it can connect to {address}"
        report.bad("present", [rank], f"has not connected {within}", remedy)
    if not absent:
        report.ok("present", f"all {where.hosts} hosts have connected")


def _own(report: Report, said: Mapping[int, Message]) -> None:
    """Local findings and versions."""
    report.raw["own"] = {str(rank): answer for rank, answer in sorted(said.items())}
    _findings(report, {rank: answer["findings"] for rank, answer in said.items()})
    same = []
    for name in dict.fromkeys(name for answer in said.values() for name in answer["versions"]):
        values = {rank: answer["versions"].get(name, versions.NONE) for rank, answer in said.items()}
        usual, other = outliers.different(values)
        for rank, value in other.items():
            text, remedy = f"it has {value}, the others have {usual}", f"install {name} {usual} there"
            if name in versions.NEEDED:
                report.bad(f"same {name}", [rank], text, remedy)
            else:
                report.warn(f"same {name}", rank, text, remedy)
        if not other and usual != versions.NONE:
            same.append(f"{name} {usual}")
    if same and len(said) > 1:
        report.ok("same", ", ".join(same))


def _findings(report: Report, said: Mapping[int, list[dict[str, Any]]]) -> None:
    """An optional part that is missing on all hosts is listed once; on some hosts it is a warning.

    An unsynchronised clock is always a warning, because the run record compares the clocks of several hosts.
    """
    missing = Counter(f["what"] for findings in said.values() for f in findings if f["state"] == MISSING)
    nowhere = sorted(what for what, count in missing.items() if count == len(said) and what != "clock")
    before = len(report.rows)
    for rank, findings in sorted(said.items()):
        for finding in findings:
            check, state, remedy = f"own: {finding['what']}", finding["state"], finding["remedy"]
            if state in (BROKEN, MISSING) and finding["needed"]:
                report.bad(check, [rank], finding["details"] or state, remedy)
            elif state == BROKEN:
                report.warn(check, rank, finding["details"], remedy)
            elif state == MISSING and finding["what"] not in nowhere:
                report.warn(check, rank, finding["details"] or "missing on this host, but not on all", remedy)
    if said and not any(row.state == BROKEN for row in report.rows[before:]):
        without = f"; missing on all: {', '.join(nowhere)}" if nowhere else ""
        report.ok("own", f"everything that a run needs works on each host{without}")


def _clocks(report: Report, hub: Hub) -> None:
    """Compares clocks with that of host 0. The error is at most half of the round trip of the reading."""
    skews: dict[int, tuple[float, float]] = {}
    for host in hub.present:
        readings = []
        for _ in range(_CLOCK_READINGS):
            sent = time.time()
            answer = hub.ask({host: {"do": "clock"}}, _ANSWER_S).get(host)
            if answer is None:
                break
            arrived = time.time()
            readings.append(((arrived - sent) / 2, answer["time"] - (sent + arrived) / 2))
        if readings:
            error_s, skew_s = min(readings)
            skews[host] = (skew_s, error_s) if host else (0.0, 0.0)
    report.raw["clocks"] = {str(host): {"skew_s": s, "error_s": e} for host, (s, e) in skews.items()}
    told = {host: f"{skew_s:+.4f} s (± {error_s:.4f} s)" for host, (skew_s, error_s) in skews.items()}
    astray = outliers.astray({host: skew_s for host, (skew_s, _) in skews.items()}, _SKEW_S)
    for host, off_s in astray.items():
        text = f"{off_s:+.3f} s from the other hosts; {told[host]} from host 0"
        report.warn("clock", host, text, "run chrony or ntpd: the run record compares times of several hosts")
    if len(skews) > 1 and not astray:
        report.ok("clock", f"difference to host 0: {listed(f'{report.names[h]} {told[h]}' for h in skews if h)}")


def _disks(report: Report, hub: Hub, where: Meeting) -> None:
    assert where.directory is not None
    token = uuid.uuid4().hex
    mark = disk.marker(where.directory, token)
    try:
        shared_file.write(mark, token)
        said = hub.ask_all({"do": "disk", "token": token}, disk.MAX_S + disk.MAX_S / 2)
    except OSError as error:
        report.bad("disk", [0], f"{where.directory}: {error.strerror or error}", "give a directory that all can write")
        return
    finally:
        with contextlib.suppress(OSError):
            mark.unlink()
    report.raw["disks"] = {str(host): answer for host, answer in sorted(said.items())}
    good = {host: answer for host, answer in sorted(said.items()) if answer.get("seen")}
    for host, answer in sorted(said.items()):
        if "error" in answer:
            remedy = "give a directory that all hosts share and can write"
            report.bad("disk", [host], f"{where.directory}: {answer['error']}", remedy)
        elif host not in good:
            text = f"{where.directory} is not the directory of host 0: a file written there is not visible"
            report.bad("disk", [host], text, "mount the same file system on all hosts")
    for host, answer in good.items():
        if answer["free_bytes"] < _FREE_BYTES:
            report.warn(
                "disk", host, f"{answer['free_bytes'] / 1e6:.0f} MB are free in {where.directory}", "free space"
            )
        if answer.get("no_links"):  # a host with an older version does not say
            report.warn("disk", host, f"{where.directory} has no hard links: {answer['no_links']}", disk.LINKS)
    if good and len(good) == len(said):
        free, write, read = (
            min(answer[name] for answer in good.values()) for name in ("free_bytes", "write_bytes_s", "read_bytes_s")
        )
        text = f"{where.directory} is shared, {free / 1e9:.1f} GB free; slowest host: writes at {rate(write)}"
        report.ok("disk", f"{text}, reads at {rate(read)}")


# --- bandwidth --------------------------------------------------------------------------------------------------------


def _bandwidth(report: Report, hub: Hub, factor: float) -> None:
    """Every host sends to every other one, or to 15 others; slow ways are measured again before a host is named."""
    rounds = outliers.rounds(hub.present)
    rates: dict[outliers.Way, float] = {}
    errors: dict[outliers.Way, str] = {}
    for repeat in range(1 + _REPEATS):
        usual = outliers.slow(rates, factor).usual
        for targets in rounds:
            again = {a: b for a, b in targets.items() if outliers.is_slow(rates.get((a, b), 0.0), usual, factor)}
            _measure(hub, again if repeat else targets, rates, errors)
    rates = {way: value for way, value in rates.items() if not hub.gone.keys() & set(way)}
    names = report.names
    report.raw["bandwidth"] = [{"from": names[a], "to": names[b], "bytes_s": value} for (a, b), value in rates.items()]
    found = outliers.slow(rates, factor)
    remedy = "check its cable, port, interface and firewall"
    for host, best in found.senders.items():
        text = f"sends at {rate(best)} at most, usual are {rate(found.usual)}"
        report.bad("bandwidth", [host], text if best else "it can connect to no other host", remedy)
    for host, best in found.receivers.items():
        text = f"receives at {rate(best)} at most, usual are {rate(found.usual)}"
        report.bad("bandwidth", [host], text if best else "no other host can connect to it", remedy)
    for (a, b), value in found.links.items():
        text = f"{names[a]} sends to {names[b]} at {rate(value)}, usual are {rate(found.usual)}"
        if not value:
            text = f"{names[a]} cannot connect to {names[b]} ({errors[a, b]})"
        report.bad("link", sorted((a, b)), text, "check the network between the two; others are well", either=True)
    if rates and not found.senders and not found.receivers and not found.links:
        slowest = min(rates, key=rates.__getitem__)
        text = f"{rate(rates[slowest])} ({names[slowest[0]]} to {names[slowest[1]]}) to {rate(max(rates.values()))}"
        report.ok("bandwidth", f"{len(rates)} connections: {text}")


def _measure(hub: Hub, ways: dict[int, int], rates: dict[outliers.Way, float], errors: dict[outliers.Way, str]) -> None:
    """Measures ``ways`` (sender: receiver) at the same time and keeps the better rate of each.

    Every host gets an order, also those that do not send: orders tell the hosts that host 0 still works.
    """
    present = set(hub.present)
    to = {sender: hub.cards[receiver] for sender, receiver in ways.items() if {sender, receiver} <= present}
    orders = {host: {"do": "send", "to": to.get(host)} for host in present} if to else {}
    for sender, answer in hub.ask(orders, 2 * bandwidth.MAX_S).items():
        if sender in to:
            way = sender, ways[sender]
            rates[way] = max(rates.get(way, 0.0), answer["bytes_s"])
            errors[way] = answer.get("error", "")
