"""Hand a state (nested mappings, lists and tensors) from one group to another over the outer communicator.

The structure is sent as JSON, the tensors as raw bytes: nothing is unpickled. The receiver gets a complete new state or
none at all; the caller puts it in place. A tensor arrives on the kind of device that it came from, and there on the
receiver's own one: numbers of devices differ between ranks. Bytes pass through the host's memory in pieces
(``run.collectives.device_copies``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from megatron_ft.errors import EngineError
from megatron_ft.run.collectives import device_copies
from megatron_ft.run.collectives.base import Communicator
from megatron_ft.types import GroupId

_TAG = 1000
"""Tags tell messages between two members apart; state and buckets use different ones."""

_EXACT_BYTES = 8
"""The size of the largest numbers of numpy that Python's numbers hold exactly."""


def flatten(state: Any, devices: bool = True) -> tuple[Any, list[torch.Tensor]]:
    """Split a state into a JSON-able skeleton and its tensors, in order. The skeleton has the kind of each tensor's device,
    without its number; without ``devices`` it says "cpu" for each."""
    tensors: list[torch.Tensor] = []

    def encode(value: Any, path: str) -> Any:
        if isinstance(value, torch.Tensor):
            tensors.append(value.detach())
            kind = device_copies.kind_of(value) if devices else "cpu"
            return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), kind]}
        if isinstance(value, Mapping):
            return {"map": [[_key(key, path), encode(item, f"{path}.{key}")] for key, item in value.items()]}
        if isinstance(value, list | tuple):
            which = "list" if isinstance(value, list) else "tuple"
            return {which: [encode(item, f"{path}[{i}]") for i, item in enumerate(value)]}
        if isinstance(value, np.generic) and value.dtype.kind in "biuf" and value.itemsize <= _EXACT_BYTES:
            return {"numpy": [value.dtype.name, value.item()]}  # its arithmetic is not that of Python's numbers
        if value is None or (isinstance(value, bool | int | float | str) and not isinstance(value, np.generic)):
            return {"value": value}
        raise EngineError(
            f"state{path} is a {type(value).__name__}; a state may hold tensors, numbers, strings, lists and mappings"
        )

    return encode(state, ""), tensors


def named(state: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a state in the order of :func:`flatten`, each with its path (``optimizer.state.0.exp_avg``)."""
    if isinstance(state, torch.Tensor):
        yield path or "state", state
    elif isinstance(state, Mapping | list | tuple):
        for key, value in state.items() if isinstance(state, Mapping) else enumerate(state):
            yield from named(value, f"{path}.{key}" if path else str(key))


def unflatten(skeleton: Any, take: Callable[[torch.dtype, list[int], str], torch.Tensor]) -> Any:
    """Inverse of :func:`flatten`; ``take(dtype, shape, kind of the device)`` yields the tensors in order."""
    ((kind, body),) = skeleton.items()
    if kind == "tensor":
        dtype, shape, on = body
        return take(getattr(torch, dtype), shape, on)
    if kind == "map":
        return {key: unflatten(item, take) for key, item in body}
    if kind == "numpy":
        return np.dtype(body[0]).type(body[1])
    if kind == "value":
        return body
    items = [unflatten(item, take) for item in body]
    return items if kind == "list" else tuple(items)


def send_state(outer: Communicator, state: Any, to: GroupId) -> None:
    """Send a whole state to one member. Raises ``Broken`` when the epoch ends meanwhile."""
    skeleton, tensors = flatten(state)
    text = json.dumps(skeleton).encode()
    # no limit: detector.collective_timeout_s between groups; an abort ends it when a rank is lost
    outer.send(torch.tensor([len(text)], dtype=torch.int64), to, _TAG).wait()
    # no limit: detector.collective_timeout_s between groups; an abort ends it when a rank is lost
    outer.send(torch.frombuffer(bytearray(text), dtype=torch.uint8), to, _TAG).wait()
    for piece in device_copies.on_host(tensors):
        # no limit: detector.collective_timeout_s between groups; an abort ends it when a rank is lost
        outer.send(piece, to, _TAG).wait()


def receive_state(outer: Communicator, source: GroupId) -> Any:
    """Receive what :func:`send_state` sends. Raises ``Broken`` when the epoch ends meanwhile."""
    length = torch.zeros(1, dtype=torch.int64)
    # no limit: detector.collective_timeout_s between groups; an abort ends it when a rank is lost
    outer.receive(length, source, _TAG).wait()
    text = torch.empty(int(length), dtype=torch.uint8)
    # no limit: detector.collective_timeout_s between groups; an abort ends it when a rank is lost
    outer.receive(text, source, _TAG).wait()
    tensors: list[torch.Tensor] = []

    def take(dtype: torch.dtype, shape: list[int], kind: str) -> torch.Tensor:
        tensors.append(device_copies.empty(shape, dtype, kind))
        return tensors[-1]

    state = unflatten(json.loads(text.numpy().tobytes()), take)
    for room in device_copies.rooms(tensors):
        # no limit: detector.collective_timeout_s between groups; an abort ends it when a rank is lost
        outer.receive(room, source, _TAG).wait()
    return state


def _key(key: Any, path: str) -> Any:
    if isinstance(key, str | int):
        return key
    raise EngineError(f"state{path} has the key {key!r}; keys must be strings or whole numbers")
