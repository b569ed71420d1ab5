"""The command ``megatron-ft simulate``: runs trials in several processes; prints a table or JSON."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import starmap
from pathlib import Path
from statistics import mean, pstdev
from typing import Any, cast

from rich.console import Console
from rich.progress import Progress

from megatron_ft.commands import plan_command
from megatron_ft.config.validators import whole_number
from megatron_ft.errors import ConfigError
from megatron_ft.plan import inputs, like_run, training_run
from megatron_ft.plan.cluster import Cluster
from megatron_ft.plan.estimate import Policy as PolicyName
from megatron_ft.plan.estimate import evaluate, possible
from megatron_ft.plan.plan_tables import large, short
from megatron_ft.plan.policy_models import POLICIES
from megatron_ft.plan.setting import Failures, Setting
from megatron_ft.plan.training_run import PARTS, Result, simulate
from megatron_ft.utils.tables import Column, FittedTable

Trials = Mapping[str, Sequence[Result]]
"""For each policy, the results of its trials."""


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``megatron-ft simulate``."""
    plan_command.cluster_options(parser)
    failures = parser.add_argument_group("failures", "their distribution")
    parser.add_argument("--policy", metavar="NAMES", help="policies, separated by commas (default: all)")
    for where, name, default, metavar, text in (
        (parser, "redundancy", None, "R", "number of groups that host each shard (default: the planner's)"),
        (parser, "trials", 3, "N", "number of runs of each policy (default: 3)"),
        (parser, "seed", 0, "N", "seed of the first trial; all policies have equal seeds"),
        (parser, "jobs", os.cpu_count() or 1, "N", "number of processes (default: all cores)"),
        (failures, "shape", 0.78, "X", "Weibull shape; 1 is exponential (default: 0.78)"),
        (failures, "renewal", "system", "WHAT", "clock of failures: system, groups or replaced (default: system)"),
        (failures, "in-restart", "missing", "WHAT",
         "a group that fails in a restart: missing, none, again or after (default: missing)"),
    ):  # fmt: skip
        where.add_argument(f"--{name}", type=inputs.as_number, default=default, metavar=metavar, help=text)
    parser.add_argument(
        "--like",
        type=Path,
        metavar="RUN_DIR",
        help="a run again, with its policy, losses and measured times: predicted and measured time (--json: as JSON)",
    )
    failures.add_argument("--hit-the-dead", action="store_true", help="a failure may hit a group that is already lost")
    failures.add_argument(
        "--mix", action="store_true", help="draw causes (crash, hang, flap, straggler, ...) as in large jobs"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Check all options, simulate, and show the results. Returns the exit code; raises ``ConfigError``."""
    if options.like is not None:
        return like_run.run(options)
    cluster = plan_command.cluster(options)
    if cluster.job_mtbf_hours is not None:
        raise ConfigError("job_mtbf_hours is given, but the simulator has no failures of the whole job; leave it out")
    settings = {policy: _setting(cluster, policy, options) for policy in _policies(cluster, options.policy)}
    for policy, setting in settings.items():
        POLICIES[policy](setting)  # an impossible placement is refused here, not in a worker process
    whole_number(1)("--trials", options.trials)
    whole_number(1)("--jobs", options.jobs)
    whole_number(0)("--seed", options.seed)
    found = _simulate(settings, range(options.seed, options.seed + options.trials), options.jobs)
    if options.json:
        print(json.dumps(as_json(cluster, settings, found), indent=2))
        return 0
    console = Console()
    table(cluster, settings, found).show(console)
    console.print(_legend(cluster), soft_wrap=True)
    return 0


def _simulate(settings: Mapping[str, Setting], seeds: range, jobs: int) -> Trials:
    """Simulate all policies with the same seeds. The number of processes does not change a result."""
    tasks = [(setting, policy, seed) for policy, setting in settings.items() for seed in seeds]
    with Progress(console=Console(stderr=True), transient=True) as progress:
        found = list(progress.track(_results(tasks, jobs), len(tasks), description=f"{len(tasks)} runs"))
    return {policy: found[i * len(seeds) : (i + 1) * len(seeds)] for i, policy in enumerate(settings)}


def _results(tasks: Sequence[tuple[Setting, str, int]], jobs: int) -> Iterator[Result]:
    if jobs == 1 or len(tasks) == 1:
        yield from starmap(simulate, tasks)
        return
    with ProcessPoolExecutor(min(jobs, len(tasks))) as pool:
        yield from pool.map(simulate, *zip(*tasks, strict=True))


# --- from options to settings -----------------------------------------------------------------------------------------


def _policies(cluster: Cluster, text: str | None) -> list[str]:
    if text is None:
        return list(possible(cluster))
    names = text.split(",")
    for name in names:
        if name not in POLICIES:
            raise ConfigError(f"--policy {name!r} is not known; there are: {', '.join(POLICIES)}")
        if name == "stacked_quota_rejoin" and cluster.rejoin_s is None:
            raise ConfigError("--policy stacked_quota_rejoin needs --rejoin-s, the seconds until a lost group is back")
    return names


def _setting(cluster: Cluster, policy: str, options: argparse.Namespace) -> Setting:
    """Return the settings of one policy, with the given redundancy or the planner's best for this policy."""
    redundancy = options.redundancy
    if redundancy is None:
        redundancy = evaluate(cluster, cast(PolicyName, policy)).redundancy
    failures = Failures(
        shape=options.shape,
        renewal=options.renewal,
        of_the_living=not options.hit_the_dead,
        rack_groups=1,
        mix=options.mix,
    )
    return Setting(
        cluster=cluster,
        redundancy=redundancy,
        failures=failures,
        in_restart=options.in_restart,
    )


# --- showing ----------------------------------------------------------------------------------------------------------


def table(cluster: Cluster, settings: Mapping[str, Setting], found: Trials) -> FittedTable:
    """Return a table with a row per policy, fastest first. Values are means over the trials."""
    names = ("r", "T / T_0", "plan", "T", "A", "failed", "wiped\nout", "planned\nrestarts", "GPU-h\nlost")
    least = {"planned\nrestarts": 4, "wiped\nout": 3, "A": 2, "plan": 1}
    columns = [Column("policy"), *(Column(name, right=True, last=least.get(name, 0)) for name in names)]
    fastest = sorted(found, key=lambda policy: _overhead(found[policy]))
    rows = [_row(cluster, policy, settings[policy], found[policy]) for policy in fastest]
    return FittedTable("Simulated runs", columns, rows, "no policy was simulated")


def _row(cluster: Cluster, policy: str, setting: Setting, results: Sequence[Result]) -> list[str]:
    finished = all(result.finished for result in results)
    time_s = mean(result.time_s for result in results)
    spread = f"\n±{pstdev(result.overhead for result in results):.3f}" if finished and len(results) > 1 else ""
    planned = training_run.planners_estimate(setting, policy).relative_time
    counts = [mean(getattr(r, name) for r in results) for name in ("failures", "wipe_outs", "planned_restarts")]
    return [
        policy.replace("_rejoin", "\n+ rejoin"),
        str(setting.redundancy) if setting.redundancy > 1 else "-",
        f"{_overhead(results):.3f}{spread}" if finished else f"stopped at\nstep {min(r.steps for r in results):,}",
        f"{planned:.3f}" if math.isfinite(planned) else "never",
        short(time_s) if finished else "-",
        f"{mean(result.availability for result in results):.1%}",
        *(f"{count:.0f}" if count < 1e4 else large(count) for count in counts),
        large(cluster.gpus * (time_s - cluster.failure_free_s) / 3600) if finished else "-",
    ]


def _overhead(results: Sequence[Result]) -> float:
    return mean(result.overhead for result in results)


def _legend(cluster: Cluster) -> str:
    return (
        f"T_0: {short(cluster.failure_free_s)}, the failure-free time. plan: T / T_0 as megatron-ft plan estimates it.\n"
        "r: number of shards a group hosts. A: share of the time without checkpoints, restarts and work done twice."
    )


def as_json(cluster: Cluster, settings: Mapping[str, Setting], found: Trials) -> dict[str, Any]:
    """Return the cluster, each policy's redundancy, and each trial with all parts of its time."""
    policies = {
        policy: {
            "redundancy": settings[policy].redundancy,
            "overhead": _finite(_overhead(results)),
            "availability": mean(result.availability for result in results),
            "parts_s": {name: mean(getattr(result, f"{name}_s") for result in results) for name in PARTS},
            "trials": [{**result.to_json(), "overhead": _finite(result.overhead)} for result in results],
        }
        for policy, results in found.items()
    }
    return {"groups": cluster.groups, "failure_free_s": cluster.failure_free_s, "policies": policies}


def _finite(value: float) -> float | None:
    """Return None for infinity, which JSON does not have: a stopped run has no time-to-train."""
    return value if math.isfinite(value) else None
