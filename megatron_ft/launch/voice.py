"""What one agent says to all groups and asks the control store, which may be away.

Nothing is lost by that: ranks train on, what cannot be said is said when the store is back, and what was said before is
said again when it has come back empty. Asking may block for the store's timeout, so it is asked again after a while only.

Failures it assumes: the store is gone or silent for a while, or comes back empty.
"""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from megatron_ft.core import detector
from megatron_ft.errors import StoreError
from megatron_ft.runtime import watcher
from megatron_ft.runtime.store import ControlStore, StoreLostMemory

_RETRY_S = 1.0
_ENDED = "ended"

Answer = TypeVar("Answer")


class Voice:
    """One agent's, on a client of its own. ``own``: keys that this agent alone writes; it puts them back."""

    def __init__(self, store: ControlStore, own: Mapping[str, Any]) -> None:
        self._store, self._own = store, dict(own)
        self._said: list[tuple[detector.Signal, str]] = []
        self._unsaid: list[tuple[detector.Signal, str]] = []
        self._away_until: float | None = None

    def tell(self, signal: detector.Signal | None = None) -> None:
        """Tell every group this, after all that could not be said before."""
        if signal is not None:
            self._unsaid.append((signal, uuid.uuid4().hex))
        # Not the entry itself: when the store has come back empty, the list begins with what was said first.
        while self._unsaid and self._ask(lambda: watcher.announce(self._store, *self._unsaid[0]) or True):
            self._said.append(self._unsaid.pop(0))

    @property
    def away(self) -> bool:
        """Whether the store did not answer when it was asked last."""
        return self._away_until is not None

    def ended(self) -> bool:
        """Whether the run has reached its end; False while that is unknown."""
        if _ENDED not in self._own and self._ask(lambda: self._store.get(_ENDED)) is not None:
            self._own[_ENDED] = True  # the group that said so may be gone when the store forgets it
        return _ENDED in self._own

    def say_ended(self) -> None:
        """It has, the record says so: whoever does not know yet hears it from here if the store has forgotten."""
        self._own[_ENDED] = True
        self._ask(lambda: self._store.set(_ENDED, True))

    def done(self, group: int) -> bool:
        """Whether that group is; False while that is unknown."""
        return self._ask(lambda: self._store.get(f"done/{group}")) is not None

    def _ask(self, operation: Callable[[], Answer]) -> Answer | None:
        """The store's answer; None while it is away."""
        if self._away_until is not None and time.monotonic() < self._away_until:
            return None
        try:
            try:
                answer = operation()
            except StoreLostMemory:
                self._remind()
                answer = operation()
        except StoreError as error:
            if self._away_until is None:
                _say(f"{error}; training goes on without it")
            self._away_until = time.monotonic() + _RETRY_S
            return None
        if self._away_until is not None:
            _say("the control store answers again")
        self._away_until = None
        return answer

    def _remind(self) -> None:
        """The store came back empty: the groups rebuild it, and what this agent has said is said again."""
        self._store.restore(own=self._own)
        self._unsaid, self._said = [*self._said, *self._unsaid], []


def _say(line: str) -> None:
    print(f"megatron_ft: {line}", file=sys.stderr, flush=True)
