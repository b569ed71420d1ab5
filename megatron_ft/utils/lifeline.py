"""Settings of prctl(2): a process that ends with its parent, and one that adopts orphans."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


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


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value)
