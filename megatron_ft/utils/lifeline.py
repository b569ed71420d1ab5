"""Settings of prctl(2): a process that ends with its parent, one that adopts orphans, and a process's name."""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Any

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36


def end_with(parent: int | None, number: signal.Signals = signal.SIGKILL) -> None:
    """Make the kernel send this process a signal when its parent ends.

    ``parent`` is the pid of the process that started this one, if known. The process ends at once when that has already
    ended.
    """
    _prctl(_PR_SET_PDEATHSIG, number)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Make descendants of this process its children when their parents end."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_name(name: str) -> None:
    """Set the name of the calling thread, which is the process's if it is the main thread; 15 characters are kept."""
    _prctl(_PR_SET_NAME, ctypes.create_string_buffer(name.encode()))


def _prctl(option: int, value: Any) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value)
