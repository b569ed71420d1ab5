"""The state of a policy after a sequence of losses, decided once for each loss and not again in every step."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

_KEPT = 16

State = TypeVar("State")
Item = TypeVar("Item", bound=Hashable)


class PastLosses(Generic[State, Item]):
    """A fold over tuples that mostly grow by one item from call to call; its last results are kept.

    Args:
        start: returns the state before the first item, from the arguments that :meth:`state` gets first.
        after: returns the state after one more item.
    """

    def __init__(self, start: Callable[..., State], after: Callable[[State, Item], State]) -> None:
        self._start, self._after = start, after
        self._known: dict[tuple[tuple[Any, ...], tuple[Item, ...]], State] = {}

    def state(self, *first: Hashable, items: tuple[Item, ...]) -> State:
        """Return the state after ``items``, one after the other."""
        key = first, items
        if key not in self._known:
            state, done = self._known.get((first, items[:-1])), max(len(items) - 1, 0)
            if state is None:
                state, done = self._start(*first), 0
            for item in items[done:]:
                state = self._after(state, item)
            self._known[key] = state
            if len(self._known) > _KEPT:
                del self._known[next(iter(self._known))]
        return self._known[key]
