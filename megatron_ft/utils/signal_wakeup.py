"""Signals as something that can be waited for, with a timeout."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Sequence


class Wakeup:
    """SIGCHLD and the given signals as bytes on a pipe, so that one ``select`` waits for all of them."""

    def __init__(self, signals: Sequence[signal.Signals]) -> None:
        self._read, write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(write, False)
        self._write = write
        self._before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGCHLD, *signals)}
        self._fd_before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    def wait(self, timeout_s: float) -> list[int]:
        """The signals that came, in order; empty after ``timeout_s``."""
        ready, _, _ = select.select([self._read], [], [], timeout_s)
        return list(os.read(self._read, 4096)) if ready else []

    def close(self) -> None:
        signal.set_wakeup_fd(self._fd_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._read)
        os.close(self._write)
