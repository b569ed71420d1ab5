"""A run directory as one object (docs/run-record.md), the source of the tables and pictures."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from megatron_ft.errors import LaunchError
from megatron_ft.record import history, invariants, run_directory
from megatron_ft.record.run_state import LEAVES
from megatron_ft.types import CUT_OFF
from megatron_ft.utils import shared_file

_TAIL_BYTES = 65_536
"""Bytes; longer than some steps of a timeline."""


class Span(NamedTuple):
    """A group's activity from ``start`` to ``end`` (unix seconds)."""

    phase: str
    start: float
    end: float
    step: int


class Steps(Sequence[dict[str, Any]]):
    """The lines of all steps, about 50 bytes each, made on request and without measurements of single groups."""

    def __init__(self) -> None:
        self.numbers, self.tokens, self._microbatches, self._epochs, self._live = (array("q") for _ in range(5))
        self.losses, self.durations, self.times = (array("d") for _ in range(3))
        self.memberships: list[Sequence[int]] = []
        self._known: dict[tuple[int, ...], int] = {}
        self._last: Sequence[int] | None = None
        self._place = 0

    def append(self, line: Mapping[str, Any]) -> None:
        """Add the next line."""
        live = line["live"]
        if live is not self._last and live != self._last:
            self._place = self._known.setdefault(tuple(live), len(self.memberships))
            if self._place == len(self.memberships):
                self.memberships.append(live)
        self._last = live
        self._live.append(self._place)
        self.numbers.append(line["step"])
        self.tokens.append(line.get("tokens", 0))
        self._microbatches.append(line["microbatches"])
        self._epochs.append(line["epoch"])
        self.losses.append(line["loss"])
        self.durations.append(line["duration_s"])
        self.times.append(line["t"])

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: Any) -> Any:
        return {
            "t": self.times[index],
            "event": "step",
            "step": self.numbers[index],
            "loss": self.losses[index],
            "microbatches": self._microbatches[index],
            "epoch": self._epochs[index],
            "live": self.memberships[self._live[index]],
            "duration_s": self.durations[index],
        }

    def kinds(self) -> set[int]:
        """Return the different numbers of microbatches."""
        return set(self._microbatches)


class Lines(Sequence[dict[str, Any]]):
    """All lines of a record in order: steps in compact form, the ``others`` unchanged."""

    def __init__(self, lines: Iterable[dict[str, Any]]) -> None:
        self.steps = Steps()
        self.others: list[dict[str, Any]] = []
        self._order = array("q")  # n for a step, -1 - n for another line
        for line in lines:
            if line["event"] == "step":
                self._order.append(len(self.steps))
                self.steps.append(line)
            else:
                self._order.append(-1 - len(self.others))
                self.others.append(line)

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: Any) -> Any:
        place = self._order[index]
        return self.steps[place] if place >= 0 else self.others[-1 - place]


@dataclass(frozen=True)
class Failure:
    """One lost group: its fault, the recovery that followed and the recorded time of the step's commit.

    ``view`` is the one that left it out, None when the run ended before; ``recovery`` is None when no step was
    interrupted (the group died after the last one, or the run stopped). ``patches`` are the lines of the groups that
    took its microbatches over, and those of the groups that were lost with it.
    """

    fault: dict[str, Any]
    view: dict[str, Any] | None
    recovery: dict[str, Any] | None
    patches: tuple[dict[str, Any], ...] = ()

    @property
    def how(self) -> str:
        """The way of detection: a broken connection may have unblocked survivors before the agent's notice came."""
        noticed = self.view.get("noticed", "") if self.view is not None else ""
        return f"{noticed}, then {self.fault['how']}" if noticed else self.fault["how"]


@dataclass(frozen=True)
class RunRecord:
    """A run's record, finished or still growing."""

    run_dir: Path
    lines: Lines

    @classmethod
    def load(cls, run_dir: Path) -> RunRecord:
        """Read a run directory. Raises ``LaunchError`` when it has no record."""
        lines = Lines(history.lines(run_dir) if run_dir.is_dir() else ())
        if not lines:
            raise LaunchError(f"{run_dir} holds no run record ({history.FILE}); give the --run-dir of a launch")
        return cls(run_dir, lines)

    def events(self, event: str) -> list[dict[str, Any]]:
        """Return all lines of that kind, in order; for steps use :attr:`steps`."""
        return [line for line in self.lines.others if line["event"] == event]

    @property
    def steps(self) -> Steps:
        """The lines of the steps, possibly millions."""
        return self.lines.steps

    @cached_property
    def faults(self) -> list[dict[str, Any]]:
        """The faults; those whose agent was lost too are taken from the view that left the group out."""
        faults = self.events("fault")
        known = {(fault["group"], fault.get("incarnation", 0)) for fault in faults}
        for (group, incarnation), view in self.left_out.items():
            why = view["lost"][str(group)]
            if (group, incarnation) not in known and not why.startswith(LEAVES):
                seat = {"t": view["t"], "group": group, "incarnation": incarnation, "how": "the other groups"}
                nobody = dict.fromkeys(("position", "pid", "host", "signal", "code", "detected_s"))
                faults.append({**nobody, **seat, "detail": why.removeprefix(CUT_OFF).partition("; ")[0]})
        return sorted(faults, key=lambda fault: fault["t"])

    @cached_property
    def left_out(self) -> dict[tuple[int, int], dict[str, Any]]:
        """The view in which a start of a group (group, incarnation) lost its seat, if it had one and has not kept it."""
        found: dict[tuple[int, int], dict[str, Any]] = {}
        seats: dict[str, int] = {}
        for view in self.views:
            for group in view["lost"]:
                found.setdefault((int(group), seats.get(group, 0)), view)
            seats = view.get("incarnations", {})
        return found

    @property
    def views(self) -> list[dict[str, Any]]:
        return self.events("view")

    @property
    def recoveries(self) -> list[dict[str, Any]]:
        return self.events("recovery")

    @property
    def injects(self) -> list[dict[str, Any]]:
        return self.events("inject")

    @cached_property
    def config(self) -> dict[str, Any]:
        """The configuration in force; empty if the file is missing: only history.jsonl is required."""
        return run_directory.config(self.run_dir)

    @cached_property
    def groups(self) -> int:
        """The number of groups at the start. A record cut off at its head still has it in a view or a step."""
        for line in self.events("start"):
            return line["groups"]
        if "groups" in self.config:
            return self.config["groups"]
        there = (*(line["live"] for line in self.views), *self.steps.memberships)
        return 1 + max((group for live in there for group in live), default=-1)

    @cached_property
    def losses(self) -> dict[int, float]:
        return dict(zip(self.steps.numbers, self.steps.losses, strict=True))

    @cached_property
    def end(self) -> dict[str, Any] | None:
        return next(iter(self.events("end")), None)

    @cached_property
    def steps_lost(self) -> int:
        """The number of steps up to the last one that have no line; ``end`` tells the last step."""
        last = max([*self.losses, self.end["step"] if self.end else -1], default=-1)
        return sum(step not in self.losses for step in range(invariants.first_step(self.lines.others), last + 1))

    @cached_property
    def failures(self) -> list[Failure]:
        """The failures in order of detection. A recovery belongs to every group that its interruption lost."""
        found = []
        for fault in self.faults:
            view = self.left_out.get((fault["group"], fault.get("incarnation", 0)))
            after = [line for line in self.recoveries if view is not None and line["epoch"] >= view["epoch"]]
            recovery = min(after, key=lambda line: line["epoch"], default=None)
            found.append(Failure(fault, view, recovery, self._patches(recovery)))
        return found

    def _patches(self, recovery: dict[str, Any] | None) -> tuple[dict[str, Any], ...]:
        """Return the patches of a recovery: a group may have gone on an epoch earlier than the writer of its line."""
        if recovery is None:
            return ()
        same = [line for line in self.recoveries if line["step"] == recovery["step"]]
        before = max((line["epoch"] for line in same if line["epoch"] < recovery["epoch"]), default=-1)
        return tuple(
            line
            for line in self.events("patch")
            if line["step"] == recovery["step"] and before < line["epoch"] <= recovery["epoch"]
        )

    @cached_property
    def ways_back_s(self) -> list[float]:
        """The time from each loss to the view that admits the group again, in seconds."""
        found = []
        for fault in self.faults:
            seats = [view["t"] for view in self.views if fault["group"] in view["joined"] and view["t"] > fault["t"]]
            found += [min(seats) - fault["t"]] if seats else []
        return found

    @cached_property
    def timelines(self) -> dict[tuple[int, int], Path]:
        """The timeline file of each (group, position). Position 0 is there for every group, its file may not exist. The
        files of a long run exceed the memory: :meth:`spans` reads them."""
        directory = self.run_dir / "timeline"
        found = {(group, 0): directory / f"g{group}.p0.jsonl" for group in range(self.groups)}
        for path in directory.glob("g*.p*.jsonl"):
            group, position = (int(part[1:]) for part in path.stem.split("."))
            found[group, position] = path
        return dict(sorted(found.items()))

    def spans(self, rank: tuple[int, int]) -> Iterator[Span]:
        """Yield the spans of a rank of :attr:`timelines` in order, one line of its file at a time."""
        with suppress(FileNotFoundError), shared_file.open_record(self.timelines[rank]) as file:
            for line in file:
                yield from _spans(line.decode(errors="replace"))

    def extent(self, rank: tuple[int, int]) -> tuple[float, float] | None:
        """Return begin of a rank's first and end of its last span, from both ends of its file; None without spans."""
        first = next(self.spans(rank), None)
        if first is None:
            return None
        with shared_file.open_record(self.timelines[rank]) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            tail = file.read().decode(errors="replace").splitlines()
        ends = [span.end for line in tail for span in _spans(line)]
        return first.start, max(ends, default=first.end)


def _spans(line: str) -> list[Span]:
    try:
        raw = json.loads(line)
    except ValueError:
        return []  # the group was killed during a write
    return [Span(phase, start, end, raw["step"]) for phase, start, end in raw["spans"]]
