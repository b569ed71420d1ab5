"""The gradients of a group whose ranks share its microbatches: each rank has a part, and one of them reduces the sum.

A bucket is summed inside the group first; then its *owner*, a rank that depends on the bucket's number only, sums it over
the groups at its position, and shares the result with the other ranks of its group. So all positions carry the same load
between groups. It stands between ``runtime.reduction`` and an engine, and costs one more buffer of the gradients' size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_ft.engines.base import Engine
from megatron_ft.runtime.inner import Inner
from megatron_ft.types import Bucket


class SharedGradients:
    """What ``runtime.reduction`` asks an engine for; ``local`` is the sum of the group's ranks."""

    def __init__(self, engine: Engine, inner: Inner) -> None:
        self._engine, self._inner, self.slots = engine, inner, engine.slots
        self._sums = [torch.zeros_like(engine.local(bucket)) for bucket in range(engine.num_buckets)]

    def owner(self, bucket: Bucket) -> int:
        """The position that reduces it."""
        return bucket % self._inner.size

    def mine(self, buckets: Sequence[Bucket]) -> list[Bucket]:
        return [bucket for bucket in buckets if self.owner(bucket) == self._inner.position]

    def collect(self, buckets: Sequence[Bucket]) -> None:
        """Sum the ranks' parts. All ranks call it; again whenever one of them has computed something since."""
        self._inner.sum(*(self._sums[bucket].copy_(self._engine.local(bucket)) for bucket in buckets))

    def spread(self, bucket: Bucket) -> None:
        """Give the owner's result to all ranks. All ranks call it."""
        self._inner.share(self._engine.reduced(bucket), self.owner(bucket))

    def local(self, bucket: Bucket) -> torch.Tensor:
        return self._sums[bucket]

    def reduced(self, bucket: Bucket) -> torch.Tensor:
        return self._engine.reduced(bucket)

    def keep_local(self, bucket: Bucket) -> None:
        self._engine.reduced(bucket).copy_(self._sums[bucket])

    def replace_reduced(self, bucket: Bucket) -> None:
        self._engine.replace_reduced(bucket)
