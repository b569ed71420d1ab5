"""Check a history in which the control store fails over: there may have been several stores with views written to each.

A ``view`` line names the view in which its writer stood (``after``), so the views form a tree. All views that were
followed by commits must be on one path of it; the other invariants are checked on that path
(``invariants.check_commits``).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_ft.record import invariants
from megatron_ft.record.invariants import Lines
from megatron_ft.types import View

_LEFT = ("left out by claim", "the store was rebuilt with another view")
"""Reasons for which a group with a seat may stop: others may go on without it, but it must not go on without them."""


def digest(view: View) -> str:
    """Return a text that tells views of one epoch apart."""
    return hashlib.sha256(json.dumps(view.to_json(), sort_keys=True).encode()).hexdigest()[:12]


def check(lines: Lines) -> list[str]:
    """Return the violations of a history with ``claim`` lines, in words; empty without any."""
    found = [*_log(lines), *_sealed(lines)]
    views = {line["view"]: line for line in lines if line["event"] == "view"}
    used = [line["view"] for line in lines if line["event"] == "commit"]
    youngest = max((views[name] for name in used), key=lambda line: line["epoch"], default=None)
    path = set(_path(views, youngest))
    for name in sorted(set(used) - path):
        assert youngest is not None
        found.append(
            f"view {views[name]['epoch']} ({name}) is followed by commits, and view {youngest['epoch']} "
            f"({youngest['view']}), which does not come after it, is too"
        )
    return found + invariants.check_commits(_on(lines, path)) + list(_stops(lines))


def _path(views: Mapping[str, Mapping[str, Any]], last: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield the views from ``last`` back to the first one."""
    while last is not None:
        yield last["view"]
        last = views.get(last["after"])
    yield from (name for name, line in views.items() if line["after"] is None)


def _on(lines: Lines, path: set[str]) -> list[Mapping[str, Any]]:
    """Return the history as it would have been with one store. Stops are checked separately."""
    kept = []
    for line in lines:
        name = line.get("branch", line.get("view"))
        if name is None or name in path or not isinstance(name, str):
            kept.append(line if line["event"] != "stop" else {**line, "synced": False})
    return kept


def _log(lines: Lines) -> Iterator[str]:
    """Claims have no holes, and none is made for fenced seats only."""
    fenced: set[tuple[int, int]] = set()
    claims = [line for line in lines if line["event"] == "claim"]
    for number, claim in enumerate(claims):
        if claim["number"] != number:
            yield f"claim {claim['number']} is made when {number} are there"
        makers = set(map(tuple, claim["makers"]))
        if makers and makers <= fenced:
            yield f"claim {number} is made by {sorted(makers)}, which {'is' if len(makers) == 1 else 'are'} fenced"
        fenced |= set(map(tuple, claim["fenced"]))


def _sealed(lines: Lines) -> Iterator[str]:
    """A view by which groups can go on has no live seat that a claim had fenced when its writer decided on it, and its
    writer has read a fence for each seat that it leaves out and that may live."""
    fences: list[set[tuple[int, int]]] = []
    gone: set[tuple[int, int]] = set()
    least = lines[0]["min_groups"]
    views: dict[str, View] = {}
    for line in lines:
        match line["event"]:
            case "claim":
                fences.append(set(map(tuple, line["fenced"])))
            case "dead" | "stop":
                gone.add((line["group"], line["incarnation"]))
            case "view":
                view = views[line["view"]] = View.from_json(line)
                if not view.lost or len(view.live) < max(least, 1) or invariants.wiped_out(lines[0], view):
                    continue
                out = set().union(*fences[: line["log"]])
                before = views[line["after"]].incarnations
                old = set().union(*fences[: line["decided"]])
                kept = sorted(old & set(view.members))
                left = sorted({(group, before.get(group, 0)) for group in view.lost} - out - gone)
                if kept:
                    yield f"view {view.epoch} keeps {kept}, which claims had fenced"
                if left:
                    yield f"view {view.epoch} leaves out {left}, which live and are not fenced"


def _stops(lines: Lines) -> Iterator[str]:
    """A group that has the model stops only because it is fenced or outside a view, its view is too small, or there is
    no other view."""
    views = [View.from_json(line) for line in lines if line["event"] == "view"]
    for line in lines:
        if line["event"] != "stop" or not line["synced"] or line["reason"].startswith(_LEFT):
            continue
        seat = line["group"], line["incarnation"]
        later = [view for view in views if view.epoch > line["epoch"]]
        ends = (
            not view.seats(*seat) or len(view.live) < lines[0]["min_groups"] or invariants.wiped_out(lines[0], view)
            for view in later
        )
        if later and not any(ends):
            yield f"group {seat[0]} (start {seat[1]}) stops although it has a seat: {line['reason']}"


def check_nobody_ends(lines: Lines) -> list[str]:
    """No living group that has the model ends before the run does; for histories without a reason to do so."""
    ended = [
        line
        for line in lines
        if line["event"] == "stop"
        and line["synced"]
        and "min_groups" not in line["reason"]
        and ("outside view" in line["reason"] or not line["wiped_out"])
    ]
    return [f"group {line['group']} (start {line['incarnation']}) lives and ends: {line['reason']}" for line in ended]
