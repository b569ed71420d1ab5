"""Lines for the job's log that name the group the others wait for, and its place, from the agents' looks at their ranks.

Training is synchronous, so one group that does not get on keeps all others waiting, without an error and without a limit
that is soon reached: a rank may evaluate or save between two steps for half an hour. At the end all groups wait: for a group
that still waits in a step or an evaluation, which no group at the end takes part in, or for the lowest group, which saves
and completes the record. So each agent reports the places
of its ranks (:class:`Spot`), and one agent reports which groups wait for which, after ``notice_s`` and when that time
has doubled.

Assumes: the caller leaves out a host whose report is invalid or old.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from megatron_ft.core.detection.rank_health import Health, Limits
from megatron_ft.types import GroupId, named

Place = Literal["starting", "outside", "dataset", "kernel", "working", "waiting", "ended", "busy"]
"""The place of a rank. ``ended``: it has made its last step and waits for the end of the run. ``busy``: at work, for no
longer than usual."""

WORDS: Mapping[Place, str] = {
    "starting": "before its first step",
    "outside": "between two steps",
    "dataset": "inside the dataset",
    "kernel": "inside the kernel (disk, network file system or driver)",
    "working": "in one piece of work",
    "waiting": "in a call of the session, such as evaluate, that needs all groups",
    "ended": "after its last step, where it saves the last checkpoint and completes the record",
}
"""The words for the place of a group that others wait for."""
_UNUSUAL = 3.0
"""A piece of work that takes this many times longer than the longest before it is worth a line."""


@dataclass(frozen=True)
class Spot:
    """The place of the ranks of one group that one host runs.

    Attributes:
        group: the group.
        incarnation: its start.
        place: of the rank that the others wait for.
        seconds: for which the rank has been there.
        storage: at least one rank is stuck in a call of the dataset or in state D, possibly ahead of its need.
    """

    group: GroupId
    incarnation: int
    place: Place
    seconds: float
    storage: bool = False

    @property
    def is_late(self) -> bool:
        return self.place not in ("waiting", "ended", "busy")


@dataclass(frozen=True)
class Line:
    """One line of the log: the groups ``waiting`` wait for the groups ``late``.

    Attributes:
        late: groups that are waited for.
        waiting: groups that wait; empty if storage does not answer for all groups, or for the only group at the end.
        place: of the late groups.
        seconds: the longest time that a late group has been there.
        over: True if the late groups go on.
    """

    late: tuple[GroupId, ...]
    waiting: tuple[GroupId, ...]
    place: Place
    seconds: float
    over: bool = False

    def __str__(self) -> str:
        late, one = named(self.late), len(self.late) == 1
        if self.over:
            return f"{late} {'goes' if one else 'go'} on after {self.seconds:.0f} s {WORDS[self.place]}"
        if not self.waiting:
            ends = "" if self.place == "ended" else ": storage does not answer"
            return f"{late} {'is' if one else 'are'} {WORDS[self.place]} for {self.seconds:.0f} s{ends}"
        waits = "waits" if len(self.waiting) == 1 else "wait"
        return f"{named(self.waiting)} {waits} for {late}, {WORDS[self.place]}, {self.seconds:.0f} s"


@dataclass(frozen=True)
class Told:
    """The last line about a late group.

    Attributes:
        place: of the group in that line.
        seconds: for which the group has been there, as of the last look.
        due_s: number of seconds in that place after which the next line is due.
    """

    place: Place
    seconds: float
    due_s: float


def spot(group: GroupId, incarnation: int, health: Health, limits: Limits, least_s: float) -> Spot:
    """Return the place of one rank. A stay of less than ``least_s`` seconds counts as ``busy``."""
    storage = health.in_storage(limits)
    return Spot(group, incarnation, _place(health, least_s), health.still_s, storage)


def _place(health: Health, least_s: float) -> Place:
    sample = health.last
    if sample is None or health.still_s < least_s:
        return "busy"
    match sample.phase:
        case "waiting" | "ended" as waits:
            return waits
        case "outside":
            return "outside" if sample.progress else "starting"
    if sample.dataset % 2:
        return "dataset"
    if sample.state == "D":
        return "kernel"
    return "working" if health.still_s > _UNUSUAL * health.longest_s else "busy"


def together(spots: Iterable[Spot]) -> dict[GroupId, Spot]:
    """Return one spot for each group: that of its last rank. The other ranks of a group wait for that one."""
    found: dict[GroupId, Spot] = {}
    for one in spots:
        other = found.get(one.group)
        if other is None:
            found[one.group] = one
            continue
        first, second = sorted((one, other), key=_rank)
        found[one.group] = replace(first, storage=first.storage or second.storage)
    return found


def _rank(one: Spot) -> tuple[int, float]:
    """Return the sort key: late spots first, the longest of them; then busy ones; then a leader that has ended; then the
    shortest wait."""
    if one.is_late:
        return 0, -one.seconds
    return {"busy": 1, "ended": 2, "waiting": 3}[one.place], 0.0 if one.place == "busy" else one.seconds


def observe(
    told: Mapping[GroupId, Told], groups: Mapping[GroupId, Spot], notice_s: float
) -> tuple[dict[GroupId, Told], list[Line]]:
    """Return the new ``told`` and the lines that are due now.

    Args:
        told: what the call before returned.
        groups: the spot of each member of the present view.
        notice_s: seconds after which the first line about a group is due.
    """
    late = {group: spot for group, spot in groups.items() if spot.is_late} or _late_at_the_end(groups)
    waits = ("waiting", "ended")
    waiting = tuple(sorted(group for group, spot in groups.items() if spot.place in waits and group not in late))
    lines = _over({group: one for group, one in told.items() if not _goes_on(one, late.get(group))})
    told = {group: one for group, one in told.items() if _goes_on(one, late.get(group))}
    told = {group: replace(one, seconds=late[group].seconds) for group, one in told.items()}
    away = bool(groups) and all(spot.is_late and spot.storage for spot in groups.values())
    ends = any(spot.place == "ended" for spot in late.values())
    for place in WORDS if waiting or away or ends else ():
        here = {group: spot.seconds for group, spot in late.items() if spot.place == place}
        due = [
            group for group, seconds in here.items() if seconds >= (told[group].due_s if group in told else notice_s)
        ]
        if due:
            lines.append(Line(tuple(sorted(here)), waiting, place, max(here.values())))
            told |= {group: Told(place, seconds, 2 * max(here.values())) for group, seconds in here.items()}
    return told, lines


def _late_at_the_end(groups: Mapping[GroupId, Spot]) -> dict[GroupId, Spot]:
    """Return the groups that a group at the end of the run waits for, while all groups wait; none while one is at work."""
    ended = [group for group, spot in groups.items() if spot.place == "ended"]
    if not ended or any(spot.place == "busy" for spot in groups.values()):
        return {}
    return {group: spot for group, spot in groups.items() if spot.place == "waiting"} or {
        min(ended): groups[min(ended)]
    }


def _goes_on(told: Told, spot: Spot | None) -> bool:
    """Return whether a group is still in the stay that the last line about it named."""
    return spot is not None and spot.place == told.place and spot.seconds >= told.seconds


def _over(ended: Mapping[GroupId, Told]) -> list[Line]:
    places = {told.place for told in ended.values()}
    of = {place: [group for group, told in ended.items() if told.place == place] for place in WORDS if place in places}
    return [Line(tuple(sorted(of[place])), (), place, max(ended[g].seconds for g in of[place]), True) for place in of]
