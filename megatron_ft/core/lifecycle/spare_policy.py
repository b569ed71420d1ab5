"""Idle hosts, *spares*, that take over the ranks of a lost host.

Intuition. A host runs *parts*: all ranks of each of its groups, or an equal share of them. A group that is lost is
started again where it was (``core.lifecycle.restart_policy``). That is impossible if the host itself is gone, or has
failed with the group as often as is allowed. Then an idle host takes over that part, and the group comes back as on its
own host.

No host decides for the others: every spare looks for vacant parts by itself, and the control store decides which was
first. The key there is that of the start to be made, which the group's own host needs, too: so no start of a group is
made twice.

Assumes: a host may be silent and well (a link was cut). Its groups are vacant only once the others have gone on without
them; when the host is heard again, it finds that another host has taken them over.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from megatron_ft.types import GroupId


@dataclass(frozen=True, order=True)
class Part:
    """The ranks of one group on one host.

    Attributes:
        group: the group.
        positions: of the ranks in the group.
        host: number of the host.
    """

    group: GroupId
    positions: tuple[int, ...]
    host: int


def parts_of(host: int, ranks: Collection[tuple[GroupId, int]]) -> tuple[Part, ...]:
    """Return the parts of a host, from (group, position) of its ranks."""
    groups = sorted({group for group, _ in ranks})
    return tuple(Part(group, tuple(sorted(p for g, p in ranks if g == group)), host) for group in groups)


def vacant(
    parts: Collection[Part],
    away: Collection[int],
    refused: Collection[tuple[int, GroupId]],
    unwanted: Collection[GroupId],
    members: Collection[GroupId],
) -> tuple[Part, ...]:
    """Return the parts that an idle host may take over, in the order of their groups.

    Args:
        parts: the parts of all hosts.
        away: hosts that are not heard.
        refused: (host, group) of groups that are not started again on that host.
        unwanted: groups that have left in order, on purpose.
        members: groups that have the model, or get it.
    """
    lost = [part for part in parts if part.host in away or (part.host, part.group) in refused]
    return tuple(sorted(part for part in lost if part.group not in members and part.group not in unwanted))


def fitting(parts: Collection[Part], room: int) -> tuple[Part, ...]:
    """Return the parts, in order, that a host with room for ``room`` ranks takes."""
    taken: list[Part] = []
    for part in parts:
        if len(part.positions) <= room:
            taken.append(part)
            room -= len(part.positions)
    return tuple(taken)
