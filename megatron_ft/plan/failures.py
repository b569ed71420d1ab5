"""The failures of one trial, the same for every policy as far as possible.

With the renewal "system", neither the times nor the random numbers that choose the victims depend on the policy: two
policies with equal seeds meet the same failures.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from math import gamma, inf
from typing import NamedTuple

import numpy as np

from megatron_ft.cluster.faults.causes import MIX
from megatron_ft.plan.setting import Failures, Setting
from megatron_ft.types import GroupId

_BLOCK = 4096


class Failure(NamedTuple):
    """``groups`` fail at ``time`` because of ``cause``: one group, or the live groups of a rack."""

    time: float
    groups: tuple[GroupId, ...]
    cause: str


class Stream:
    """The failures of one trial, in order of time. Call :meth:`next_time`, then :meth:`take`."""

    def __init__(self, setting: Setting, seed: int) -> None:
        self._failures: Failures = setting.failures
        self._groups = setting.cluster.groups
        self._scale = setting.cluster.mtbf_s / gamma(1 + 1 / self._failures.shape)
        self._gaps = np.random.default_rng([seed, 1])
        self._marks = np.random.default_rng([seed, 2])
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
        """Note that ``groups`` start anew. Where each group has a clock, the clocks of these, or of replaced ones,
        restart."""
        if not self._each:
            return
        going = {group for _, group in self._clocks} | {self._victim}
        fresh = set(groups) if self._failures.renewal == "groups" else set(groups) - going
        if self._victim is not None:
            self._clocks.append((self._time, self._victim))
        self._wind(now, fresh)
        self._time, self._victim = self._draw()

    def next_time(self, targets: Collection[GroupId]) -> float:
        """Return when the next of ``targets`` fails. A failure of any other group has no effect."""
        if not targets:
            return inf
        if self._failures.of_the_living and self._victim is not None and not self._each and not self._failures.trace:
            while targets and self._victim not in targets:
                self._victim = (self._victim + 1) % self._groups  # the next live group, cyclically
        while self._victim is not None and self._victim not in targets:
            self._time, self._victim = self._draw()
        return self._time

    def take(self, targets: Collection[GroupId]) -> Failure:
        """Return the failure at :meth:`next_time`, and advance to the one after it."""
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
        """Drop the failures before ``time``, when no group ran."""
        while self._time < time:
            self._time, self._victim = self._draw()

    def _wind(self, now: float, fresh: Collection[GroupId]) -> None:
        kept = [clock for clock in self._clocks if clock[1] not in fresh]
        lives = self._groups * self._scale * self._gaps.weibull(self._failures.shape, len(fresh))
        self._clocks = kept + [(now + life, group) for life, group in zip(lives.tolist(), sorted(fresh), strict=True)]
        heapq.heapify(self._clocks)

    def _draw(self) -> tuple[float, GroupId | None]:
        """Return the time and the group of the next failure; (infinity, None) when there is none."""
        if self._failures.trace:
            return next(self._recorded, (inf, None))
        if self._each:
            return heapq.heappop(self._clocks) if self._clocks else (inf, None)
        if self._at == len(self._block):
            self._block = (self._scale * self._gaps.weibull(self._failures.shape, _BLOCK)).tolist()
            self._at = 0
        self._last += self._block[self._at]
        self._at += 1
        return self._last, int(self._marks.random() * self._groups)
