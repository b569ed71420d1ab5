"""The run record as tables."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from megatron_ft.record import invariants, run_summary
from megatron_ft.record.run_record import Failure, RunRecord
from megatron_ft.record.words import ended
from megatron_ft.utils.tables import Column, FittedTable


def failures_table(record: RunRecord) -> FittedTable:
    """Return a table with one row per lost group."""
    columns = (
        Column("step", right=True),
        Column("group", right=True),
        Column("failure", least=16),
        Column("detected by (after s)", last=1, least=24),
        Column("stall s", right=True),
        Column("micro-\nbatches\npatched", right=True),
        Column("of these\nprefetched /\nfetched", right=True, last=3),
        Column("buckets\nkept /\nredone", right=True, last=2),
    )
    points = {line["pid"]: line.get("point") for line in record.injects}
    found = [_row(failure, points.get(failure.fault["pid"])) for failure in record.failures]
    return FittedTable("Failures", columns, found, "No group was lost.", f"steps lost = {record.steps_lost}")


def _row(failure: Failure, point: str | None) -> list[str]:
    fault, recovery = failure.fault, failure.recovery
    what = ended(fault)
    after = "" if fault["detected_s"] is None else f" ({fault['detected_s']:.3f})"
    row = [
        str(recovery["step"]) if recovery else "-",
        str(fault["group"]),
        f"{what} at {point}" if point else what,
        f"{failure.how}{after}",
    ]
    if recovery is None:
        return [*row, "-", "-", "-", "-"]
    buckets = f"{recovery['buckets_kept']} / {recovery['buckets_redone']}"
    return [*row, f"{recovery['stall_s']:.3f}", str(recovery["patched"]), _samples(failure), buckets]


def _samples(failure: Failure) -> str:
    """Return the numbers of patched microbatches that were in memory, and that had to be read."""
    if not failure.patches:
        return "-"
    prefetched, fetched = (sum(len(line[kind]) for line in failure.patches) for kind in ("prefetched", "fetched"))
    return f"{prefetched} / {fetched}"


def summary_table(facts: Mapping[str, Any], differences: Mapping[str, float]) -> FittedTable:
    """Return a table of the facts of a run (``record.run_summary``), and of its differences to another one."""
    found = [*run_summary.rows(facts), *((name, f"{value:.2e}") for name, value in differences.items())]
    return FittedTable("Run", (Column("", least=36), Column("")), found, "")


def compare(record: RunRecord, reference: RunRecord) -> dict[str, float]:
    """Return the relative differences to a failure-free run of the same job and seed, by name.

    The norm of the parameters is missing while a run is unfinished.
    """
    found = {"largest relative loss difference": invariants.largest_difference(record.losses, reference.losses)}
    if record.end and reference.end:
        mine, theirs = record.end["params_norm"], reference.end["params_norm"]
        found["relative difference of the parameters' norm"] = abs(mine - theirs) / theirs
    return found


# --- Slurm ------------------------------------------------------------------------------------------------------------


def slurm_jobs(record: RunRecord) -> list[str]:
    """Return the ids of the Slurm jobs in which the run was supervised, the newest last."""
    return list(dict.fromkeys(line["job"] for line in record.events("slurm")))


def supervisor_table(record: RunRecord) -> FittedTable:
    """Return a table with one row for each line that a supervisor wrote to the record."""
    found = []
    for line in record.events("slurm"):
        fields = {name: value for name, value in line.items() if name not in ("t", "event", "what", "job")}
        details = ", ".join(f"{name} {_joined(value)}" for name, value in fields.items())
        found.append((time.strftime("%H:%M:%S", time.localtime(line["t"])), line["what"], details))
    columns = [Column(name) for name in ("time", "what the supervisor did", "details")]
    jobs = ", ".join(slurm_jobs(record))
    return FittedTable(f"Slurm: job {jobs}", columns, found, f"Slurm: the supervisor of job {jobs} did nothing.")


def _joined(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
