"""The command ``megatron-ft status``: one screen about a run, from its record and its list of ranks."""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.text import Text

from megatron_ft.errors import LaunchError
from megatron_ft.report.progress import Event, Progress
from megatron_ft.runlog import history, run_directory
from megatron_ft.utils import terminal

_EVENTS = 10
_LOOK_S = 1.0


class Status:
    """Return what is known of the run in ``run_dir``. Raises ``LaunchError`` if there is none."""

    def __init__(self, run_dir: Path) -> None:
        try:
            self._config = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise LaunchError(
                f"{run_dir} is not the directory of a run: config.json cannot be read ({error})"
            ) from None
        self._run_dir, self._tail = run_dir, history.Tail(run_dir)
        self._progress = Progress(self._config["groups"])
        self._events: deque[str] = deque(maxlen=_EVENTS)
        self._end = ""

    def look(self) -> bool:
        """Read what is new in the record. Return whether the run goes on."""
        for event in self._tail.new():
            told = self._progress.take(event)
            if event["event"] == "stop":
                told = self._end = f"ended with exit code {event['exit_code']}: {event['reason']}"
            elif event["event"] == "end":
                self._end = "all steps are done"
            elif event["event"] in ("start", "resume"):
                self._end = ""  # the run goes on from a checkpoint
            if told:
                self._events.append(f"{_time(event)}  {told}")
        return not self._end

    def lines(self) -> list[str]:
        ranks: list[dict[str, Any]] = run_directory.read(self._run_dir / "ranks.json")
        hosts = len({rank["host"] for rank in ranks})
        state = self._end or f"{len(ranks)} ranks live on {hosts} {'host' if hosts == 1 else 'hosts'}"
        return [
            f"run {self._config['run_id']} in {self._run_dir}: {state}",
            self._progress.line(),
            f"{self._progress.failures} failures" + (", the last events:" if self._events else ""),
            *self._events,
        ]


def _time(event: Event) -> str:
    return time.strftime("%m-%d %H:%M:%S", time.localtime(event["t"]))


def run(options: argparse.Namespace) -> int:
    """Show the status once, or on a terminal until the run ends. Returns the exit code."""
    status, console = Status(options.run_dir), terminal.console()
    goes_on = status.look()
    if not console.is_terminal or options.once or not goes_on:
        for line in status.lines():
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        return 0
    with Live(console=console, auto_refresh=False) as live:
        while goes_on:
            live.update(Group(*map(Text, status.lines())), refresh=True)
            time.sleep(_LOOK_S)
            goes_on = status.look()
        live.update(Group(*map(Text, status.lines())), refresh=True)
    return 0
