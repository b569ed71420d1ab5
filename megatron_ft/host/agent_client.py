"""The control-store client of one agent: what it announces to all groups and asks the store, which may be away.

An outage of the store loses nothing: ranks train on, announcements are made when the store is back, and earlier ones are
repeated when it has come back empty. A question may block for the store's timeout, so it is repeated only after a while.

While nothing happens, nothing is asked: a thread waits for notices (``run.store.watcher``), and the agent takes in what
that thread has heard. Only after a notice about a view or the run's end, it asks for the newest view, or the end.

Failures it assumes: the store is gone or silent for a while, or comes back empty. The thread ends by a bug: another one is
started, once.
"""

from __future__ import annotations

import time
import traceback
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from megatron_ft.core.protocol import key_lifetimes, signals
from megatron_ft.errors import StoreError
from megatron_ft.run.store import ControlStore, StoreLostMemory, garbage_collection, watcher
from megatron_ft.run.store.client import DONE
from megatron_ft.types import View
from megatron_ft.utils.console import say
from megatron_ft.utils.vital_thread import described

_RETRY_S = 1.0
_FAR_S = 20.0
"""Seconds between two questions without a notice: a view's writer may be lost before it announces it."""
_LISTEN_S = 10.0
"""The longest wait for one notice: after a link was cut, the connection may be dead although the store answers again."""
_VIEW, _ENDED = "view", "ended"

Answer = TypeVar("Answer")


class AgentClient:
    """One agent's client, on a connection of its own. ``own``: keys that this agent alone writes; it puts them back.

    Large because it has a method for each thing that an agent says or asks; all share the rule that it never waits.
    """

    def __init__(self, store: ControlStore, own: Mapping[str, Any]) -> None:
        self._store, self._own = store, dict(own)
        self._said: list[tuple[signals.Signal, str]] = []
        self._unsaid: list[tuple[signals.Signal, str]] = []
        self._away_until: float | None = None
        self._asked: dict[str, float] = {}
        self._stirred: dict[str, float] = {}
        self._news: deque[signals.Signal] = deque()
        self._ear: watcher.Watcher | None = None
        self._bugs: list[BaseException] = []

    def listen(self, heard: Callable[[signals.Verdict], None] = lambda verdict: None) -> None:
        """Listen from now on; the run must have begun. ``heard`` gets every verdict, in the listening thread."""

        def failed(error: BaseException) -> None:
            self._bugs.append(error)
            if len(self._bugs) == 1:
                traceback.print_exception(error)
                say(f"the thread that listens for notices {described(error)}; another one hears all of them again")
                self.listen(heard)

        self._ear = watcher.Watcher(
            self._store.clone(), heard, self.stir, self.stir, wait_s=_LISTEN_S, told=self._told, failed=failed
        )
        self._ear.start()

    def _told(self, signal: signals.Signal) -> None:
        """Listening thread: note which answers a notice may have changed, and keep it for :meth:`news`."""
        if question := {signals.ViewAgreed: _VIEW, signals.RunFinished: _ENDED}.get(type(signal)):
            self._stirred[question] = time.monotonic()
        self._news.append(signal)

    def stir(self, error: StoreError | None = None) -> None:
        """Ask everything anew: anything may have happened. Any thread may call it."""
        self._stirred |= dict.fromkeys((_VIEW, _ENDED), time.monotonic())

    def hurry(self) -> None:
        """Ask the store at once: it is at another address from now on. Any thread may call it."""
        if self._away_until is not None:
            self._away_until = 0.0

    def close(self) -> None:
        if (ear := self._ear) is not None:
            ear.stop()

    def _is_due(self, question: str) -> bool:
        """Return whether the answer may have changed since that question was asked last."""
        now, last = time.monotonic(), self._asked.get(question, -float("inf"))
        due = self.away or self._stirred.get(question, last - 1.0) >= last or now - last >= _FAR_S
        if due:
            self._asked[question] = now
        return due

    def announce(self, signal: signals.Signal | None = None) -> None:
        """Tell every group this signal, after all that could not be told before."""
        if signal is not None:
            self._unsaid.append((signal, uuid.uuid4().hex))

        def announced() -> bool:
            watcher.announce(self._store, *self._unsaid[0])
            return True

        while self._unsaid and self._ask(announced) is not None:
            self._said.append(self._unsaid.pop(0))

    @property
    def told(self) -> bool:
        """Return whether all that was to be told is on the store."""
        return not self._unsaid

    def news(self) -> list[signals.Signal]:
        """Return the signals of all senders since the last call; all of them again when the store has come back empty, or
        the listening thread was started again. Raises the exception that has ended that thread, too."""
        if len(self._bugs) > 1:
            raise self._bugs[-1]
        return [self._news.popleft() for _ in range(len(self._news))]

    def newest_view(self, known: View) -> View:
        """Return the newest view that stands; ``known`` while no newer one is found."""
        if not self._is_due(_VIEW):
            return known
        while (raw := self._ask(partial(garbage_collection.find_view, self._store, known.epoch + 1))) is not None:
            known = View.from_json(raw)
        # What a store that comes back empty could not need any more is forgotten.
        needed = key_lifetimes.kept([own for own, _ in self._said], known)
        self._said = [said for said in self._said if said[0] in needed]
        present = key_lifetimes.Present(known, key_lifetimes.floor_of(known, 0))
        self._own = {key: value for key, value in self._own.items() if not key_lifetimes.expired(key, present)}
        return known

    def put(self, key: str, value: Any) -> bool:
        """Write a key that only this agent writes, and again after the store came back empty. False: it is away."""
        self._own[key] = value

        def written() -> bool:
            self._store.set(key, value)
            return True

        return self._ask(written) is not None

    def knows(self, key: str, value: Any) -> None:
        """Note that ``value`` stands at ``key``: this agent puts it back, too, when the store has come back empty."""
        self._own[key] = value

    def claim(self, key: str, value: Any) -> Any | None:
        """Write a key unless it exists; return what stands there, None while unknown. Values name their writer."""
        standing = self._ask(lambda: self._store.create(key, value))
        if standing == value:
            self._own[key] = value
        return standing

    def get(self, key: str) -> Any | None:
        """Return what stands there; None while that is unknown."""
        return self._ask(lambda: self._store.get(key))

    @property
    def away(self) -> bool:
        """Return whether the store did not answer when it was asked last."""
        return self._away_until is not None

    def ended(self) -> bool:
        """Return whether the run has reached its end; False while that is unknown."""
        if _ENDED not in self._own and self._is_due(_ENDED):
            end = self._ask(lambda: self._store.get(_ENDED))
            if end is not None:
                self._own[_ENDED] = end  # the group that wrote it may be gone when the store forgets it
        return _ENDED in self._own

    @property
    def end(self) -> Mapping[str, Any]:
        """The last group's statement about the run's end: ``step`` and ``saved`` of the record's ``end`` line."""
        end = self._own.get(_ENDED)
        return end if isinstance(end, Mapping) else {}

    def say_ended(self, end: Mapping[str, Any]) -> None:
        """Announce the end that the record shows, for agents that have not heard of it if the store has forgotten."""
        self.put(_ENDED, {name: end[name] for name in ("step", "saved") if name in end})

    def done(self, seat: str) -> bool:
        """Return whether that start of a group is done; False while that is unknown."""
        return seat in (self._ask(lambda: self._store.members(DONE)) or {})

    def _ask(self, operation: Callable[[], Answer]) -> Answer | None:
        """Return the store's answer; None while it is away."""
        if self._away_until is not None and time.monotonic() < self._away_until:
            return None
        try:
            try:
                answer = operation()
            except StoreLostMemory:
                self._store.restore(own=self._own, also=self._repeat)
                answer = operation()
        except StoreError as error:
            if self._away_until is None:
                say(f"{error}; a recovery waits for one")
            self._away_until = time.monotonic() + _RETRY_S
            return None
        if self._away_until is not None:
            say("the control store answers again")
            self.stir()  # a question without an answer counts as asked
        self._away_until = None
        return answer

    def _repeat(self, fresh: ControlStore) -> None:
        """Announce all again in a store that came back empty; the groups rebuild the rest of it."""
        for signal, by in self._said:
            watcher.announce(fresh, signal, by)
