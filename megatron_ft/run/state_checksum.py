"""Checksums of one rank's state: parameters, persistent buffers and optimizer state.

The state is one sequence of bytes, cut into ``CHUNKS`` equal chunks. In every ``period`` steps the rank looks at all of
them; a step looks at one chunk at most, so that the cost of a whole pass is spread over the period.

Failures it assumes: none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from megatron_ft.run.engines.port import Engine
from megatron_ft.run.engines.tensor_checksum import BITS, fold, sums

CHUNKS = 8
_MOST_NAMED = 3
"""Number of tensors in a message."""

Details = Mapping[str, list[Any]]
"""Name of a tensor -> its checksum, and its dtype and placement as text."""
_Kind = tuple[str, torch.dtype, torch.device, Sequence[Any]]


class StateCheck:
    """The checksums of one rank's state: the engine's, and the tensors of ``more`` (name, tensor). ``period``: steps in
    which the whole state is checked once, 0: never. ``chunks``: their number; ``pass_steps``: steps in a row in which every
    chunk is due at least once, 0: none ever is."""

    def __init__(
        self, engine: Engine, period: int, more: Callable[[], Iterable[tuple[str, torch.Tensor]]] = tuple
    ) -> None:
        self._engine, self._period, self._more = engine, period, more
        self._every = max(1, period // CHUNKS)
        self.chunks = period // self._every
        self.pass_steps = self._every * self.chunks
        self._last: tuple[int, list[tuple[str, int]], list[_Kind]] = (-1, [], [])

    def of_step(self, step: int) -> int:
        """Return the checksum of the chunk that is due at the beginning of ``step``; 0 when none is due."""
        chunk = self.due(step)
        return 0 if chunk is None else fold(sums(self._tensors(), chunk, self.chunks))

    def details(self, step: int) -> Details:
        """Return the details of each tensor in that chunk, to name the differing ones."""
        chunk = self.due(step)
        if chunk is None:
            return {}
        listed = list(self._tensors())
        return _details(sums(listed, chunk, self.chunks), _kinds(listed))

    def whole(self, step: int) -> int:
        """Return the checksum of the whole state, which is that of the beginning of ``step``."""
        listed = list(self._tensors())
        found = sums(listed, 0, 1)
        self._last = step, found, _kinds(listed)  # at once: another thread reads it
        return fold(found)

    def _tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        return chain(self._engine.state_tensors(), self._more())

    def last(self, step: int) -> Details | None:
        """Return the details of each tensor from the last :meth:`whole`, if that was for ``step``. For any thread."""
        at, found, kinds = self._last
        return _details(found, kinds) if at == step else None

    def due(self, step: int) -> int | None:
        """Return the chunk that is due in that step, or None."""
        if not self._period or step % self._every:
            return None
        return step // self._every % self.chunks


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the names of the tensors that differ, or that only one side has, in order."""
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def in_words(names: Sequence[str], one: Details, other: Details) -> str:
    """Return the first of the differing tensors as text: name, dtype and placement, and the checksums of both sides."""
    shown = []
    for name in names[:_MOST_NAMED]:
        kinds = dict.fromkeys(side[name][1] for side in (one, other) if name in side)
        both = " and ".join(f"{side[name][0]:012x}" if name in side else "missing" for side in (one, other))
        shown.append(f"{name}, {' or '.join(kinds)}, checksums {both}")
    more = len(names) - len(shown)
    return "; ".join(shown) + (f" and {more} more" if more else "")


def _kinds(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[_Kind]:
    return [(name, tensor.dtype, tensor.device, getattr(tensor, "placements", ())) for name, tensor in tensors]


def _details(found: Iterable[tuple[str, int]], kinds: Iterable[_Kind]) -> Details:
    texts = {
        name: f"{str(dtype).removeprefix('torch.')} on {device.type}{''.join(f', {placement}' for placement in placements)}"
        for name, dtype, device, placements in kinds
    }
    return {name: [total & ((1 << BITS) - 1), texts[name]] for name, total in found}
