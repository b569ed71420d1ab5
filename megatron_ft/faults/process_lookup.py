"""Find the processes of a run and signal nothing else: ranks that ``ranks.json`` lists, their agent, and its store.

The file may be old and a pid somebody else's by now. A rank of the run began at the very moment that the list says (clock
ticks since boot), and was started by its parent, an agent (its environment, which nobody can change later). A signal goes
through a file descriptor of the process that was looked at, so nothing can take its pid in between.

Failures it assumes: any process can end at any moment; then there is nobody to signal, which is an answer, not an error.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ft.runtime.points import start_of


@dataclass(frozen=True)
class Process:
    """A process by pid and start (clock ticks since boot)."""

    pid: int
    start: int

    def send(self, number: signal.Signals) -> bool:
        """Signal it. False when it has ended, whoever has its pid now."""
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
        try:
            return start_of(self.pid) == self.start and _state(self.pid) not in "ZX"
        except OSError:
            return False

    @property
    def is_stopped(self) -> bool:
        """Whether it is frozen by SIGSTOP (state T of proc(5))."""
        try:
            return _state(self.pid) == "T" and start_of(self.pid) == self.start
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
    """All ranks of the run that live on this host; none when the run has not started or is over."""
    return _living(_listed(run_dir))


def find(run_dir: Path, group: int, position: int = 0) -> Rank | None:
    """One living rank; None when it is not there (yet, or any more)."""
    entries = [e for e in _listed(run_dir) if (e["group"], e["position"]) == (group, position)]
    return next(iter(_living(entries)), None)


def agent(run_dir: Path) -> Process | None:
    """Who started a rank, and is its parent still."""
    for rank in ranks(run_dir):
        try:
            parent = int(_stat(rank.pid)[1])
            return Process(parent, start_of(parent))
        except OSError:
            continue
    return None


def store(run_dir: Path, agent: Process) -> Process | None:
    """The embedded control store, which the agent's keeper has started; None while there is none (on this host)."""
    try:
        entry = json.loads((run_dir / "store.json").read_text(encoding="utf-8"))
        found = Process(entry["pid"], start_of(entry["pid"]))
        keeper = int(_stat(found.pid)[1])
        its_own = int(_stat(keeper)[1]) == agent.pid and start_of(agent.pid) == agent.start
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if its_own and entry.get("host") == socket.gethostname() and found.lives else None


def _listed(run_dir: Path) -> list[dict[str, Any]]:
    try:
        return json.loads((run_dir / "ranks.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []


def _living(entries: list[dict[str, Any]]) -> list[Rank]:
    found = map(_verified, entries)
    return [rank for rank in found if rank is not None]


def _verified(entry: dict[str, Any]) -> Rank | None:
    pid, group, position = entry["pid"], entry["group"], entry["position"]
    if not _is_here(entry.get("host")):
        return None
    try:
        start, parent = start_of(pid), _stat(pid)[1]
        agent = _environment(pid).get("MEGATRON_FT_AGENT_PID")
    except OSError:
        return None
    return Rank(pid, start, group, position) if start == entry["start"] and agent == parent else None


def _is_here(host: str | None) -> bool:
    """Whether it names this host; agents add their address where several have the same name, as in network namespaces."""
    return host is None or host.partition("(")[0] == socket.gethostname()


def _environment(pid: int) -> dict[str, str]:
    pairs = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def _state(pid: int) -> str:
    return _stat(pid)[0]


def _stat(pid: int) -> list[str]:
    """proc(5)'s stat from its third field on; the second can contain anything."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rsplit(")", 1)[1].split()
