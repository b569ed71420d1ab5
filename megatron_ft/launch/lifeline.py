"""Tie a process's life to that of the one that started it: the kernel ends it with its parent."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def end_with(parent: int | None) -> None:
    """From here on. ``parent``: who started this process, where that is known: it may have died before the call."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)
