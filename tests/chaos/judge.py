"""What must hold of every chaos run, whatever was injected; each check returns its violations in words."""

from __future__ import annotations

import time
from typing import Any

from megatron_ft.errors import FTError
from megatron_ft.faults import checkers
from megatron_ft.faults.recorded import Record
from megatron_ft.faults.replay import replay
from tests.chaos.plan import STOPPED_LIMIT_S, is_long, takes
from tests.chaos.play import Played

_SLACK_S = 0.1
"""The agent looks so often; a stop that comes so close to the limit may be either."""

Lines = list[dict[str, Any]]


def judge(played: Played, reference: Lines) -> list[str]:
    """The violations of one run; empty when every promise was kept."""
    lines = played.history
    found = _end(played)
    found += checkers.check_history(lines, played.plan.job.groups * played.plan.job.per_group, reference)
    found += _replayed(played)
    if not any(line["event"] == "end" for line in lines):
        return found
    return found + _survivors(lines) + _innocent(played, lines) + _fenced(played, lines)


def lost(lines: Lines) -> dict[int, str]:
    """Group -> why, of all views."""
    return {int(group): why for line in lines if line["event"] == "view" for group, why in line["lost"].items()}


def woken_before_the_end(played: Played, lines: Lines) -> list[int]:
    """The frozen groups that went on, left out by then, while the others were still training."""
    end = next((line["t"] for line in lines if line["event"] == "end"), time.time())
    views = {int(group): line["t"] for line in lines if line["event"] == "view" for group in line["lost"]}
    found = []
    for case in played.cases:
        begun = next((line["t"] for line in lines if line.get("fault") == case.key), None)
        if begun is not None and is_long(case.fault) and case.number in played.stops:
            woken = begun + played.stops[case.number]
            found += [group for group in takes(case.fault) if views.get(group, woken) < woken < end]
    return found


def _end(played: Played) -> list[str]:
    found = [played.trouble] if played.trouble else []
    if played.code is None:
        found.append(f"it hung and was ended after {played.seconds:.0f} s")
    elif played.code:
        found.append(f"the launcher ended with exit code {played.code}")
    return found + [f"process {pid} of the run is left" for pid in played.left]


def _replayed(played: Played) -> list[str]:
    try:
        result = replay(Record.load(played.run_dir))
    except FTError as error:
        return [f"replay: {error}"]
    found = [
        f"replay: {decision.what}: {difference.name}: recorded {difference.recorded}, core decides {difference.decided}"
        for decision in result.different
        for difference in decision.differences
    ]
    return found + ([f"replay stopped: {result.stopped}"] if result.stopped else [])


def _survivors(lines: Lines) -> list[str]:
    """Whom the last view has is there at the end, and nobody else."""
    live = [line["live"] for line in lines if line["event"] == "view"][-1]
    there = sorted(line["group"] for line in lines if line["event"] == "survivor")
    return [] if there == sorted(live) else [f"the survivors are {there}, the last view has {sorted(live)}"]


def _innocent(played: Played, lines: Lines) -> list[str]:
    """Nobody is lost to whom nothing happened that would take him."""
    may_be: set[int] = set()
    for case in played.cases:
        if case.state == "injected":
            may_be |= takes(case.fault)
            if case.fault.kind == "stop" and played.stops.get(case.number, 0.0) > STOPPED_LIMIT_S - _SLACK_S:
                may_be.add(case.fault.group)  # this machine was too busy to end it in time
    return [f"group {group} is lost, it should not be: {why}" for group, why in lost(lines).items() if group not in may_be]


def _fenced(played: Played, lines: Lines) -> list[str]:
    """Who was given up while frozen has found itself outside."""
    found = []
    for group, why in lost(lines).items():
        if "is stopped" not in why or _dies_as_well(played, group):
            continue
        log = (played.run_dir / "logs" / f"g{group}.p0.log").read_text(errors="replace")
        if "outside view" not in log and "has left" not in log:
            found.append(f"group {group} was frozen and left out; awake, it did not say so: {log[-300:]!r}")
    return found


def _dies_as_well(played: Played, group: int) -> bool:
    """Whether it is struck by more than a stop: a rank that waits for its strike at a point is frozen as well."""
    return any(group in takes(case.fault) and not is_long(case.fault) for case in played.cases)
