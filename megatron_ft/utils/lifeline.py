"""Who ends with whom, and whose child is who: what the kernel can be asked for with prctl(2)."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def end_with(parent: int | None, number: signal.Signals = signal.SIGKILL) -> None:
    """The kernel ends this process with its parent, from here on, by that signal. ``parent``: who started it, where that is
    known: it may have died before the call."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Whose parent dies becomes a child of this process, if it descends from it."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value)
