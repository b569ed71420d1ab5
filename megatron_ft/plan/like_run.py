"""``megatron-ft simulate --like RUN_DIR``: a run again in the simulator, with its own policy, failures and measured times.

It shows whether the simulator is right about what follows from a loss: less work for some groups and more for others,
patches, detection and agreement, groups that come back, checkpoints, restarts and steps made again. How long a microbatch,
a reduction, a recovery or a restart takes is measured in the run; how these add up to its time is predicted. The
decisions are those of the same plans that the groups made (``planned``). Groups that left in order count as lost, and
stragglers are not simulated.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import inf
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console

from megatron_ft.core.detection import stragglers
from megatron_ft.errors import WIPED_OUT, ConfigError
from megatron_ft.plan.cluster import Cluster
from megatron_ft.plan.planned import Planned, largest_load
from megatron_ft.plan.setting import Failures, Setting
from megatron_ft.plan.training_run import Result, simulate
from megatron_ft.record import protocol_trace, run_directory
from megatron_ft.record.run_record import RunRecord
from megatron_ft.types import GroupId, PlanOrigin
from megatron_ft.utils.tables import Column, FittedTable

_COMPUTES = ("compute", "standby", "forward", "backward")
_COUNTS = ("compute", "standby", "forward")
"""Phases of a timeline that compute, and those with one span for each microbatch."""


@dataclass(frozen=True)
class Measured:
    """What the simulator takes from a run: seconds, as means, and the losses.

    Attributes:
        microbatch_s: Time of a microbatch, at the slowest group of each step.
        step_s: Time of a step with all groups, without a loss and without a checkpoint.
        allreduce_s: The part of it beside the microbatches.
        detection_s: From the cause of a loss to its detection.
        stall_s: From there until the others go on, without the computing.
        entry_s: Stall when a group comes back.
        rejoin_s: From a loss until the group is back; None if none came back.
        restart_s: From the loss that ended an attempt to the next step, without that step.
        checkpoint_s: Stall of a checkpoint.
        period_s: Time between checkpoints; infinite without any.
        losses: (seconds after the first step, group).
    """

    microbatch_s: float
    step_s: float
    allreduce_s: float
    detection_s: float
    stall_s: float
    entry_s: float
    rejoin_s: float | None
    restart_s: float
    checkpoint_s: float
    period_s: float
    losses: tuple[tuple[float, GroupId], ...]


@dataclass(frozen=True)
class Comparison:
    """A run and its simulation. ``seconds``: from the end of its first step to the end of its last one; ``steps_again``:
    steps that were made more than once."""

    policy: str
    measured: Measured
    seconds: float
    steps: int
    steps_again: int
    restarts: int
    rejoined: int
    predicted: Result

    @property
    def off(self) -> float:
        """The predicted time relative to the measured one, less 1."""
        return self.predicted.time_s / self.seconds - 1

    def to_json(self) -> dict[str, Any]:
        took = asdict(self.measured)
        return {
            **{name: value for name, value in asdict(self).items() if name != "predicted"},
            "measured": {name: None if value == inf else value for name, value in took.items()},
            "predicted": self.predicted.to_json(),
            "predicted_over_measured": self.predicted.time_s / self.seconds,
        }


_OF_THE_RUN = ("preset", "measured", "policy", "redundancy")


def run(options: argparse.Namespace) -> int:
    """Compare and print. Returns the exit code; raises ``FTError`` for a record that does not suffice."""
    if given := [f"--{name.replace('_', '-')}" for name in _OF_THE_RUN if getattr(options, name) is not None]:
        raise ConfigError(f"--like takes policy, times and losses from the run; leave {', '.join(given)} out")
    run_dir = options.like
    found = compare(run_dir)
    if options.json:
        print(json.dumps(found.to_json(), indent=2, allow_nan=False))
        return 0
    console = Console()
    _table(run_dir, found).show(console)
    took = found.measured
    back = "" if took.rejoin_s is None else f", back after {took.rejoin_s:.3g} s"
    console.print(
        f"Measured in the run: a microbatch {took.microbatch_s:.3g} s, the rest of a step {took.allreduce_s:.3g} s, "
        f"detection {took.detection_s:.3g} s, stall {took.stall_s:.3g} s{back}, restart {took.restart_s:.3g} s, checkpoint "
        f"{took.checkpoint_s:.3g} s.",
        soft_wrap=True,
    )
    return 0


def compare(run_dir: Path) -> Comparison:
    """Return a run beside its simulation. Raises ``FTError``."""
    starts = [record for path in run_directory.starts_of(run_dir) if (record := RunRecord.load(path)).steps]
    if not starts:
        raise ConfigError(f"{run_dir} has made no step; simulate --like needs a run with two steps or more")
    job, settings = protocol_trace.Record.load(run_dir).job, starts[-1].config["fault_tolerance"]
    first, last = starts[0].steps.numbers[0], starts[-1].steps.numbers[-1]
    seconds = starts[-1].steps.times[-1] - starts[0].steps.times[0]
    groups, everybody = job.shards, tuple(range(job.shards))
    load = largest_load(job.plan(0, PlanOrigin(everybody), stragglers.Speeds()), everybody)
    took = measure(starts, everybody, load)
    cluster = Cluster(
        gpus=groups,
        gpus_per_group=1,
        gpus_per_node=1,
        mtbf_s=max(seconds / max(1, len(took.losses)), took.step_s),
        step_s=took.step_s,
        allreduce_s=took.allreduce_s,
        microbatches=load,
        restart_s=took.restart_s,
        checkpoint_s=max(took.checkpoint_s, 1e-9),
        steps=last - first,
        detection_s=took.detection_s,
        reconfigure_s=took.stall_s,
        rejoin_s=took.rejoin_s,
    )
    setting = Setting(
        cluster=cluster,
        redundancy=1 if job.placement is None else job.placement.redundancy,
        failures=Failures(trace=took.losses or ((1e9 * seconds, 0),), rack_groups=1),
        period_s=min(took.period_s, 1e9 * seconds),
        jitter=0.0,
        in_restart="after",  # every loss of the record ended a start that had made steps
        entry_s=took.entry_s,
    )
    model = Planned(setting, job, rejoins=settings["rejoin"]["enabled"] and took.rejoin_s is not None)
    made = sum(len(start.steps) for start in starts)
    return Comparison(
        policy=settings["policy"] + (f", standby {settings['standby']}" if settings["standby"] != "none" else ""),
        measured=took,
        seconds=seconds,
        steps=cluster.steps,
        steps_again=made - (last - first + 1),
        restarts=len(starts) - 1,
        rejoined=sum(len(view["joined"]) for start in starts for view in start.views[1:]),
        predicted=simulate(setting, settings["policy"], 0, model),
    )


# --- measuring --------------------------------------------------------------------------------------------------------


def measure(starts: Sequence[RunRecord], everybody: tuple[GroupId, ...], load: int) -> Measured:
    """Return what the starts of a run say about its times and losses. ``load``: microbatches of the busiest group in a step
    with ``everybody``. Raises ``ConfigError`` if fewer than two steps had all groups and neither a loss nor a checkpoint."""
    begun = starts[0].steps.times[0]
    quiet = [(record, frozenset(_quiet(record, everybody))) for record in starts]
    steps = [record.steps[place] for record, places in quiet for place in places]
    if len(steps) < 2:
        raise ConfigError(
            f"{starts[-1].run_dir} has {len(steps)} steps with all {len(everybody)} groups and neither a loss nor a "
            f"checkpoint; the times of at least two are needed"
        )
    step_s = mean(line["duration_s"] for line in steps)
    microbatch_s = mean(
        each
        for record, places in quiet
        for each in _microbatches_s(record, {record.steps.numbers[at] for at in places})
    )
    allreduce_s = max(0.0, step_s - load * microbatch_s)
    faults = [[fault for fault in record.faults if fault["code"] != WIPED_OUT] for record in starts]
    after_losses, at_entries = list[float](), list[float]()
    for record in starts:
        losing = {view["epoch"] for view in record.views if view["lost"]}
        for line in record.recoveries:
            (after_losses if line["epoch"] in losing else at_entries).append(line["stall_s"])
    detected = [fault["detected_s"] for each in faults for fault in each if fault["detected_s"] is not None]
    stall_s, detection_s = _mean(after_losses), _mean(detected)
    back = [seconds for record in starts for seconds in record.ways_back_s]
    restarts = [
        after.steps.times[0] - before_ends[-1]["t"] - stall_s - step_s
        for (_, after), before_ends in zip(pairwise(starts), faults, strict=False)
        if before_ends
    ]
    saves = [[line for line in record.events("checkpoint") if line["blocked_s"] is not None] for record in starts]
    return Measured(
        microbatch_s=microbatch_s,
        step_s=step_s,
        allreduce_s=allreduce_s,
        detection_s=detection_s,
        stall_s=stall_s,
        entry_s=_mean(at_entries),
        # A group enters at the next boundary, on average half a step after it is ready.
        rejoin_s=max(0.0, mean(back) - step_s / 2) if back else None,
        restart_s=max(0.0, _mean(restarts)),
        checkpoint_s=_mean([line["blocked_s"] for each in saves for line in each]),
        period_s=mean(gaps) if (gaps := [b["t"] - a["t"] for each in saves for a, b in pairwise(each)]) else inf,
        losses=tuple(
            (fault["t"] - (fault["detected_s"] or 0.0) - begun, fault["group"])
            for each in faults
            for fault in each
            if fault["t"] > begun and fault["group"] in everybody
        ),
    )


def _quiet(record: RunRecord, everybody: tuple[GroupId, ...]) -> Iterator[int]:
    """Yield the places of steps with all groups, without a change of membership, a recovery or a checkpoint."""
    disturbed = {line["step"] for line in (*record.recoveries, *record.views, *record.events("checkpoint"))}
    disturbed |= {line["step"] - 1 for line in record.events("checkpoint")}
    for place, number in enumerate(record.steps.numbers):
        if place and number not in disturbed and tuple(record.steps[place]["live"]) == everybody:
            yield place


def _microbatches_s(record: RunRecord, steps: set[int]) -> Iterator[float]:
    """Yield for each of ``steps`` the seconds of a microbatch at the group for which they were longest."""
    longest: dict[int, float] = {}
    for group, position in record.timelines:
        if position:
            continue
        of_steps: dict[int, list[tuple[str, float, float]]] = {}
        for phase, start, end, step in record.spans((group, 0)):
            if step in steps and phase in _COMPUTES:
                of_steps.setdefault(step, []).append((phase, start, end))
        for step, spans in of_steps.items():
            whole = max(end for *_, end in spans) - min(start for _, start, _ in spans)
            number = sum(phase in _COUNTS for phase, *_ in spans)
            longest[step] = max(longest.get(step, 0.0), whole / max(1, number))
    if steps and not longest:
        raise ConfigError(f"{record.run_dir} has no timelines of its steps; they tell how long a microbatch takes")
    yield from longest.values()


def _mean(values: Sequence[float]) -> float:
    return mean(values) if values else 0.0


# --- showing ----------------------------------------------------------------------------------------------------------


def _table(run_dir: Path, found: Comparison) -> FittedTable:
    predicted = found.predicted
    rows = [
        ["time to train (s)", f"{found.seconds:.1f}", f"{predicted.time_s:.1f}", f"{found.off:+.1%}"],
        ["steps", str(found.steps), str(predicted.steps), ""],
        ["groups lost", str(len(found.measured.losses)), str(predicted.failures), ""],
        ["groups that came back", str(found.rejoined), str(predicted.rejoins), ""],
        ["restarts of the job", str(found.restarts), str(predicted.wipe_outs), ""],
        ["steps made again", str(found.steps_again), str(round(predicted.lost_s / found.measured.step_s)), ""],
    ]
    columns = [Column(""), *(Column(name, right=True) for name in ("measured", "predicted", "difference"))]
    return FittedTable(f"{run_dir}: {found.policy}", columns, rows, "nothing to compare")
