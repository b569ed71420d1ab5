"""What ties a process to its parent, one that adopts orphans, and a process's name: settings of prctl(2), and signals."""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Any

SAVE_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
"""The signals by which a cluster manager asks a launcher to save and stop. Some send them to every process of a job."""
_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36


def end_with(parent: int | None, number: int = signal.SIGKILL) -> None:
    """Make this process a part of its parent's: the kernel sends it a signal when its parent ends, and it ignores
    :data:`SAVE_SIGNALS`, which are for the launcher.

    ``parent`` is the pid of the process that started this one, if known. The process ends at once when that has already
    ended.
    """
    ignore_save_signals()
    _prctl(_PR_SET_PDEATHSIG, number)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def ignore_save_signals() -> None:
    """Ignore :data:`SAVE_SIGNALS`, here and in every program that this process starts."""
    for number in SAVE_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def adopt_orphans() -> None:
    """Make descendants of this process its children when their parents end."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_name(name: str) -> None:
    """Set the name of the calling thread, which is the process's if it is the main thread; 15 characters are kept."""
    _prctl(_PR_SET_NAME, ctypes.create_string_buffer(name.encode()))


def _prctl(option: int, value: Any) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value)
