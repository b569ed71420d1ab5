"""Finds and signals the processes of a run: ranks in ``ranks.json``, their agent, and its store; never other processes.

The file may be old, and a pid may belong to another process by now. A rank is accepted when its start time (clock ticks
since boot) is that of the list, and its parent is the agent in its environment, which cannot change later. Signals go
through a pidfd, so the pid cannot be reused in between. Failures assumed: any process ends at any moment, which is not
an error.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ft.utils import shared_file
from megatron_ft.utils.process_status import lives, process_status, start_of


@dataclass(frozen=True)
class Process:
    """A process, identified by pid and start time (clock ticks since boot)."""

    pid: int
    start: int

    def send(self, number: signal.Signals) -> bool:
        """Sends a signal. Returns False when the process has ended."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        try:
            if start_of(self.pid) != self.start:
                return False
            signal.pidfd_send_signal(descriptor, number)
        except (ProcessLookupError, FileNotFoundError):
            return False
        finally:
            os.close(descriptor)
        return True

    @property
    def lives(self) -> bool:
        return lives(self.pid, self.start)

    @property
    def is_stopped(self) -> bool:
        """True for a process that SIGSTOP has frozen (state T of proc(5))."""
        try:
            status = process_status(self.pid)
            return status.state == "T" and status.start == self.start
        except OSError:
            return False


@dataclass(frozen=True)
class Rank(Process):
    """A living rank of a run."""

    group: int
    position: int

    def __str__(self) -> str:
        return f"rank {self.position} of group {self.group} (pid {self.pid})"


def ranks(run_dir: Path) -> list[Rank]:
    """Returns the living ranks of the run on this host."""
    return _living(_listed(run_dir))


def find(run_dir: Path, group: int, position: int = 0) -> Rank | None:
    """Returns a rank, or None when it is not alive."""
    entries = [e for e in _listed(run_dir) if (e["group"], e["position"]) == (group, position)]
    return next(iter(_living(entries)), None)


def agent(run_dir: Path) -> Process | None:
    """Returns the agent: the parent of a living rank."""
    for rank in ranks(run_dir):
        try:
            parent = process_status(rank.pid).parent
            return Process(parent, start_of(parent))
        except OSError:
            continue
    return None


def store(run_dir: Path, agent: Process) -> Process | None:
    """Returns the embedded control store, which the agent's keeper has started; None when this host has none."""
    try:
        entry = json.loads(shared_file.read_record(run_dir / "store.json"))
        found = Process(entry["pid"], start_of(entry["pid"]))
        keeper = process_status(found.pid).parent
        its_own = process_status(keeper).parent == agent.pid and start_of(agent.pid) == agent.start
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if its_own and entry.get("host") == socket.gethostname() and found.lives else None


def _listed(run_dir: Path) -> list[dict[str, Any]]:
    return shared_file.read_json(run_dir / "ranks.json") or []


def _living(entries: list[dict[str, Any]]) -> list[Rank]:
    return [rank for rank in map(_verified, entries) if rank is not None]


def _verified(entry: dict[str, Any]) -> Rank | None:
    pid = entry["pid"]
    # Agents append their address when several hosts have the same name, as in network namespaces.
    if entry["host"].partition("(")[0] != socket.gethostname():
        return None
    try:
        status = process_status(pid)
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    if status.start != entry["start"] or b"MEGATRON_FT_AGENT_PID=%d" % status.parent not in environment:
        return None
    return Rank(pid, status.start, entry["group"], entry["position"])
