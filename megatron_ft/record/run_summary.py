"""A run in numbers, from its record: how it ended, its speed, and what became of the time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median
from typing import Any

from megatron_ft.record import run_state
from megatron_ft.record.run_record import RunRecord
from megatron_ft.utils import directory_lock
from megatron_ft.utils.durations import duration


def summary(record: RunRecord) -> dict[str, Any]:
    """Return the facts of a run, finished or not (docs/run-record.md, "The report").

    Times are in seconds. The parts of ``time_s`` add up to ``wall_s``: the sum differs by rounding only.
    """
    times, lost_s = _times(record)
    wall_s = sum(times.values())
    numbers, durations = record.steps.numbers, sorted(record.steps.durations)
    slow = math.ceil(0.99 * len(durations)) - 1
    tokens = sum(record.steps.tokens)
    saved = record.events("checkpoint")
    state = run_state.of(record.lines.others, record.groups)
    return {
        "run_id": next((line.get("run_id") for line in record.events("start")), None),
        "ended": _ended(record, state),
        "exit_code": state.exit_code,
        "groups_at_start": record.groups,
        "groups_at_end": len(record.steps[-1]["live"]) if numbers else record.groups,
        "steps": len(record.losses),
        "steps_lost": record.steps_lost,
        "steps_made_again": len(numbers) - len(record.losses),
        "microbatches": sorted(record.steps.kinds()),
        "loss": record.steps.losses[-1] if numbers else None,
        "wall_s": wall_s,
        "time_s": times,
        "short_handed_s": lost_s,
        "goodput": times["training"] / wall_s if wall_s else None,
        "step_s": {"median": median(durations), "p99": durations[slow]} if durations else None,
        "tokens": tokens or None,
        "tokens_per_s": tokens / wall_s if tokens and wall_s else None,
        "losses": len(record.faults),
        "leaves": state.leaves,
        "joins": state.joins,
        "returns": state.returns,
        "checkpoints": {
            "saved": len(saved),
            "failed": len(record.events("checkpoint_failed")),
            "newest_step": saved[-1]["step"] if saved else None,
        },
        "divergences": len(record.events("divergence")),
        "slow_groups": sorted({int(group) for line in record.events("stragglers") for group in line["slow"]}),
    }


def rows(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the facts for people: name and value. Facts that do not occur in the run are left out."""
    times, checkpoints = facts["time_s"], facts["checkpoints"]
    found = [
        ("ended", facts["ended"]),
        ("steps", f"{facts['steps']:,}, {facts['steps_lost']} lost, {facts['steps_made_again']} made again"),
        ("microbatches in a step", " ".join(map(str, facts["microbatches"]))),
        ("groups at the start, at the end", f"{facts['groups_at_start']}, {facts['groups_at_end']}"),
    ]
    if facts["loss"] is not None:
        found.append(("loss of the last step", f"{facts['loss']:.6f}"))
    if facts["step_s"]:
        found.append(("step, median and 99%", f"{facts['step_s']['median']:.3g} s, {facts['step_s']['p99']:.3g} s"))
    if facts["tokens_per_s"]:
        found.append(("tokens per second of wall time", f"{facts['tokens_per_s']:,.0f}"))
    found.append(("wall time", duration(facts["wall_s"])))
    for name, seconds in times.items():
        if seconds >= 0.0005 * facts["wall_s"]:
            found.append((f"  {name}", f"{duration(seconds)} ({seconds / facts['wall_s']:.1%})"))
    if facts["goodput"] is not None:
        found.append(("goodput (training / wall time)", f"{facts['goodput']:.1%}"))
    if facts["short_handed_s"]:
        found.append(("longer steps while groups were away", duration(facts["short_handed_s"])))
    words = {"losses": "lost", "returns": "came back", "leaves": "left in order", "joins": "joined"}
    moves = [f"{facts[name]} {does}" for name, does in words.items() if facts[name]]
    found.append(("groups", ", ".join(moves) or "none was lost, left or joined"))
    if checkpoints["saved"] or checkpoints["failed"]:
        newest = "" if checkpoints["newest_step"] is None else f", newest of step {checkpoints['newest_step']}"
        found.append(("checkpoints", f"{checkpoints['saved']} saved, {checkpoints['failed']} failed{newest}"))
    if facts["divergences"]:
        found.append(("states that differed", str(facts["divergences"])))
    if facts["slow_groups"]:
        found.append(("groups that were slow", " ".join(map(str, facts["slow_groups"]))))
    return found


def _times(record: RunRecord) -> tuple[dict[str, float], float]:
    """Return what the wall time was spent on, and by how much steps took longer while groups were away."""
    names = ("training", "recovery", "saving", "made again", "starting", "between steps", "not running", "ending")
    times = dict.fromkeys(names, 0.0)
    whole = [line["duration_s"] for line in record.steps if len(line["live"]) >= record.groups]
    usual, short_s = median(whole) if whole else math.inf, 0.0
    now, before = record.lines[0]["t"], ""
    made: set[int] = set()
    overhead = {"recovery": 0.0, "saving": 0.0}  # of the step that is being made
    for line in record.lines:
        event, t = line["event"], line["t"]
        if event == "slurm":  # a job may live longer than its run
            continue
        if event == "recovery":
            overhead["recovery"] += line["stall_s"]
        elif event == "checkpoint":
            overhead["saving"] += line["blocked_s"]
        elif event == "step":
            begun = max(now, t - line["duration_s"])
            times["starting" if before in ("", "start") else "between steps"] += begun - now
            left = max(t - begun, 0.0)
            for name, seconds in overhead.items():
                times[name] += min(seconds, left)
                left -= min(seconds, left)
                overhead[name] = 0.0
            times["made again" if line["step"] in made else "training"] += left
            if len(line["live"]) < record.groups:
                short_s += max(0.0, left - usual)
            made.add(line["step"])
            now, before = max(now, t), "step"
        elif event == "start":
            if before:
                times["not running"] += max(t - now, 0.0)
            now, before = max(now, t), "start"
        last = t
    times["ending"] += max(last - now, 0.0)
    return times, short_s


def _ended(record: RunRecord, state: run_state.RunState) -> str:
    """Return in words how the last start of the run has ended."""
    line = state.closing
    if line is None:
        states = {True: "it is not over", False: "it was killed", None: "it is not over, or was killed"}
        said = states[directory_lock.lives(record.run_dir, directory_lock.RUN)]
    else:
        said = run_state.steps_made(line) if line["event"] == "end" else f"stopped: {line['reason']}"
    return "; ".join([said, *state.not_saved])
