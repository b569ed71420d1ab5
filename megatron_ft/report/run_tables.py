"""The run record as tables."""

from __future__ import annotations

import time
from typing import Literal

from rich.table import Table

from megatron_ft.report.words import ended
from megatron_ft.runlog import invariants
from megatron_ft.runlog.run_record import Failure, RunRecord

_OLDER = ("step", "node")
"""Values of ``what`` in lines about steps and nodes, which versions before 0.2 wrote."""


def failures_table(record: RunRecord) -> Table:
    """Return a table with one row per lost group."""
    table = Table(title="Failures", title_justify="left")
    columns: tuple[tuple[str, Literal["left", "right"]], ...] = (
        ("step", "right"),
        ("group", "right"),
        ("failure", "left"),
        ("detected by (after s)", "left"),
        ("stall s", "right"),
        ("micro-\nbatches\npatched", "right"),
        ("of these\nprefetched /\nfetched", "right"),
        ("buckets\nkept /\nredone", "right"),
    )
    for name, justify in columns:
        table.add_column(name, justify=justify)
    points = {line["pid"]: line.get("point") for line in record.injects}
    for failure in record.failures:
        table.add_row(*_row(failure, points.get(failure.fault["pid"])))
    table.caption = f"steps lost = {record.steps_lost}"
    table.caption_justify = "left"
    return table


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


def summary_table(record: RunRecord, reference: RunRecord | None = None) -> Table:
    """Return a table of the run's results, compared with those of ``reference``, a failure-free run of the same
    seed."""
    table = Table(title="Run", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    steps = record.steps
    table.add_row("steps committed", str(len(record.losses)))
    table.add_row("steps lost", str(record.steps_lost))
    table.add_row("microbatches in every step", " ".join(str(n) for n in sorted(steps.kinds())))
    table.add_row("groups at the start / at the end", f"{record.groups} / {len(steps[-1]['live']) if steps else 0}")
    if saved := record.events("checkpoint"):
        failed = len(record.events("checkpoint_failed"))
        more = f", {failed} failed" if failed else ""
        table.add_row("checkpoints / newest", f"{len(saved)}{more} / step {saved[-1]['step']}")
    for line in record.events("not_saved"):
        table.add_row("NOT saved", line["reason"])
    if record.end:
        table.add_row("final loss", f"{record.end['loss']:.6f}")
    if reference is not None:
        for name, value in compare(record, reference).items():
            table.add_row(name, f"{value:.2e}")
    return table


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


def supervisor_table(record: RunRecord) -> Table:
    """Return a table with one row for each line that a supervisor wrote to the record."""
    table = Table(title=f"Slurm: job {', '.join(slurm_jobs(record))}", title_justify="left")
    for name in ("time", "what the supervisor did", "details"):
        table.add_column(name, overflow="fold")
    for line in record.events("slurm"):
        if line["what"] in _OLDER:
            continue
        fields = {name: value for name, value in line.items() if name not in ("t", "event", "what", "job")}
        details = ", ".join(f"{name} {_joined(value)}" for name, value in fields.items())
        table.add_row(time.strftime("%H:%M:%S", time.localtime(line["t"])), line["what"], details)
    return table


def _joined(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
