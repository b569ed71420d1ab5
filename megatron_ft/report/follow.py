"""Follow a history while it grows, and show it: a progress bar on a terminal, plain lines elsewhere."""

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
from megatron_ft.runtime import history

_POLL_S = 0.1

Event = Mapping[str, Any]


def follow(run_dir: Path, stop: Callable[[], bool]) -> Iterator[dict[str, Any]]:
    """Yield the lines of a run's history as they are written, until ``stop()`` and nothing new is there."""
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
    """The run is shown meanwhile."""
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
    """Step, loss, live groups and failures of a run, fed with its events."""

    def __init__(self, groups: int, console: Console | None = None) -> None:
        self._console = console or Console()
        self._live, self._failures, self._steps, self._next_line = groups, 0, None, 0
        self._groups, self._saved = groups, None
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
        """Take in one event of the history."""
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
        elif kind == "checkpoint":
            self._checkpoint(event)
        elif kind == "checkpoint_failed":
            self._say(f"step {event['step']} is not saved: {event['reason']}")
        elif kind == "step":
            self._step(event)
        elif kind == "end":
            self._say(f"all {event['step'] + 1} steps done, loss {event['loss']:.4f}")
        if self._bar is not None:
            done = event["step"] + 1 if kind == "step" else None
            loss = {"loss": f"{event['loss']:.4f}"} if kind == "step" else {}
            live = f"{self._live}/{self._groups}"
            self._bar.update(
                self._task, completed=done, total=self._steps, live=live, failures=self._failures, **loss
            )

    def _step(self, event: Event) -> None:
        """Without a terminal: a line for about every tenth of the steps."""
        if self._bar is not None or event["step"] < self._next_line:
            return
        total = self._steps or 0
        self._next_line = event["step"] + max(1, total // 10)
        of = f"/{total}" if total else ""
        self._say(f"step {event['step'] + 1}{of}  loss {event['loss']:.4f}  live {self._live}/{self._groups}")

    def _checkpoint(self, event: Event) -> None:
        """The first, and from then on those that come with a line of a step anyway."""
        if self._saved is None or self._bar is not None or event["step"] >= self._next_line:
            self._say(checkpoint_line(event))
        self._saved = event["step"]

    @staticmethod
    def _fault(event: Event) -> str:
        who = f"rank {event['position']} on {event['host']} (pid {event['pid']})"
        what = happened(event)
        more = f" ({event['detail']})" if event["detail"] not in ("", what) else ""
        return f"group {event['group']} lost: {who} {what}{more}"

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False)


def recovery_line(event: Event, view: Event) -> str:
    """What a recovery came to, in words. ``view``: the newest."""
    if view["epoch"] == event["epoch"] and view["joined"] and not event["patched"]:
        back = " ".join(map(str, view["joined"]))
        return f"group {back} is back in step {event['step']}; the others waited {event['stall_s']:.2f} s"
    by = " ".join(sorted(event["patched_by"], key=int))
    patched = f"{event['patched']} microbatches taken over by groups {by}" if event["patched"] else "nothing to patch"
    return f"step {event['step']} goes on: {patched}; stalled {event['stall_s']:.2f} s"


def restart_line(event: Event) -> str:
    """How a lost group comes back, in words."""
    pids = " ".join(map(str, event["pids"])) or "none could be started"
    after = f", {event['after_s']:.1f} s after it was lost" if event["after_s"] > 0.1 else ""
    return (
        f"group {event['group']} is started again on {event['host']} (incarnation {event['incarnation']}, pid {pids}){after}"
    )


def host_line(event: Event) -> str:
    """What a host that has come later does, in words."""
    groups = " ".join(map(str, event["groups"]))
    if event["what"] == "spare":
        return f"host {event['host']} is there as a spare"
    return f"host {event['host']} {'takes over' if event['what'] == 'took over' else 'adds'} group {groups}"


def checkpoint_line(event: Event) -> str:
    """What was saved, in words."""
    megabytes = event["bytes"] / 2**20
    return (
        f"step {event['step']} is saved: {megabytes:.1f} MiB by groups {' '.join(map(str, event['writers']))} in "
        f"{event['seconds']:.2f} s, {event['blocked_s']:.3f} s of them in training's way"
    )


def straggler_line(event: Event) -> str:
    """Who is slow from a step on, in words."""
    if not event["slow"]:
        return f"step {event['step']}: all groups are about as fast again"
    slow = ", ".join(f"group {group} takes {factor:.1f} times as long" for group, factor in event["slow"].items())
    return f"step {event['step']}: {slow} as the others; it gets fewer microbatches"
