"""``megatron-ft doctor`` on all hosts of a run at once: host 0 asks, everybody measures, the bad one is named.

Host 0 decides nothing by itself: what was measured goes through ``core.pairs`` and ``core.alike``. Its own part in it is
that of any other host, over a line to itself, so it can be found to be the bad one.

Failures it assumes: any host may be missing, dead, frozen, cut off, or slow, at any moment. Every question has its time,
and who has not answered then is named and left out of the questions that follow.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from rich.console import Console

from megatron_ft.core import alike, pairs
from megatron_ft.doctor import disk, everybody, guest, measure, meeting, versions
from megatron_ft.doctor.hub import Hub, to_all
from megatron_ft.doctor.local import BROKEN, MISSING, OK, WARN
from megatron_ft.doctor.meeting import Meeting
from megatron_ft.doctor.report import Report
from megatron_ft.launch import addresses

_LOOK_S = 900.0
"""A host tries a dozen imports, each of which may take two minutes; who is frozen is known long before."""
_END_S = 2.0
_CLOCK_LOOKS = 8
_SKEW_S = 0.5
_LOOKS_AGAIN = 2
"""At pairs that look bad: a disturbance is gone then, and fewer others measure. (At those without a connection once.)"""
_FREE_BYTES = 1 << 30


def run_together(where: Meeting, console: Console, as_json: bool, factor: float) -> int:
    """This host's part. Returns 0 when all hosts are ready, else 1; the same on all of them."""
    if where.rank != 0:
        code, line = guest.attend(where)
        print(f"host {where.rank}: {line}", file=sys.stderr if as_json else console.file, flush=True)
        return code
    report = _lead(where, factor)
    if as_json:
        print(json.dumps(report.to_json(), indent=1), file=console.file)
    else:
        console.print(report.table())
        print(report.verdict(), file=console.file)
    return 0 if report.ready else 1


def _lead(where: Meeting, factor: float) -> Report:
    listener = meeting.listen(where)
    token = uuid.uuid4().hex
    hub = Hub(listener, where, token)
    host, port = listener.getsockname()[:2]
    itself = Meeting(where.hosts, 0, (host, port), where.job, where.directory, where.address or host)
    own = threading.Thread(target=guest.attend, args=(itself,), name="megatron_ft-doctor-own", daemon=True)
    try:
        with meeting.announced(where, listener):
            own.start()
            hub.meet(where.patience_s)
        report = Report(_names(where, hub.cards))
        report.raw["hosts"] = {str(rank): card for rank, card in sorted(hub.cards.items())}
        _absent(report, hub, where, host)
        _Check(report, hub, token, factor).all(where)
        for rank, why in sorted(hub.gone.items()):
            report.bad("there", [rank], why, "see whether it is up, and what its doctor says")
        hub.end(0 if report.ready else 1, report.verdict())
        own.join(_END_S)
        return report
    finally:
        hub.close()


def _names(where: Meeting, cards: Mapping[int, Mapping[str, Any]]) -> dict[int, str]:
    """Several namespaces or containers can have one name: then the address says more."""
    count = Counter(card["name"] for card in cards.values())
    names = {rank: where.name(rank) for rank in range(where.hosts)}
    for rank, card in cards.items():
        names[rank] = card["name"] if count[card["name"]] == 1 else f"{card['name']}({card['address']})"
    return names


def _absent(report: Report, hub: Hub, where: Meeting, own: str) -> None:
    """Who has not come, and what that says."""
    absent = [rank for rank in report.names if rank not in hub.cards]
    within = f"within {where.patience_s:g} s"
    loopback = len(hub.cards) < 2 and (own.startswith("127.") or own == "::1")
    remedy = f"{own} is an address of this machine only: check what --store says, and /etc/hosts" if loopback else ""
    guilty = alike.to_blame_for_absence(where.hosts, hub.cards)
    if guilty == (0,):
        report.bad("there", [0], f"none of the other {len(absent)} hosts has reached it {within}", remedy or _start(absent))
    for rank in guilty:
        if rank and rank in hub.calling:
            text = f"it is heard, but makes no connection {within}: what host 0 sends does not reach it"
            report.bad("there", [rank], text, "a cable, a firewall or a route on the way from host 0 to it")
        elif rank:
            report.bad("there", [rank], f"has not come {within}", remedy or _start([rank]))
    if not absent:
        report.ok("there", f"all {where.hosts} hosts have come")


def _start(ranks: Collection[int]) -> str:
    return f"start doctor there with --host-rank {', '.join(map(str, ranks))}; else see whether it is up"


class _Check:
    """The questions, one after the other."""

    def __init__(self, report: Report, hub: Hub, token: str, factor: float) -> None:
        self._report, self._hub, self._token, self._factor = report, hub, token, factor
        self._nccl = False
        self._elsewhere: dict[str, set[int]] = {}
        """Hosts that use another interface than the one that leads to the others, by library."""

    def all(self, where: Meeting) -> None:
        self._look()
        self._clocks()
        if where.directory is not None:
            self._disks(where)
        if len(self._hub.present) > 1:
            self._pairs()
            self._reduce("gloo")
            if self._nccl:
                self._reduce("nccl")

    # --- what each host says of itself --------------------------------------------------------------------------------

    def _look(self) -> None:
        said = self._hub.ask(to_all(self._hub.present, {"do": "look"}), _LOOK_S, "looking at itself")
        self._report.raw["own"] = {str(rank): answer for rank, answer in sorted(said.items())}
        self._nccl = bool(said) and all(answer["nccl"] for answer in said.values())
        self._findings({rank: answer["findings"] for rank, answer in said.items()})
        self._interfaces({rank: answer["interfaces"] for rank, answer in said.items()})
        self._versions({rank: answer["versions"] for rank, answer in said.items()})

    def _findings(self, said: Mapping[int, list[dict[str, Any]]]) -> None:
        """What is optional and missing everywhere is the cluster's habit; on some hosts only, it is told. So is a clock that
        nobody sets: with several hosts it matters."""
        absent: dict[str, dict[int, dict[str, Any]]] = {}
        well = True
        for rank, findings in sorted(said.items()):
            for finding in findings:
                what, text = f"own: {finding['what']}", finding["details"] or finding["state"]
                if finding["needed"] and finding["state"] != OK:
                    self._report.bad(what, [rank], text, finding["remedy"])
                    well = False
                elif finding["state"] == BROKEN:
                    self._report.warn(what, [rank], text, finding["remedy"])
                    well = False
                elif finding["state"] == MISSING:
                    absent.setdefault(finding["what"], {})[rank] = finding
        nowhere = sorted(what for what, found in absent.items() if len(found) == len(said) and what != "clock")
        for what, found in absent.items():
            for rank, finding in found.items() if what not in nowhere else ():
                text = finding["details"] or "not there, but on others"
                self._report.warn(f"own: {what}", [rank], text, finding["remedy"])
        if said and well:
            without = f"; missing on all: {', '.join(nowhere)}" if nowhere else ""
            self._report.ok("own", f"what a run needs works on each{without}")

    def _interfaces(self, said: Mapping[int, list[dict[str, Any]]]) -> None:
        found = [(rank, finding) for rank, findings in sorted(said.items()) for finding in findings]
        for rank, finding in found:
            if finding["state"] == BROKEN:
                self._report.bad("interface", [rank], finding["details"], finding["remedy"])
            elif finding["state"] == WARN:
                self._report.warn("interface", [rank], finding["details"], finding["remedy"])
                for backend in ("gloo", "nccl"):
                    if finding["details"].startswith(f"{backend.upper()}_"):
                        self._elsewhere.setdefault(backend, set()).add(rank)
        if found and all(finding["state"] == OK for _, finding in found):
            texts = {finding["details"] for _, finding in found}
            each = (f"{self._report.names[rank]}: {finding['details']}" for rank, finding in found)
            self._report.ok("interface", pairs.listed(texts if len(texts) == 1 else each))

    def _versions(self, said: Mapping[int, dict[str, str]]) -> None:
        names = list(dict.fromkeys(name for some in said.values() for name in some))
        same = []
        for name in names:
            usual, odd = alike.different({rank: some.get(name, versions.NONE) for rank, some in said.items()})
            for rank, value in odd.items():
                say = self._report.bad if name in versions.NEEDED else self._report.warn
                say(f"same {name}", [rank], f"it has {value}, the others have {usual}", f"install {name} {usual} there")
            if not odd and usual != versions.NONE:
                same.append(f"{name} {usual}")
        if same and len(said) > 1:
            self._report.ok("same", ", ".join(same))

    # --- clocks and disks ---------------------------------------------------------------------------------------------

    def _clocks(self) -> None:
        """Relative to host 0's. The error is at most half of the round trip in which the other clock was read."""
        skews: dict[int, tuple[float, float]] = {}
        for rank in self._hub.present:
            looks = []
            for _ in range(_CLOCK_LOOKS):
                sent = time.time()
                answer = self._hub.ask({rank: {"do": "clock"}}, 2 * measure.MOST_S, "reading its clock").get(rank)
                if answer is None:
                    break
                arrived = answer["arrived"]
                looks.append(((arrived - sent) / 2, answer["time"] - (sent + arrived) / 2))
            if looks:
                error_s, skew_s = min(looks)
                skews[rank] = skew_s, error_s
        self._report.raw["clocks"] = {str(rank): {"skew_s": s, "error_s": e} for rank, (s, e) in skews.items()}
        if 0 in skews:
            skews[0] = 0.0, 0.0
        odd = alike.astray({rank: skew_s for rank, (skew_s, _) in skews.items()}, _SKEW_S)
        for rank, off_s in odd.items():
            text = f"{off_s:+.3f} s from the others, by host 0's clock {_skew(skews[rank])}"
            self._report.warn("clock", [rank], text, "chrony or ntpd: the record's times are compared")
        if len(skews) > 1 and not odd:
            others = [f"{self._report.names[rank]} {_skew(skew)}" for rank, skew in skews.items() if rank]
            self._report.ok("clock", f"by host 0's: {pairs.listed(others)}")

    def _disks(self, where: Meeting) -> None:
        assert where.directory is not None
        mark = disk.marker(where.directory, self._token)
        try:
            mark.write_text(self._token, encoding="utf-8")
            said = self._hub.ask(to_all(self._hub.present, {"do": "disk", "token": self._token}), 3 * disk.MOST_S, "disk")
        except OSError as error:
            self._report.bad("disk", [0], f"{where.directory}: {error.strerror or error}", "one that all can write")
            return
        finally:
            with contextlib.suppress(OSError):
                mark.unlink()
        self._report.raw["disks"] = {str(rank): answer for rank, answer in sorted(said.items())}
        bad = {rank: answer["trouble"] for rank, answer in said.items() if "trouble" in answer}
        seen = {rank for rank, answer in said.items() if answer.get("seen")}
        for rank, why in sorted(bad.items()):
            self._report.bad("disk", [rank], f"{where.directory}: {why}", "a directory that all hosts see and can write")
        blind = [rank for rank in said if rank not in seen and rank not in bad]
        for rank in blind:
            text = f"{where.directory} is not the directory of host 0: it does not see a file written there"
            self._report.bad("disk", [rank], text, "mount the same file system on all hosts")
        for rank, answer in sorted(said.items()):
            if answer.get("free_bytes", _FREE_BYTES) < _FREE_BYTES:
                self._report.warn("disk", [rank], f"{answer['free_bytes'] / 1e6:.0f} MB are free in {where.directory}")
        rates = {rank: answer["write_bytes_s"] for rank, answer in said.items() if "write_bytes_s" in answer}
        usual, slow = alike.slower(rates, self._factor)
        for rank, value in slow.items():
            self._report.warn("disk", [rank], f"it writes at {pairs.rate(value)}, usual are {pairs.rate(usual)}")
        if rates and not bad and not blind and not slow:
            free = min(answer["free_bytes"] for answer in said.values()) / 1e9
            reads = min(answer["read_bytes_s"] for answer in said.values())
            text = f"the same {where.directory}, {free:.1f} GB free; written at {pairs.rate(min(rates.values()))} or more"
            self._report.ok("disk", f"{text}, read at {pairs.rate(reads)} or more")

    # --- pairs --------------------------------------------------------------------------------------------------------

    def _pairs(self) -> None:
        ways: dict[pairs.Pair, pairs.Way] = {}
        looks: list[dict[str, Any]] = []
        for some in pairs.rounds(self._hub.present):
            ways |= self._round(some, looks)
        for look in range(_LOOKS_AGAIN):
            again = {pair for pair in pairs.suspects(ways, self._factor) if not look or ways[pair].opens}
            for some in pairs.apart(again)[: pairs.MOST_ROUNDS]:
                for way, second in self._round(some, looks).items():
                    ways[way] = pairs.better(ways.get(way), second)
        self._report.raw["pairs"] = looks
        gone = self._hub.gone.keys()
        ways = {way: value for way, value in ways.items() if not gone & set(way)}
        found = pairs.judge(ways, self._factor)
        names = self._report.names
        for host in found.hosts:
            self._report.bad("pairs", [host.host], host.words(names), "its cable, port, interface or firewall")
        for trouble in found.links:
            both = sorted((trouble.sender, trouble.receiver))
            self._report.bad("link", both, trouble.words(names), "what is between the two; others are well", either=True)
        if not found.hosts and not found.links and ways:
            self._report.ok("pairs", _summary(ways, names))

    def _round(self, some: Collection[pairs.Pair], looks: list[dict[str, Any]]) -> dict[pairs.Pair, pairs.Way]:
        """All these pairs at the same time. The lower host measures, the other one looks whether it can call back."""
        there = set(self._hub.present)
        orders = {}
        for a, b in some:
            if {a, b} <= there:
                for me, other in ((a, b), (b, a)):
                    card = self._hub.cards[other]
                    peer = {"rank": other, "address": card["address"], "port": card["port"], "ear": card["ear"]}
                    orders[me] = {"do": "call", "peer": peer, "measure": len(looks), "fully": me == a}
        said = self._hub.ask(orders, 2 * measure.MOST_S, "measuring pairs")
        ways = {}
        for a, b in some:
            if a in said and b in said:
                answers = [{key: said[rank][key] for key in measure.Measured.__annotations__} for rank in (a, b)]
                looks.append({"pair": [a, b], "from_first": answers[0], "from_second": answers[1]})
                there_, back = (measure.Measured.from_json(answer) for answer in answers)
                ways[a, b] = pairs.Way(there_.opens, there_.why, back.heard, there_.rtt_s, there_.out_bytes_s)
                ways[b, a] = pairs.Way(back.opens, back.why, there_.heard, there_.rtt_s, there_.in_bytes_s)
        return ways

    # --- all together -------------------------------------------------------------------------------------------------

    def _reduce(self, backend: str) -> None:
        """Among those of which nothing bad is known: whether they could start without the others."""
        hosts = [rank for rank in self._hub.present if rank in self._report.startable]
        check = f"all-reduce, {backend}"
        if len(hosts) < 2 or 0 not in hosts:
            why = "host 0 is bad itself, and has its store" if len(hosts) > 1 else "there are no two hosts that are well"
            self._report.warn(check, (), f"not tried: {why}")
            return
        try:
            store = everybody.Store(self._hub.cards[0]["address"])
        except OSError as error:
            self._report.bad(check, [0], str(error))
            return
        where = addresses.joined(self._hub.cards[0]["address"], store.port)
        order = {"do": "reduce", "store": where, "size": len(hosts), "backend": backend}
        orders = {host: {**order, "rank": rank} for rank, host in enumerate(hosts)}
        try:
            said = self._hub.ask(orders, 2 * everybody.MOST_S, check, _failed)
        finally:
            store.close()
        outcomes = {rank: _outcome(answer) for rank, answer in said.items()}
        self._report.raw[backend] = {str(rank): outcome.to_json() for rank, outcome in sorted(outcomes.items())}
        failed = {rank: outcome for rank, outcome in outcomes.items() if outcome.failed}
        if not failed and len(outcomes) == len(hosts):
            seconds = max(outcome.seconds for outcome in outcomes.values())
            among = "all hosts" if len(hosts) == len(self._report.names) else f"the {len(hosts)} that are well"
            self._report.ok(check, f"{among}, {seconds:.1f} s with the import of torch")
            return
        alone = {rank for rank, outcome in failed.items() if outcome.alone}
        stages = {rank: outcome.stage for rank, outcome in outcomes.items()}
        guilty = alike.to_blame(stages, failed, alone, self._elsewhere.get(backend, ()))
        remedy = "see its interface, and whether a firewall closes ports between hosts"
        for rank in guilty:
            text = f"{_told(outcomes[rank])}" if rank in failed else "the others do not reach it through its interface"
            self._report.bad(check, [rank], text, remedy)
        if failed and not guilty:
            told = (f"{self._report.names[rank]}: {_told(outcome)}" for rank, outcome in sorted(failed.items()))
            self._report.bad(check, [], pairs.listed(told), "see the interfaces, and whether a firewall closes ports")


def _told(outcome: everybody.Outcome) -> str:
    return f"{outcome.trouble} (it got as far as: {everybody.STAGES[outcome.stage]})"


def _failed(answer: Mapping[str, Any]) -> bool:
    return _outcome(answer).failed


def _outcome(answer: Mapping[str, Any]) -> everybody.Outcome:
    return everybody.Outcome(answer["stage"], answer["seconds"], answer["trouble"])


def _skew(skew: tuple[float, float]) -> str:
    return f"{skew[0]:+.4f} s (± {skew[1]:.4f} s)"


def _summary(ways: Mapping[pairs.Pair, pairs.Way], names: Mapping[int, str]) -> str:
    rates = {way: value.bytes_s for way, value in ways.items() if value.bytes_s is not None}
    rtts = [value.rtt_s for value in ways.values() if value.rtt_s is not None]
    if not rates or not rtts:
        return f"{len(ways) // 2} pairs reach each other"
    a, b = min(rates, key=rates.__getitem__)
    return (
        f"{len(ways) // 2} pairs: round trips of {pairs.milliseconds(min(rtts))} to {pairs.milliseconds(max(rtts))}, "
        f"{pairs.rate(min(rates.values()))} ({names[a]} to {names[b]}) to {pairs.rate(max(rates.values()))}"
    )
