"""How long a microbatch takes a group, as it tells the others in the step after (``core.stragglers``)."""

from __future__ import annotations

import time

import torch

from megatron_ft.engines.base import TAIL, Engine

WORTH_S = 0.02
"""Nobody balances microbatches that take less: they are all said to take as long."""


class Pace:
    """Kept by a group's leader.

    With several ranks per group a microbatch takes the group as long as its slowest rank needs, which shows when they sum
    up what they have computed.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._reset()

    def _reset(self) -> None:
        self._began, self._count, self._seconds, self._collected = time.monotonic(), 0, 0.0, False

    def begin(self) -> float:
        """A step begins; seconds per microbatch of the one before, 0 if that is not known."""
        known = self._count and (self._ranks == 1 or self._collected)
        seconds = max(self._seconds / self._count, WORTH_S) if known else 0.0
        self._reset()
        return seconds

    def computed(self, count: int, seconds: float) -> None:
        """So many microbatches at the same time; ``seconds`` is what the leader needed for its own."""
        self._count += count
        if self._ranks == 1:
            self._seconds += seconds

    def collected(self, at: float) -> None:
        """All ranks had summed up what they computed at ``at``; counts once in a step."""
        if self._ranks > 1 and not self._collected:
            self._seconds, self._collected = at - self._began, True

    def disturbed(self) -> None:
        """The step was interrupted: what it takes now says nothing of this group."""
        if self._ranks > 1:
            self._count = 0


class Slots:
    """The numbers that travel with bucket 0, one of each group. Views are kept: making one takes longer than using it."""

    def __init__(self, engine: Engine, group: int) -> None:
        self._engine, self._group = engine, group
        self._own = self._all = torch.empty(0)

    def say(self, number: float) -> None:
        """Into this group's slot of the step that has just begun."""
        bucket = self._engine.local(0)
        if self._own._base is not bucket:
            self._own = bucket[-TAIL - self._engine.slots + self._group]
        self._own.fill_(number)

    def read(self) -> list[float]:
        """What all groups have said, once bucket 0 is reduced."""
        bucket = self._engine.reduced(0)
        if self._all._base is not bucket:
            self._all = bucket[-TAIL - self._engine.slots : -TAIL]
        return self._all.tolist()
