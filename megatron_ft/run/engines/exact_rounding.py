"""Exact reduction: each microbatch's gradient is rounded once to a grid, and everything after that is exact.

``core.exactness.grid`` decides on the grid. This module rounds: it takes the gradients of one microbatch, adds the
rounded values to a bucket's fp64 tensor, and counts their magnitudes there. A bucket's tensor is [elements + statistics
+ riders + slots + TAIL]; the statistics are, for each unit, ``COUNTS`` counts and the sum of the exponents that the
microbatches were rounded with, and at their end two words of the checksum.

**Rounding.** ``(g + c) - c`` in fp64 with ``c = 1.5 * 2^(lowest + 52)``: the sum has the exponent of c, so it is rounded
to a multiple of ``2^lowest``, and the difference is exact (``run.engines.rounding_loops``).

**Checksum.** Added to c, a sum s has the bits of c plus ``s / 2^lowest``: as integers, the bits of a bucket are a linear
function of its numbers. Modulo 2^64 the checksums of all groups' parts add up to that of the sum, unless a part was
changed on its way.

Failures it assumes: bits that flip on the wire, in a buffer or in a reduction.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import fsum, isnan, nan
from typing import TYPE_CHECKING, Any

import torch

from megatron_ft.core.exactness import grid
from megatron_ft.errors import InvariantBroken
from megatron_ft.run.engines import rounding_loops
from megatron_ft.run.engines.rounding_loops import BIAS, HALF, MASK, Grid

if TYPE_CHECKING:
    from megatron_ft.run.engines.buckets import Bucket

_SERIAL = 1 << 15
"""torch sums up to this many numbers in one thread, whatever the number of threads is."""
_WIDTH = grid.COUNTS + 1
_CHECK = 2
INT32_BITS = 30
"""With at most this many ``exact_bits`` the gradients of a bucket travel as int32."""


def statistics(units: int) -> int:
    """Return the number of elements of a bucket's statistics, for that many units."""
    return units * _WIDTH + _CHECK


class ExactBucket:
    """The grid of one bucket. ``units``: the places of its units in the grid of the rank: its parameters, in bucket 0
    then the loss and the changes of buffers."""

    def __init__(self, bucket: Bucket, units: Sequence[int], bits: int) -> None:
        self.bucket, self.units, self._bits = bucket, list(units), bits
        self._loops = rounding_loops.choose(bucket)
        self._end = bucket.elements + bucket.statistics

    def set(self, exponents: Sequence[int], microbatches: int) -> None:
        """Set the grid for the next microbatches."""
        mine = [exponents[unit] for unit in self.units]
        self._lowest = [grid.lowest(exponent, microbatches, self._bits) for exponent in mine]
        magics = [1.5 * 2.0 ** (lowest + 52) for lowest in self._lowest]
        self._loops.grid = Grid(mine, magics, self.bucket.local.device)

    def add(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Add the gradients of a microbatch, one for each parameter; None: it has none."""
        total = self.bucket.adds_to.flat
        self._loops.add([None if one is None else one.float() for one in gradients], total, self.statistics(total))

    def add_single(self, unit: int, value: torch.Tensor, total: torch.Tensor) -> None:
        """Add the value of another unit, fp64 [elements], to ``total``."""
        largest = value.abs().amax(0, keepdim=True) if len(value) else value.new_zeros(1)
        self._loops.grid.count(largest, self.statistics(self.bucket.adds_to.flat), unit)
        magic = self._loops.grid.magics[unit]
        total.add_(value.add(magic).sub_(magic))

    def statistics(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the counts and the sum of exponents of each unit, a view of ``flat`` [units, counts + 1]."""
        return flat[self.bucket.elements : self._end - _CHECK].view(-1, _WIDTH)

    # --- the wire -----------------------------------------------------------------------------------------------------

    @property
    def as_int32(self) -> bool:
        return self._bits <= INT32_BITS

    def pack(self, flat: torch.Tensor, wire: torch.Tensor) -> None:
        """Write the gradients of a flat bucket as multiples of the grid, int32 [elements]."""
        for (first, last), lowest in self._spans():
            wire[first:last].copy_(flat[first:last].mul(2.0**-lowest))

    def unpack(self, wire: torch.Tensor, flat: torch.Tensor) -> None:
        """Inverse of :meth:`pack`; gradients that no integer can express become nan."""
        if isnan(flat[self._end - 1]):
            flat[: self.bucket.elements] = nan
            return
        for (first, last), lowest in self._spans():
            flat[first:last].copy_(wire[first:last]).mul_(2.0**lowest)

    def _spans(self) -> list[tuple[tuple[int, int], int]]:
        return list(zip(self.bucket.spans, self._lowest, strict=False))

    def load(self, part: torch.Tensor, flat: torch.Tensor) -> None:
        """Copy a group's part of a bucket to the tensor that will be summed in place, with the checksum of its gradients:
        nan if they are not finite, and cannot be checked."""
        flat[self.bucket.elements :] = part[self.bucket.elements :]
        flat[self._end - _CHECK : self._end] = self._loops.copy(part, flat)

    def intact(self, flat: torch.Tensor) -> bool:
        """Return whether the gradients of a sum are on the grid, and have the checksum that those of the parts add up to."""
        said = flat[self._end - _CHECK : self._end].tolist()
        if any(map(isnan, said)):
            return True
        low, high = (int(number) if number.is_integer() else -1 for number in said)
        if (low + (high << HALF)) & MASK == self._loops.total(flat):
            return True
        # Beyond the grid the checksum is not linear, and the sums will be discarded.
        return any(grid.beyond(counts) for *counts, _ in self.statistics(flat).tolist())


class Rounding:
    """The grid of one rank, ``exponents`` of its units: its parameters in the order of the forward pass, the loss, and
    the changes of buffers.

    Args:
        buckets: all buckets of the rank, last parameters first.
        bits: see ``grid.lowest``.
    """

    def __init__(self, buckets: Sequence[Bucket], bits: int) -> None:
        units, self._bits = sum(len(bucket.parameters) for bucket in buckets), bits
        self.exponents = [grid.GUESS] * (units + 2)
        self.guessed = True
        """True until the magnitudes of a step were measured."""
        self.buckets: list[ExactBucket] = []
        names = list(range(units))
        for number, bucket in enumerate(buckets):
            mine = [names.pop() for _ in bucket.parameters] + ([units, units + 1] if number == 0 else [])
            self.buckets.append(ExactBucket(bucket, mine, bits))
        self._loss, self._changes = len(buckets[0].parameters), len(buckets[0].parameters) + 1
        self._microbatches = 1
        self._set()

    def begin(self, microbatches: int) -> None:
        """Begin a step of at most ``microbatches`` microbatches in all groups."""
        if microbatches != self._microbatches:
            self._microbatches = microbatches
            self._set()

    def _set(self) -> None:
        for bucket in self.buckets:
            bucket.set(self.exponents, self._microbatches)

    def add_loss(self, loss: torch.Tensor) -> None:
        """Add the loss of a microbatch to bucket 0."""
        first = self.buckets[0]
        first.add_single(self._loss, loss.detach().reshape(1).double(), first.bucket.adds_to.loss.view(1))

    def add_changes(self, changes: torch.Tensor, total: torch.Tensor) -> None:
        """Add the changes of buffers of a microbatch, fp64 [elements], to ``total``, their place in bucket 0."""
        self.buckets[0].add_single(self._changes, changes, total)

    def judge(self, microbatches: int) -> bool:
        """Return whether the sums of the step must not be used.

        Raises ``InvariantBroken`` if the groups have rounded to different grids."""
        discard = self.guessed
        for one in self.buckets:
            for unit, counts, exponent in self._found(one, microbatches):
                if exponent != self.exponents[unit]:
                    raise InvariantBroken(
                        f"the groups have rounded a gradient to different grids: the mean exponent of {microbatches} "
                        f"microbatches is {exponent}, and this group's is {self.exponents[unit]}"
                    )
                discard |= grid.beyond(counts)
        return discard

    def advance(self, microbatches: int) -> None:
        """Set the grid of the next step, or of the next attempt, from the statistics of the reduced buckets. A group that
        repeats the steps of others takes their grid from there, too."""
        for one in self.buckets:
            for unit, counts, exponent in self._found(one, microbatches):
                self.exponents[unit] = grid.following(int(exponent), counts, self._bits)
        self.guessed = False
        self._set()

    def _found(self, one: ExactBucket, microbatches: int) -> Iterator[tuple[int, list[float], float]]:
        """Yield each unit to which microbatches were added, with its counts and the exponent they were rounded with.
        Only the last stage of a pipeline has a loss, and a stage without buffers no changes of them."""
        for unit, (*counts, total) in zip(one.units, one.statistics(one.bucket.sum).tolist(), strict=True):
            if total:
                yield unit, counts, total / microbatches - BIAS

    def state(self) -> dict[str, Any]:
        """Return the grid, which is part of the committed state."""
        return {"exponents": list(self.exponents), "guessed": self.guessed}

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Inverse of :meth:`state`; None: the state is of a run without exact reduction."""
        if state is None or len(state["exponents"]) != len(self.exponents):
            state = {"exponents": [grid.GUESS] * len(self.exponents), "guessed": True}
        self.exponents, self.guessed = list(state["exponents"]), state["guessed"]
        self._set()


def square_norm(tensors: Sequence[torch.Tensor]) -> float:
    """Return the sum of the squares of fp64 tensors: the same bits with any number of threads."""
    pieces = [piece for one in tensors for piece in one.reshape(-1).split(_SERIAL if one.is_cpu else 1 << 40)]
    return fsum(norm * norm for norm in torch.stack(torch._foreach_norm(pieces)).tolist()) if pieces else 0.0
