"""Whether a run that was struck has kept every promise: a judgement of its record, and of what each strike has led to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ft.burnin.plan import Strike, Victim
from megatron_ft.errors import FTError
from megatron_ft.faults import checkers
from megatron_ft.faults.recorded import Record
from megatron_ft.faults.replay import replay
from megatron_ft.runtime import history

Lines = Sequence[Mapping[str, Any]]


@dataclass
class Case:
    """One strike and what became of it. ``refused``: why it was not done, ``excused`` if that is nobody's fault; ``mark``:
    how many lines the record had before; ``back_s``: until all groups were there again, None: they never were; ``why``:
    how the run has named the loss."""

    strike: Strike
    victim: Victim | None = None
    refused: str = ""
    excused: bool = False
    at: float = 0.0
    mark: int = 0
    back_s: float | None = None
    why: str = ""


def lost(lines: Lines) -> dict[int, str]:
    """Group -> why, of all views."""
    views = (line for line in lines if line["event"] == "view")
    return {int(group): why for view in views for group, why in view["lost"].items()}


def whole(lines: Lines, groups: int) -> bool:
    """Whether all groups are members now."""
    return next((len(line["live"]) == groups for line in reversed(lines) if line["event"] == "view"), False)


def judge(run_dir: Path, code: int, cases: Sequence[Case], reference: Path | None = None) -> list[str]:
    """The promises that were not kept, in words; empty when all were. ``code``: what the supervisor has ended with."""
    starts = [*sorted((run_dir / "earlier").glob("*")), run_dir]
    histories = [history.read(start) for start in starts]
    lines = checkers.joined(histories)
    found = [f"the job ended with exit code {code}, not 0"] if code else []
    size = next((line["microbatches"] for line in lines if line["event"] == "begin"), None)
    if size is None:
        return [*found, "the run has made no step"]
    found += checkers.check_history(lines, size, history.read(reference) if reference is not None else None)
    found += [message for case in cases for message in _of(case)]
    found += _innocent([line for start in histories for line in start], cases)
    return found + [message for start, its in zip(starts, histories, strict=True) if its for message in _replayed(start)]


def _of(case: Case) -> list[str]:
    what = f"fault {case.strike.number} ({case.strike.kind})"
    if case.refused:
        return [] if case.excused else [f"{what} was not done: {case.refused}"]
    if not case.why:
        groups = " ".join(map(str, case.victim.groups))
        return [f"{what} on {case.victim.node} was not noticed: none of its groups ({groups}) is named as lost"]
    if case.back_s is None:
        return [f"{what} on {case.victim.node}: not all groups were there again"]
    return []


def _innocent(lines: Lines, cases: Sequence[Case]) -> list[str]:
    """Nobody is lost to whom nothing happened."""
    struck = {group for case in cases if case.victim is not None and not case.refused for group in case.victim.groups}
    return [
        f"group {group} was lost, and nothing had been done to it: {why}"
        for group, why in lost(lines).items()
        if group not in struck
    ]


def _replayed(start: Path) -> list[str]:
    try:
        result = replay(Record.load(start))
    except FTError as error:
        return [f"replay: {error}"]
    found = [f"replay: {decision.what}: core decides otherwise" for decision in result.different]
    return found + ([f"replay stopped: {result.stopped}"] if result.stopped else [])
