"""The slow part of saving, beside training: one thread, one save at a time, and nothing of it is raised where one trains.

A save that fails costs that checkpoint and nothing else. One that hangs, in a file system that does not answer, makes the
next ones be skipped; the thread is a daemon, so that it does not keep the process from ending.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_ft.errors import FTError

_NICENESS = 10
"""A tenth of what a training thread gets where they compete. Not the least there is: whoever holds Python's lock and does
not get the processor keeps the training thread waiting."""


@dataclass(frozen=True)
class Saved:
    """How a save ended: ``value`` is what its work returned, or ``error`` says why it failed."""

    what: str
    value: Any
    error: str | None
    took_s: float


class Saver:
    """The background thread of one process; its methods are the training thread's, and none of them waits but ``wait``."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._what = ""
        self._since = 0.0
        self._result: Saved | None = None

    def start(self, what: str, work: Callable[[], Any]) -> str | None:
        """Begin ``work`` (``write_part`` of a snapshot; in the leader also ``complete`` and ``prune``) in the background.

        Returns None, or the reason why it is skipped. What ``work`` uses must not change any more. ``what`` names it in
        messages: "step 812".
        """
        if self.busy:
            return f"{what} is not saved: {self._what} is still being written, for {time.monotonic() - self._since:.1f} s"
        if self._result is not None:
            return f"{what} is not saved: nobody has asked yet how {self._what} ended"
        self._what, self._since = what, time.monotonic()
        self._thread = threading.Thread(target=self._run, args=(what, work), name="checkpoint", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # the system has no thread left
            self._thread = None
            return f"{what} is not saved: {error}"
        return None

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def poll(self) -> Saved | None:
        """How the last save ended, once; None while it goes on."""
        if self.busy or self._result is None:
            return None
        result, self._result, self._thread = self._result, None, None
        return result

    def wait(self, timeout_s: float | None = None) -> Saved | None:
        """The same, but wait for it: before a run ends."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self.poll()

    def _run(self, what: str, work: Callable[[], Any]) -> None:
        started = time.monotonic()
        with contextlib.suppress(OSError):  # Linux: of this thread alone
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        value = error = None
        try:
            value = work()
        except FTError as refused:
            error = str(refused)
        except BaseException as bug:  # the outermost loop: whatever it is, training goes on and somebody hears of it
            error = f"{type(bug).__name__}: {bug}"
        self._result = Saved(what, value, error, time.monotonic() - started)
