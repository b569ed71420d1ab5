"""The passes over memory of exact reduction, three times with the same bits: for a CPU with numba, for a GPU with
Triton, and with torch's operations where the compiler is missing (:func:`choose`).

torch needs several passes over memory, which takes several times as long. On a CPU it works on blocks that fit into a
cache. ``run.engines.exact_rounding`` explains the arithmetic.

Failures it assumes: none.
"""

from __future__ import annotations

import importlib.util
import logging
import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache
from math import isfinite, nan
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from megatron_ft.core.exactness import grid
from megatron_ft.utils import extras

if TYPE_CHECKING:
    from megatron_ft.run.engines.buckets import Bucket

_log = logging.getLogger(__name__)

BIAS = 256
"""Added to each microbatch's exponent, so that their sum is 0 only for a unit to which no microbatch adds."""
HALF, MASK = 32, (1 << 64) - 1
_CPU_BLOCK = 1 << 16
"""Elements that torch rounds at a time on a CPU: half a MB of fp64."""
_GPU_BLOCK = 4096


class Grid:
    """The grid of some units, on a device: ``magics``, the numbers c whose addition rounds to it; ``thresholds`` [units,
    counts]; ``shares``, what each microbatch adds to the sum of exponents."""

    def __init__(self, exponents: Sequence[int], magics: Sequence[float], device: torch.device) -> None:
        self.magics = list(magics)
        self.there = torch.tensor(self.magics, dtype=torch.float64, device=device)
        mine = torch.tensor(list(exponents), dtype=torch.float64)
        offsets = torch.tensor(grid.OFFSETS, dtype=torch.float64)
        least = torch.full((len(mine), 1), 5e-324, dtype=torch.float64)
        self.thresholds = torch.cat([least, torch.exp2(mine[:, None] + offsets)], dim=1).to(device)
        self.shares = (mine + BIAS).to(device)

    def count(self, largest: torch.Tensor, statistics: torch.Tensor, first: int = 0) -> None:
        """Add the largest magnitudes of a microbatch to the statistics of the units from ``first`` on."""
        units = slice(first, first + len(largest))
        # An inf or nan is no reason for a coarser grid.
        known = torch.nan_to_num(largest.double(), nan=0.0, posinf=0.0)
        statistics[units, :-1].add_(known[:, None] >= self.thresholds[units])
        statistics[units, -1].add_(self.shares[units])


class Loops(ABC):
    """The passes over the gradients of one bucket, on the present ``grid``."""

    grid: Grid

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    @abstractmethod
    def add(self, gradients: Sequence[torch.Tensor | None], total: torch.Tensor, statistics: torch.Tensor) -> None:
        """Add the rounded gradients of a microbatch to the flat bucket ``total``, and their magnitudes to the statistics
        [units, counts + 1]. None: a parameter has no gradient."""

    @abstractmethod
    def copy(self, part: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
        """Copy the gradients of a flat bucket. Return their checksum as two numbers below 2^32, or nan if one of them is
        not finite; fp64 [2] on the bucket's device, whose host need not wait for it."""

    @abstractmethod
    def total(self, flat: torch.Tensor) -> int | None:
        """Return the checksum of a flat bucket's gradients, None if one of them is not on the grid."""

    def _parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [flat[first:last] for first, last in self._bucket.spans]


def choose(bucket: Bucket) -> Loops:
    """Return the loops for a bucket."""
    device = bucket.local.device
    if device.type == "cpu" and (compiled := _compiled()) is not None:
        return _WithNumba(bucket, compiled)
    if device.type == "cuda" and (on_device := _on_device()) is not None:
        return _WithTriton(bucket, on_device)
    return _WithTorch(bucket)


def _words(checksum: int | None) -> torch.Tensor:
    if checksum is None:
        return torch.full((2,), nan, dtype=torch.float64)
    return torch.tensor([checksum & (1 << HALF) - 1, checksum >> HALF & (1 << HALF) - 1], dtype=torch.float64)


# --- numba ------------------------------------------------------------------------------------------------------------

_MAGNITUDE, _MAGNITUDE_64 = np.int32(0x7FFFFFFF), np.int64(0x7FFFFFFFFFFFFFFF)
_FINITE_32, _FINITE = np.int32(0x7F800000), np.int64(0x7FF0000000000000)
"""Bits from which on a magnitude is inf or nan."""
_NONE = np.zeros(0, dtype=np.float32)


class _Compiled(NamedTuple):
    add: Any
    copy: Any
    total: Any


class _WithNumba(Loops):
    def __init__(self, bucket: Bucket, compiled: _Compiled) -> None:
        super().__init__(bucket)
        self._compiled = compiled

    def add(self, gradients: Sequence[torch.Tensor | None], total: torch.Tensor, statistics: torch.Tensor) -> None:
        flat, rows, magics = total.numpy(), statistics.numpy(), self.grid.magics
        limits, shares = self.grid.thresholds.numpy(), self.grid.shares.numpy()
        for at, (gradient, (first, last)) in enumerate(zip(gradients, self._bucket.spans, strict=True)):
            values = _NONE if gradient is None else gradient.detach().reshape(-1).numpy()
            where = flat[first:last], magics[at], rows[at], limits[at]
            self._compiled.add(values, values.view(np.int32), *where)
        rows[: len(gradients), -1] += shares[: len(gradients)]

    def copy(self, part: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
        source, target, checksum, all_finite = part.numpy(), flat.numpy(), 0, True
        for (first, last), magic in zip(self._bucket.spans, self.grid.magics, strict=False):
            found, finite = self._compiled.copy(source[first:last], target[first:last], magic)
            checksum, all_finite = checksum + int(found), all_finite and finite
        return _words(checksum & MASK if all_finite else None)

    def total(self, flat: torch.Tensor) -> int | None:
        source, checksum = flat.numpy(), 0
        for (first, last), magic in zip(self._bucket.spans, self.grid.magics, strict=False):
            found, on_grid = self._compiled.total(source[first:last], magic)
            if not on_grid:
                return None
            checksum += int(found)
        return checksum & MASK


@cache
def _compiled() -> _Compiled | None:
    """Return the compiled loops; None without numba."""
    if importlib.util.find_spec("numba") is None:
        _log.warning(f"exact reduction rounds several times faster on a CPU with numba: {extras.install('exact')}")
        return None
    from numba import njit

    def compiled(function: Any) -> Any:
        try:
            return njit(nogil=True, error_model="numpy", cache=True)(function)
        except RuntimeError:  # no directory in which the result could be kept
            return njit(nogil=True, error_model="numpy")(function)

    return _Compiled(*map(compiled, (_add, _copy, _total)))


def _add(gradient, bits, total, magic, row, limits):
    most = np.int32(0)
    for i in range(gradient.size):
        total[i] += (np.float64(gradient[i]) + magic) - magic
        most = max(most, bits[i] & _MAGNITUDE)
    largest = np.float64(np.int32(most).view(np.float32)) if most < _FINITE_32 else 0.0
    for j in range(limits.size):
        row[j] += largest >= limits[j]


def _copy(source, target, magic):
    found, most, base = np.int64(0), np.int64(0), np.float64(magic).view(np.int64)
    for i in range(source.size):
        value = source[i]
        target[i] = value
        found += np.float64(value + magic).view(np.int64) - base
        most = max(most, np.float64(value).view(np.int64) & _MAGNITUDE_64)
    return found, most < _FINITE


def _total(source, magic):
    found, off, base = np.int64(0), np.int64(0), np.float64(magic).view(np.int64)
    for i in range(source.size):
        moved = source[i] + magic
        found += np.float64(moved).view(np.int64) - base
        off += moved - magic != source[i]
    return found, off == 0


# --- Triton -----------------------------------------------------------------------------------------------------------


class _OnDevice(NamedTuple):
    """The loops for GPUs; each takes one parameter of a bucket."""

    add: Any
    total: Any


class _WithTriton(Loops):
    def __init__(self, bucket: Bucket, on_device: _OnDevice) -> None:
        super().__init__(bucket)
        self._on_device = on_device

    def add(self, gradients: Sequence[torch.Tensor | None], total: torch.Tensor, statistics: torch.Tensor) -> None:
        magics = self.grid.there
        largest = torch.zeros(len(gradients), dtype=torch.int32, device=magics.device)
        for unit, (gradient, part) in enumerate(zip(gradients, self._parts(total), strict=True)):
            if gradient is not None:
                values = gradient.detach().reshape(-1)
                size = values.numel()
                blocks = (-(-size // _GPU_BLOCK),)
                self._on_device.add[blocks](values, part, magics, largest, unit, size, block=_GPU_BLOCK)
        self.grid.count(largest.view(torch.float32), statistics)

    def copy(self, part: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
        total, finite = self._totals(self._parts(part), self._parts(flat), int(_FINITE))
        words = torch.stack([total & (1 << HALF) - 1, total >> HALF & (1 << HALF) - 1]).double()
        return torch.where(finite > 0, words, nan)

    def total(self, flat: torch.Tensor) -> int | None:
        total, on_grid = self._totals(self._parts(flat), None, 1).tolist()
        return total & MASK if on_grid else None

    def _totals(
        self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor] | None, limit: int
    ) -> torch.Tensor:
        """Return two words on the device, int64: the sum of all numbers in units of the grid modulo 2^64, and whether the
        bits of all magnitudes are below ``limit``: with targets those of the numbers, which are copied there; without, those
        of their distances from the grid."""
        magics = self.grid.there
        blocks = [-(-source.numel() // _GPU_BLOCK) for source in sources]
        # A place for each block: with atomic additions the blocks would wait for each other.
        sums, bounds = torch.empty(2, sum(blocks), dtype=torch.int64, device=magics.device)
        first = 0
        for unit, (source, count) in enumerate(zip(sources, blocks, strict=True)):
            target, copies = source if targets is None else targets[unit], targets is not None
            where = source, target, magics, sums[first:], bounds[first:], unit, source.numel()
            self._on_device.total[(count,)](*where, copies=copies, block=_GPU_BLOCK)
            first += count
        return torch.stack([sums.sum(), (bounds.amax() < limit).to(torch.int64)])


@cache
def _on_device() -> _OnDevice | None:
    """Return the compiled loops for GPUs; None without Triton."""
    if importlib.util.find_spec("triton") is None:
        return None
    import triton  # type: ignore[import-not-found]  # comes with torch for GPUs
    import triton.language as tl  # type: ignore[import-not-found]

    @triton.jit
    def rounded_add(gradient, total, magics, largest, unit, size, block: tl.constexpr):
        at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
        inside = at < size
        magic = tl.load(magics + unit)
        value = tl.load(gradient + at, mask=inside, other=0.0)
        before = tl.load(total + at, mask=inside, other=0.0)
        tl.store(total + at, before + ((value.to(tl.float64) + magic) - magic), mask=inside)
        bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        tl.atomic_max(largest + unit, tl.max(bits, axis=0))

    @triton.jit
    def copy_and_total(source, target, magics, sums, bounds, unit, size, copies: tl.constexpr, block: tl.constexpr):
        at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
        inside = at < size
        magic = tl.load(magics + unit)
        value = tl.load(source + at, mask=inside, other=0.0)
        if copies:
            tl.store(target + at, value, mask=inside)
        numbers = (value + magic).to(tl.int64, bitcast=True) - magic.to(tl.int64, bitcast=True)
        tl.store(sums + tl.program_id(0), tl.sum(numbers, axis=0))
        if not copies:
            value = value - ((value + magic) - magic)
        bits = value.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF
        tl.store(bounds + tl.program_id(0), tl.max(bits, axis=0))

    return _OnDevice(rounded_add, copy_and_total)


# --- torch ------------------------------------------------------------------------------------------------------------


class _WithTorch(Loops):
    def add(self, gradients: Sequence[torch.Tensor | None], total: torch.Tensor, statistics: torch.Tensor) -> None:
        none = torch.zeros((), device=total.device)
        self.grid.count(torch.stack([none if one is None else _largest(one) for one in gradients]), statistics)
        for gradient, part, magic in zip(gradients, self._parts(total), self.grid.magics, strict=False):
            if gradient is not None:
                for values, sums in zip(_blocks(gradient.detach().reshape(-1)), _blocks(part), strict=True):
                    sums.add_(values.to(torch.float64, copy=True).add_(magic).sub_(magic))

    def copy(self, part: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
        elements = self._bucket.elements
        finite = isfinite(flat[:elements].copy_(part[:elements]).sum())
        return _words(self._sum(flat, check=False) if finite else None).to(flat.device)

    def total(self, flat: torch.Tensor) -> int | None:
        return self._sum(flat, check=True)

    def _sum(self, flat: torch.Tensor, check: bool) -> int | None:
        """Return the checksum; None if ``check`` and a number is not on the grid."""
        total = 0
        for part, magic in zip(self._parts(flat), self.grid.magics, strict=False):
            bits = struct.unpack("<q", struct.pack("<d", magic))[0]
            for values in _blocks(part):
                moved = values + magic
                total += int(moved.view(torch.int64).sum()) - values.numel() * bits
                if check and not torch.equal(moved.sub_(magic), values):
                    return None
        return total & MASK


def _blocks(flat: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return consecutive parts of a flat tensor that fit into a CPU's cache; on a device the whole."""
    return flat.split(_CPU_BLOCK) if flat.is_cpu and len(flat) > _CPU_BLOCK else (flat,)


def _largest(gradient: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude, nan if there is one: on a CPU several times faster than torch's norm."""
    low, high = torch.aminmax(gradient.detach())
    return torch.maximum(-low, high)
