"""The numbers that a group sends to all others in every step, together with bucket 0: the time of a microbatch in the
step before (``core.detection.stragglers``), and checksums of the state from which the step begins and of the
optimizers' hyperparameters (``core.detection.state_divergence``)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import isfinite

import torch

from megatron_ft.core.exactness.batches import Sent
from megatron_ft.run.engines.port import TAIL, Engine

WORTH_S = 0.02
"""Seconds. Microbatches that take less are not balanced: they are all reported with this time."""
_HALF_BITS = 24
STATE, SET, MADE = CHECKSUMS = range(3)
"""The checksums that each rank sends: of the state from which it begins the step, of the hyperparameters with which it
begins the step, and of those with which it has made the step before."""
_HALF = (1 << _HALF_BITS) - 1
"""The largest number that a slot carries; fp32 holds whole numbers up to 2^24 exactly."""

TAG_BITS = _HALF_BITS
_BATCHES = 7
"""Numbers of ``core.exactness.batches.Sent``: each of its two digests has two halves."""


class StepTimer:
    """The time per microbatch of a group, measured by its leader.

    With several ranks per group a microbatch takes the time of the group's slowest rank, which shows when they sum up
    their results.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._reset()

    def _reset(self) -> None:
        self._began, self._count, self._seconds, self._collected = time.monotonic(), 0, 0.0, False

    def begin(self) -> float:
        """Begin a step. Return the seconds per microbatch of the step before, 0 if unknown."""
        known = self._count and (self._ranks == 1 or self._collected)
        seconds = max(self._seconds / self._count, WORTH_S) if known else 0.0
        self._reset()
        return seconds

    def computed(self, count: int, seconds: float) -> None:
        """Count ``count`` microbatches computed in parallel; ``seconds`` is the time of the leader's own."""
        self._count += count
        if self._ranks == 1:
            self._seconds += seconds

    def collected(self, at: float) -> None:
        """Note that all ranks had summed up their results at ``at``; counts once in a step."""
        if self._ranks > 1 and not self._collected:
            self._seconds, self._collected = at - self._began, True

    def disturbed(self) -> None:
        """Discard the measurement: the step was interrupted."""
        if self._ranks > 1:
            self._count = 0


class Slots:
    """The numbers that travel with bucket 0: one row per group, to which only that group adds, so their sum over the
    groups contains the row of each. They are whole numbers below 2^24 except for the seconds, so fp32 holds them
    exactly. Digests are below 2^48; they are sent with exact reduction only, whose buckets are fp64.

    Args:
        engine: the engine of bucket 0.
        group, position: those of this rank.
        positions: number of ranks of a group that are summed into one bucket 0: all that share microbatches, else 1.
        digests: number of digests that each group can send (``core.exactness.verification``).
    """

    def __init__(self, engine: Engine, group: int, position: int = 0, positions: int = 1, digests: int = 0) -> None:
        self._engine, self._group, self._digests = engine, group, digests
        self._batches = 2 + 2 * len(CHECKSUMS) * positions
        self._checksums = self._batches + _BATCHES * positions
        self._width = slots_of_group(positions, digests)
        self._position = position if positions > 1 else 0
        self.shared = positions > 1
        self._own = self._all = torch.empty(0)

    def say_seconds(self, seconds: float) -> None:
        """Set the seconds per microbatch of the step before; called by the leader only."""
        self._row()[0] = seconds

    def say_suspect(self, suspect: bool) -> None:
        """Set if this rank's gradient was not finite several times in a row."""
        self._row()[1] = float(suspect)

    def say_checksums(self, checksums: Sequence[int]) -> None:
        """Set this rank's checksums, in the order of :data:`CHECKSUMS`; 0: it has none."""
        halves = [float(half) for one in checksums for half in (one & _HALF, one >> _HALF_BITS)]
        row, at = self._row(), 2 + len(halves) * self._position
        row[at : at + len(halves)] = torch.tensor(halves, dtype=row.dtype)

    def say_batches(self, sent: Sent) -> None:
        """Set the digests of batches that this rank compares."""
        numbers = [part for tag, one in (sent[:2], sent[2:4]) for part in (tag, one & _HALF, one >> _HALF_BITS)]
        row, at = self._row(), self._batches + _BATCHES * self._position
        row[at : at + _BATCHES] = torch.tensor([*numbers, sent.returned], dtype=row.dtype)

    def batches(self) -> list[dict[int, Sent]]:
        """Return the digests of batches of every group that has sent some: for each of the ranks that share the bucket."""
        rows = self._rows()[:, self._batches : self._checksums]
        if not rows.any():
            return []
        said: list[dict[int, Sent]] = [{} for _ in range(rows.shape[1] // _BATCHES)]
        for group, row in enumerate(rows.tolist()):
            for at, of_groups in enumerate(said):
                tag, low, high, other, *halves, back = map(_whole, row[_BATCHES * at : _BATCHES * (at + 1)])
                if tag or other:
                    digest = halves[0] | halves[1] << _HALF_BITS
                    of_groups[group] = Sent(tag, low | high << _HALF_BITS, other, digest, back)
        return said

    def say_digests(self, now: Sequence[int], before: Sequence[int]) -> None:
        """Set the digests that this rank has computed, and those of the attempt before; 0: it has none."""
        row = self._row()
        for at, found in ((self._checksums, now), (self._checksums + self._digests, before)):
            row[at : at + len(found)] = torch.tensor(found, dtype=row.dtype)

    def _row(self) -> torch.Tensor:
        """Return this group's row. Views are kept: making one takes longer than using it."""
        bucket = self._engine.local(0)
        if self._own._base is not bucket:
            first = bucket.numel() - TAIL - self._engine.slots + self._group * self._width
            self._own = bucket[first : first + self._width]
        return self._own

    def seconds(self) -> list[float]:
        """Return the seconds of every group, once bucket 0 is reduced; 0: unknown."""
        return self._rows()[:, 0].tolist()

    def suspects(self) -> frozenset[int]:
        """Return the groups that report a suspect rank."""
        said = self._rows()[:, 1]
        return frozenset(group for group, flag in enumerate(said.tolist()) if flag > 0) if said.any() else frozenset()

    def checksums(self) -> tuple[dict[int, tuple[int, ...]], ...]:
        """Return for each of :data:`CHECKSUMS` those of every group that has sent one, for each of its ranks that share
        the bucket."""
        said: tuple[dict[int, tuple[int, ...]], ...] = tuple({} for _ in CHECKSUMS)
        for group, row in enumerate(self._rows()[:, 2 : self._batches].tolist()):
            values = [_whole(low) | _whole(high) << _HALF_BITS for low, high in zip(row[::2], row[1::2], strict=True)]
            for kind, of_groups in enumerate(said):
                if any(of_kind := values[kind :: len(CHECKSUMS)]):
                    of_groups[group] = tuple(of_kind)
        return said

    def digests(self) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
        """Return the digests of every group, and those of the attempt before."""
        rows = [[_whole(number) for number in row[self._checksums :]] for row in self._rows().tolist()]
        now = {group: row[: self._digests] for group, row in enumerate(rows)}
        return now, {group: row[self._digests :] for group, row in enumerate(rows)}

    def differing(self, states: Sequence[int], others: Sequence[int]) -> tuple[frozenset[int], bool]:
        """Return which of the ranks that share the bucket have other checksums in one group than in another one, and
        whether this rank is one of them. A rank that shares it with no other is number 0."""
        found = frozenset(at for at, (one, other) in enumerate(zip(states, others, strict=True)) if one != other)
        return found, self._position in found

    def _rows(self) -> torch.Tensor:
        bucket = self._engine.reduced(0)
        if self._all._base is not bucket:
            self._all = bucket[-TAIL - self._engine.slots : -TAIL].view(-1, self._width)
        return self._all


def _whole(number: float) -> int:
    return int(number) if isfinite(number) else 0


def slots_of_group(positions: int, digests: int = 0) -> int:
    """Return how many numbers each group sends; arguments as for :class:`Slots`."""
    return 2 + (2 * len(CHECKSUMS) + _BATCHES) * positions + 2 * digests
