"""The hyperparameters of a rank's optimizers: the numbers and names in their parameter groups, such as learning rate,
momentum, weight decay and betas.

A script may set them in its loop, in hooks, or with a scheduler of its own. A group that follows others repeats their
steps without its script, so the values with which a step was made travel with the step's gradients, and are in place
when the optimizer acts. All groups compare them in every step (``run.state_guard``).

Failures it assumes: none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

Values = list[dict[str, Any]]
"""For each parameter group of each optimizer: key -> number, text, None, or a list of these. The key ``params`` is left
out, and so are values of other types."""


class Hyperparameters:
    """Those of some optimizers.

    Attributes:
        made: the values with which the last step was made; None before the first step of this process.
        left: the values right after that step, and after the engine's scheduler; None before the first step.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._hooks: dict[int, RemovableHandle] = {}
        self._given: Values | None = None
        self.made: Values | None = None
        self.left: Values | None = None

    def _groups(self) -> Iterator[dict[str, Any]]:
        for optimizer in self._optimizers:
            yield from optimizer.param_groups

    def read(self) -> Values:
        """Return the present values. A numpy number becomes a Python one in the optimizer as well: it calculates with other
        precision, and a group that follows would have it only from its script."""
        return [_values(group) for group in self._groups()]

    def write(self, values: Values | None) -> None:
        """Put values that :meth:`read` returned, maybe in another group, in place; None: leave all as they are."""
        for group, given in zip(self._groups(), values or (), strict=False):
            for key, value in given.items():
                present = group.get(key)
                if isinstance(present, torch.Tensor):
                    present.fill_(value)
                else:
                    group[key] = tuple(value) if isinstance(present, tuple) else value

    @contextmanager
    def step(self, values: Values | None = None) -> Iterator[None]:
        """Surround the optimizers' step, and record its values. ``values``: those with which another group has made the
        step; they are in place when the optimizer acts, whatever hooks of the script set before."""
        self._given = values
        self._act()
        for number, optimizer in enumerate(self._optimizers):
            self._hook_last(number, optimizer)
        yield
        self._given, self.left = None, self.read()

    def _act(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self.write(self._given)
            self.made = self.read()

    def _hook_last(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        """Let :meth:`_act` be the last hook before the optimizer acts: the script may have added others."""
        hooks = getattr(optimizer, "_optimizer_step_pre_hooks", None)
        if hooks is None:  # not an optimizer of torch: it calls no hooks
            return
        handle = self._hooks.get(number)
        if handle is None or next(reversed(hooks), None) != handle.id:
            if handle is not None:
                handle.remove()
            self._hooks[number] = optimizer.register_step_pre_hook(self._act)


def _values(group: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for key, value in group.items():
        if key == "params":
            continue
        if isinstance(value, np.generic):
            group[key] = value = value.item()
        plain = [*map(_plain, value)] if isinstance(value, list | tuple) else _plain(value)
        if plain is not ... and not (isinstance(plain, list) and ... in plain):
            found[key] = plain
    return found


def _plain(value: Any) -> Any:
    """Return a value as JSON can hold it; ``...`` for one of another type."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else ...
    return float(value) if isinstance(value, Real) else ...


def checksum(values: Values | None) -> int:
    """Return a checksum of 48 bits, at least 1; 0 for None."""
    if values is None:
        return 0
    text = repr([sorted(group.items()) for group in values])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest()) or 1


def named(values: Values | None) -> dict[str, Any]:
    """Return ``lr of parameter group 0`` -> value, for all of them."""
    return {f"{key} of parameter group {n}": one for n, group in enumerate(values or ()) for key, one in group.items()}
