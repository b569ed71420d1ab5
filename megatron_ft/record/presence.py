"""Which groups were members of the run at what time, according to the record. The timeline picture shows it.

A group is a member from the view that admits it until it dies. A lost group that comes back passes through these states
in this order; a start that fails goes back to ``dead`` from any of them. The states are derived from lines of the
record only.

- ``dead``: no process of the group takes part.
- ``starting``: its ranks were started again and load the script.
- ``receiving``: its ranks receive the model state.
- ``following``: its ranks have the state and repeat the members' steps until a view admits them.
- ``member``: a view includes the group.
- ``left``: the group has left in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from megatron_ft.record.run_record import RunRecord
from megatron_ft.record.run_state import LEAVES
from megatron_ft.types import GroupId

_Start = tuple[GroupId, int]
"""A group and its incarnation."""


class Stage(NamedTuple):
    """One state of a group from ``start`` to ``end`` (Unix seconds). ``incarnation`` counts the group's starts from
    0."""

    state: str
    start: float
    end: float
    incarnation: int


def died(record: RunRecord, fault: Mapping[str, Any]) -> float:
    """Return when the process of a ``fault`` line died (Unix seconds).

    That is when an injected signal was sent, otherwise ``detected_s`` before the line.
    """
    pid = fault["pid"]
    sent = [line["t"] for line in record.injects if pid is not None and line["pid"] == pid and line["t"] <= fault["t"]]
    return sent[-1] if sent else fault["t"] - (fault["detected_s"] or 0.0)


def stages(record: RunRecord) -> dict[GroupId, list[Stage]]:
    """Return for every group of a run its states in order of time; each begins where the one before ends.

    A group of the first view is a member from the first line. A group that was added later begins with its first start.
    """
    times = [line["t"] for line in record.lines]
    marks = _marks(record, min(times))
    return {group: _stages(marks[group], max(times)) for group in sorted(marks)}


def _stages(marks: Mapping[int, Mapping[str, float]], closed: float) -> list[Stage]:
    """Return the states of a group from ``marks``: for each incarnation and state, its begin.

    A state lasts until the next one begins, and the last one until ``closed``.
    """
    flat = [(state, t, number) for number in sorted(marks) for state, t in marks[number].items()]
    found, latest = [], float("inf")
    for state, t, number in reversed(flat):  # clocks of hosts may differ: no state begins after the one that follows it
        start, end = min(t, latest), min(latest, closed)
        if end > start:
            found.append(Stage(state, start, end, number))
        latest = start
    return found[::-1]


def _marks(record: RunRecord, opened: float) -> dict[GroupId, dict[int, dict[str, float]]]:
    """Return for each group, incarnation and state when it begins, in the order of the states."""
    seated = _seated(record, opened)
    lost = {
        start: ("left" if view["lost"][str(start[0])].startswith(LEAVES) else "dead", view["t"])
        for start, view in record.left_out.items()
    }
    restarts, returns = _first(record.events("restart")), _first(record.events("rejoined"))
    faults = _first(record.faults)
    found: dict[GroupId, dict[int, dict[str, float]]] = {}
    for start in sorted({*seated, *lost, *restarts, *returns, *faults}):
        marks = found.setdefault(start[0], {}).setdefault(start[1], {})
        if start in restarts:
            marks["starting"] = restarts[start]["t"]
        if start in returns and "receive_s" in returns[start]:  # records of older versions do not have it
            ready = returns[start]["t"] - returns[start]["seconds"]
            marks |= {"receiving": ready, "following": ready + returns[start]["receive_s"]}
        if start in seated:
            marks["member"] = seated[start]
        over = [lost[start]] if start in lost else []
        if start in faults and "left" not in dict(over):  # processes may outlive the membership, or the reverse
            over.append(("dead", died(record, faults[start])))
        if over:
            state, t = min(over, key=lambda mark: mark[1])
            marks[state] = t
    return found


def _first(lines: Iterable[Mapping[str, Any]]) -> dict[_Start, Mapping[str, Any]]:
    """Return the first line about each start of a group. Every host with ranks of the group may have written one."""
    found: dict[_Start, Mapping[str, Any]] = {}
    for line in lines:
        found.setdefault((line["group"], line.get("incarnation", 0)), line)
    return found


def _seated(record: RunRecord, opened: float) -> dict[_Start, float]:
    """Return when views admitted each start of a group."""
    seated: dict[_Start, float] = {}
    committed = {line["step"]: line["t"] for line in record.steps}
    for number, view in enumerate(record.views):
        # Another process writes the step line: that of the step before may come a moment after the view.
        admits = max(view["t"], committed.get(view["step"] - 1, view["t"])) if number else opened
        for group in view["live"]:
            seated.setdefault((group, view.get("incarnations", {}).get(str(group), 0)), admits)
    return seated
