"""The discrete-event kernel: a heap of calls ordered by (time, priority, id), and the futures that wait for them.

The id is the order of scheduling, so calls of equal time and priority never change places: a run depends on nothing but
what it is given. Time has no unit here; the caller decides.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Coroutine, Generator
from typing import Any


class Kernel:
    """Simulated time and everything that is still to come."""

    def __init__(self) -> None:
        self.now = 0.0
        self.count = 0
        """Calls scheduled so far: with the time, a fingerprint of the whole run."""
        self._heap: list[tuple[float, int, int, Callable[[], object]]] = []

    def at(self, time: float, call: Callable[[], object], priority: int = 0) -> None:
        """Call at ``time``; at equal times the lower priority number goes first, then the earlier call."""
        assert time >= self.now, f"{time} is in the past, it is {self.now}"
        self.count += 1
        heapq.heappush(self._heap, (time, priority, self.count, call))

    def after(self, delay: float, call: Callable[[], object]) -> None:
        """Call in ``delay`` from now."""
        self.at(self.now + delay, call)

    def run(self, until: float, done: Callable[[], bool]) -> bool:
        """Work off the calls; True as soon as ``done()``, False when nothing is left or the next is after ``until``."""
        while not done():
            if not self._heap or self._heap[0][0] > until:
                return False
            self.now, _, _, call = heapq.heappop(self._heap)
            call()
        return True


class Future:
    """A value that is set once; the waiting callbacks are called with it. Later values are ignored."""

    __slots__ = ("_done", "_value", "_waiter")

    def __init__(self) -> None:
        self._done, self._value = False, None
        self._waiter: Callable[[Any], object] | None = None

    def resolve(self, value: Any = None) -> None:
        if self._done:
            return
        self._done, self._value = True, value
        if self._waiter is not None:
            self._waiter(value)

    def then(self, waiter: Callable[[Any], object]) -> None:
        """Call ``waiter`` with the value: at once if it is there already."""
        if self._done:
            waiter(self._value)
        else:
            self._waiter = waiter

    def __await__(self) -> Generator[Future, Any, Any]:
        return (yield self)


class Thread:
    """Runs a coroutine that waits for futures, one after the other.

    It can be suspended (nothing is lost, it goes on later) or stopped for good.
    """

    def __init__(self, body: Coroutine[Future, Any, None]) -> None:
        self._body = body
        self._suspended = self._stopped = False
        self._held: tuple[Any] | None = None

    def start(self) -> None:
        self._go_on(None)

    def suspend(self) -> None:
        self._suspended = True

    def resume(self) -> None:
        self._suspended = False
        if self._held is not None:
            (value,), self._held = self._held, None
            self._go_on(value)

    def stop(self) -> None:
        self._stopped = True

    def _go_on(self, value: Any) -> None:
        if self._stopped:
            return
        if self._suspended:
            self._held = (value,)
            return
        try:
            future = self._body.send(value)
        except StopIteration:
            self._stopped = True
            return
        future.then(self._go_on)
