"""The one reducer of a run's record: :class:`RunState` folds history lines, one at a time, into the state of the run.

Agents, ``inject``, ``status``, the progress display, trackers and ``report`` query it, and a new reader of a growing record
(metrics, a page) does, too. Its memory is bounded however long the record is; ``runlog/run_record.py`` keeps every line.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_ft.record import history
from megatron_ft.types import CUT_OFF

LEAVES = "leaves after step"
"""The reason in views of a group that has left in order (``core.protocol.signals``)."""
_STARTS, _VIEWS, _INJECTED = 8, 16, 4096
"""Entries that are kept: starts of a group, views in which no step is committed yet, and injected faults."""
_HARMLESS = ("slow", "nan", "bitflip")
"""Injected faults that end no process: a later death has another cause."""
_RECENT = 50
"""Steps whose median is the present time of a step."""


class RunState:
    """The state of a run by its record, whose lines :meth:`take` takes in their order.

    Large because each attribute is what some lines tell, and lines change several of them at once.

    Args:
        groups: number of groups at the start. Default 0: groups are known from the first view on.

    Attributes:
        now: time of the newest line in Unix seconds, 0 before the first; ``started``: of the first ``start`` line, or None.
        empty: True before the first line.
        begun: training has begun.
        end: the ``end`` line, None without one.
        closing: the ``end`` or ``stop`` line of the present start, None while it goes on.
        not_saved: reasons of ``not_saved`` lines after it.
        exit_code: of the present start, None while it goes on.
        last_step: the highest committed step, None before the first.
        done: number of steps that are done; ``total``: of the whole run, None while it is not known.
        loss: of the last step, None before the first.
        saved: the newest step from which a later start can go on, None without one; ``saved_in``: its path, or "".
        view: the newest ``view`` line, None before the first.
        ever: all groups that ever were members; ``added``: those that the newest view admits for the first time.
        failures: number of ranks that have failed, and of groups whose host was cut off.
        joins, returns, leaves: number of groups that views have admitted for the first time, admitted again, and left out
            because they left in order.
    """

    def __init__(self, groups: int = 0) -> None:
        self.now, self.started = 0.0, None
        self.empty, self.begun = True, False
        self.end: Mapping[str, Any] | None = None
        self.closing: Mapping[str, Any] | None = None
        self.exit_code: int | None = None
        self.not_saved: list[str] = []
        self.last_step: int | None = None
        self.done, self.loss = 0, None
        self.total: int | None = None
        self.saved: int | None = None
        self.saved_in = ""
        self.view: Mapping[str, Any] | None = None
        self.ever = set(range(groups))
        self.added: set[int] = set()
        self.failures = self.joins = self.returns = self.leaves = 0
        self._groups = range(groups)
        self._injected: dict[int, float] = {}
        self._seats: dict[int, tuple[Sequence[int], Mapping[str, int]]] = {}
        self._committed: dict[int, set[int]] = {}
        self._durations: deque[float] = deque(maxlen=_RECENT)
        self._tokens: deque[tuple[int, float]] = deque(maxlen=_RECENT)
        self._began = self._trained_s = self._stalled_s = 0.0

    def take(self, line: Mapping[str, Any]) -> None:
        """Take in the next line of the record. Fields that records of older versions do not have may be missing."""
        self.empty, self.now = False, max(self.now, line.get("t", 0.0))
        self.exit_code = outcome(line, self.exit_code)
        match line["event"]:
            case "step":
                self._take_step(line)
            case "view":
                self._take_view(line)
            case "begin":
                self.begun, self.total = True, line.get("steps")
                self._began = self._began or self.now
            case "start":
                self.not_saved = []
                self.closing, self.started = None, self.started or line.get("t")
            case "end":
                self.end, self.closing, self.not_saved = line, line, []
            case "stop":
                self.closing, self.not_saved = line, []
            case "not_saved":
                self.not_saved.append(line["reason"])
            case "resume":
                self.done = self.saved = line["step"]
                self.saved_in, self.closing = line.get("checkpoint", ""), None
            case "checkpoint":
                self.saved, self.saved_in = line["step"], line.get("path", "")
            case "fault":
                self.failures += 1
            case "recovery":
                self._stalled_s += line.get("stall_s", 0.0)
            case "inject" if line.get("pid") is not None and line.get("kind") not in _HARMLESS:
                self._injected.pop(line["pid"], None)
                self._injected[line["pid"]] = line["t"]
                if len(self._injected) > _INJECTED:
                    del self._injected[next(iter(self._injected))]

    def _take_step(self, line: Mapping[str, Any]) -> None:
        self.done, self.loss = line["step"] + 1, line.get("loss")
        self.last_step = line["step"] if self.last_step is None else max(self.last_step, line["step"])
        seconds = line.get("duration_s", 0.0)
        self._began = self._began or self.now - seconds
        self._durations.append(seconds)
        self._trained_s += seconds
        if "tokens" in line:
            self._tokens.append((line["tokens"], seconds))
        live, starts = self._seats.pop(line.get("epoch", -1), ((), {}))  # the first step of its epoch is enough
        for group in live:
            own = self._committed.setdefault(group, set())
            own.add(starts.get(str(group), 0))
            if len(own) > _STARTS:
                own.discard(min(own))

    def _take_view(self, line: Mapping[str, Any]) -> None:
        new = set(line["live"])
        joined = set(line.get("joined", ()))
        self.joins, self.returns = self.joins + len(joined - self.ever), self.returns + len(joined & self.ever)
        self.leaves += sum(why.startswith(LEAVES) for why in line.get("lost", {}).values())
        self.view, self.added, self.ever = line, new - self.ever, self.ever | new
        self.failures += len(cut_off(line))
        self._seats = {epoch: seats for epoch, seats in self._seats.items() if epoch > line["epoch"] - _VIEWS}
        self._seats[line["epoch"]] = line["live"], line.get("incarnations", {})

    @property
    def over(self) -> bool:
        """True if the present start has an ``end`` or ``stop`` line."""
        return self.closing is not None

    @property
    def live(self) -> Sequence[int]:
        """The members by the newest view; before the first, the groups at the start."""
        return self._groups if self.view is None else self.view["live"]

    @property
    def step_s(self) -> float | None:
        """Median duration of the last steps, in seconds; None before the first."""
        return statistics.median(self._durations) if self._durations else None

    @property
    def tokens_s(self) -> float | None:
        """Tokens per second in the last steps; None if the record has no tokens."""
        tokens, seconds = (sum(each) for each in zip(*self._tokens, strict=True)) if self._tokens else (0, 0.0)
        return tokens / seconds if tokens and seconds else None

    @property
    def eta_s(self) -> float | None:
        """Seconds until the last step at the present speed; None while it is not known."""
        return None if self.total is None or self.step_s is None else (self.total - self.done) * self.step_s

    @property
    def goodput(self) -> float | None:
        """Share of the time since the first step began in which steps were made without waiting for a recovery; None
        before a step is done. Evaluation and saving between steps do not count as training."""
        elapsed = self.now - self._began
        return max(0.0, self._trained_s - self._stalled_s) / elapsed if self._durations and elapsed > 0 else None

    def injected(self, pid: int) -> float | None:
        """Return the time of the last injected fault that can end process ``pid``; None if there was none."""
        return self._injected.get(pid)

    def has_committed(self, group: int, incarnation: int) -> bool:
        """Return True if that start of the group has taken part in a step; for old starts, if any later one has."""
        own = self._committed.get(group, ())
        return incarnation in own or len(own) == _STARTS and incarnation < min(own)


def outcome(line: Mapping[str, Any], before: int | None) -> int | None:
    """Return a run's exit code after that line of its record, None while it goes on; ``before``: the code before it."""
    stated = line.get("exit_code")
    return {"start": None, "end": 0, "stop": stated, "not_saved": stated}.get(line["event"], before)


def early_end(steps: int, told: Callable[[], bool], goes_on: bool) -> dict[str, Any]:
    """Return what the ``end`` line says of a run that has ended before the last of its ``steps``. ``told``: whether it was
    told to stop; ``goes_on``: whether the same command goes on from there."""
    reason = "it was told to stop" if told() else "its script has ended it"
    return {"of": steps, "reason": f"{reason}, and the same command goes on" if goes_on else reason}


def steps_made(end: Mapping[str, Any]) -> str:
    """Return in words which steps a run has made. ``end``: its ``end`` line."""
    made = end["step"] + 1
    return f"stopped after step {made} of {end['of']}: {end['reason']}" if "of" in end else f"all {made} steps are done"


def cut_off(view: Mapping[str, Any]) -> dict[str, str]:
    """Return the groups that a ``view`` line leaves out because their host is cut off, with the reasons: no agent is left
    to write a ``fault`` line of them."""
    return {group: why for group, why in view.get("lost", {}).items() if why.startswith(CUT_OFF)}


def of(lines: Iterable[Mapping[str, Any]], groups: int = 0) -> RunState:
    """Return the state of a run of ``groups`` groups after these lines."""
    found = RunState(groups)
    for line in lines:
        found.take(line)
    return found


def read(run_dir: Path) -> RunState:
    """Return the state of a run whose record does not grow or is read once."""
    return of(history.lines(run_dir))


class Watched:
    """The state of a run whose record grows. Each :meth:`poll` reads the lines added since the last one."""

    def __init__(self, run_dir: Path) -> None:
        self._tail, self.known = history.Tail(run_dir), RunState()

    def poll(self) -> RunState:
        """Take in the added lines. Raises ``OSError``; ``known`` then has the lines read before the error."""
        for line in self._tail.each():
            self.take(line)
        return self.known

    def take(self, line: dict[str, Any]) -> None:
        """Take in one line."""
        self.known.take(line)
