"""Checks from its record that a run has kept every promise in spite of the injected faults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ft.burnin.strikes import Strike, Victim
from megatron_ft.errors import FTError
from megatron_ft.runlog import history, invariants, run_directory
from megatron_ft.runlog.protocol_trace import Record
from megatron_ft.runlog.replay import replay
from megatron_ft.types import given

Lines = Sequence[Mapping[str, Any]]


@dataclass
class Case:
    """One fault and its effect.

    Attributes:
        strike: the fault.
        victim: its target; None before it is chosen.
        refused: why it was not injected; "" if it was.
        at: time of the injection (Unix seconds).
        mark: number of lines in the record before.
        back_s: time until all groups were members again; None: they were not.
        why: reason that the run recorded for the loss.
    """

    strike: Strike
    victim: Victim | None = None
    refused: str = ""

    at: float = 0.0
    mark: int = 0
    back_s: float | None = None
    why: str = ""


def lost(lines: Lines) -> dict[int, str]:
    """Returns group -> reason of the loss, from all views."""
    views = (line for line in lines if line["event"] == "view")
    return {int(group): why for view in views for group, why in view["lost"].items()}


def whole(lines: Lines, groups: int) -> bool:
    """Returns True when all groups are members in the last view."""
    return next((len(line["live"]) == groups for line in reversed(lines) if line["event"] == "view"), False)


def judge(run_dir: Path, code: int, cases: Sequence[Case], reference: Path | None = None) -> list[str]:
    """Returns a message for each broken promise. ``code``: exit code of the supervisor."""
    starts = run_directory.starts_of(run_dir)
    histories = [history.read(start) for start in starts]
    lines = invariants.joined(histories)
    found = [f"the job ended with exit code {code}, not 0"] if code else []
    size = next((line["microbatches"] for line in lines if line["event"] == "begin"), None)
    if size is None:
        return [*found, "the run has committed no step"]
    found += invariants.check_history(lines, size, history.read(reference) if reference is not None else None)
    found += [message for case in cases for message in _of(case)]
    found += _innocent([line for start in histories for line in start], cases)
    return found + [
        message for start, its in zip(starts, histories, strict=True) if its for message in _replayed(start)
    ]


def _of(case: Case) -> list[str]:
    what = f"fault {case.strike.number} ({case.strike.kind})"
    if case.refused:
        return [f"{what} was not injected: {case.refused}"]
    victim = given(case.victim)
    if not case.why:
        groups = " ".join(map(str, victim.groups))
        return [f"{what} on {victim.node} was not noticed: none of its groups ({groups}) is named as lost"]
    if case.back_s is None:
        return [f"{what} on {victim.node}: not all groups were members again"]
    return []


def _innocent(lines: Lines, cases: Sequence[Case]) -> list[str]:
    """Reports lost groups that were no target of a fault."""
    struck = {group for case in cases if case.victim is not None and not case.refused for group in case.victim.groups}
    return [
        f"group {group} was lost without an injected fault: {why}"
        for group, why in lost(lines).items()
        if group not in struck
    ]


def _replayed(start: Path) -> list[str]:
    try:
        result = replay(Record.load(start))
    except FTError as error:
        return [f"replay: {error}"]
    found = [f"replay: {decision.what}: core decides differently" for decision in result.different]
    return found + ([f"replay stopped: {result.stopped}"] if result.stopped else [])
