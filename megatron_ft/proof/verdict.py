"""Checks from its record that a run has kept every promise in spite of the faults that were injected into it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_ft.errors import FTError
from megatron_ft.proof.replay import replay
from megatron_ft.record import history, invariants, run_directory, run_state
from megatron_ft.record.protocol_trace import Record

Lines = Sequence[Mapping[str, Any]]
_ENDS_A_RANK = ("exception", "oom")
"""Kinds of faults that end a rank without a signal."""


def judge(run_dir: Path, reference: Path | None = None) -> list[str]:
    """Return a message for each broken promise, over all starts of the run. ``reference``: a run without failures."""
    starts = run_directory.starts_of(run_dir)
    histories = [history.read(start) for start in starts]
    everything, lines = [line for start in histories for line in start], invariants.joined(histories)
    code = run_state.of(everything).exit_code
    found = [] if code == 0 else ["the run has not ended" if code is None else f"the run ended with exit code {code}"]
    size = next((line["microbatches"] for line in lines if line["event"] == "begin"), None)
    if size is None:
        return [*found, "the run has committed no step"]
    found += invariants.check_history(lines, size, history.read(reference) if reference is not None else None)
    found += unnoticed(everything) + _innocent(everything)
    return found + [
        message for start, its in zip(starts, histories, strict=True) if its for message in _replayed(start)
    ]


def lost(lines: Lines) -> dict[int, str]:
    """Return group -> reason of the loss, from all views."""
    views = (line for line in lines if line["event"] == "view")
    return {int(group): why for view in views for group, why in view["lost"].items()}


def absent(lines: Lines) -> list[int]:
    """Return the groups of the run's start that are no members in the last view, except those that left in order."""
    groups = next((line["groups"] for line in lines if line["event"] == "start" and "groups" in line), 0)
    live: list[int] = next((line["live"] for line in reversed(lines) if line["event"] == "view"), [])
    left = {line["group"] for line in lines if line["event"] == "leave"}
    return sorted(set(range(groups)) - set(live) - left)


def faults(lines: Lines) -> int:
    """Return the number of injected faults; one that strikes several ranks is one."""
    return len({line.get("fault", number) for number, line in enumerate(lines) if line["event"] == "inject"})


def _groups(line: Mapping[str, Any]) -> set[int]:
    """Return the groups that an injected fault strikes."""
    return set(line.get("groups", ())) | ({line["group"]} - {None})


def unnoticed(lines: Lines) -> list[str]:
    """Report members that a fault has ended and that no later view names as lost."""
    found: list[str] = []
    live: set[int] = set()
    for number, line in enumerate(lines):
        if line["event"] == "view":
            live = set(line["live"])
        elif line["event"] == "inject" and (line.get("signal") == "SIGKILL" or line.get("kind") in _ENDS_A_RANK):
            missing = (_groups(line) & live) - lost(lines[number:]).keys()
            what = f"the fault {line.get('kind') or line['signal']} ({line['point']})"
            found += [f"{what} was not noticed: no view names group {group} as lost" for group in sorted(missing)]
    return found


def _innocent(lines: Lines) -> list[str]:
    """Report lost groups that no fault has struck and that did not leave in order."""
    struck = {group for line in lines if line["event"] == "inject" for group in _groups(line)}
    struck |= {line["group"] for line in lines if line["event"] == "leave"}
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
