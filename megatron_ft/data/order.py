"""The samples of a microbatch, a pure function of its id, so that any group can compute any microbatch.

The order of a data epoch is a keyed permutation of ``range(num_samples)``, which is evaluated at single positions.
Nothing is shuffled, stored or exchanged, so that a takeover, a rejoin or a restart needs no data state. The order
depends on ``(seed, epoch)`` only.

(A *data epoch* is one pass over the samples. It has nothing to do with the epoch of a view.)
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import numpy as np

from megatron_ft.types import Microbatch

_ROUNDS = 8


def _mix(value: np.ndarray) -> np.ndarray:
    """Scatter 64-bit words (the splitmix64 finaliser)."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
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

    def _shuffle_grid(self, value: np.ndarray) -> np.ndarray:
        rows, columns = self._rows, self._columns
        row, column = value // columns, value % columns
        for number, key in enumerate(self._keys):
            # The hash is reduced before it is added: the sum must not wrap at 2**64 in numpy.
            if number % 2 == 0:
                row = (row + _mix(column ^ key) % rows) % rows
            else:
                column = (column + _mix(row ^ key) % columns) % columns
        return row * columns + column

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


permutation = lru_cache(maxsize=8)(Permutation)
"""The order of one data epoch, kept for the next microbatch: 8 are enough for several datasets in a process."""


class BatchSchedule:
    """The number of microbatches in a shard, for every step of a run: one number, unless the script changes it.

    It is a state that checkpoints and a returning group carry (``run.registered_state``), because the numbers of a
    step's samples follow from the sizes of all steps before it.
    """

    def __init__(self, per_shard: int) -> None:
        self._initial, self._changes = per_shard, [(0, per_shard)]

    @classmethod
    def of(cls, sizes: int | BatchSchedule) -> BatchSchedule:
        """Return the schedule itself, or that of a run in which every step has this size."""
        return sizes if isinstance(sizes, BatchSchedule) else cls(sizes)

    @property
    def is_fixed(self) -> bool:
        """Return whether no step has another size than the first one given."""
        return self._changes == [(0, self._initial)]

    def at(self, step: int) -> int:
        """Return the number of microbatches in a shard of ``step``."""
        return next(size for first, size in reversed(self._changes) if first <= max(step, 0))

    def before(self, step: int) -> int:
        """Return the number of microbatches of one shard in all steps before ``step``."""
        ends = [first for first, _ in self._changes[1:]] + [step]
        spans = zip(self._changes, ends, strict=True)
        return sum(max(0, min(end, step) - first) * size for (first, size), end in spans)

    def number(self, microbatch: Microbatch, groups: int) -> int:
        """Return the consecutive number of a microbatch in a run of ``groups`` shards.

        Raises ``ValueError`` for a microbatch that does not exist in that run.
        """
        step, shard, index = microbatch
        size = self.at(step)
        if step < 0 or not 0 <= shard < groups or not 0 <= index < size:
            raise ValueError(f"no microbatch {step}/{shard}.{index} in a run of {groups} shards x {size} microbatches")
        return self.before(step) * groups + shard * size + index

    def change(self, step: int, per_shard: int) -> None:
        """Set the size of ``step`` and all after it. Raises ``ValueError`` for a step before the last change."""
        if step < self._changes[-1][0]:
            raise ValueError(f"the size of step {step} was followed by a change at step {self._changes[-1][0]}")
        kept = [change for change in self._changes if change[0] < step]
        if not kept or kept[-1][1] != per_shard:
            kept.append((step, per_shard))
        self._changes = kept

    def state_dict(self) -> dict[str, Any]:
        """Return all changes, as JSON has them."""
        return {"changes": [list(change) for change in self._changes]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the changes of another schedule."""
        self._changes = [(first, size) for first, size in state["changes"]]


def sample_indices(
    microbatch: Microbatch,
    *,
    groups: int,
    microbatches_per_group: int | BatchSchedule,
    samples_per_microbatch: int,
    num_samples: int,
    seed: int,
) -> np.ndarray:
    """Return the sample numbers of a microbatch: int64 ``[samples_per_microbatch]``, each in ``range(num_samples)``.

    The samples of a run are numbered consecutively: sample j of microbatch (step, shard, index) is number ``k =
    ((step*groups + shard)*microbatches_per_group + index)*samples_per_microbatch + j`` if all steps have the same size
    (:class:`BatchSchedule`). It is taken from data epoch ``k
    // num_samples`` at position ``k % num_samples`` of that epoch's order. So every sample occurs exactly once per data
    epoch, none is dropped at an epoch's end, and a microbatch may contain samples of two data epochs.

    Raises ``ValueError`` for a microbatch that does not exist in a run of this shape.
    """
    if samples_per_microbatch < 1 or num_samples < 1:
        raise ValueError(f"{samples_per_microbatch=} and {num_samples=} must be at least 1")
    first = BatchSchedule.of(microbatches_per_group).number(microbatch, groups) * samples_per_microbatch
    epochs, positions = np.divmod(np.arange(first, first + samples_per_microbatch, dtype=np.int64), num_samples)
    samples = np.empty_like(positions)
    for epoch in np.unique(epochs).tolist():
        chosen = epochs == epoch
        samples[chosen] = permutation(num_samples, seed, epoch).many(positions[chosen])
    return samples


# The seeds of ``data.generators``. Each is the same in every group.


def microbatch_seed(run_seed: int, microbatch: Microbatch) -> int:
    """Return the seed of all random choices in the computation of ``microbatch``."""
    return _seed(f"{run_seed}/{microbatch}")


def data_seed(run_seed: int, microbatch: Microbatch) -> int:
    """Return the seed of the random numbers that the dataset draws for ``microbatch``."""
    return _seed(f"{run_seed}/data {microbatch}")


def step_seed(run_seed: int, step: int) -> int:
    """Return the seed of the random numbers that the optimizer draws in ``step``."""
    return _seed(f"{run_seed}/optimizer {step}")


def script_seed(run_seed: int, step: int, after: str) -> int:
    """Return the seed of the random numbers that a script draws between two calls of the session, while the next step is
    ``step``. ``after``: the first of the two calls."""
    return _seed(f"{run_seed}/script {step} {after}")


def evaluation_seed(run_seed: int, name: str, sample: int) -> int:
    """Return the seed of the random numbers for the batch of an evaluation that begins with number ``sample``."""
    return _seed(f"{run_seed}/evaluation {name} {sample}")


def _seed(purpose: str) -> int:
    return int.from_bytes(blake2b(purpose.encode(), digest_size=8).digest(), "little") >> 1
