"""Exact reduction: each microbatch's gradient is rounded once to a grid, and everything after that is exact.

``core.exactness.grid`` decides on the grid. This module rounds: it takes the gradients of one microbatch, adds the
rounded values to a bucket's fp64 tensor, and counts their magnitudes there. A bucket's tensor is [elements + statistics
+ riders + slots + TAIL]; the statistics are, for each unit, ``COUNTS`` counts and the sum of the exponents that the
microbatches were rounded with, and at their end two words of the checksum.

**Rounding.** ``(g + c) - c`` in fp64 with ``c = 1.5 * 2^(lowest + 52)``: the sum has the exponent of c, so it is rounded
to a multiple of ``2^lowest``, and the difference is exact. On a CPU ``engines.rounding_kernels`` does it in one pass over
memory; without numba torch does it, on blocks that fit into a cache.

**Checksum.** Added to c, a sum s has the bits of c plus ``s / 2^lowest``: as integers, the bits of a bucket are a linear
function of its numbers. Modulo 2^64 the checksums of all groups' parts add up to that of the sum, unless a part was
changed on its way.

Failures it assumes: bits that flip on the wire, in a buffer or in a reduction.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from math import fsum, isfinite, isnan, nan
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from megatron_ft.core.exactness import grid
from megatron_ft.engines import rounding_kernels
from megatron_ft.errors import InvariantBroken

if TYPE_CHECKING:
    from megatron_ft.engines.buckets import Bucket

_BLOCK = 1 << 16
"""Elements that are rounded at a time on a CPU: half a MB of fp64."""
_SERIAL = 1 << 15
"""torch sums up to this many numbers in one thread, whatever the number of threads is."""
_WIDTH = grid.COUNTS + 1
_BIAS = 256
"""Added to each microbatch's exponent, so that the sum is 0 only for a unit to which no microbatch adds."""
_CHECK = 2
_HALF, _MASK = 32, (1 << 64) - 1
INT32_BITS = 30
"""With at most this many ``exact_bits`` the gradients of a bucket travel as int32."""


def statistics(units: int) -> int:
    """Return the number of elements of a bucket's statistics, for that many units."""
    return units * _WIDTH + _CHECK


class _Piece(NamedTuple):
    """A part of a unit in a block: ``start`` and ``stop`` in the flat gradient of the bucket's parameter ``which``."""

    which: int
    start: int
    stop: int
    room: torch.Tensor


class _Block(NamedTuple):
    """Consecutive elements of a bucket that are rounded together in a shared room, fp64."""

    first: int
    last: int
    pieces: list[_Piece]
    room: torch.Tensor

    @property
    def rooms(self) -> list[torch.Tensor]:
        return [piece.room for piece in self.pieces]


class ExactBucket:
    """The grid of one bucket. ``units``: the places of its units in the grid of the rank: its parameters, in bucket 0
    then the loss and the changes of buffers."""

    def __init__(self, bucket: Bucket, units: Sequence[int], room: torch.Tensor, bits: int) -> None:
        self.bucket, self.units, self._bits = bucket, list(units), bits
        self._blocks = _blocks(bucket, room)
        self._rooms = [block.rooms for block in self._blocks]
        self._device = room.device
        self._kernels = rounding_kernels.kernels() if room.device.type == "cpu" else None
        self._on_device = rounding_kernels.device_kernels() if room.device.type == "cuda" else None
        self._end = bucket.elements + bucket.statistics

    def set(self, exponents: Sequence[int], microbatches: int) -> None:
        """Set the grid for the next microbatches."""
        mine = [exponents[unit] for unit in self.units]
        self._lowest = [grid.lowest(exponent, microbatches, self._bits) for exponent in mine]
        self.magic = [1.5 * 2.0 ** (lowest + 52) for lowest in self._lowest]
        self._magic_there = torch.tensor(self.magic, dtype=torch.float64, device=self._device)
        self._magics = [[self.magic[piece.which] for piece in block.pieces] for block in self._blocks]
        device = self._device
        offsets = torch.tensor(grid.OFFSETS, dtype=torch.float64, device=device)
        self._exponents = torch.tensor(mine, dtype=torch.float64, device=device)
        least = torch.full((len(mine), 1), 5e-324, dtype=torch.float64, device=device)
        self._thresholds = torch.cat([least, torch.exp2(self._exponents[:, None] + offsets)], dim=1)
        self._limits, self._shares = self._thresholds.cpu().numpy(), self._exponents.cpu().numpy() + _BIAS

    def add(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Add the gradients of a microbatch, one for each parameter; None: it has none."""
        total = self.bucket.adds_to.flat
        if self._kernels is not None:
            flat, rows = total.numpy(), self.statistics(total).numpy()
            for at, (gradient, (first, last)) in enumerate(zip(gradients, self.bucket.spans, strict=True)):
                unit = flat[first:last], self.magic[at], rows[at], self._limits[at]
                rounding_kernels.add(gradient, *unit, self._kernels)
            rows[: len(gradients), -1] += self._shares[: len(gradients)]
            return
        if self._on_device is not None:
            where = self._parts(total), self._magic_there
            largest = rounding_kernels.add_on_device(gradients, *where, self._on_device)
            self._count(largest, slice(0, len(gradients)))
            return
        self._count(_largest(gradients, self._device), slice(0, len(gradients)))
        for block, rooms, magics in zip(self._blocks, self._rooms, self._magics, strict=True):
            known, values = [], []
            for piece in block.pieces:
                gradient = gradients[piece.which]
                if gradient is None:
                    piece.room.zero_()
                    continue
                values.append(
                    gradient if piece.room.shape == gradient.shape else gradient.reshape(-1)[piece.start : piece.stop]
                )
                known.append(piece.room)
            if known:
                torch._foreach_copy_(known, values)
            torch._foreach_add_(rooms, magics)
            torch._foreach_sub_(rooms, magics)
            total[block.first : block.last].add_(block.room)

    def _parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [flat[first:last] for first, last in self.bucket.spans]

    def add_single(self, unit: int, value: torch.Tensor, total: torch.Tensor) -> None:
        """Add the value of another unit, fp64 [elements], to ``total``."""
        self._count(value.abs().amax(0, keepdim=True) if len(value) else value.new_zeros(1), slice(unit, unit + 1))
        total.add_(value.add(self.magic[unit]).sub_(self.magic[unit]))

    def _count(self, largest: torch.Tensor, units: slice) -> None:
        found = self.statistics(self.bucket.adds_to.flat)[units]
        known = torch.nan_to_num(
            largest.double(), nan=0.0, posinf=0.0
        )  # what is not finite is no reason for a coarser grid
        found[:, :-1].add_(known[:, None] >= self._thresholds[units])
        found[:, -1].add_(self._exponents[units] + _BIAS)

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
        checksum: int | None = None
        if self._kernels is not None:
            found = [
                rounding_kernels.copy(part[first:last], flat[first:last], magic, self._kernels)
                for (first, last), magic in zip(self.bucket.spans, self.magic, strict=False)
            ]
            checksum = None if None in found else sum(one for one in found if one is not None) & _MASK
            flat[self.bucket.elements :] = part[self.bucket.elements :]
        elif self._on_device is not None:
            flat[self.bucket.elements :] = part[self.bucket.elements :]
            copied = self._parts(part), self._parts(flat), self._magic_there
            total, finite = rounding_kernels.total_on_device(*copied, self._on_device)
            words = torch.stack([total & (1 << _HALF) - 1, total >> _HALF & (1 << _HALF) - 1]).to(flat.dtype)
            flat[self._end - _CHECK : self._end] = torch.where(finite > 0, words, nan)  # the host need not know
            return
        elif isfinite(flat.copy_(part)[: self.bucket.elements].sum()):
            checksum = self._checksum(flat, of_sum=False)
        said = [nan, nan] if checksum is None else [checksum & (1 << _HALF) - 1, checksum >> _HALF]
        flat[self._end - _CHECK : self._end] = torch.tensor(said, dtype=flat.dtype)

    def intact(self, flat: torch.Tensor) -> bool:
        """Return whether the gradients of a sum are on the grid, and have the checksum that those of the parts add up to."""
        said = flat[self._end - _CHECK : self._end].tolist()
        if any(map(isnan, said)):
            return True
        low, high = (int(number) if number.is_integer() else -1 for number in said)
        if (low + (high << _HALF)) & _MASK == self._checksum(flat):
            return True
        # Beyond the grid the checksum is not linear, and the sums will be discarded.
        return any(grid.beyond(counts) for *counts, _ in self.statistics(flat).tolist())

    def _checksum(self, flat: torch.Tensor, of_sum: bool = True) -> int | None:
        """Return the sum of all gradients in units of the grid, modulo 2^64; None if one in a sum is not on the grid."""
        if self._kernels is not None:
            spans = zip(self.bucket.spans, self.magic, strict=False)
            found = [rounding_kernels.total(flat[first:last], magic, self._kernels) for (first, last), magic in spans]
            return None if None in found else sum(one for one in found if one is not None) & _MASK
        if self._on_device is not None:
            words = rounding_kernels.total_on_device(self._parts(flat), None, self._magic_there, self._on_device)
            total, on_grid = words.tolist()
            return total & _MASK if on_grid else None
        total = 0
        for block, rooms, magics in zip(self._blocks, self._rooms, self._magics, strict=True):
            block.room.copy_(flat[block.first : block.last])
            torch._foreach_add_(rooms, magics)
            total += int(block.room.view(torch.int64).sum())
            total -= sum(room.numel() * _bits_of(magic) for room, magic in zip(rooms, magics, strict=True))
            torch._foreach_sub_(rooms, magics)
            if of_sum and not torch.equal(block.room, flat[block.first : block.last]):
                return None
        return total & _MASK


class Rounding:
    """The grid of one rank, ``exponents`` of its units: its parameters in the order of the forward pass, the loss, and
    the changes of buffers.

    Args:
        buckets: all buckets of the rank, last parameters first.
        bits: see ``grid.lowest``.
    """

    def __init__(self, buckets: Sequence[Bucket], bits: int) -> None:
        units = sum(len(bucket.parameters) for bucket in buckets)
        self.exponents = [grid.GUESS] * (units + 2)
        self.guessed = True
        """True until the magnitudes of a step were measured."""
        rooms: dict[torch.device, torch.Tensor] = {}
        self.buckets: list[ExactBucket] = []
        names = list(range(units))
        for number, bucket in enumerate(buckets):
            device = bucket.local.device
            if device not in rooms:
                largest = max(one.elements for one in buckets if one.local.device == device)
                size = min(largest, _BLOCK) if device.type == "cpu" else largest
                rooms[device] = torch.empty(size, dtype=torch.float64, device=device)
            mine = [names.pop() for _ in bucket.parameters] + ([units, units + 1] if number == 0 else [])
            self.buckets.append(ExactBucket(bucket, mine, rooms[device], bits))
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
                self.exponents[unit] = grid.following(int(exponent), counts)
        self.guessed = False
        self._set()

    def _found(self, one: ExactBucket, microbatches: int) -> Iterator[tuple[int, list[float], float]]:
        """Yield each unit to which microbatches were added, with its counts and the exponent they were rounded with.
        Only the last stage of a pipeline has a loss, and a stage without buffers no changes of them."""
        for unit, (*counts, total) in zip(one.units, one.statistics(one.bucket.sum).tolist(), strict=True):
            if total:
                yield unit, counts, total / microbatches - _BIAS

    def state(self) -> dict[str, Any]:
        """Return the grid, which is part of the committed state."""
        return {"exponents": list(self.exponents), "guessed": self.guessed}

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Inverse of :meth:`state`; None: the state is of a run without exact reduction."""
        if state is None or len(state["exponents"]) != len(self.exponents):
            state = {"exponents": [grid.GUESS] * len(self.exponents), "guessed": True}
        self.exponents, self.guessed = list(state["exponents"]), state["guessed"]
        self._set()


def _largest(gradients: Sequence[torch.Tensor | None], device: torch.device) -> torch.Tensor:
    """Return the largest magnitude in each gradient; 0 for None, nan where it has one."""
    known = [gradient for gradient in gradients if gradient is not None]
    if device.type == "cpu":  # the norm of a device is fast, that of a CPU takes longer than all other passes together
        bounds = [torch.aminmax(gradient) for gradient in known]
        found = [torch.maximum(-low, high) for low, high in bounds]
    else:
        found = list(torch._foreach_norm(known, float("inf")))
    zero, each = torch.zeros((), device=device), iter(found)
    return torch.stack([zero if gradient is None else next(each) for gradient in gradients])


def square_norm(tensors: Sequence[torch.Tensor]) -> float:
    """Return the sum of the squares of fp64 tensors: the same bits with any number of threads."""
    pieces = [piece for one in tensors for piece in one.reshape(-1).split(_SERIAL if one.is_cpu else 1 << 40)]
    return fsum(norm * norm for norm in torch.stack(torch._foreach_norm(pieces)).tolist()) if pieces else 0.0


def _bits_of(value: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _blocks(bucket: Bucket, room: torch.Tensor) -> list[_Block]:
    """Cut the gradients of a bucket into blocks that fit into the room."""
    blocks: list[_Block] = []
    pieces: list[_Piece] = []
    first = filled = 0

    def close() -> None:
        nonlocal pieces, first, filled
        if pieces:
            blocks.append(_Block(first, first + filled, pieces, room[:filled]))
        pieces, first, filled = [], first + filled, 0

    for index, parameter in enumerate(bucket.parameters):
        start, size = 0, parameter.numel()
        if size > room.numel() - filled:
            close()
        while start < size:
            stop = min(size, start + room.numel() - filled)
            part = room[filled : filled + stop - start]
            pieces.append(_Piece(index, start, stop, part.view(parameter.shape) if stop - start == size else part))
            filled += stop - start
            start = stop
            if filled == room.numel():
                close()
    close()
    return blocks
