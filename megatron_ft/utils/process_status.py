"""Facts about a process of this host, from proc(5).

psutil is not used: ``start`` is compared with values in records of earlier runs, in clock ticks, and the agent samples
every rank several times per second, for which one read of one file is enough.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import NamedTuple


class ProcessStatus(NamedTuple):
    """State letter, id of the parent, processor time and time of the start since boot, both in clock ticks."""

    state: str
    parent: int
    cpu_ticks: int
    start: int

    @property
    def ended(self) -> bool:
        """Whether the process has ended and its parent has not waited for it yet."""
        return self.state in "ZX"


def process_status(pid: int) -> ProcessStatus:
    """Return the status of process ``pid``. Raises ``OSError`` when there is none."""
    text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    fields = text.rpartition(")")[2].split()  # the name of the command, in parentheses, can contain anything
    return ProcessStatus(fields[0], int(fields[1]), int(fields[11]) + int(fields[12]), int(fields[19]))


def start_of(pid: int) -> int:
    """Return when process ``pid`` started, in clock ticks since boot. With the pid it identifies a process. Raises
    ``OSError`` when there is none."""
    return process_status(pid).start


def lives(pid: int, start: int) -> bool:
    """Return whether the process that started at ``start`` still runs: the pid may belong to another one by now."""
    try:
        status = process_status(pid)
    except OSError:
        return False
    return not status.ended and status.start == start


def ended_with(code: int) -> str:
    """Describe an exit code as ``subprocess`` reports it."""
    return f"ended with {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
