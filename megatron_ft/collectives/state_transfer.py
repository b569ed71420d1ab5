"""Hand a state (nested mappings, lists and tensors) from one group to another over the outer communicator.

The structure is sent as JSON, the tensors as raw bytes: nothing is unpickled. The receiver gets a complete new state or
none at all; the caller puts it in place.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch

from megatron_ft.collectives.base import Communicator
from megatron_ft.errors import EngineError
from megatron_ft.types import GroupId

_TAG = 1000
"""Tags tell messages between two members apart; state and buckets use different ones."""


def flatten(state: Any, devices: bool = True) -> tuple[Any, list[torch.Tensor]]:
    """Split a state into a JSON-able skeleton and its tensors, in order. Without ``devices``, whose numbers differ between
    groups, the skeleton says "cpu" for each."""
    tensors: list[torch.Tensor] = []

    def encode(value: Any, path: str) -> Any:
        if isinstance(value, torch.Tensor):
            tensors.append(value.detach())
            return {
                "tensor": [
                    str(value.dtype).removeprefix("torch."),
                    list(value.shape),
                    str(value.device) if devices else "cpu",
                ]
            }
        if isinstance(value, Mapping):
            return {"map": [[_key(key, path), encode(item, f"{path}.{key}")] for key, item in value.items()]}
        if isinstance(value, list | tuple):
            kind = "list" if isinstance(value, list) else "tuple"
            return {kind: [encode(item, f"{path}[{i}]") for i, item in enumerate(value)]}
        if value is None or isinstance(value, bool | int | float | str):
            return {"value": value}
        raise EngineError(
            f"state{path} is a {type(value).__name__}; a state may hold tensors, numbers, strings, lists and mappings"
        )

    return encode(state, ""), tensors


def unflatten(skeleton: Any, take: Callable[[torch.dtype, list[int], str], torch.Tensor]) -> Any:
    """Inverse of :func:`flatten`; ``take(dtype, shape, device)`` yields the tensors in order."""
    ((kind, body),) = skeleton.items()
    if kind == "tensor":
        dtype, shape, device = body
        return take(getattr(torch, dtype), shape, device)
    if kind == "map":
        return {key: unflatten(item, take) for key, item in body}
    if kind == "value":
        return body
    items = [unflatten(item, take) for item in body]
    return items if kind == "list" else tuple(items)


def send_state(outer: Communicator, state: Any, to: GroupId) -> None:
    """Send a whole state to one member. Raises ``Broken`` when the epoch ends meanwhile."""
    skeleton, tensors = flatten(state)
    text = json.dumps(skeleton).encode()
    outer.send(torch.tensor([len(text)], dtype=torch.int64), to, _TAG).wait()
    outer.send(torch.frombuffer(bytearray(text), dtype=torch.uint8), to, _TAG).wait()
    for tensor in tensors:
        if tensor.numel():
            outer.send(tensor.cpu().contiguous().reshape(-1).view(torch.uint8), to, _TAG).wait()


def receive_state(outer: Communicator, source: GroupId) -> Any:
    """Receive what :func:`send_state` sends. Raises ``Broken`` when the epoch ends meanwhile."""
    length = torch.zeros(1, dtype=torch.int64)
    outer.receive(length, source, _TAG).wait()
    text = torch.empty(int(length), dtype=torch.uint8)
    outer.receive(text, source, _TAG).wait()

    def take(dtype: torch.dtype, shape: list[int], device: str) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=dtype)
        if tensor.numel():
            outer.receive(tensor.reshape(-1).view(torch.uint8), source, _TAG).wait()
        return tensor.to(device)

    return unflatten(json.loads(text.numpy().tobytes()), take)


def _key(key: Any, path: str) -> Any:
    if isinstance(key, str | int):
        return key
    raise EngineError(f"state{path} has the key {key!r}; keys must be strings or whole numbers")
