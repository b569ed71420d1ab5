"""The planner's inputs as measured in a run: ``megatron-ft plan --measured RUN_DIR``.

A run without failures has no values for their cost, and a run without checkpoints none for theirs. The planner's
defaults or flags replace missing values. Each rank counts as a GPU.
"""

from __future__ import annotations

from statistics import median
from typing import Any

from megatron_ft.errors import ConfigError
from megatron_ft.record.run_record import RunRecord

HOUR_S = 3600.0


def measured(record: RunRecord, gpus_per_node: int = 8) -> dict[str, Any]:
    """Return values of ``plan.cluster.Cluster``, as medians. Raises ``ConfigError`` for fewer than two full
    steps."""
    whole = [line["duration_s"] for line in record.steps if len(line["live"]) == record.groups]
    if len(whole) < 2:
        raise ConfigError(f"{record.run_dir} has {len(whole)} steps with all groups; at least two are needed")
    start, begin = record.events("start")[0], record.events("begin")[0]
    ranks = start["ranks_per_group"]
    gpus = record.groups * ranks
    found: dict[str, Any] = {
        "gpus": gpus,
        "gpus_per_group": ranks,
        "gpus_per_node": gpus_per_node,
        "step_s": median(whole[1:]),  # the first one warms up
        "steps": begin["steps"],
        "microbatches": max(1, begin["microbatches"] // record.groups),
    }
    times = {
        "checkpoint_s": (line["blocked_s"] for line in record.events("checkpoint")),
        "detection_s": (line["detected_s"] for line in record.faults if line["detected_s"] is not None),
        "reconfigure_s": (line["stall_s"] for line in record.recoveries if line["patched"]),
        "rejoin_s": record.ways_back_s,
    }
    found |= {name: median(values) for name, given in times.items() if (values := list(given))}
    own = [line["t"] for line in record.lines.others if line["event"] != "slurm"]  # a job may live longer than its run
    lived_s = max(own[-1], record.steps.times[-1]) - own[0]
    if record.faults:
        found["node_mtbf_hours"] = lived_s / len(record.faults) / HOUR_S * gpus / gpus_per_node
    if record.events("resume"):
        found["restart_s"] = record.steps[0]["t"] - record.steps[0]["duration_s"] - record.lines[0]["t"]
    return found
