"""The gradients of a group of several ranks, and the rank that reduces each bucket between the groups.

When the ranks share the group's microbatches, each rank has a part of every bucket. The parts are first summed inside
the group. Then the bucket's *owner*, a rank that depends on the bucket's number only, sums it over the groups at its
position, and shares the result with the other ranks of its group. So all positions carry the same load between groups.
This layer is between ``run.collectives.bucket_allreduce`` and an engine. The sums take the place of the reduced buckets:
before each attempt to reduce them, they are made anew.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import torch

from megatron_ft.run.collectives.intra_group import IntraGroup
from megatron_ft.run.engines.exact_rounding import ExactBucket
from megatron_ft.run.engines.port import Engine
from megatron_ft.types import Bucket


class _OfGroup:
    """The common part. ``_first``: the number that this rank's bucket 0 has in the group."""

    def __init__(self, engine: Engine, inner: IntraGroup) -> None:
        self._engine, self._inner, self._first = engine, inner, 0
        self.num_buckets = engine.num_buckets

    @abstractmethod
    def owner(self, bucket: Bucket) -> int:
        """Return the position that reduces ``bucket``."""

    def mine(self, buckets: Sequence[Bucket]) -> list[Bucket]:
        return [bucket for bucket in buckets if self.owner(bucket) == self._inner.position]

    def tail(self, bucket: Bucket) -> int:
        return self._engine.tail(bucket - self._first)

    def exact(self, bucket: Bucket) -> ExactBucket | None:
        return self._engine.exact(bucket - self._first)

    def reduced(self, bucket: Bucket) -> torch.Tensor:
        return self._engine.reduced(bucket - self._first)

    def replace_reduced(self, bucket: Bucket) -> None:
        self._engine.replace_reduced(bucket - self._first)


class SharedGradients(_OfGroup):
    """The buckets as ``run.collectives.bucket_allreduce`` uses them; ``local`` is the sum over the group's ranks."""

    in_place = True

    def owner(self, bucket: Bucket) -> int:
        return bucket % self._inner.size

    def collect(self, buckets: Sequence[Bucket]) -> None:
        """Sum the ranks' parts. All ranks call it, again before each attempt to reduce these buckets."""
        self._inner.sum(*(self._engine.reduced(bucket).copy_(self._engine.local(bucket)) for bucket in buckets))

    def broadcast(self, bucket: Bucket) -> None:
        """Copy the owner's result to all ranks. All ranks call it."""
        self._inner.share(self._engine.reduced(bucket), self.owner(bucket))

    def local(self, bucket: Bucket) -> torch.Tensor:
        return self._engine.reduced(bucket)

    def keep_local(self, bucket: Bucket) -> None:
        """Do nothing: the sum over the group's ranks is in the reduced bucket."""


class OwnGradients(_OfGroup):
    """The buckets of ranks that compute together (pipeline, tensor parallelism). Each rank has its own parameters and
    buckets, numbered one rank after the other. Nothing is summed inside the group, and only its owner has a bucket."""

    in_place = False

    def __init__(self, engine: Engine, inner: IntraGroup) -> None:
        super().__init__(engine, inner)
        counts = torch.zeros(inner.size, dtype=torch.int64)
        counts[inner.position] = engine.num_buckets
        inner.sum(counts)
        self._ends = list(accumulate(counts.tolist()))
        self._first = self._ends[inner.position] - engine.num_buckets
        self.num_buckets = self._ends[-1]

    def number(self, bucket: Bucket) -> Bucket:
        """Return the number in the group of a bucket of this rank's engine."""
        return self._first + bucket

    def owner(self, bucket: Bucket) -> int:
        return bisect_right(self._ends, bucket)

    def collect(self, buckets: Sequence[Bucket]) -> None:
        """Do nothing: a rank's own results are in its buckets already."""

    def broadcast(self, bucket: Bucket) -> None:
        """Do nothing: no other rank needs the bucket."""

    def local(self, bucket: Bucket) -> torch.Tensor:
        return self._engine.local(bucket - self._first)

    def keep_local(self, bucket: Bucket) -> None:
        self._engine.keep_local(bucket - self._first)
