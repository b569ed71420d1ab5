"""Groups that hold another state than the others, found from the checksums that all groups send.

Intuition. All groups start a step from the same parameters, buffers and optimizer state, to the bit. Each group's checksum
of them travels in a slot of its own with bucket 0, so every group that commits the step compares the same numbers and comes
to the same conclusion without another message. Most steps compare a part of the state, the step in which a group enters
compares all of it.

Two corruptions do not end in the same wrong state, so the state that most groups hold is taken for right, provided that at
least two groups hold it and no other state is held by as many groups. Groups that have come back are no such independent
witnesses: what a return does not restore (a value that only the script knows) is missing in all of them alike. So the
groups that have not entered since all of the state was last compared decide, and if they do not agree, the right state is
unknown, and the run must stop.

The same holds for gradients that are not finite: when a strict minority of the groups has produced them in several steps in
a row, the fault is in these groups and not in the model or the data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass

from megatron_ft.types import GroupId, View, named


@dataclass(frozen=True)
class Comparison:
    """The outcome of comparing states.

    Attributes:
        minority: groups, ascending, whose state is not the right one.
        tied: if it is not known which state is right, all sets of groups with equal states; empty otherwise.
    """

    minority: tuple[GroupId, ...] = ()
    tied: tuple[tuple[GroupId, ...], ...] = ()

    def __bool__(self) -> bool:
        """True if some states differ."""
        return bool(self.minority or self.tied)


def compare(checksums: Mapping[GroupId, Hashable], doubted: Collection[GroupId] = ()) -> Comparison:
    """Compare the checksums of the groups that have sent one. ``doubted``: the groups of :func:`doubted`."""
    if len(set(checksums.values())) <= 1:
        return Comparison()
    witnesses = Counter(checksum for group, checksum in checksums.items() if group not in doubted)
    ranked = witnesses.most_common(2)
    agree = len(ranked) == 1
    if agree or (len(ranked) == 2 and ranked[0][1] > max(ranked[1][1], 1)):
        right = ranked[0][0]
        return Comparison(minority=tuple(sorted(group for group, found in checksums.items() if found != right)))
    holders: dict[Hashable, list[GroupId]] = {}
    for group in sorted(checksums):
        holders.setdefault(checksums[group], []).append(group)
    return Comparison(tied=tuple(sorted(map(tuple, holders.values()))))


def takers(view: View, step: int) -> frozenset[GroupId]:
    """Return the groups that begin ``step`` with a state which they have taken from others: groups that have entered in
    this step, and those that ``view`` has found behind. What the run starts from is nobody's result, and not compared."""
    behind = view.behind if view.epoch and step == view.step else ()
    return frozenset((*behind, *(group for group, entered in view.entered.items() if entered == step)))


def compares_all(view: View, step: int) -> bool:
    """Return whether the groups compare all of their states when they reduce ``step`` under ``view``: a group has taken its
    state in this step."""
    return step == view.step and bool(takers(view, step))


def doubted(view: View, step: int, pass_steps: int) -> frozenset[GroupId]:
    """Return the groups that are no independent witnesses in ``step``: those that have taken their state in it, and those
    that have entered since all of the state was last compared and found equal before.

    All of it is compared in a step in which a group enters, and piece by piece in any ``pass_steps`` steps (0: never). A
    group that has entered in such a step counts from its next one on: it had not yet made a step by itself. A group that
    was behind counts at once in the next step: its process is the one that has made the steps before.
    """
    entries = {group: entered for group, entered in view.entered.items() if entered <= step}
    compared = max((entered for entered in entries.values() if entered < step), default=-1)
    since = max(compared, step - pass_steps if pass_steps else 0)
    return takers(view, step) | {group for group, entered in entries.items() if entered >= since}


def nonfinite_minority(flagged: Mapping[GroupId, bool]) -> tuple[GroupId, ...]:
    """Return the groups that have to leave because their gradients are flagged, if they are fewer than half of all."""
    guilty = tuple(sorted(group for group, flag in flagged.items() if flag))
    return guilty if 2 * len(guilty) < len(flagged) else ()


def words(sets: tuple[tuple[GroupId, ...], ...]) -> str:
    """Return the sets of groups that hold equal states as text for messages: ``group 0 and groups 1 2``."""
    return " and ".join(map(named, sets))
