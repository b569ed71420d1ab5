"""Follow the record of a run as it is written, and show a progress bar on a terminal, or lines elsewhere."""

from __future__ import annotations

import contextlib
import shlex
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from megatron_ft.record import history, run_directory
from megatron_ft.record.progress import Event, Progress
from megatron_ft.utils import shared_file, terminal
from megatron_ft.utils.new_lines import NewLines

_POLL_S = 0.1
_LINE_EVERY_S = 60.0
_LAST_LINES = 12
"""Lines of its output that are shown of a rank that ended by itself."""
NONE, ALL = "none", "all"
"""Values of ``--tee`` beside numbers of ranks."""


def looks(run_dir: Path, stop: Callable[[], bool]) -> Iterator[list[dict[str, Any]]]:
    """Look at a run's record as it is written, and yield the lines that are new at each look. It ends when ``stop()`` is
    true and no line is left."""
    tail = history.Tail(run_dir)
    # no limit: the command itself, until what it watches is over; a signal ends it
    while True:
        last_look = stop()
        events = tail.new()
        yield events
        if last_look:
            return
        if not events:
            time.sleep(_POLL_S)


@contextlib.contextmanager
def shown(
    groups: int, run_dir: Path, ranks_per_group: int = 1, tee: str = NONE, follows: bool = False
) -> Iterator[None]:
    """Show the run's progress inside the block, and what the ranks that ``tee`` names write: numbers with commas between
    them, all or none. ``follows``: another group that becomes the writer is shown in place of theirs."""
    done = threading.Event()

    def show() -> None:
        try:
            with ProgressView(groups, Outputs(run_dir, ranks_per_group, tee, follows)) as view:
                for events in looks(run_dir, done.is_set):
                    view.show_outputs()  # before what is new in the record: the run's end comes last
                    for event in events:
                        view.update(event)
                view.show_outputs(last=True)
        except OSError:
            return  # a terminal that goes away must not end the run

    watching = threading.Thread(target=show, name="megatron_ft-display", daemon=True)
    watching.start()
    try:
        yield
    finally:
        done.set()
        watching.join(timeout=5.0)


class Outputs:
    """The new lines in the logs of some ranks."""

    def __init__(self, run_dir: Path, ranks_per_group: int, tee: str, follows: bool = False) -> None:
        self.run_dir, self._tee, self._follows = run_dir, tee, follows
        ranks = [] if tee in (NONE, ALL) else [divmod(int(word), ranks_per_group) for word in tee.split(",")]
        self._positions = [position for _, position in ranks]
        self._own = [run_directory.log(run_dir, *rank) for rank in dict.fromkeys(ranks)]
        self._read: dict[Path, NewLines] = {}

    def shows(self, log: Path) -> bool:
        """Return whether the lines of this log are shown as they come."""
        return self._tee == ALL or log in self._own

    def follow(self, group: int) -> None:
        """Show what the same ranks of that group write from now on, if the writer is to be followed."""
        if self._follows:
            self._own = [
                run_directory.log(self.run_dir, group, position) for position in dict.fromkeys(self._positions)
            ]
            self._read = {log: NewLines(log, log.stat().st_size if log.exists() else 0) for log in self._own}

    def new(self, last: bool = False) -> Iterator[str]:
        """Yield the lines that are complete now and were not at the last look; with all ranks, after a name of the rank.

        ``last``: the ranks have ended, and a last line without a newline is complete, too.
        """
        if self._tee == NONE:
            return
        logs = self._own or sorted((self.run_dir / "logs").glob("g*.p*.log"))
        for log in logs:
            for line in self._read.setdefault(log, NewLines(log)).read(last):
                yield line if self._own else f"[{log.stem}] {line}"


class ProgressView:
    """Shows a run from the lines of its record: a bar on a terminal, else a line each minute; and every event."""

    def __init__(self, groups: int, outputs: Outputs, console: Console | None = None) -> None:
        self._console = console or terminal.console()
        self._progress = Progress(groups)
        self._outputs = outputs
        self._next_line = 0.0
        self._ends: set[tuple[str, ...]] = set()
        self._writer: int | None = None
        self._bar: Bar | None = None
        if self._console.is_terminal:
            self._bar = Bar(BarColumn(bar_width=20), TextColumn("{task.fields[line]}"), console=self._console)
            self._task = self._bar.add_task("", total=None, line=self._progress.line())

    def __enter__(self) -> ProgressView:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, event: Event) -> None:
        """Show one line of the record."""
        progress = self._progress
        told = progress.take(event)
        if event["event"] == "start":
            self._say(f"run directory {self._outputs.run_dir}, with the output of each rank in logs/")
            quoted = shlex.quote(str(self._outputs.run_dir))
            self._say(f"watch: megatron-ft status {quoted}; stop: megatron-ft stop {quoted}")
        if told:
            self._say(told)
        if event["event"] == "view":
            self._say_writer(min(event["live"], default=None))
        if event["event"] == "fault" and event["code"]:
            self._show_end(event)
        if self._bar is not None:
            self._bar.update(
                self._task, completed=progress.state.done, total=progress.state.total, line=progress.line()
            )
        elif event["event"] == "step" and event.get("t", 0.0) >= self._next_line:
            self._next_line = event.get("t", 0.0) + _LINE_EVERY_S
            self._say(progress.line())

    def show_outputs(self, last: bool = False) -> None:
        """Show what the ranks have written since the last call; ``last``: they have ended."""
        for line in self._outputs.new(last):
            self._say(line)

    def _say_writer(self, writer: int | None) -> None:
        """Say where the output of ``session.is_writer`` is from now on, when another group is the writer."""
        before, self._writer = self._writer, writer
        if writer is None or before in (None, writer):
            return
        self._outputs.follow(writer)
        log = run_directory.log(self._outputs.run_dir, writer, 0)
        shown = "is shown here" if self._outputs.shows(log) else f"is in {log}"
        self._say(f"group {writer} is the writer now (session.is_writer): its output {shown}")

    def _show_end(self, event: Event) -> None:
        """Show the last lines of a rank that ended by itself, unless they are shown anyway, or are those of another."""
        log = run_directory.log(self._outputs.run_dir, event["group"], event["position"])
        with contextlib.suppress(OSError):
            lines = tuple(shared_file.read_record(log).decode(errors="replace").splitlines()[-_LAST_LINES:])
            if lines in self._ends:
                return
            self._ends.add(lines)
            if self._outputs.shows(log):
                return
            self._say(f"the last lines of {log}:")
            for line in lines:
                self._say(f"  {line}")

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)  # soft_wrap: a path stays on one line
