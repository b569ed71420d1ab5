"""What one agent says to all groups and asks the control store, which may be away.

Nothing is lost by that: ranks train on, what cannot be said is said when the store is back, and what was said before is
said again when it has come back empty. Asking may block for the store's timeout, so it is asked again after a while only.

While nothing happens nothing is asked, either: a thread waits for the next notice (``runtime.watcher``). Only after one are
the news asked for; only after one that says so the newest view, or whether the run has ended.

Failures it assumes: the store is gone or silent for a while, or comes back empty.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from megatron_ft.core import detector
from megatron_ft.errors import StoreError
from megatron_ft.launch.console import say
from megatron_ft.runtime import watcher
from megatron_ft.runtime.agreement import DONE
from megatron_ft.runtime.store import NOTICES, ControlStore, StoreLostMemory
from megatron_ft.types import View

_RETRY_S = 1.0
_FAR_S = 20.0
"""So often is asked without a notice, too: who has written a view may have been lost before it said so."""
_NEWS, _VIEW, _ENDED = "news", "view", "ended"
_GAP = 16
"""So many views further is looked when the store has come back empty: only the newest ones were put back."""

Answer = TypeVar("Answer")


class Voice:
    """One agent's, on a client of its own. ``own``: keys that this agent alone writes; it puts them back."""

    def __init__(self, store: ControlStore, own: Mapping[str, Any]) -> None:
        self._store, self._own = store, dict(own)
        self._said: list[tuple[detector.Signal, str]] = []
        self._unsaid: list[tuple[detector.Signal, str]] = []
        self._away_until: float | None = None
        self._heard, self._memory, self._looked_in = 0, store.memory, store.memory
        self._asked: dict[str, float] = {}
        self._stirred: dict[str, float] = {}
        self._ear: watcher.Watcher | None = None

    def listen(self) -> None:
        """From now on; the run must have begun."""
        self._ear = watcher.Watcher(self._store.clone(), self._hear, self.stir, self.stir)
        self._ear.start()

    def _hear(self, verdict: detector.Verdict) -> None:
        questions = {detector.Agreed: (_NEWS, _VIEW), detector.Over: (_NEWS, _ENDED)}
        self._stirred |= dict.fromkeys(questions.get(type(verdict), (_NEWS,)), time.monotonic())

    def stir(self, error: StoreError | None = None) -> None:
        """Anything may have happened: ask anew. Any thread."""
        self._stirred |= dict.fromkeys((_NEWS, _VIEW, _ENDED), time.monotonic())

    def close(self) -> None:
        if self._ear is not None:
            self._ear.stop()

    def _is_due(self, question: str) -> bool:
        """Whether the answer may have changed since that was asked last."""
        now, last = time.monotonic(), self._asked.get(question, -float("inf"))
        due = self._ear is None or self.away or self._stirred.get(question, last - 1.0) >= last or now - last >= _FAR_S
        if due:
            self._asked[question] = now
        return due

    def tell(self, signal: detector.Signal | None = None) -> None:
        """Tell every group this, after all that could not be said before."""
        if signal is not None:
            self._unsaid.append((signal, uuid.uuid4().hex))
        # Not the entry itself: when the store has come back empty, the list begins with what was said first.
        while self._unsaid and self._ask(lambda: watcher.announce(self._store, *self._unsaid[0]) or True):
            self._said.append(self._unsaid.pop(0))

    @property
    def told(self) -> bool:
        """Whether everybody can hear all that was to be told."""
        return not self._unsaid

    def news(self) -> list[detector.Signal]:
        """What anybody has told since the last call; all of it again when the store has come back empty."""
        found = []
        if not self._is_due(_NEWS):
            return found
        while (entry := self._ask(self._next_notice)) is not None:
            self._heard += 1
            found.append(detector.from_json(entry))
        return found

    def _next_notice(self) -> dict[str, Any] | None:
        if self._memory != self._store.memory:  # another log
            self._heard, self._memory = 0, self._store.memory
        return self._store.get(f"{NOTICES}/{self._heard}")

    def newest_view(self, known: View) -> View:
        """The last one that stands; ``known`` while nothing else is heard."""
        if not self._is_due(_VIEW):
            return known
        epoch = last = known.epoch + 1
        while epoch <= last:
            raw = self.get(f"view/{epoch}")
            if raw is not None:
                known, last = View.from_json(raw), epoch + 1
            if self._looked_in != self._store.memory:
                self._looked_in, last = self._store.memory, epoch + _GAP
            epoch += 1
        return known

    def say(self, key: str, value: Any) -> bool:
        """Write a key that is this agent's alone, and again when the store has come back empty. False: it is away."""
        self._own[key] = value
        return self._ask(lambda: self._store.set(key, value) or True) is not None

    def claim(self, key: str, value: Any) -> Any | None:
        """Write a key unless somebody has; what stands there now, None while that is unknown. Values name their writer."""
        standing = self._ask(lambda: self._store.create(key, value))
        if standing == value:
            self._own[key] = value
        return standing

    def get(self, key: str) -> Any | None:
        """What stands there; None while that is unknown."""
        return self._ask(lambda: self._store.get(key))

    @property
    def away(self) -> bool:
        """Whether the store did not answer when it was asked last."""
        return self._away_until is not None

    def ended(self) -> bool:
        """Whether the run has reached its end; False while that is unknown."""
        if _ENDED not in self._own and self._is_due(_ENDED) and self._ask(lambda: self._store.get(_ENDED)) is not None:
            self._own[_ENDED] = True  # the group that said so may be gone when the store forgets it
        return _ENDED in self._own

    def say_ended(self) -> None:
        """It has, the record says so: whoever does not know yet hears it from here if the store has forgotten."""
        self.say(_ENDED, True)

    def done(self, seat: str) -> bool:
        """Whether that start of a group is; False while that is unknown."""
        return seat in (self._ask(lambda: self._store.members(DONE)) or {})

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
                say(f"{error}; training goes on without it")
            self._away_until = time.monotonic() + _RETRY_S
            return None
        if self._away_until is not None:
            say("the control store answers again")
            self.stir()  # what was asked in vain counts as asked
        self._away_until = None
        return answer

    def _remind(self) -> None:
        """The store came back empty: the groups rebuild it, and what this agent has said is said again."""
        self._store.restore(own=self._own)
        self._unsaid, self._said = [*self._said, *self._unsaid], []
