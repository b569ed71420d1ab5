"""The state of a training script beside its model: an average of the weights, the best loss, a curriculum.

Every group runs the same script, so each keeps these objects by itself. What a script does not repeat is carried: by the
first step, which starts all groups from one state, by a checkpoint, and by the return of a group, whose script has not run
the steps that its engine repeats. The state is that of a boundary: after all that the script did since the last step.

The state belongs to the checked state (``run.state_checksum``): groups whose objects differ are found like groups
whose parameters differ.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import torch

from megatron_ft.data.order import BatchSchedule
from megatron_ft.errors import ConfigError, EngineError
from megatron_ft.run.collectives.state_transfer import flatten

KEY = "registered"
"""Name of this state in a transferred or saved state, and prefix of its tensors' names."""
BATCH = "microbatches_per_group"
"""Name of the batch schedule in it; it is there once the script has changed the size of a batch."""


@runtime_checkable
class Stateful(Protocol):
    """An object with a state that can be saved, as ``torch.nn.Module`` and PyTorch's optimizers have it."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state: nested mappings, lists and tuples of tensors, numbers, texts and None."""

    def load_state_dict(self, state: Any) -> Any:
        """Take over a state; its tensors may be on the CPU."""


class Registered:
    """The registered objects of one rank, by name, and the size of the batch at each step."""

    def __init__(self, sizes: BatchSchedule) -> None:
        self.sizes = sizes
        self._objects: dict[str, Stateful] = {}

    def __bool__(self) -> bool:
        return bool(self._objects) or not self.sizes.is_fixed

    def add(self, name: str, stateful: Any) -> None:
        """Add an object. Raises ``ConfigError`` if the name is taken, or the state cannot be carried."""
        if not isinstance(name, str) or not name or name in self._objects or name == BATCH:
            raise ConfigError(
                f"session.register({name!r}, ...): the name must be a text that is not empty, once for each object, and "
                f"not {BATCH}; registered are: {', '.join(self._objects) or 'none'}"
            )
        if not isinstance(stateful, Stateful):
            raise ConfigError(
                f"session.register({name!r}, ...): a {type(stateful).__name__} has no state_dict() and load_state_dict()"
            )
        try:
            flatten(stateful.state_dict())
        except EngineError as error:
            raise ConfigError(f"session.register({name!r}, ...): {error}") from None
        self._objects[name] = stateful

    def state(self) -> dict[str, Any]:
        """Return the present states, by name; their tensors are the objects' own."""
        states = {name: stateful.state_dict() for name, stateful in self._objects.items()}
        return states if self.sizes.is_fixed else {**states, BATCH: self.sizes.state_dict()}

    def load(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Give the objects their states. Returns the names that only one side has: those objects are left as they are."""
        if BATCH in state:
            self.sizes.load_state_dict(state[BATCH])
        for name in self._objects.keys() & state.keys():
            self._objects[name].load_state_dict(state[name])
        return tuple(sorted((self._objects.keys() ^ state.keys()) - {BATCH}))

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and tensor for all tensors of the state, and for each object a hash of all that is no tensor."""
        for name, state in self.state().items():
            skeleton, tensors = flatten(state, devices=False)
            for number, tensor in enumerate(tensors):
                yield f"{KEY}.{name}[{number}]", tensor
            digest = hashlib.sha256(json.dumps(skeleton).encode()).digest()
            yield f"{KEY}.{name}", torch.frombuffer(bytearray(digest), dtype=torch.uint8)
