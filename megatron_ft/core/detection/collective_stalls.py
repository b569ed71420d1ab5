"""A group whose ranks wait in a collective of their engine that does not end: when that is too long, and for which rank.

Intuition. Inside a group every rank waits for others most of the time, so a long wait accuses no rank. Each rank knows two
things: for how long its own training thread has made no progress in the engine (:class:`Pace`), and which collectives it
has entered (:class:`Report`, from torch's flight recorder). The first says that something is wrong. The second, of all
ranks together, says where: the ranks that wait have entered a collective that another rank has not entered
(:func:`find`). A rank that does not wait itself, and that others wait for, is the culprit.

A culprit may have an excuse: it is inside the dataset, or in the script's own code between two steps. Its agent judges
that (``core.detection.rank_health``), with the longer limits for storage and scripts, and the group is not given up here.

Assumes: a report may be missing, because its rank is stopped, holds the GIL or has ended. The recorder keeps the newest
calls only; a group in which a rank has no call is one that it has not entered lately. Calls of one process group that are
no point-to-point operations end in their order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from megatron_ft.core.detection.rank_health import LEARNED, LOOK_S, learned_limit

CEILING_S = 1800.0
"""The limit of a collective between groups by default, and the highest learned one inside a group, in seconds."""


# --- when -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Training:
    """The state of a training thread.

    Attributes:
        sign: changes with each sign of progress.
        inside: it is in an operation of its engine, where it waits for the other ranks of its group only.
        finished: number of such operations that have ended.
        excuse: why it may be late, for people, if its agent judges that; else empty.
    """

    sign: object
    inside: bool
    finished: int
    excuse: str = ""


@dataclass(frozen=True)
class Pace:
    """A training thread's time inside its engine. Times in seconds.

    Attributes:
        looked: local time of the last look; None before the first.
        last: its state then.
        still_s: time inside without a sign of progress; 0 outside.
        longest_s: the longest time before one.
    """

    looked: float | None = None
    last: Training = Training(None, False, 0)
    still_s: float = 0.0
    longest_s: float = 0.0

    def limit_s(self, given_s: float | None) -> tuple[float, str]:
        """Return the seconds without a sign that are allowed, and the reason. ``given_s``: the user's; None: learned."""
        if given_s is not None:
            return given_s, "collective_timeout_s"
        if self.last.finished < LEARNED:
            return CEILING_S, "it has just started"
        learned, why = learned_limit(self.longest_s)
        return min(learned, CEILING_S), why


def look(pace: Pace, now: Training, at: float, given_s: float | None) -> Pace:
    """Take in a look at the training thread; ``at``: a local monotonic clock, in seconds."""
    if pace.looked is None or not pace.last.inside:
        return replace(pace, looked=at, last=now, still_s=0.0)
    still_s = pace.still_s + min(max(at - pace.looked, 0.0), LOOK_S)  # a process that did not look has seen nothing
    if now == pace.last:
        return replace(pace, looked=at, still_s=still_s)
    learns = pace.still_s <= pace.limit_s(given_s)[0]  # else a hang or an outage would be learned
    return Pace(at, now, 0.0, max(pace.longest_s, still_s) if learns else pace.longest_s)


# --- where ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """An operation that one rank has started in a process group.

    Attributes:
        group: torch's name of the process group, the same at all its ranks.
        number: sequence number in the group; of a point-to-point operation, at this rank only.
        name: of the operation, such as ``all_reduce``.
        sizes: of its inputs, for people.
        ended: it has ended here.
        p2p: it is a point-to-point operation.
        peer: position of the rank at the other end of it; None if unknown.
    """

    group: str
    number: int
    name: str
    sizes: str = ""
    ended: bool = False
    p2p: bool = False
    peer: int | None = None


@dataclass(frozen=True)
class Report:
    """What one rank of a group knows about its own collectives.

    Attributes:
        position: of the rank.
        pid: of its process.
        host: name of its host; ``host_rank`` its number, None in a run on one host.
        calls: its calls around the oldest that has not ended, oldest first.
        entered: process group -> number of the newest collective that the rank has entered.
        members: process group -> positions of its ranks.
        labels: process group -> its name for people.
        excuse: why the rank may be late, for people; empty without a reason.
    """

    position: int
    pid: int = 0
    host: str = ""
    host_rank: int | None = None
    calls: tuple[Call, ...] = ()
    entered: Mapping[str, int] = field(default_factory=dict)
    members: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    excuse: str = ""

    @property
    def waits_in(self) -> Call | None:
        """The oldest call that has not ended, nor a later one that ends after it."""
        return next(iter(unended(self.calls)), None)

    def has_entered(self, call: Call) -> bool:
        return self.entered.get(call.group, 0) >= call.number


def unended(calls: Iterable[Call]) -> list[Call]:
    """Return the calls that have not ended, oldest first. One before a call of the same stream that has ended is over: torch
    does not record the end of each operation in a batch."""
    found: list[Call] = []
    over: set[tuple[str, bool, int | None]] = set()
    for call in reversed(list(calls)):
        stream = call.group, call.p2p, call.peer
        if call.ended:
            over.add(stream)
        elif stream not in over and (call.group, call.p2p, None) not in over:
            found.append(call)
    return found[::-1]


@dataclass(frozen=True)
class Finding:
    """Why a collective does not end.

    Attributes:
        predicate: a sentence for people, without the guilty ranks as its subject if there are any.
        guilty: positions of the ranks that the others wait for; empty if none can be named.
        excuse: why these may be late; empty if the group cannot go on.
    """

    predicate: str
    guilty: tuple[int, ...] = ()
    excuse: str = ""

    @property
    def why(self) -> str:
        """The whole sentence."""
        return f"{_ranks(self.guilty)} {self.predicate}" if self.guilty else self.predicate


def find(reports: Mapping[int, Report], size: int) -> Finding | None:
    """Return what the ranks of a group wait for; None if none of them waits.

    Args:
        reports: position -> report of the rank, of those that have answered.
        size: number of ranks of the group.
    """
    waits = {position: call for position, report in sorted(reports.items()) if (call := report.waits_in) is not None}
    if not waits:
        return None
    label = {group: name for report in reports.values() for group, name in report.labels.items()}
    return (
        _mismatch(reports, waits, label)
        or _missing(reports, waits, size, label)
        or _circle(reports, waits, size, label)
        or _stuck(reports, waits, label)
    )


def _members(reports: Mapping[int, Report], group: str, size: int) -> tuple[int, ...]:
    known = (report.members[group] for report in reports.values() if group in report.members)
    return next(known, tuple(range(size)))


def _lacking(reports: Mapping[int, Report], position: int, call: Call, size: int) -> set[int]:
    """Return the ranks for which ``position`` waits in ``call``."""
    if not call.p2p:
        others = set(_members(reports, call.group, size)) - {position}
        return {other for other in others if other not in reports or not reports[other].has_entered(call)}
    if call.peer is None:
        return set()
    there = reports[call.peer].waits_in if call.peer in reports else None
    meets = there is not None and there.p2p and there.group == call.group and there.peer in (position, None)
    return set() if meets else {call.peer}


def _missing(
    reports: Mapping[int, Report], waits: Mapping[int, Call], size: int, label: Mapping[str, str]
) -> Finding | None:
    """Return the ranks that others wait for and that wait for none."""
    late: dict[tuple[str, int, bool, int | None], set[int]] = {}
    for position, call in waits.items():
        if lacking := _lacking(reports, position, call, size) - waits.keys():
            late.setdefault((call.group, call.number, call.p2p, call.peer), set()).update(lacking)
    if not late:
        return None
    where = max(late, key=lambda place: (len(late[place]), place[:2]))
    here = [position for position, call in waits.items() if (call.group, call.number, call.p2p, call.peer) == where]
    call, roots = waits[here[0]], sorted(late[where])
    excused = [position for position in roots if position in reports and reports[position].excuse]
    guilty = [position for position in roots if position not in excused] or roots
    end = "the other end of " if call.p2p else ""
    why = f"did not enter {end}{_words(call, label)}; {_ranks(here)} {_verb('wait', here)} in it"
    if silent := [position for position in guilty if position not in reports]:
        why += f" ({_ranks(silent)} did not answer)"
    excuse = "" if guilty != excused else "; ".join(f"rank {at} is {reports[at].excuse}" for at in excused)
    return Finding(why, tuple(guilty), excuse)


def _mismatch(reports: Mapping[int, Report], waits: Mapping[int, Call], label: Mapping[str, str]) -> Finding | None:
    """Return the ranks that have called another operation where the others wait."""
    for call in (call for call in waits.values() if not call.p2p):
        said: dict[str, list[int]] = {}
        for position, report in sorted(reports.items()):
            there = next((one for one in report.calls if _is_same(one, call)), None)
            if there is not None:
                said.setdefault(there.name, []).append(position)
        if len(said) > 1:
            usual = max(said, key=lambda name: len(said[name]))
            clear = len(said[usual]) > max(len(ranks) for name, ranks in said.items() if name != usual)
            words = ", ".join(f"{_ranks(ranks)} called {name}" for name, ranks in sorted(said.items()))
            guilty = sorted(at for name, ranks in said.items() if name != usual for at in ranks) if clear else []
            where = f"collective #{call.number} of {label.get(call.group, call.group)}: {words}"
            return Finding(f"called another operation as {where}" if guilty else where, tuple(guilty))
    return None


def _is_same(one: Call, other: Call) -> bool:
    return (one.group, one.number, one.p2p) == (other.group, other.number, other.p2p)


def _circle(
    reports: Mapping[int, Report], waits: Mapping[int, Call], size: int, label: Mapping[str, str]
) -> Finding | None:
    places = [
        f"rank {position} in {_words(call, label)}"
        for position, call in waits.items()
        if _lacking(reports, position, call, size)
    ]
    return Finding(f"ranks wait for each other: {', '.join(places)}") if places else None


def _stuck(reports: Mapping[int, Report], waits: Mapping[int, Call], label: Mapping[str, str]) -> Finding:
    """All ranks that are needed have entered the collective."""
    call = min(waits.values(), key=lambda call: (call.p2p, call.number))
    here = [position for position, one in waits.items() if _is_same(one, call)]
    sizes: dict[str, int] = {}  # -> the first rank with them
    for position in here:
        sizes.setdefault(waits[position].sizes, position)
    differ = "" if len(sizes) < 2 or call.p2p else "; the sizes differ: "
    differ += ", ".join(f"{size} at rank {at}" for size, at in sizes.items()) if differ else ""
    why = f"{_words(call, label)} does not end, and no rank is missing in it: the network or a device; {_ranks(here)}"
    return Finding(f"{why} {_verb('wait', here)} in it{differ}")


def _words(call: Call, label: Mapping[str, str]) -> str:
    return f"{call.name} #{call.number} of {label.get(call.group, call.group)}"


def _ranks(positions: Iterable[int]) -> str:
    found = sorted(positions)
    return f"{'rank' if len(found) == 1 else 'ranks'} {', '.join(map(str, found))}"


def _verb(verb: str, positions: Iterable[int]) -> str:
    return verb if len(list(positions)) > 1 else f"{verb}s"
