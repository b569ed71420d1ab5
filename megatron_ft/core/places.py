"""Where groups are, as the notice log tells in order, and what that makes of hosts that do not hear each other.

A host says which groups it has when it hears nothing of another one. It may say so late, and be wrong: when its link is
healed, what it could not say before comes after the news that its groups are on another host now. Then it accused in the
name of groups that are well, and hear everybody. So a silence concerns of each group only the host that had it last.

Assumes: all read the same log, in its order; when the store has forgotten, what is said again may come in any order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from megatron_ft.core.detector import Housed, Signal, Silent, Verdict, judge
from megatron_ft.core.links import Unit
from megatron_ft.types import GroupId


@dataclass(frozen=True)
class Places:
    """``moved``: the start of each group from which on another host than before has it, or a part of it; ``silences``: what
    hosts have said and not taken back, by the groups they named."""

    moved: Mapping[GroupId, int] = field(default_factory=dict)
    silences: Mapping[tuple[Unit, Unit], Silent] = field(default_factory=dict)


def hear(places: Places, signal: Signal) -> tuple[Places, tuple[Verdict, ...]]:
    """Take in the next notice. Returns the verdicts it leads to."""
    match signal:
        case Silent() if not set(signal.groups_by) & set(signal.groups_about):
            rest = {units: said for units, said in places.silences.items() if units != signal.units}
            after = replace(places, silences=rest if signal.heard else {**rest, signal.units: signal})
            return after, (judge(_at(signal, places.moved)),)
        case Housed(ranks=ranks, incarnation=incarnation):
            newest = {group: max(incarnation, places.moved.get(group, 0)) for group, _ in ranks}
            after = replace(places, moved={**places.moved, **newest})
            changes = [(_at(said, places.moved), _at(said, after.moved)) for said in places.silences.values()]
            said = [part for old, new in changes if old != new for part in (replace(old, heard=True), new)]
            return after, (*map(judge, said), judge(signal))
    return places, (judge(signal),)


def _at(said: Silent, moved: Mapping[GroupId, int]) -> Silent:
    """What it says of the groups that are still where its host believed them to be."""
    since = dict(said.since)
    by, about = (
        tuple(group for group in unit if since.get(group, 0) >= moved.get(group, 0)) for unit in said.units
    )
    return replace(said, groups_by=by, groups_about=about)
