"""Groups that hold another state than the others, found from the checksums that all groups send.

Intuition. All groups start a step from the same parameters, buffers and optimizer state, to the bit. Each group's checksum
of them travels in a slot of its own with bucket 0, so every group that commits the step compares the same numbers and comes
to the same conclusion without another message. Two corruptions do not end in the same wrong state, so the state that
most groups hold is taken for right, provided that at least two groups hold it and no other state is held by as many
groups. Otherwise the right state is unknown, and the run must stop.

The same holds for gradients that are not finite: when a strict minority of the groups has produced them in several steps in
a row, the fault is in these groups and not in the model or the data.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from megatron_ft.types import GroupId


@dataclass(frozen=True)
class Comparison:
    """The outcome of comparing states.

    Attributes:
        minority: groups, ascending, whose state is not the one that most groups hold.
        tied: if no state is held by most groups, all sets of groups with equal states; empty otherwise.
    """

    minority: tuple[GroupId, ...] = ()
    tied: tuple[tuple[GroupId, ...], ...] = ()


def compare(checksums: Mapping[GroupId, Hashable]) -> Comparison:
    """Compare the checksums of the groups that have sent one."""
    if len(set(checksums.values())) <= 1:
        return Comparison()
    holders: dict[Hashable, list[GroupId]] = {}
    for group in sorted(checksums):
        holders.setdefault(checksums[group], []).append(group)
    ranked = sorted(map(tuple, holders.values()), key=lambda groups: (-len(groups), groups))
    if len(ranked[0]) == 1 or len(ranked[0]) == len(ranked[1]):
        return Comparison(tied=tuple(sorted(ranked)))
    return Comparison(minority=tuple(sorted(group for groups in ranked[1:] for group in groups)))


def nonfinite_minority(flagged: Mapping[GroupId, bool]) -> tuple[GroupId, ...]:
    """Return the groups that have to leave because their gradients are flagged, if they are fewer than half of all."""
    guilty = tuple(sorted(group for group, flag in flagged.items() if flag))
    return guilty if 2 * len(guilty) < len(flagged) else ()


def words(sets: tuple[tuple[GroupId, ...], ...]) -> str:
    """Return the sets of groups that hold equal states as text for messages: ``group 0 and groups 1 2``."""
    return " and ".join(f"group{'s' * (len(groups) > 1)} {' '.join(map(str, groups))}" for groups in sets)
