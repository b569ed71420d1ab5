"""The command ``megatron-ft plan``: prints a table or JSON, and writes a picture and a config section."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from megatron_ft.config import schema
from megatron_ft.config.validators import Rule, is_number
from megatron_ft.errors import ConfigError, FTError
from megatron_ft.plan import config_section, inputs, measured, plan_tables, verified_share
from megatron_ft.plan.cluster import Cluster
from megatron_ft.plan.estimate import recommend
from megatron_ft.plan.presets import PRESETS
from megatron_ft.record.run_record import RunRecord

_SHARE = Rule(
    "a number above 0, at most 1: the share of microbatches", lambda value: is_number(value) and 0 < value <= 1
)


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``megatron-ft plan``."""
    cluster_options(parser)
    parser.add_argument(
        "--redundancy",
        type=inputs.as_number,
        metavar="R",
        help="number of groups that host each shard (default: the best for each policy)",
    )
    parser.add_argument(
        "--wrong-share",
        type=inputs.as_number,
        metavar="P",
        help="also say how many microbatches to verify, for a host that computes this share of its microbatches wrongly",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--out", type=Path, metavar="JSON", help="write the fault_tolerance section, with all that is recommended"
    )
    parser.set_defaults(run=run)


def cluster_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe a cluster, for :func:`cluster`."""
    parser.add_argument("--preset", metavar="NAME", help="llama3-16k, fthsdp-100k, spare-600k, recover-512 or lab-64")
    parser.add_argument(
        "--file", type=Path, metavar="FILE", help="YAML or JSON file with the values below; keys have underscores"
    )
    parser.add_argument(
        "--measured", type=Path, metavar="RUN_DIR", help="take times and failure rate from the record of this run"
    )
    values = parser.add_argument_group(
        "values", "of the cluster and the job; they override --preset, --file and --measured"
    )
    for name, text in (
        ("gpus", "number of GPUs"),
        ("gpus-per-group", "number of GPUs of one model replica"),
        ("gpus-per-node", "number of GPUs of a node (default: 8)"),
        ("node-mtbf-hours", "failure rate: mean time between failures of one node"),
        ("failures-per-1000-node-days", "or failures per 1000 node-days (Llama 3: 3.79)"),
        ("system-mtbf-s", "or mean time between failures of the whole system"),
        ("step-s", "time of a failure-free step"),
        ("allreduce-s", "part of the step in which only gradients are reduced (default: 0)"),
        ("microbatches", "number of microbatches of a group in a step (default: 16)"),
        ("steps", "number of steps of the whole run; the checkpoint period depends on it"),
        ("restart-s", "time to restart the whole job"),
        ("checkpoint-s", "time for which a checkpoint stops training"),
        ("detection-s", "time until a failure is detected (default: 5)"),
        ("reconfigure-s", "time from there until the survivors continue (default: 2)"),
        ("rejoin-s", "time until a lost group is back, or none (default: 900)"),
        ("job-mtbf-hours", "time between failures that end the whole job: fabric, file system (default: none)"),
        ("repair-hours", "time until a node that failed is in service again (to answer: how many spare nodes?)"),
    ):
        values.add_argument(f"--{name}", type=inputs.as_number, help=text, metavar=name.rpartition("-")[2].upper())


def cluster(options: argparse.Namespace) -> Cluster:
    """Return the cluster that the options describe. Raises ``ConfigError``."""
    flags = {name: getattr(options, name) for name in inputs.NAMES}
    values = {} if options.measured is None else measured.measured(RunRecord.load(options.measured))
    return inputs.cluster(options.preset, options.file, flags, values)


def run(options: argparse.Namespace) -> int:
    """Print and write what the options ask for. Returns the exit code; raises ``FTError``."""

    def refused(section: config_section.Section) -> str | None:
        try:
            schema.resolve(section, groups=described.groups)
        except FTError as error:
            return str(error)
        return None

    described = cluster(options)
    plan = recommend(described, options.redundancy)
    pasted, hints = config_section.choose(described, plan, refused)
    source = PRESETS[options.preset].source if options.preset else None
    if options.out:
        if pasted is None:
            raise ConfigError(f"there is no section to write to {options.out}: {hints[0]}")
        options.out.write_text(json.dumps(pasted, indent=2) + "\n", encoding="utf-8")
    share = None if options.wrong_share is None else _SHARE("--wrong-share", options.wrong_share)
    if options.json:
        verified = None if share is None else [asdict(one) for one in verified_share.choices(described, share)]
        print(json.dumps(plan_tables.as_json(described, plan, pasted, hints, source, verified), indent=2))
        return 0
    console = Console()
    plan_tables.cluster_table(described).show(console)
    if source:
        console.print(f"[dim]{escape(source)}[/dim]")
    plan_tables.policy_table(plan).show(console)
    console.print(f"\n[bold]Recommended:[/bold] {escape(plan.reason)}\n")
    if pasted is not None:
        console.print("For the config:")
        print(json.dumps(pasted, indent=2))  # not through rich, which would break lines
    for hint in hints:
        console.print(f"# {escape(hint)}", soft_wrap=True)
    if share is not None:
        verified_share.table(described, share).show(console)
    if options.out:
        print(f"section: {options.out}")
    return 0
