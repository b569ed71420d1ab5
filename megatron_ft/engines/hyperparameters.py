"""The hyperparameters of a rank's optimizers: the numbers and names in their parameter groups, such as learning rate,
momentum, weight decay and betas.

A script may set them in its loop, in hooks, or with a scheduler of its own. A group that follows others repeats their
steps without its script, so the values with which a step was made travel with the step's gradients, and are in place
when the optimizer acts. All groups compare them in every step (``worker.state_guard``).

Failures it assumes: none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from numbers import Real
from operator import is_
from typing import Any, NamedTuple

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
        self._known: dict[int, _Known] = {}
        self._hooks: dict[int, RemovableHandle] = {}
        self._given: Values | None = None
        self.made: Values | None = None
        self.left: Values | None = None

    def _groups(self) -> Iterator[dict[str, Any]]:
        for optimizer in self._optimizers:
            yield from optimizer.param_groups

    def read(self) -> Values:
        """Return the present values, not to be changed. A numpy number becomes a Python one in the optimizer as well: it
        calculates with other precision, and a group that follows would have it only from its script."""
        return [self._values(number, group) for number, group in enumerate(self._groups())]

    def _values(self, number: int, group: dict[str, Any]) -> _Values:
        known = self._known.get(number)  # nearly nothing changes in a step, and this is read several times
        if known is None or [*group] != known.keys:
            known, changed = _Known([*group], [], _Values()), list(group)
        elif all(map(is_, group.values(), known.raw)):
            return known.values
        else:
            changed = [key for key, raw in zip(group, known.raw, strict=True) if group[key] is not raw]
        for key in changed:
            if isinstance(group[key], np.generic):
                group[key] = group[key].item()
        values = known.values.after({key: group[key] for key in changed})
        if all(key == "params" or _never_changes(group[key]) for key in changed):
            self._known[number] = _Known(known.keys, [*group.values()], values)
        return values

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


class _Values(dict[str, Any]):
    """Values of one parameter group, and what the checksum takes for each."""

    def __init__(self, values: Mapping[str, Any] | None = None, texts: Mapping[str, str] | None = None) -> None:
        super().__init__(values or {})
        self.texts = dict(texts or {})

    def after(self, changed: Mapping[str, Any]) -> _Values:
        """Return these values with some others, of any type, in their place."""
        found = _Values(self, self.texts)
        for key, value in changed.items():
            plain = [*map(_plain, value)] if isinstance(value, list | tuple) else _plain(value)
            if key == "params" or plain is ... or (isinstance(plain, list) and ... in plain):
                found.pop(key, None)
                found.texts.pop(key, None)
            else:
                found[key], found.texts[key] = plain, f"{key}: {plain!r}"
        return found

    @cached_property
    def text(self) -> str:
        return "\n".join(text for _, text in sorted(self.texts.items()))


class _Known(NamedTuple):
    keys: list[str]
    raw: list[Any]
    values: _Values


def _never_changes(value: Any) -> bool:
    plain = value is None or isinstance(value, bool | int | float | str)
    return plain or (isinstance(value, tuple) and all(map(_never_changes, value)))


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
    text = "\n\n".join((one if isinstance(one, _Values) else _Values().after(one)).text for one in values)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest()) or 1


def named(values: Values | None) -> dict[str, Any]:
    """Return ``lr of parameter group 0`` -> value, for all of them."""
    return {f"{key} of parameter group {n}": one for n, group in enumerate(values or ()) for key, one in group.items()}
