"""Who takes over the ranks of a host that is lost: idle hosts, *spares*.

Intuition. A host runs *parts*: of each of its groups all ranks, or an equal share of them. A group that is lost is started
again where it was (``core.restarts``). That comes to nothing when the host itself is gone, or when it has failed with the
group as often as is allowed. Then an idle host takes over that part, and the group comes back as it would have at home.

Nobody decides for the others: every spare looks for itself, and the control store says who was first. Its key is that of
the start it is about to make, which the host at home needs, too: so no start of a group is made twice.

Assumes: a host may be silent and well (a link was cut). Its groups are vacant only once the others have gone on without
them; back again, it finds that they are somebody else's.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from megatron_ft.types import GroupId


@dataclass(frozen=True, order=True)
class Part:
    """The ranks of one group on one host."""

    group: GroupId
    positions: tuple[int, ...]
    host: int


def parts_of(host: int, ranks: Collection[tuple[GroupId, int]]) -> tuple[Part, ...]:
    """The parts of a host, from (group, position) of its ranks."""
    groups = sorted({group for group, _ in ranks})
    return tuple(Part(group, tuple(sorted(p for g, p in ranks if g == group)), host) for group in groups)


def vacant(
    parts: Collection[Part],
    away: Collection[int],
    refused: Collection[tuple[int, GroupId]],
    unwanted: Collection[GroupId],
    members: Collection[GroupId],
) -> tuple[Part, ...]:
    """The parts that an idle host may take over, in the order of their groups.

    Args:
        away: hosts of which nothing is heard.
        refused: (host, group) that is not started again there.
        unwanted: groups that have left in order: somebody wanted that.
        members: groups that have the model, or get it.
    """
    lost = [part for part in parts if part.host in away or (part.host, part.group) in refused]
    return tuple(sorted(part for part in lost if part.group not in members and part.group not in unwanted))


def fitting(parts: Collection[Part], room: int) -> tuple[Part, ...]:
    """Those of ``parts`` that a host with room for so many ranks takes, the first ones first."""
    taken: list[Part] = []
    for part in parts:
        if len(part.positions) <= room:
            taken.append(part)
            room -= len(part.positions)
    return tuple(taken)
