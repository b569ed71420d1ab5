"""Loops of exact reduction in one pass over memory: on a CPU compiled by numba (``pip install 'megatron_ft[exact]'``), on
a GPU by Triton, which comes with torch.

torch needs several passes, which cost several times as much; the bits are the same. Where the compiler is missing
``engines.exact_rounding`` uses torch.

Failures it assumes: none.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import torch

_MAGNITUDE, _MAGNITUDE_64 = np.int32(0x7FFFFFFF), np.int64(0x7FFFFFFFFFFFFFFF)
_FINITE_32, _FINITE = np.int32(0x7F800000), np.int64(0x7FF0000000000000)
"""Bits from which on a magnitude is inf or nan."""
_NONE = np.zeros(0, dtype=np.float32)


class Kernels(NamedTuple):
    """The compiled loops; each takes a flat tensor on the CPU."""

    add: Any
    copy: Any
    total: Any


@cache
def kernels() -> Kernels | None:
    """Return the compiled loops; None without numba."""
    if importlib.util.find_spec("numba") is None:
        return None
    from numba import njit

    def compiled(function: Any) -> Any:
        try:
            return njit(nogil=True, error_model="numpy", cache=True)(function)
        except RuntimeError:  # no directory in which the result could be kept
            return njit(nogil=True, error_model="numpy")(function)

    return Kernels(*map(compiled, (_add, _copy, _total)))


def add(gradient: torch.Tensor | None, total: Any, magic: float, row: Any, thresholds: Any, to: Kernels) -> None:
    """Add a rounded fp32 gradient to ``total``, and its magnitude to the unit's counts in ``row`` (arrays of fp64)."""
    values = _NONE if gradient is None else gradient.detach().reshape(-1).numpy()
    to.add(values, values.view(np.int32), total, magic, row, thresholds)


def copy(source: torch.Tensor, target: torch.Tensor, magic: float, to: Kernels) -> int | None:
    """Copy an fp64 tensor. Return the sum of its numbers in units of the grid modulo 2^64, None if one is not finite."""
    found, finite = to.copy(source.numpy(), target.numpy(), magic)
    return int(found) if finite else None


def total(source: torch.Tensor, magic: float, to: Kernels) -> int | None:
    """Return the sum of the numbers of an fp64 tensor in units of the grid modulo 2^64, None if one is not on the grid."""
    found, on_grid = to.total(source.numpy(), magic)
    return int(found) if on_grid else None


def _add(gradient, bits, total, magic, row, thresholds):
    most = np.int32(0)
    for i in range(gradient.size):
        total[i] += (np.float64(gradient[i]) + magic) - magic
        most = max(most, bits[i] & _MAGNITUDE)
    largest = np.float64(np.int32(most).view(np.float32)) if most < _FINITE_32 else 0.0
    for j in range(thresholds.size):
        row[j] += largest >= thresholds[j]


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


class DeviceKernels(NamedTuple):
    """The loops for GPUs; each takes one unit of a bucket."""

    add: Any
    total: Any


@cache
def device_kernels() -> DeviceKernels | None:
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

    return DeviceKernels(rounded_add, copy_and_total)


_BLOCK = 4096


def add_on_device(
    gradients: Sequence[torch.Tensor | None], totals: Sequence[torch.Tensor], magics: torch.Tensor, to: DeviceKernels
) -> torch.Tensor:
    """Add rounded fp32 gradients to ``totals``, flat fp64 tensors. Return the largest magnitude of each, fp32 [units]."""
    import torch

    largest = torch.zeros(len(gradients), dtype=torch.int32, device=magics.device)
    for unit, (gradient, total) in enumerate(zip(gradients, totals, strict=True)):
        if gradient is not None:
            values = gradient.detach().reshape(-1)
            size = values.numel()
            to.add[(-(-size // _BLOCK),)](values, total, magics, largest, unit, size, block=_BLOCK)
    return largest.view(torch.float32)


def total_on_device(
    sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor] | None, magics: torch.Tensor, to: DeviceKernels
) -> torch.Tensor:
    """Return two words on the device, int64. The first is the sum of all numbers in units of the grid modulo 2^64. If there
    are ``targets``, copy ``sources``, flat fp64 tensors, there; the second is 1 if all numbers are finite. Without targets
    it is 1 if all numbers are on the grid; else 0."""
    import torch

    blocks = [-(-source.numel() // _BLOCK) for source in sources]
    sums, bounds = torch.empty(2, sum(blocks), dtype=torch.int64, device=magics.device)  # blocks do not wait for others
    first = 0
    for unit, (source, count) in enumerate(zip(sources, blocks, strict=True)):
        size, target, copies = source.numel(), source if targets is None else targets[unit], targets is not None
        to.total[(count,)](
            source, target, magics, sums[first:], bounds[first:], unit, size, copies=copies, block=_BLOCK
        )
        first += count
    limit = 1 if targets is None else int(_FINITE)
    return torch.stack([sums.sum(), (bounds.amax() < limit).to(torch.int64)])
