"""The ``fault_tolerance`` section of a config that implements a recommendation, and the advice beside it."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, isfinite
from typing import Any

from scipy.special import pdtr

from megatron_ft.core.replication.placement import largest_redundancy
from megatron_ft.plan.cluster import Cluster
from megatron_ft.plan.estimate import Estimate, Recommendation, label
from megatron_ft.utils.durations import duration

Section = dict[str, Any]
SURE = 0.99
"""Share of the time for which the spare nodes suffice."""
EXAMPLE_REPAIR_HOURS = 24.0
REPORT_TIMEOUT_S = 60.0
"""The config's default. A group reports between two microbatches, so the timeout must exceed the longest of them."""


def section(cluster: Cluster, estimate: Estimate) -> Section:
    """Return the section with all that is recommended for this policy, defaults included."""
    policy = estimate.policy.removesuffix("_rejoin")
    found: Section = {"policy": policy, "min_groups": 1}
    if policy in ("stacked_quota", "spare", "replication"):
        found["redundancy"] = estimate.redundancy
    if policy in ("stacked_quota", "spare"):
        golomb = estimate.redundancy <= largest_redundancy(cluster.groups)
        found["placement"] = "full" if estimate.redundancy == cluster.groups else "golomb" if golomb else "consecutive"
    if 4 * cluster.microbatch_s > REPORT_TIMEOUT_S:
        found["detector"] = {"report_timeout_s": float(ceil(4 * cluster.microbatch_s))}
    found["checkpoint"] = {"period_s": float(f"{estimate.period_s:.3g}")}
    found["rejoin"] = {"enabled": estimate.policy == "stacked_quota_rejoin"}
    return {"fault_tolerance": found}


def choose(
    cluster: Cluster, plan: Recommendation, refused: Callable[[Section], str | None]
) -> tuple[Section | None, list[str]]:
    """Return the section of the best policy that the config accepts, and advice.

    ``refused`` returns the config's reason against a section, or None.
    """
    hints: list[str] = []
    for estimate in (plan.best, *(e for e in plan.estimates if e is not plan.best)):
        candidate = section(cluster, estimate)
        why = refused(candidate)
        if why is None:
            # What the section cannot say: where its values come from, and what has to be decided beside it.
            return candidate, [*hints, _of_period(cluster, estimate), _of_spares(cluster), _of_job(cluster, estimate)]
        if not hints:
            hints.append(f"this version cannot run {label(estimate)} ({why})")
    return None, hints


def spare_nodes(cluster: Cluster, repair_hours: float) -> int:
    """Return the number of nodes to hold in reserve, so that they suffice for the share ``SURE`` of the time.

    Every failure is taken for one that sends a node to repair; the number of nodes in repair is Poisson distributed.
    """
    mean = repair_hours * 3600 / cluster.mtbf_s
    spares = max(0, int(mean) - 1)
    while pdtr(spares, mean) < SURE:
        spares += 1
    return spares


def _of_period(cluster: Cluster, estimate: Estimate) -> str:
    period = f"checkpoint.period_s: every {duration(estimate.period_s)}"
    run = f"the run's {duration(cluster.failure_free_s)} ({cluster.steps:,} steps)"
    if estimate.policy == "restart":
        why = f"every failure, one in {duration(cluster.mtbf_s)}, ends the job"
    elif isfinite(estimate.endured) and estimate.policy in ("spare", "replication"):
        why = f"a failure that is not masked comes every {duration(estimate.uptime_s)}"
    elif cluster.job_mtbf_s <= cluster.failure_free_s * estimate.relative_time:
        why = f"the whole job ends every {duration(cluster.job_mtbf_s)}"
    else:
        why = f"insures against one end of the job, as none is expected in {run}; a longer run has a longer period"
    return f"{period}: {why}. 'auto' measures all this in the run"


def _of_spares(cluster: Cluster) -> str:
    known = cluster.repair_hours is not None
    hours = cluster.repair_hours or EXAMPLE_REPAIR_HOURS
    spares = spare_nodes(cluster, hours)
    enough = f"{spares} beside the job's {ceil(cluster.nodes):,} suffice for {SURE:.0%} of the time"
    if known:
        return f"spare nodes: {enough}, with {duration(hours * 3600)} to repair a node"
    return f"spare nodes: if a repair takes {duration(hours * 3600)} (--repair-hours says how long), {enough}"


def _of_job(cluster: Cluster, estimate: Estimate) -> str:
    if isfinite(cluster.job_mtbf_s):
        lost_s = cluster.down_s + estimate.period_s / 2
        return (
            f"failures of the whole job: each costs {duration(lost_s)} (a restart and half a checkpoint period) under "
            f"this policy, every {duration(cluster.job_mtbf_s)}"
        )
    return "failures of the whole job (fabric, file system) are left out; --job-mtbf-hours takes them into account"
