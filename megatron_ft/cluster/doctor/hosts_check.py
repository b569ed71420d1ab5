"""``megatron-ft doctor`` on all hosts of a run: host 0 collects, compares and names the hosts that must not take part.

Every host examines itself, connects to host 0 and carries out its orders (``host_orders``, with the failures it assumes);
host 0 does so, too, and can be found faulty like any other host.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
import uuid
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Console

from megatron_ft.cluster.doctor import bandwidth, disk, host_orders, local, outliers, versions
from megatron_ft.cluster.doctor.doctor_report import BROKEN, MISSING, Report, listed, rate
from megatron_ft.cluster.doctor.host_orders import Hub
from megatron_ft.cluster.doctor.meeting import Meeting, Message
from megatron_ft.utils import net, shared_file
from megatron_ft.utils.auth.secret import Secret
from megatron_ft.utils.terminal import printable

SEND = "doctor sends"
"""Purpose of the key for the connections of the bandwidth test."""
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


def run_together(where: Meeting, console: Console, as_json: bool, factor: float) -> int:
    """Runs this host's part. Returns 0 when all hosts are ready, else 1; the same on all hosts."""
    if where.rank != 0:
        code, line = host_orders.attend(where, HostPart(where))
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


class HostPart(host_orders.Part):
    """This host's part in the check: it has examined itself, answers with what it has found, and measures."""

    def __init__(self, where: Meeting) -> None:
        findings = local.examine()
        self._examined = {"findings": [asdict(one) for one in findings], "versions": versions.here(findings)}
        self._directory = where.directory
        self._receiver: bandwidth.Receiver | None = None
        self.silent_s = _EXAMINE_S

    def listens(self, own: str, secret: Secret) -> int:
        self.leave()
        self._key = secret.of(SEND)
        self._receiver = bandwidth.Receiver(own, self._key)
        return self._receiver.port

    def examine(self) -> Message:
        self.silent_s = _ORDER_S
        return self._examined

    def clock(self) -> Message:
        return {"time": time.time()}

    def disk(self, token: str) -> Message:
        if self._directory is None:
            return {"error": "--directory is missing on this host and given on host 0"}
        return disk.try_out(self._directory, token)

    def send(self, to: Mapping[str, Any] | None) -> Message:
        if to is None:
            return {}
        try:
            return {"bytes_s": bandwidth.send_rate(to["address"], to["port"], self._key)}
        except OSError as error:
            return {"bytes_s": 0.0, "error": error.strerror or str(error)}

    def leave(self) -> None:
        if self._receiver is not None:
            self._receiver.close()


# --- host 0 -----------------------------------------------------------------------------------------------------------


def _lead(where: Meeting, factor: float) -> Report:
    with host_orders.gathered(where, lambda: HostPart(where)) as hub:
        names = {rank: where.name(rank) for rank in range(where.hosts)}
        report = Report(names | net.distinct_names(hub.host_records))
        report.raw["hosts"] = {str(rank): host_record for rank, host_record in sorted(hub.host_records.items())}
        _present(report, hub, where)
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


def _present(report: Report, hub: Hub, where: Meeting) -> None:
    address, absent = hub.address, [rank for rank in range(where.hosts) if rank not in hub.host_records]
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
    to = {sender: hub.host_records[receiver] for sender, receiver in ways.items() if {sender, receiver} <= present}
    orders = {host: {"do": "send", "to": to.get(host)} for host in present} if to else {}
    for sender, answer in hub.ask(orders, 2 * bandwidth.MAX_S).items():
        if sender in to:
            way = sender, ways[sender]
            rates[way] = max(rates.get(way, 0.0), answer["bytes_s"])
            errors[way] = answer.get("error", "")
