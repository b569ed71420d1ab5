"""The hosts of groups, read from the notice log in order, and the groups that a silence between two hosts concerns.

A host that hears nothing of another one lists its own groups in the notice. The notice may come late and be wrong: when
the host's link is healed, it may arrive after the news that these groups are on another host now. It would then accuse
in the name of groups that are well and hear all hosts. So for each group, a silence concerns only the host that had it last.

A silence also concerns only the starts of a group that were on that host: those that have asked for a seat so far, and later
ones that ask while their group is still there. A group that has come back on another host reads the old silence before
the news that it has moved, and takes the notices in one by one: without that limit the first one would end its first epoch.

Assumes: all processes read the same log, in its order, and a group that moves asks for a seat after the news of that.
When the store has lost its contents, notices may be repeated in any order: until the news of a move comes again, a
silence may concern the group that has moved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from megatron_ft.core.detection.link_detector import Unit
from megatron_ft.core.protocol.signals import (
    ForgedNotice,
    HostAssigned,
    HostSilent,
    JoinRequested,
    Signal,
    Verdict,
    classify,
)
from megatron_ft.types import GroupId


@dataclass(frozen=True)
class GroupLocations:
    """The locations and silences read from the log so far.

    Attributes:
        moved: group -> the start from which on another host than before has it, or a part of it.
        asked: group -> its newest start that has asked for a seat.
        silences: pair of hosts, as the groups they named -> the silence that was not withdrawn.
    """

    moved: Mapping[GroupId, int] = field(default_factory=dict)
    asked: Mapping[GroupId, int] = field(default_factory=dict)
    silences: Mapping[tuple[Unit, Unit], HostSilent] = field(default_factory=dict)


def apply(places: GroupLocations, signal: Signal) -> tuple[GroupLocations, tuple[Verdict, ...]]:
    """Take in the next notice, and return the new locations and the verdicts that it leads to."""
    match signal:
        case ForgedNotice():
            return places, ()
        case HostSilent() if not set(signal.groups_by) & set(signal.groups_about):
            rest = {units: said for units, said in places.silences.items() if units != signal.units}
            after = replace(places, silences=rest if signal.heard else {**rest, signal.units: signal})
            return after, (classify(_at(signal, after)),)
        case HostAssigned(ranks=ranks, incarnation=incarnation):
            newest = {group: max(incarnation, places.moved.get(group, 0)) for group, _ in ranks}
            after = replace(places, moved={**places.moved, **newest})
        case JoinRequested(group=group, incarnation=incarnation):
            after = replace(places, asked={**places.asked, group: max(incarnation, places.asked.get(group, 0))})
        case _:
            after = places
    return after, (*_corrections(places, after), classify(signal))


def _corrections(before: GroupLocations, after: GroupLocations) -> Iterator[Verdict]:
    """Yield the verdicts of the standing silences that have changed from ``before`` to ``after``."""
    if before is not after:
        for said in before.silences.values():
            old, new = _at(said, before), _at(said, after)
            if old.units != new.units:
                yield classify(replace(old, heard=True))
            if old != new:
                yield classify(new)


def _at(said: HostSilent, places: GroupLocations) -> HostSilent:
    """Return the silence for the groups that are still where its host believed them to be, with the starts concerned."""
    since, until = dict(said.since), dict(said.until)
    by, about = (
        tuple(group for group in unit if since.get(group, 0) >= places.moved.get(group, 0)) for unit in said.units
    )
    newest = {
        group: max(known.get(group, 0) for known in (since, until, places.asked)) for group in sorted({*by, *about})
    }
    return replace(said, groups_by=by, groups_about=about, until=tuple(newest.items()))
