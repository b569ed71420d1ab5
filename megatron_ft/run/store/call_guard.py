"""Calls into a library that may never return, made so that the caller always returns.

A connection lives in a thread of its own, which makes it and carries out one call after the other. When a call is not
over in time, the thread is abandoned together with its connection, and the next call begins with new ones. Handing a
call over and its answer back costs about 10 us.

Failures it assumes: connecting or a call blocks for ever, without the GIL (a frozen server, a cut network).
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar


class Closable(Protocol):
    """A connection that another thread can make return."""

    def cut(self) -> None:
        """Make the call that blocks on this connection return, if that can be done. Any thread may call it."""


Connection = TypeVar("Connection", bound=Closable)
Answer = TypeVar("Answer")


class Overdue(Exception):
    """The call was not over in time and was abandoned. It may still take effect."""


class Guard(Generic[Connection]):
    """Carries out calls on a connection that ``connect`` makes when one is needed.

    ``connect`` gets a function to which it passes the connection *before* it blocks in making it, so that an abandoned
    attempt can be cut, too.
    """

    def __init__(self, connect: Callable[[Callable[[Connection], None]], Connection]) -> None:
        self._connect = connect
        self._worker: _Worker[Connection] | None = None
        self._lock = threading.Lock()

    @property
    def connected(self) -> bool:
        worker = self._worker
        return worker is not None and worker.connected

    def call(self, operation: Callable[[Connection], Answer], bound_s: float) -> Answer:
        """Return the operation's answer or raise its error; raise ``Overdue`` after ``bound_s``, connecting included."""
        end = time.monotonic() + bound_s
        if not self._lock.acquire(timeout=max(0.0, bound_s)):
            raise Overdue
        try:
            worker = self._worker
            if worker is None:
                worker = self._worker = _Worker(self._connect)
                weakref.finalize(self, worker.jobs.put, None)
            try:
                answer, error = worker.answer(operation, max(0.0, end - time.monotonic()))
            except queue.Empty:
                self._worker = None
                worker.abandon()
                raise Overdue from None
        finally:
            self._lock.release()
        if error is not None:
            raise error
        return answer

    def cut(self, patience_s: float) -> None:
        """Make the present call return, and wait until the thread has ended. Any thread may call it."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.abandon()
            worker.thread.join(patience_s)

    def drop(self) -> None:
        """Begin the next call with a new connection."""
        with self._lock:
            worker, self._worker = self._worker, None
        if worker is not None:
            worker.jobs.put(None)


class _Worker(Generic[Connection]):
    """The thread. It keeps no reference to its guard, so that it ends when the guard has no other references."""

    def __init__(self, connect: Callable[[Callable[[Connection], None]], Connection]) -> None:
        self.jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.connected = False
        self._abandoned = False
        self._announced: Connection | None = None
        self._connect = connect
        self.thread = threading.Thread(target=self._work, name="megatron_ft-store", daemon=True)
        self.thread.start()

    def answer(self, operation: Callable[[Connection], Answer], bound_s: float) -> tuple[Any, Exception | None]:
        reply: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()
        self.jobs.put((operation, reply))
        return reply.get(timeout=max(0.0, bound_s))

    def abandon(self) -> None:
        self._abandoned = True
        self.jobs.put(None)
        if self._announced is not None:
            self._announced.cut()

    def _announce(self, connection: Connection) -> None:
        self._announced = connection
        if self._abandoned:
            raise Overdue

    def _work(self) -> None:
        connection = None
        # no limit: the guard's thread waits for calls; dropping the guard ends it
        while (job := self.jobs.get()) is not None:
            operation, reply = job
            try:
                if connection is None:
                    connection = self._connect(self._announce)
                    self.connected = True
                reply.put((operation(connection), None))
            except Exception as error:  # the caller's thread raises it
                # A traceback would keep the connection, and so its socket, alive.
                reply.put((None, error.with_traceback(None)))
            operation = reply = job = None
