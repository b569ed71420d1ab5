"""The ranks of one host as its agent starts them, for the first time and again: environment, log, pulse, process.

Every start of a group has a pulse and an error file of its own; all starts append to one log file, where users look.

Failures it assumes: the process from which ranks are forked may be gone whenever it is needed, years after it was
started; then each rank is an interpreter of its own.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from megatron_ft.config.rank_env import RankEnvironment
from megatron_ft.host import forkserver, rank_bootstrap, rank_monitor
from megatron_ft.record import run_directory
from megatron_ft.run import progress_counters
from megatron_ft.run.collectives import nccl_watchdog
from megatron_ft.run.store.claim_log import TOLD
from megatron_ft.types import seat
from megatron_ft.utils import shared_file, steady_clock, vital_thread
from megatron_ft.utils.console import say
from megatron_ft.utils.process_status import start_of


@dataclass
class Rank:
    """One process of a group.

    Attributes:
        start: start time of the process in clock ticks after boot, which tells a reused pid.
        started: time of the start, in seconds since the epoch; ``ended`` likewise, None while it lives.
        log: the file of its output.
        error: the file in which it writes what ended it.
        watched: its pulse and health.
        dropped: the agent has killed it to make room for its group's next start, or because it waits in vain: no fault.
        killed: the agent has killed it.
    """

    group: int
    position: int
    incarnation: int
    process: subprocess.Popen | forkserver.Forked
    start: int
    started: float
    log: Path
    error: Path
    watched: rank_monitor.Watched
    ended: float | None = None
    dropped: bool = False
    killed: bool = False

    def last_words(self) -> dict[str, Any]:
        """Return what the rank wrote about its death, and in which microbatch, if it could."""
        said = shared_file.read_json(self.error)
        return {} if said is None else {"detail": said["message"], "microbatch": said["microbatch"]}

    def drop(self) -> None:
        self.dropped = True
        self.kill()

    def end(self, why: str) -> None:
        """Kill the process; ``why`` becomes its last words."""
        vital_thread.leave_error(why, path=self.error)
        self.kill()

    def kill(self) -> None:
        self.killed = True
        if self.poll() is None:
            self.process.kill()
            _kill_group(self.process.pid)

    def poll(self) -> int | None:
        """Return the exit code, None while the process lives. What it has started, in its process group, ends with it.

        The group gets its signal before the process is waited for: until then its number cannot be that of others.
        """
        if self.process.returncode is None:
            ended = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return None
            _kill_group(self.process.pid)
        return self.process.poll()

    def listed(self, host: str) -> dict[str, Any]:
        """Return the rank's entry in ``ranks.json``."""
        return {
            "group": self.group,
            "position": self.position,
            "incarnation": self.incarnation,
            "pid": self.process.pid,
            "host": host,
            "start": self.start,
            "started": round(self.started, 6),
        }


def _kill_group(leader: int) -> None:
    with contextlib.suppress(OSError):  # none of its processes is left, or it has just been forked and has no group yet
        os.killpg(leader, signal.SIGKILL)


class Starter:
    """Starts the ranks of one host, ``here``: (group, position) of each. They are forked from ``forks``, if it is given."""

    _here: list[tuple[int, int] | None]
    """Indexed by the number of their device."""

    def __init__(
        self,
        command: Sequence[str],
        here: Sequence[tuple[int, int]],
        run_dir: Path,
        forks: forkserver.ForkServer | None,
    ) -> None:
        self._command, self._here, self._run_dir, self._forks = list(command), list(here), run_dir, forks
        self._nccl = nccl_watchdog.environment(os.environ)
        self._pulses = progress_counters.directory()
        self.told = self._pulses / TOLD
        """The file in which the ranks look for the number of the newest claim."""

    def house(self, ranks: Sequence[tuple[int, int]]) -> None:
        """Set the ranks that are here from now on. Earlier ranks keep their devices; new ranks get free ones."""
        self._here = [rank if rank in ranks else None for rank in self._here]
        for rank in ranks:
            if rank not in self._here:
                free = self._here.index(None) if None in self._here else len(self._here)
                self._here[free : free + 1] = [rank]

    def start(self, env: RankEnvironment) -> Rank:
        """Start one rank. Raises ``OSError`` when there is no process, file or memory available."""
        log = run_directory.log(self._run_dir, env.group, env.position)
        own_name = f"g{seat(env.group, env.incarnation)}.p{env.position}"
        error, heartbeats = log.parent / f"{own_name}.error", self._pulses / own_name
        progress_counters.create(heartbeats)
        own = {
            rank_bootstrap.AGENT_VARIABLE: str(os.getpid()),
            vital_thread.ERROR_VARIABLE: str(error),
            progress_counters.VARIABLE: str(heartbeats),
        }
        # The number of its device, and of its group's ranks on this host: groups may share a host, hosts a group.
        number = self._here.index((env.group, env.position))
        together = sum(rank is not None and rank[0] == env.group for rank in self._here)
        own |= {"LOCAL_RANK": str(number), "LOCAL_WORLD_SIZE": str(together)}
        with shared_file.append_to(log) as output:
            if not env.incarnation:
                output.truncate(0)
            else:
                with contextlib.suppress(OSError):  # a full disk is no reason not to start it
                    size = os.fstat(output.fileno()).st_size
                    if size and os.pread(output.fileno(), 1, size - 1) != b"\n":  # the start before has died in a line
                        os.write(output.fileno(), b"\n")
                    os.write(output.fileno(), f"--- group {env.group}, incarnation {env.incarnation} ---\n".encode())
            common = forkserver.common_environment(len(self._here))
            process = self._start_process({**self._nccl, **common, **env.to_env(), **own}, output)
        watched = rank_monitor.Watched(process.pid, heartbeats)
        start = start_of(process.pid)
        return Rank(env.group, env.position, env.incarnation, process, start, steady_clock.now(), log, error, watched)

    def _start_process(self, env: Mapping[str, str], output: BinaryIO) -> subprocess.Popen | forkserver.Forked:
        """Fork the process, or if that cannot be done, start an interpreter of its own."""
        if self._forks is not None:
            try:
                return self._forks.start(self._command, env, output)
            except forkserver.NotForked as error:
                say(f"{error}; every rank imports torch by itself")
                self.end_forks()
        return subprocess.Popen(
            [sys.executable, "-m", "megatron_ft.host.rank_bootstrap", *self._command],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C on the terminal reaches the agent alone
        )

    def end_forks(self) -> None:
        """End the fork server; no further rank is forked."""
        forks, self._forks = self._forks, None
        if forks is not None:
            forks.close()

    def close(self) -> None:
        self.end_forks()
        shutil.rmtree(self._pulses, ignore_errors=True)
