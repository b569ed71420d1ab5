"""When which groups fail: one stream per trial, the same for every policy as far as it can be.

With renewal of the system neither the times nor the numbers that name the victims depend on what a policy does: two
policies of equal seed meet the same failures.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from math import gamma, inf
from typing import NamedTuple

import numpy as np

from megatron_ft.faults.causes import MIX
from megatron_ft.sim.training.setting import Failures, Setting
from megatron_ft.types import GroupId

_BLOCK = 4096


class Failure(NamedTuple):
    """``groups`` fail at ``time``, of ``cause``; one group, or the living ones of a rack."""

    time: float
    groups: tuple[GroupId, ...]
    cause: str


class Stream:
    """Failures of one trial, in order: :meth:`next_time`, then :meth:`take`."""

    def __init__(self, setting: Setting, seed: int) -> None:
        self._failures: Failures = setting.failures
        self._groups = setting.cluster.groups
        self._scale = setting.cluster.mtbf_s / gamma(1 + 1 / self._failures.shape)
        self._gaps = np.random.default_rng([seed, 1])
        self._marks = np.random.default_rng([seed, 2])
        self._chances = _chances(self._failures, self._groups, seed)
        self._block: Sequence[float] = ()
        self._at = 0
        self._last = 0.0
        self._clocks: list[tuple[float, GroupId]] = []
        self._recorded = iter(sorted(self._failures.trace))
        self._each = self._failures.renewal != "system" and not self._failures.trace
        if self._each:
            self._wind(0.0, range(self._groups))
        self._time, self._victim = self._draw()

    def started(self, now: float, groups: Collection[GroupId]) -> None:
        """These groups start anew: where each has a clock, that of a replaced one (or of every one) begins again."""
        if not self._each:
            return
        going = {group for _, group in self._clocks} | {self._victim}
        fresh = set(groups) if self._failures.renewal == "groups" else set(groups) - going
        if self._victim is not None:
            self._clocks.append((self._time, self._victim))
        self._wind(now, fresh)
        self._time, self._victim = self._draw()

    def next_time(self, targets: Collection[GroupId]) -> float:
        """When the next of ``targets`` fails; what would hit a group that is gone hits nobody."""
        if not targets:
            return inf
        if self._failures.of_the_living and self._victim is not None and not self._each and not self._failures.trace:
            while targets and self._victim not in targets:
                self._victim = (self._victim + 1) % self._groups  # the next one that lives, around the ring
        while self._victim is not None and self._victim not in targets:
            self._time, self._victim = self._draw()
        return self._time

    def take(self, targets: Collection[GroupId]) -> Failure:
        """What happens at :meth:`next_time`; the stream goes on to what comes after."""
        time, hit, failures = self.next_time(targets), self._victim, self._failures
        assert hit is not None, "there is no further failure to take"
        self._time, self._victim = self._draw()
        cause = "crash"
        if failures.mix:
            names, shares = zip(*MIX, strict=True)
            cause = names[int(np.searchsorted(np.cumsum(shares), self._marks.random() * sum(shares), side="right"))]
        if failures.rack_share and self._marks.random() < failures.rack_share:
            first = hit // failures.rack_groups * failures.rack_groups
            return Failure(time, tuple(g for g in range(first, first + failures.rack_groups) if g in targets), cause)
        return Failure(time, (hit,), cause)

    def skip_to(self, time: float) -> None:
        """Failures before ``time`` hit nobody: there was nothing to hit."""
        while self._time < time:
            self._time, self._victim = self._draw()

    def _wind(self, now: float, fresh: Collection[GroupId]) -> None:
        kept = [clock for clock in self._clocks if clock[1] not in fresh]
        lives = self._groups * self._scale * self._gaps.weibull(self._failures.shape, len(fresh))
        self._clocks = kept + [(now + life, group) for life, group in zip(lives.tolist(), sorted(fresh), strict=True)]
        heapq.heapify(self._clocks)

    def _draw(self) -> tuple[float, GroupId | None]:
        """The next failure, whoever it would hit; (infinity, None) when there is none."""
        if self._failures.trace:
            return next(self._recorded, (inf, None))
        if self._each:
            return heapq.heappop(self._clocks) if self._clocks else (inf, None)
        if self._at == len(self._block):
            self._block = (self._scale * self._gaps.weibull(self._failures.shape, _BLOCK)).tolist()
            self._at = 0
        self._last += self._block[self._at]
        self._at += 1
        return self._last, int(np.searchsorted(self._chances, self._marks.random() * self._chances[-1], side="right"))


def _chances(failures: Failures, groups: int, seed: int) -> np.ndarray:
    """Cumulative chances of the groups to be hit."""
    weights = np.ones(groups)
    frail = round(failures.frail_share * groups)
    weights[np.random.default_rng([seed, 3]).permutation(groups)[:frail]] = failures.frail_weight
    return np.cumsum(weights)
