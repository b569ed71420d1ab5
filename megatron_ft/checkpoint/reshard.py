"""States of a group whose ranks hold parts of each tensor, put together and divided anew: a checkpoint of 2 shards on 4.

An engine that can be divided anew says in its state what each rank holds (``engines.port.PARTS``).

Failures it assumes: none; the files have been checked when they were read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from megatron_ft.engines.port import PARTS
from megatron_ft.errors import CheckpointError


def whole(states: Sequence[Mapping[str, Any]], path: str) -> dict[str, Any]:
    """Return the state of a group as one rank alone would hold it. ``states``: by position. ``path``: of the checkpoint.

    Raises ``CheckpointError`` for states that say nothing of their parts.
    """
    if not all(PARTS in state for state in states):
        raise CheckpointError(
            f"checkpoint {path} was saved by an engine whose state cannot be divided anew; start with as many ranks in a "
            f"group, divided in the same way, as it was saved with"
        )
    first = states[0]
    model = {name: _joined([(state["model"][name], state[PARTS]["model"].get(name)) for state in states])
             for name in first["model"]}  # fmt: skip
    moments = {
        number: {key: _joined([_moment(state, number, key) for state in states]) for key in values}
        for number, values in first["optimizer"]["state"].items()
    }
    return {**first, "model": model, "optimizer": {**first["optimizer"], "state": moments}, PARTS: {}}


def cut(state: Mapping[str, Any], parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a whole state that a rank holds. ``parts``: what its own state says (``engines.port.PARTS``)."""
    model = {name: _piece(tensor, parts["model"].get(name)) for name, tensor in state["model"].items()}
    moments = {
        number: {key: _piece(value, parts["optimizer"].get(number)) for key, value in values.items()}
        for number, values in state["optimizer"]["state"].items()
    }
    return {**state, "model": model, "optimizer": {**state["optimizer"], "state": moments}}


def _moment(state: Mapping[str, Any], number: int, key: str) -> tuple[Any, Any]:
    value, box = state["optimizer"]["state"][number][key], state[PARTS]["optimizer"].get(number)
    part = isinstance(value, torch.Tensor) and box is not None and list(value.shape) == box[2]
    return value, box if part else None


def _joined(parts: Iterable[tuple[Any, Sequence[Any] | None]]) -> Any:
    found: torch.Tensor | None = None
    for value, box in parts:
        if box is None:
            return value
        if found is None:
            found = value.new_zeros(box[0])
        found[_slices(box[1], list(value.shape))] = value
    return found


def _piece(value: Any, box: Sequence[Any] | None) -> Any:
    if box is None or not isinstance(value, torch.Tensor) or list(value.shape) != list(box[0]):
        return value
    return value[_slices(box[1], box[2])].clone()


def _slices(offset: Sequence[int], size: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(begin, begin + count) for begin, count in zip(offset, size, strict=True))
