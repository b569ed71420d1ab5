"""Save in a background thread beside training, one save at a time. No error of a save is raised in the training thread.

A failed save costs only that checkpoint. While a save hangs in a file system that does not answer, later ones are
skipped. The thread is a daemon, so that it does not keep the process from ending.
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
"""Added to the nice value of the process for the thread: it gets about a tenth of the processor time of a training
thread. It is not the lowest priority, because a thread that holds the interpreter lock without a processor makes the
training thread wait."""


@dataclass(frozen=True)
class Saved:
    """Result of a save: the ``value`` that its work returned, or the ``error`` for which it failed."""

    what: str
    value: Any
    error: str | None
    took_s: float


class Saver:
    """The background thread of one process. The training thread calls the methods; only :meth:`wait` blocks."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._what = ""
        self._since = 0.0
        self._result: Saved | None = None

    def start(self, what: str, work: Callable[[], Any]) -> str | None:
        """Begin a save in the background.

        Args:
            what: Name of the save in messages, such as "step 812".
            work: Function that saves (``write_part``; in the leader also ``complete`` and ``prune``). Its data must not
                change any more.

        Returns:
            None, or the reason why the save is skipped.
        """
        if self.busy:
            return (
                f"{what} is not saved: {self._what} is still being written, for {time.monotonic() - self._since:.1f} s"
            )
        if self._result is not None:
            return f"{what} is not saved: the result of {self._what} has not been polled yet"
        self._what, self._since = what, time.monotonic()
        self._thread = threading.Thread(target=self._run, args=(what, work), name="checkpoint", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # the system's limit on threads is reached
            self._thread = None
            return f"{what} is not saved: {error}"
        return None

    @property
    def busy(self) -> bool:
        """Whether a save is running."""
        return self._thread is not None and self._thread.is_alive()

    def poll(self) -> Saved | None:
        """Return the result of the last save, once; None while it is running."""
        if self.busy or self._result is None:
            return None
        result, self._result, self._thread = self._result, None, None
        return result

    def wait(self, timeout_s: float | None = None) -> Saved | None:
        """Wait for the running save, and return :meth:`poll`. It is called before a run ends."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self.poll()

    def _run(self, what: str, work: Callable[[], Any]) -> None:
        started = time.monotonic()
        with contextlib.suppress(OSError):  # on Linux this applies to the calling thread only
            own = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, own, min(os.getpriority(os.PRIO_PROCESS, own) + _NICENESS, 19))
        value = error = None
        try:
            value = work()
        except FTError as refused:
            error = str(refused)
        except BaseException as bug:  # the outermost guard of the thread: training continues, and the result reports it
            error = f"{type(bug).__name__}: {bug}"
        self._result = Saved(what, value, error, time.monotonic() - started)
