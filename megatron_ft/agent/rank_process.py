"""The ranks of one host as its agent starts them, for the first time and again: environment, log, pulse, process.

Every start of a group has a pulse and an error file of its own; the log goes on in the same file, where a person looks.

Failures it assumes: the process that ranks are forked from may be gone whenever it is needed, years after it was started;
each rank is an interpreter of its own then.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from megatron_ft.launch import bootstrap, forkserver, monitor
from megatron_ft.launch.console import say
from megatron_ft.runtime import pulse, watchdog
from megatron_ft.runtime.environment import RankEnvironment, seat
from megatron_ft.runtime.points import start_of


@dataclass
class Rank:
    """One process. ``dropped``: the agent has ended it itself, to make room for its group's next start or because there is
    nothing left to wait for; that is no fault."""

    group: int
    position: int
    incarnation: int
    process: subprocess.Popen | forkserver.Forked
    start: int
    started: float
    log: Path
    error: Path
    watched: monitor.Watched
    ended: float | None = None
    dropped: bool = False

    def last_words(self) -> dict[str, Any]:
        """What the rank said it died of, and in which microbatch, if it could."""
        try:
            said = json.loads(self.error.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return {"detail": said["message"], "microbatch": said["microbatch"]}

    def drop(self) -> None:
        self.dropped = True
        self.process.kill()

    def listed(self, host: str) -> dict[str, Any]:
        """As ``ranks.json`` has it."""
        return {
            "group": self.group,
            "position": self.position,
            "incarnation": self.incarnation,
            "pid": self.process.pid,
            "host": host,
            "start": self.start,
            "started": round(self.started, 6),
        }


class Starter:
    """Starts the ranks of one host, ``here``: (group, position) of each. They are forked from ``forks``, if there is one."""

    _here: list[tuple[int, int] | None]
    """By the number of their device."""

    def __init__(
        self, command: Sequence[str], here: Sequence[tuple[int, int]], run_dir: Path, forks: forkserver.ForkServer | None
    ) -> None:
        self._command, self._here, self._run_dir, self._forks = list(command), list(here), run_dir, forks
        self._nccl = watchdog.environment(os.environ)
        self._pulses = pulse.directory()

    def house(self, ranks: Sequence[tuple[int, int]]) -> None:
        """Those that are here from now on. Who stays keeps its device; who is new gets one that is free."""
        self._here = [rank if rank in ranks else None for rank in self._here]
        for rank in ranks:
            if rank not in self._here:
                free = self._here.index(None) if None in self._here else len(self._here)
                self._here[free : free + 1] = [rank]

    def start(self, env: RankEnvironment) -> Rank:
        """One rank. Raises ``OSError`` when there is no process, file or memory to be had."""
        name = f"g{env.group}.p{env.position}"
        logs, own_name = self._run_dir / "logs", f"g{seat(env.group, env.incarnation)}.p{env.position}"
        log, error, beats = logs / f"{name}.log", logs / f"{own_name}.error", self._pulses / own_name
        pulse.create(beats)
        own = {bootstrap.AGENT_VARIABLE: str(os.getpid()), bootstrap.ERROR_VARIABLE: str(error), pulse.VARIABLE: str(beats)}
        # Which device of this host is its own, and how many of its group are here: groups may share a host, hosts a group.
        number = self._here.index((env.group, env.position))
        together = sum(rank is not None and rank[0] == env.group for rank in self._here)
        own |= {"LOCAL_RANK": str(number), "LOCAL_WORLD_SIZE": str(together)}
        with log.open("ab" if env.incarnation else "wb") as output:
            if env.incarnation:
                with contextlib.suppress(OSError):  # a full disk is no reason not to start it
                    os.write(output.fileno(), f"--- group {env.group}, incarnation {env.incarnation} ---\n".encode())
            common = forkserver.common_environment(len(self._here))
            process = self._start_process({**self._nccl, **common, **env.to_env(), **own}, output)
        watched = monitor.Watched(process.pid, beats)
        start = start_of(process.pid)
        return Rank(env.group, env.position, env.incarnation, process, start, time.time(), log, error, watched)

    def _start_process(self, env: Mapping[str, str], output: BinaryIO) -> subprocess.Popen | forkserver.Forked:
        """Forked, or if that cannot be done, an interpreter of its own."""
        if self._forks is not None:
            try:
                return self._forks.start(self._command, env, output)
            except forkserver.NotForked as error:
                say(f"{error}; every rank imports torch by itself")
                self.end_forks()
        return subprocess.Popen(
            [sys.executable, "-m", "megatron_ft.launch.bootstrap", *self._command],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C on the terminal reaches the agent alone
        )

    def end_forks(self) -> None:
        """No rank is forked any more."""
        forks, self._forks = self._forks, None
        if forks is not None:
            forks.close()

    def close(self) -> None:
        self.end_forks()
        shutil.rmtree(self._pulses, ignore_errors=True)
