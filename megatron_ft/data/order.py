"""The samples of a microbatch, a pure function of its id, so that any group can compute any microbatch.

The order of a data epoch is a keyed permutation of ``range(num_samples)``, which is evaluated at single positions.
Nothing is shuffled, stored or exchanged, so that a takeover, a rejoin or a restart needs no data state. The order
depends on ``(seed, epoch)`` only.

(A *data epoch* is one pass over the samples. It has nothing to do with the epoch of a view.)
"""

from __future__ import annotations

import math
import struct
from functools import lru_cache
from hashlib import blake2b
from typing import TypeVar

import numpy as np

from megatron_ft.types import Microbatch

_MASK = (1 << 64) - 1
_ROUNDS = 8
Words = TypeVar("Words", int, np.ndarray)  # one value, or a uint64 array of them


def _mix(value: Words) -> Words:
    """Scatter a 64-bit word (the splitmix64 finaliser). Scalars and arrays use the same code, so they agree."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class Permutation:
    """A keyed bijection of ``range(n)`` in O(1) memory: a Feistel network with cycle walking.

    ``n`` values are laid out on a grid of rows x columns, the smallest nearly square one that holds them. Each round
    shifts the row by a keyed hash of the column, or the column by one of the row, which can always be undone: a
    bijection of the grid. A value that lands on one of the few spare cells (less than one row) is mapped again until it
    lands inside; following the cycles of a bijection is a bijection of the cells inside.

    Equal ``(n, seed, epoch)`` give the same order on every machine and in every version. Raises ``ValueError`` unless
    ``1 <= n <= 2**62``.
    """

    def __init__(self, n: int, seed: int, epoch: int = 0) -> None:
        if not 1 <= n <= 1 << 62:
            raise ValueError(f"a permutation needs 1 <= n <= 2**62, got n={n}")
        self.n = n
        self._rows = math.isqrt(n - 1) + 1
        self._columns = -(-n // self._rows)
        digest = blake2b(f"megatron_ft order {seed} {epoch}".encode(), digest_size=8 * _ROUNDS).digest()
        self._keys = struct.unpack(f"<{_ROUNDS}Q", digest)

    def _shuffle_grid(self, value: Words) -> Words:
        rows, columns = self._rows, self._columns
        row, column = value // columns, value % columns
        for number, key in enumerate(self._keys):
            # The hash is reduced before it is added: the sum must not wrap at 2**64 in numpy.
            if number % 2 == 0:
                row = (row + _mix(column ^ key) % rows) % rows
            else:
                column = (column + _mix(row ^ key) % columns) % columns
        return row * columns + column

    def __call__(self, position: int) -> int:
        """Return the value at ``position``. Raises ``ValueError`` outside ``range(n)``."""
        if not 0 <= position < self.n:
            raise ValueError(f"position {position} is outside range({self.n})")
        value = self._shuffle_grid(int(position))
        while value >= self.n:
            value = self._shuffle_grid(value)
        return value

    def many(self, positions: np.ndarray) -> np.ndarray:
        """Return the values at an array of positions: int64, same shape. Raises ``ValueError`` outside ``range(n)``."""
        positions = np.asarray(positions, dtype=np.int64)
        if positions.size and not (positions.min() >= 0 and positions.max() < self.n):
            raise ValueError(f"positions {positions.min()}..{positions.max()} are not all inside range({self.n})")
        values = self._shuffle_grid(positions.reshape(-1).astype(np.uint64))
        outside = np.flatnonzero(values >= self.n)
        while outside.size:
            values[outside] = self._shuffle_grid(values[outside])
            outside = outside[values[outside] >= self.n]
        return values.astype(np.int64).reshape(positions.shape)


@lru_cache(maxsize=8)  # a microbatch needs one data epoch, rarely two: enough for several datasets in a process
def permutation(n: int, seed: int, epoch: int) -> Permutation:
    """Return the order of one data epoch. Its keys are derived once."""
    return Permutation(n, seed, epoch)


def sample_indices(
    microbatch: Microbatch,
    *,
    groups: int,
    microbatches_per_group: int,
    samples_per_microbatch: int,
    num_samples: int,
    seed: int,
) -> np.ndarray:
    """Return the sample numbers of a microbatch: int64 ``[samples_per_microbatch]``, each in ``range(num_samples)``.

    The samples of a run are numbered consecutively: sample j of microbatch (step, shard, index) is number ``k =
    ((step*groups + shard)*microbatches_per_group + index)*samples_per_microbatch + j``. It is taken from data epoch ``k
    // num_samples`` at position ``k % num_samples`` of that epoch's order. So every sample occurs exactly once per data
    epoch, none is dropped at an epoch's end, and a microbatch may contain samples of two data epochs.

    Raises ``ValueError`` for a microbatch that does not exist in a run of this shape.
    """
    step, shard, index = microbatch
    if step < 0 or not 0 <= shard < groups or not 0 <= index < microbatches_per_group:
        raise ValueError(
            f"no microbatch {step}/{shard}.{index} in a run of {groups} shards x {microbatches_per_group} microbatches"
        )
    if samples_per_microbatch < 1 or num_samples < 1:
        raise ValueError(f"{samples_per_microbatch=} and {num_samples=} must be at least 1")
    first = ((step * groups + shard) * microbatches_per_group + index) * samples_per_microbatch
    epochs, positions = np.divmod(np.arange(first, first + samples_per_microbatch, dtype=np.int64), num_samples)
    samples = np.empty_like(positions)
    for epoch in np.unique(epochs).tolist():
        chosen = epochs == epoch
        samples[chosen] = permutation(num_samples, seed, epoch).many(positions[chosen])
    return samples


def microbatch_seed(run_seed: int, microbatch: Microbatch) -> int:
    """Return the seed of all random choices in the computation of ``microbatch``. It is the same in every group."""
    digest = blake2b(f"{run_seed}/{microbatch}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def step_seed(run_seed: int, step: int) -> int:
    """Return the seed of the random numbers that the optimizer draws in ``step``. It is the same in every group."""
    digest = blake2b(f"{run_seed}/optimizer {step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
