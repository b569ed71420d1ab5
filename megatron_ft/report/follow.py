"""Follow the record of a run as it is written, and show a progress bar on a terminal, or lines elsewhere."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from megatron_ft.report.words import happened
from megatron_ft.runlog import history
from megatron_ft.types import host_name, place_name, rank_name
from megatron_ft.utils import terminal

_POLL_S = 0.1

Event = Mapping[str, Any]


def follow(run_dir: Path, stop: Callable[[], bool]) -> Iterator[dict[str, Any]]:
    """Yield the lines of a run's record as they are written. It ends when ``stop()`` is true and no line is left."""
    tail = history.Tail(run_dir)
    while True:
        last_look = stop()
        events = tail.new()
        yield from events
        if last_look:
            return
        if not events:
            time.sleep(_POLL_S)


@contextlib.contextmanager
def shown(groups: int, run_dir: Path) -> Iterator[None]:
    """Show the run's progress inside the block."""
    done = threading.Event()

    def show() -> None:
        try:
            with ProgressView(groups) as view:
                for event in follow(run_dir, done.is_set):
                    view.update(event)
        except OSError:
            return  # a terminal that goes away must not end the run

    watching = threading.Thread(target=show, name="megatron_ft-display", daemon=True)
    watching.start()
    try:
        yield
    finally:
        done.set()
        watching.join(timeout=5.0)


class ProgressView:
    """Shows step, loss, live groups and failures of a run from the events of its record."""

    def __init__(self, groups: int, console: Console | None = None) -> None:
        self._console = console or terminal.console()
        self._live, self._failures, self._steps, self._next_line = groups, 0, None, 0
        self._groups, self._saved, self._place = groups, None, ""
        self._view: Event = {"epoch": -1}
        self._bar: Progress | None = None
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("step"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("loss {task.fields[loss]}"),
                TextColumn("live {task.fields[live]}"),
                TextColumn("failures {task.fields[failures]}"),
                TimeElapsedColumn(),
                console=self._console,
            )
            self._task = self._bar.add_task("", total=None, loss="-", live=f"{groups}/{groups}", failures=0)

    def __enter__(self) -> ProgressView:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, event: Event) -> None:
        """Process one event of the record."""
        kind = event["event"]
        if kind == "begin":
            self._steps = event["steps"]
        elif kind == "view":
            self._live, self._view = len(event["live"]), event
        elif kind == "fault":
            self._failures += 1
            self._say(self._fault(event))
        elif kind == "recovery":
            self._say(recovery_line(event, self._view))
        elif kind == "restart":
            self._say(restart_line(event))
        elif kind == "host":
            self._say(host_line(event))
        elif kind == "given_up":
            self._say(f"group {event['group']} does not come back: {event['reason']}")
        elif kind == "stragglers":
            self._say(straggler_line(event))
        elif kind == "resume":
            self._place = event["checkpoint"]
        elif kind == "checkpoint":
            self._checkpoint(event)
        elif kind == "checkpoint_failed":
            self._say(f"step {event['step']} is not saved: {event['reason']}")
        elif kind == "step":
            self._step(event)
        elif kind == "end":
            self._say(f"all {event['step'] + 1} steps done, loss {event['loss']:.4f}{self._saved_end(event)}")
        elif kind == "not_saved":
            self._say(event["reason"])
        if self._bar is not None:
            done = event["step"] + 1 if kind == "step" else None
            loss: dict[str, Any] = {"loss": f"{event['loss']:.4f}"} if kind == "step" else {}
            live = f"{self._live}/{self._groups}"
            self._bar.update(self._task, completed=done, total=self._steps, live=live, failures=self._failures, **loss)

    def _step(self, event: Event) -> None:
        """Print a line for about every tenth of the steps, when there is no terminal."""
        if self._bar is not None or event["step"] < self._next_line:
            return
        total = self._steps or 0
        self._next_line = event["step"] + max(1, total // 10)
        of = f"/{total}" if total else ""
        self._say(f"step {event['step'] + 1}{of}  loss {event['loss']:.4f}  live {self._live}/{self._groups}")

    def _saved_end(self, event: Event) -> str:
        """Return the part of the last line that says whether the state after the last step is saved."""
        if "saved" not in event:
            return ""
        if event["saved"] == event["step"] + 1:
            return f"; step {event['saved']} is saved in {self._place}" if self._place else ""
        newest = (
            "there is no checkpoint" if event["saved"] is None else f"the newest checkpoint is of step {event['saved']}"
        )
        return f"; step {event['step'] + 1} is NOT saved, {newest}"

    def _checkpoint(self, event: Event) -> None:
        """Print a line about the first checkpoint, and about later ones that fall together with a line of a step."""
        if self._saved is None or self._bar is not None or event["step"] >= self._next_line:
            self._say(checkpoint_line(event))
        self._saved, self._place = event["step"], event["path"]

    @staticmethod
    def _fault(event: Event) -> str:
        who = rank_name(event["position"], event["pid"], event["host"], event.get("host_rank"))
        what = happened(event)
        more = f" ({event['detail']})" if event["detail"] not in ("", what) else ""
        return f"group {event['group']} lost: {who} {what}{more}"

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)  # soft_wrap: a path stays on one line


def recovery_line(event: Event, view: Event) -> str:
    """Describe a recovery in words. ``view`` is the newest view."""
    if view["epoch"] == event["epoch"] and view["joined"] and not event["patched"]:
        back = " ".join(map(str, view["joined"]))
        return f"group {back} is back in step {event['step']}; the others waited {event['stall_s']:.2f} s"
    by = " ".join(sorted(event["patched_by"], key=int))
    patched = f"{event['patched']} microbatches taken over by groups {by}" if event["patched"] else "nothing to patch"
    return f"step {event['step']} goes on: {patched}; stalled {event['stall_s']:.2f} s"


def restart_line(event: Event) -> str:
    """Describe the restart of a lost group in words."""
    pids = " ".join(map(str, event["pids"])) or "none could be started"
    after = f", {event['after_s']:.1f} s after it was lost" if event["after_s"] > 0.1 else ""
    where = place_name(event["host"], event.get("host_rank"))
    return f"group {event['group']} is started again on {where} (incarnation {event['incarnation']}, pid {pids}){after}"


def host_line(event: Event) -> str:
    """Describe in words what a host does that has joined the run."""
    groups = " ".join(map(str, event["groups"]))
    who = host_name(event["host"], event.get("host_rank"))
    if event["what"] == "spare":
        return f"{who} is there as a spare"
    return f"{who} {'takes over' if event['what'] == 'took over' else 'adds'} group {groups}"


def checkpoint_line(event: Event) -> str:
    """Describe a checkpoint in words."""
    megabytes = event["bytes"] / 2**20
    return (
        f"step {event['step']} is saved: {megabytes:.1f} MiB by groups {' '.join(map(str, event['writers']))} in "
        f"{event['seconds']:.2f} s, {event['blocked_s']:.3f} s of them in training's way; in {event['path']}"
    )


def straggler_line(event: Event) -> str:
    """Describe in words which groups are slow from a step on."""
    if not event["slow"]:
        return f"step {event['step']}: all groups are about as fast again"
    slow = ", ".join(f"group {group} takes {factor:.1f} times as long" for group, factor in event["slow"].items())
    return f"step {event['step']}: {slow} as the others; it gets fewer microbatches"
