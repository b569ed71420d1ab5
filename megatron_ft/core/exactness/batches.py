"""Whether groups load the same batch for the same microbatch.

A dataset must be a function of the microbatch id. In the first step that groups make together, each sends a digest of the
batch of the first microbatch that it computes (``own``), and one of the batch of the first microbatch that the next group
computes (``other``), which it has loaded after its own. So a clock and a file list of another order are seen, and
an iterator whose position is the same in all groups, too: the two loads are at different positions. A group that is
alone loads its first microbatch twice.

Each rank of a group that loads samples does so, and compares with the ranks at the same position: hosts of one group may
have different files. A group that has come back and has not been found equal since is not believed against one
that is: only the group that came back leaves. It is not known which batch is right where neither or both are believed.

The digests travel with bucket 0. A tag says of which microbatch a digest is: views may change between the moment at which a
group chooses the microbatches and that at which all compare.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from megatron_ft.types import GroupId, Microbatch, Plan


class Sent(NamedTuple):
    """The numbers of one group; a tag of 0: there is none. ``returned``: 1 if the group has come back, and no comparison
    has found its batch equal since."""

    own_tag: int = 0
    own: int = 0
    other_tag: int = 0
    other: int = 0
    returned: int = 0


class Pair(NamedTuple):
    """The group that computes a microbatch, and the one that has loaded it for comparison."""

    owner: GroupId
    checker: GroupId


class Comparison(NamedTuple):
    """The groups that took part; for each whose batch is not the right one, a pair that shows it; and a pair of which it
    is not known which batch is right, if there is one."""

    groups: frozenset[GroupId]
    wrong: Mapping[GroupId, Pair]
    undecided: Pair | None


Leaf = Sequence[str]
"""Path in the batch, what is there (type, dtype, shape), and the hash of its content."""


def chosen(plan: Plan, live: Collection[GroupId], group: GroupId) -> tuple[Microbatch, Microbatch] | None:
    """Return the microbatches of ``own`` and of ``other``; None for a group that computes nothing."""
    ring = sorted(member for member, share in plan.assignment.items() if share and member in live)
    if group not in ring:
        return None
    following = ring[(ring.index(group) + 1) % len(ring)]
    return plan.of(group)[0], plan.of(following)[0]


def compared(sent: Mapping[GroupId, Sent]) -> Comparison:
    """Compare what all groups have sent; the same in each group that has the sums."""
    owners = {said.own_tag: group for group, said in sorted(sent.items()) if said.own_tag}
    same = dict[Pair, bool]()
    for checker, said in sorted(sent.items()):
        owner = owners.get(said.other_tag)
        if said.other_tag and owner is not None:
            same[Pair(owner, checker)] = sent[owner].own == said.other
    groups = frozenset(group for pair in same for group in pair)
    believed, wrong = {group for group in groups if not sent[group].returned}, dict[GroupId, Pair]()
    while True:
        for pair, equal in same.items():
            for one, other in (pair, pair[::-1]):
                if not equal and one in believed and other not in believed:
                    wrong.setdefault(other, pair)
        # Those whose batch is that of a believed group are believed against the rest.
        linked = {group for pair, equal in same.items() if equal and believed & set(pair) for group in pair}
        if linked <= believed | wrong.keys():
            break
        believed |= linked - wrong.keys()
    open_pairs = (pair for pair, equal in same.items() if not equal and not wrong.keys() & set(pair))
    return Comparison(groups, wrong, next(open_pairs, None))


def difference(one: Sequence[Leaf], other: Sequence[Leaf], names: tuple[str, str]) -> str:
    """Return the first difference of two batches, in words; empty if there is none. ``names``: of the two loads."""
    theirs = {leaf[0]: leaf for leaf in other}
    for path, kind, content in one:
        where = f"batch{path}"
        if path not in theirs:
            return f"{where} ({kind}) is there {names[0]} only"
        _, their_kind, their_content = theirs[path]
        if kind != their_kind:
            return f"{where} is {kind} {names[0]} and {their_kind} {names[1]}"
        if content != their_content:
            return f"{where} ({kind}) has another content {names[0]} than {names[1]}"
    paths = {leaf[0] for leaf in one}
    return next((f"batch{path} ({kind}) is there {names[1]} only" for path, kind, _ in other if path not in paths), "")
