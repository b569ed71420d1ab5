"""Which group evaluates which samples, when an evaluation between two steps is shared by all groups.

The batches of the evaluation are cut into chunks, a few for each group. A group computes its own chunks and publishes the
result of each. The first result of a chunk that is published stands, so a chunk that two groups compute counts once; groups
need not agree on which of them is lost. A chunk of a group that is lost, or that is late, is taken over by the others.

Assumes: crash-stop groups, and a compare-and-set store. All groups have the same model, and a result does not depend on the
group that computes it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from megatron_ft.types import GroupId

_CHUNKS_PER_GROUP = 4
"""A lost group costs the others at most its chunks, and what it takes over begins after a quarter of its work."""


@dataclass(frozen=True)
class Division:
    """The division of an evaluation; the same at all groups.

    Args:
        groups: the groups that share it, ascending.
        samples: number of samples.
        batch: number of samples in a batch; the last batch may be smaller.
    """

    groups: tuple[GroupId, ...]
    samples: int
    batch: int

    @property
    def batches(self) -> int:
        return -(-self.samples // self.batch)

    @property
    def chunks(self) -> int:
        return min(self.batches, _CHUNKS_PER_GROUP * len(self.groups))

    def owner(self, chunk: int) -> GroupId:
        return self.groups[chunk % len(self.groups)]

    def batches_of(self, chunk: int) -> range:
        """Return the numbers of the chunk's batches."""
        return range(self.batches * chunk // self.chunks, self.batches * (chunk + 1) // self.chunks)

    def samples_of(self, batch: int) -> range:
        return range(batch * self.batch, min((batch + 1) * self.batch, self.samples))


def collects(division: Division, me: GroupId, lost: Collection[GroupId]) -> bool:
    """Return whether this group adds up the results: the lowest one that is not known to be lost."""
    return next((group for group in division.groups if group not in lost), me) == me


def next_chunk(
    division: Division, me: GroupId, published: Collection[int], lost: Collection[GroupId], late: bool
) -> int | None:
    """Return the chunk that this group computes next; None if it has to wait for others, or all are published.

    Args:
        me: the group; it need not be one of those that share the evaluation.
        published: the chunks whose results are known to be published.
        lost: the groups that are known to be lost.
        late: whether the group has waited for the others long enough to compute their chunks as well.
    """
    missing = [chunk for chunk in range(division.chunks) if chunk not in published]
    own = [chunk for chunk in missing if division.owner(chunk) == me]
    if own:
        return own[0]
    free = missing if late else [chunk for chunk in missing if division.owner(chunk) in lost]
    # Each group begins elsewhere, so that they do not all compute the same chunk.
    living = [group for group in division.groups if group not in lost] or [me]
    place = sum(group < me for group in living) % len(living)
    return free[place * len(free) // len(living)] if free else None
