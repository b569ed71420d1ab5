"""Checksums of one rank's state: parameters, persistent buffers, optimizer state and the optimizer's numbers.

The state is one sequence of bytes, cut into ``CHUNKS`` equal chunks. In every ``period`` steps the rank looks at all of
them; a step looks at one chunk at most, so that the cost of a whole pass is spread over the period.

Failures it assumes: none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain

import torch

from megatron_ft.engines.port import Engine
from megatron_ft.engines.tensor_checksum import BITS, fold, sums

CHUNKS = 8


class StateCheck:
    """The checksums of one rank's state: the engine's, and the tensors of ``more`` (name, tensor). ``period``: steps in
    which the whole state is checked once, 0: never."""

    def __init__(
        self, engine: Engine, period: int, more: Callable[[], Iterable[tuple[str, torch.Tensor]]] = tuple
    ) -> None:
        self._engine, self._period, self._more = engine, period, more
        self._every = max(1, period // CHUNKS)
        self._chunks = period // self._every
        self._last: tuple[int, list[tuple[str, int]]] = (-1, [])

    def of_step(self, step: int) -> int:
        """Return the checksum of the chunk that is due at the beginning of ``step``; 0 when none is due."""
        chunk = self.due(step)
        return 0 if chunk is None else fold(sums(self._tensors(), chunk, self._chunks))

    def details(self, step: int) -> dict[str, int]:
        """Return the checksum of each tensor in that chunk, name -> checksum, to name the differing ones."""
        chunk = self.due(step)
        if chunk is None:
            return {}
        return _named(sums(self._tensors(), chunk, self._chunks))

    def whole(self, step: int) -> int:
        """Return the checksum of the whole state, which is that of the beginning of ``step``."""
        found = sums(self._tensors(), 0, 1)
        self._last = step, found  # at once: another thread reads it
        return fold(found)

    def _tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        return chain(self._engine.state_tensors(), self._more())

    def last(self, step: int) -> dict[str, int] | None:
        """Return each tensor's checksum from the last :meth:`whole`, if that was for ``step``. For any thread."""
        at, found = self._last
        return _named(found) if at == step else None

    def due(self, step: int) -> int | None:
        """Return the chunk that is due in that step, or None."""
        if not self._period or step % self._every:
            return None
        return step // self._every % self._chunks


def differing(mine: dict[str, int], theirs: dict[str, int]) -> list[str]:
    """Return the names of the tensors that differ, or that only one side has, in order."""
    return sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))


def _named(found: Iterable[tuple[str, int]]) -> dict[str, int]:
    return {name: total & ((1 << BITS) - 1) for name, total in found}
