"""Wait for signals with a timeout."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence

from megatron_ft.utils import file_descriptors, lifeline

_NO_SIGNAL = 0


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals on which a launcher ends its run in order, those that ask it to save included.

    SIGHUP, the end of the terminal, is one of them unless it is ignored, as ``nohup`` starts its command.
    """
    ends = (signal.SIGTERM, signal.SIGINT, *lifeline.SAVE_SIGNALS)
    return ends if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (*ends, signal.SIGHUP)


class Wakeup:
    """Turns SIGCHLD and the given signals into bytes on a pipe, so that one ``poll`` waits for all of them."""

    def __init__(self, signals: Sequence[signal.Signals]) -> None:
        self._read, write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(write, False)
        self._write = write
        self._before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGCHLD, *signals)}
        self._fd_before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    def wait(self, timeout_s: float) -> list[int]:
        """Return the signals that have arrived, in order; none after ``timeout_s``, or :meth:`wake`."""
        arrived = os.read(self._read, 4096) if file_descriptors.readable(self._read, timeout_s) else b""
        return [number for number in arrived if number != _NO_SIGNAL]

    def wake(self) -> None:
        """End a wait at once. Any thread may call it."""
        with contextlib.suppress(BlockingIOError):  # the pipe is full, which ends the wait as well
            os.write(self._write, bytes([_NO_SIGNAL]))

    def close(self) -> None:
        """Restore the former handlers."""
        signal.set_wakeup_fd(self._fd_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._read)
        os.close(self._write)
