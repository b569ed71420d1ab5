"""The command ``megatron-ft status``: one screen about a run, from its record and its list of ranks."""

from __future__ import annotations

import argparse
import time
from collections import deque
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.text import Text

from megatron_ft.errors import LaunchError
from megatron_ft.record import history, run_directory, run_state
from megatron_ft.record.progress import Progress
from megatron_ft.utils import directory_lock, steady_clock, terminal

_EVENTS = 10
_LOOK_S = 1.0
_QUIET_S, _QUIET_STEPS = 60.0, 10.0
"""A record without a line for longer than this time, and than this number of steps takes, is called old."""


class Status:
    """Return what is known of the run in ``run_dir``. Raises ``LaunchError`` if there is none."""

    def __init__(self, run_dir: Path) -> None:
        self._config = run_directory.config(run_dir)
        if not self._config:
            raise LaunchError(f"{run_dir} is not the directory of a run: config.json cannot be read")
        self._run_dir, self._tail = run_dir, history.Tail(run_dir)
        self._progress = Progress(self._config["groups"])
        self._events: deque[str] = deque(maxlen=_EVENTS)

    def look(self) -> bool:
        """Read what is new in the record. Return whether the run goes on, as far as is known."""
        # Before the record is read: its last line is written before the lock is free.
        lives = self._lives() is not False
        for event in self._tail.new():
            told = self._progress.take(event)
            if event["event"] == "stop":
                told = self._end()
            if told:
                at = time.strftime("%m-%d %H:%M:%S", time.localtime(event["t"]))
                self._events.append(f"{at}  {told}")
        return not self._progress.state.over and lives

    def lines(self) -> list[str]:
        lives = self._lives() is not False
        return [
            f"run {self._config['run_id']} in {self._run_dir}: {self._end() or self._state(lives)}",
            self._progress.line(lives),
            f"{self._progress.state.failures} failures" + (", the last events:" if self._events else ""),
            *self._events,
        ]

    def _end(self) -> str:
        """Return how the run has ended; "" while it goes on, also from a checkpoint."""
        line = self._progress.state.closing
        if line is None:
            return ""
        return (
            f"ended with exit code {line['exit_code']}: {line['reason']}"
            if line["event"] == "stop"
            else run_state.steps_made(line)
        )

    def _state(self, lives: bool) -> str:
        """Return what is known of a run without a last line: its lock, its processes on this host, the age of its lines."""
        ranks: list[dict[str, Any]] = run_directory.living(self._run_dir)
        age_s = max(0.0, steady_clock.now() - self._progress.state.now)
        aged = f"the last line of its record is {timedelta(seconds=round(age_s))} old"
        if not lives:
            left = f"; ranks of it live on: pids {' '.join(str(rank['pid']) for rank in ranks)}" if ranks else ""
            return f"it was killed, for no process holds its lock; {aged}{left}"
        hosts = len({rank["host"] for rank in ranks})
        state = f"{len(ranks)} ranks live on {hosts} {'host' if hosts == 1 else 'hosts'}"
        if age_s <= max(_QUIET_S, _QUIET_STEPS * (self._progress.state.step_s or 0.0)):
            return state
        known = "a process holds its lock" if self._lives() else "this host cannot see whether it lives"
        return f"{state if ranks else 'no rank is listed'}, but {aged}; {known}"

    def _lives(self) -> bool | None:
        return directory_lock.lives(self._run_dir, directory_lock.RUN)


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``megatron-ft status``."""
    parser.add_argument("run_dir", type=Path, help="run directory")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Show the status once, or on a terminal until the run ends. Returns the exit code."""
    status, console = Status(options.run_dir), terminal.console()
    goes_on = status.look()
    if not console.is_terminal or not goes_on:
        for line in status.lines():
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        return 0
    with Live(console=console, auto_refresh=False) as live:
        # no limit: the command itself, until what it watches is over; a signal ends it
        while goes_on:
            live.update(Group(*map(Text, status.lines())), refresh=True)
            time.sleep(_LOOK_S)
            goes_on = status.look()
        live.update(Group(*map(Text, status.lines())), refresh=True)
    return 0
