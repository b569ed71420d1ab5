"""The command ``megatron-ft report``: prints tables and Slurm's description of the job, and draws pictures; or a verdict."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from megatron_ft.cluster.launchers.slurm import commands as slurm
from megatron_ft.errors import LaunchError
from megatron_ft.proof import verdict
from megatron_ft.record import run_plots, run_summary, run_tables
from megatron_ft.record.run_record import RunRecord
from megatron_ft.utils import terminal


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``megatron-ft report``."""
    parser.add_argument("run_dir", type=Path, help="run directory")
    parser.add_argument(
        "--reference", type=Path, metavar="RUN_DIR", help="run directory of a failure-free run, for comparison"
    )
    parser.add_argument("--slurm", action="store_true", help="also print the job's records from sacct or scontrol")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--json", action="store_true", help="print the facts of the run as JSON, and nothing else")
    instead.add_argument(
        "--check", action="store_true", help="only check that the run kept every promise; exit code 1: it did not"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print and draw the report of a run; with ``--json`` print its facts only, with ``--check`` the verdict. Returns the
    exit code; raises ``LaunchError`` or ``RecordError``.
    """
    record = RunRecord.load(options.run_dir)
    reference = RunRecord.load(options.reference) if options.reference else None
    if options.check:
        return _check(options, record)
    jobs = run_tables.slurm_jobs(record)
    if options.slurm and not jobs:
        raise LaunchError(
            f"--slurm: {options.run_dir} was not supervised in Slurm (megatron-ft supervise); leave it out"
        )
    facts = run_summary.summary(record)
    differences = {} if reference is None else run_tables.compare(record, reference)
    if options.json:
        print(json.dumps({**facts, "differences": differences}, indent=1))
        return 0
    console = terminal.console()
    run_tables.failures_table(record).show(console)
    run_tables.summary_table(facts, differences).show(console)
    if jobs:
        run_tables.supervisor_table(record).show(console)
    for job in jobs if options.slurm else ():
        console.print(f"\nSlurm's record of job {job}; slurm/README.md explains the states:")
        console.print(slurm.described(job), markup=False, highlight=False, soft_wrap=True)
    loss, timeline = options.run_dir / "loss.png", options.run_dir / "timeline.png"
    run_plots.loss_plot(record, reference, loss)
    run_plots.timeline_plot(record, timeline)
    for path in (loss, timeline):
        console.print(f"picture: {path}", soft_wrap=True)
    return 0


def _check(options: argparse.Namespace, record: RunRecord) -> int:
    found = verdict.judge(options.run_dir, options.reference)
    rejoins = record.config.get("fault_tolerance", {}).get("rejoin", {}).get("enabled", True)
    if rejoins and (absent := verdict.absent(record.lines.others)):
        found.append(f"groups {' '.join(map(str, absent))} were not members again at the end")
    for message in found:
        print(terminal.printable(f"NOT KEPT: {message}"))
    words = "every promise was kept" if not found else f"{len(found)} promises were not kept"
    print(f"check: {verdict.faults(record.lines.others)} injected faults, {words}")
    return 1 if found else 0
