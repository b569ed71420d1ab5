"""Processes as proc(5) shows them. Any can end while it is looked at; that is an answer, not an error."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path


def pids() -> list[int]:
    """Return the pids of all processes, zombies left out."""
    return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if state(pid) not in "ZX"]


def state(pid: int) -> str:
    """Return the state of a process: ``T`` when it is stopped, ``X`` when there is none."""
    return (_stat(pid) or "X")[0]


def group(pid: int) -> int:
    """Return the number of a process's group; 0 when there is none."""
    stat = _stat(pid)
    return int(stat[2]) if stat else 0


def program(pid: int) -> str:
    """Return the name of the program file of a process; empty when that cannot be read."""
    try:
        return Path(os.readlink(f"/proc/{pid}/exe")).name
    except OSError:
        return ""


def command(pid: int) -> list[str]:
    return _strings(pid, "cmdline")


def environment(pid: int) -> list[str]:
    """Return the ``NAME=value`` pairs with which the process was started."""
    return _strings(pid, "environ")


def open_files(pid: int) -> set[str]:
    found = set()
    with contextlib.suppress(OSError):
        for link in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found.add(os.readlink(link.path))
    return found


def identity(path: str) -> tuple[int, int] | None:
    """Return the identity of a namespace, by a file that stands for it; None when there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def with_descendants(own: set[int]) -> set[int]:
    parents = {pid: int(stat[1]) for pid in pids() if (stat := _stat(pid))}
    found = set(own)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def send(to: set[int], number: signal.Signals) -> None:
    for pid in to:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _strings(pid: int, file: str) -> list[str]:
    try:
        return Path(f"/proc/{pid}/{file}").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def _stat(pid: int) -> list[str]:
    """Return the fields of stat from the third on; empty when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
