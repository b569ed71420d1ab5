"""A run directory as one object (docs/run-record.md): what the tables and pictures are made from."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from megatron_ft.errors import LaunchError
from megatron_ft.faults import checkers
from megatron_ft.runtime import history


class Span(NamedTuple):
    """What a group did from ``start`` to ``end`` (unix seconds)."""

    phase: str
    start: float
    end: float
    step: int


_LEAVES = "leaves after step"
"""What views say of a group that has left in order (``core.detector``)."""


@dataclass(frozen=True)
class Failure:
    """One lost group: its fault, the recovery that followed and when the record says the step was committed.

    ``view`` is the one that left it out, None when the run ended before; ``recovery`` is None when no step was
    interrupted (the group died after the last one, or the run stopped). ``patches`` are the lines of the groups that took
    its microbatches over, and those of the groups that were lost with it.
    """

    fault: dict[str, Any]
    view: dict[str, Any] | None
    recovery: dict[str, Any] | None
    patches: tuple[dict[str, Any], ...] = ()

    @property
    def how(self) -> str:
        """What noticed it: survivors may have been unblocked by a reset connection before the agent's notice came."""
        if self.view is not None and self.view["reason"] not in self.view["lost"].values():
            return f"reset connection, then {self.fault['how']}"
        return self.fault["how"]


@dataclass(frozen=True)
class RunRecord:
    """A run's record, finished or still growing."""

    run_dir: Path
    lines: list[dict[str, Any]]

    @classmethod
    def load(cls, run_dir: Path) -> RunRecord:
        """Raises ``LaunchError`` when there is no record in the directory."""
        lines = history.read(run_dir) if run_dir.is_dir() else []
        if not lines:
            raise LaunchError(f"{run_dir} holds no run record ({history.FILE}); give the --run-dir of a launch")
        return cls(run_dir, lines)

    def events(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["event"] == event]

    @property
    def steps(self) -> list[dict[str, Any]]:
        return self.events("step")

    @cached_property
    def faults(self) -> list[dict[str, Any]]:
        """Also those that no agent has written down, because it was lost, too: the view that left the group out says so."""
        noted = self.events("fault")
        known = {(fault["group"], fault.get("incarnation", 0)) for fault in noted}
        return sorted([*noted, *self._unnoted(known)], key=lambda fault: fault["t"])

    def _unnoted(self, known: Collection[tuple[int, int]]) -> Iterator[dict[str, Any]]:
        seats: dict[str, int] = {}
        for view in self.views:
            for group, why in view["lost"].items():
                seat = {"group": int(group), "incarnation": seats.get(group, 0)}
                if tuple(seat.values()) not in known and not why.startswith(_LEAVES):
                    first = why.removeprefix("cut off: ").partition("; ")[0]
                    nobody = dict.fromkeys(("position", "pid", "host", "signal", "code", "detected_s"))
                    yield {"t": view["t"], **nobody, **seat, "detail": first, "how": "the other groups"}
            seats = view.get("incarnations", {})

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
        """The configuration in force; empty when the file is missing."""
        return _json_or(self.run_dir / "config.json", {})

    @cached_property
    def ranks(self) -> list[dict[str, Any]]:
        """The ranks alive when the file was last replaced; empty when it is missing."""
        return _json_or(self.run_dir / "ranks.json", [])

    @cached_property
    def groups(self) -> int:
        """How many groups the run started with. A record cut off at its head still has it in a view or a step."""
        for line in self.events("start"):
            return line["groups"]
        if "groups" in self.config:
            return self.config["groups"]
        return 1 + max((group for line in self.views + self.steps for group in line["live"]), default=-1)

    @cached_property
    def losses(self) -> dict[int, float]:
        return checkers.losses(self.lines)

    @cached_property
    def end(self) -> dict[str, Any] | None:
        ends = self.events("end")
        return ends[0] if ends else None

    @cached_property
    def steps_lost(self) -> int:
        """Step numbers up to the last one that have no line; ``end`` tells which the last one is."""
        last = max([*self.losses, self.end["step"] if self.end else -1], default=-1)
        return sum(step not in self.losses for step in range(checkers.first_step(self.lines), last + 1))

    @cached_property
    def failures(self) -> list[Failure]:
        """In the order in which they were noticed. A recovery belongs to every group its interruption lost."""
        found = []
        for fault in self.faults:
            view = self._left_out_by(fault["group"], fault.get("incarnation", 0))
            after = [line for line in self.recoveries if view is not None and line["epoch"] >= view["epoch"]]
            recovery = min(after, key=lambda line: line["epoch"], default=None)
            found.append(Failure(fault, view, recovery, self._patches(recovery)))
        return found

    def _left_out_by(self, group: int, incarnation: int) -> dict[str, Any] | None:
        """The view in which that start of the group lost its seat; None when it never had one, or kept it."""
        seated = 0
        for view in self.views:
            if str(group) in view["lost"] and seated == incarnation:
                return view
            seated = view.get("incarnations", {}).get(str(group), 0)
        return None

    def _patches(self, recovery: dict[str, Any] | None) -> tuple[dict[str, Any], ...]:
        """What belongs to a recovery: a group may have gone on an epoch earlier than the writer of its line."""
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
    def timeline(self) -> dict[tuple[int, int], list[Span]]:
        """(group, position) -> what that rank did, in order. Position 0 is there for every group."""
        spans: dict[tuple[int, int], list[Span]] = {(group, 0): [] for group in range(self.groups)}
        for path in (self.run_dir / "timeline").glob("g*.p*.jsonl"):
            group, position = (int(part[1:]) for part in path.stem.split("."))
            own = spans.setdefault((group, position), [])
            for line in path.read_text(encoding="utf-8").splitlines():
                own += _spans(line)
        return dict(sorted(spans.items()))


def _json_or(path: Path, otherwise: Any) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return otherwise  # the record is read for what it has; history.jsonl alone is required


def _spans(line: str) -> list[Span]:
    try:
        raw = json.loads(line)
    except ValueError:
        return []  # the group was killed while it wrote
    return [Span(phase, start, end, raw["step"]) for phase, start, end in raw["spans"]]
