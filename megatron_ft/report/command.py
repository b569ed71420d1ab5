"""``megatron-ft report``: tables, pictures, and what Slurm says."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from rich.console import Console

from megatron_ft.core.slurm_said import Said
from megatron_ft.errors import LaunchError
from megatron_ft.report import plots, slurm, tables
from megatron_ft.report.record import RunRecord


def run(options: argparse.Namespace, ask_slurm: Callable[[Sequence[str], str | None], list[Said]]) -> int:
    """``ask_slurm``: what Slurm says now of jobs of a cluster."""
    record = RunRecord.load(options.run_dir)
    reference = RunRecord.load(options.reference) if options.reference else None
    said = _said(options, record, ask_slurm)
    console = Console()
    console.print(tables.failures_table(record))
    console.print(tables.summary_table(record, reference))
    if slurm.supervised(record):
        console.print(slurm.slurm_table(record, said))
    for name, plot in (
        ("loss.png", lambda path: plots.loss_plot(record, reference, path)),
        ("timeline.png", lambda path: plots.timeline_plot(record, path)),
    ):
        path = options.run_dir / name
        plot(path)
        console.print(f"picture: {path}")
    return 0


def _said(options: argparse.Namespace, record: RunRecord, ask_slurm: Callable) -> list[Said]:
    if not (options.slurm or options.sacct):
        return []
    if not slurm.supervised(record):
        asked = "--slurm" if options.slurm else "--sacct"
        raise LaunchError(f"{asked}: {options.run_dir} was not supervised in Slurm (megatron-ft supervise); leave it out")
    if options.sacct:
        return slurm.of_these_jobs(record, slurm.read(options.sacct), f"--sacct {options.sacct}")
    return ask_slurm(slurm.jobs(record), slurm.cluster(record))
