"""The ``fault_tolerance`` section of a config that implements a recommendation, ready to paste."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Any

from megatron_ft.core.replication.placement import largest_redundancy
from megatron_ft.planning.cluster import Cluster
from megatron_ft.planning.estimate import Estimate, Recommendation, duration, label

Section = dict[str, Any]
REPORT_TIMEOUT_S = 60.0
"""The config's default. A group reports between two microbatches, so the timeout must exceed the longest of them."""


def section(cluster: Cluster, estimate: Estimate) -> Section:
    """Return the section with the keys that need another value than the default of ``config.schema``."""
    policy = estimate.policy.removesuffix("_rejoin")
    found: Section = {"policy": policy}
    if policy in ("stacked_quota", "spare", "replication"):
        found["redundancy"] = estimate.redundancy
        found["placement"] = _placement(cluster.groups, estimate.redundancy)
    if 4 * cluster.microbatch_s > REPORT_TIMEOUT_S:
        found["detector"] = {"report_timeout_s": float(ceil(4 * cluster.microbatch_s))}
    return {"fault_tolerance": found}


def choose(
    cluster: Cluster, plan: Recommendation, refused: Callable[[Section], str | None]
) -> tuple[Section | None, list[str]]:
    """Return the section of the best policy that the config accepts, and hints about other settings.

    ``refused`` returns the config's reason against a section, or None.
    """
    hints: list[str] = []
    for estimate in (plan.best, *(e for e in plan.estimates if e is not plan.best)):
        candidate = section(cluster, estimate)
        why = refused(candidate)
        if why is None:
            return candidate, hints + _beside(cluster, estimate)
        if not hints:
            hints.append(f"this version cannot run {label(estimate)} ({why})")
    return None, hints


def _beside(cluster: Cluster, estimate: Estimate) -> list[str]:
    """Return hints about settings that the plan assumes."""
    period = f"{estimate.period_s:.0f} s ({duration(estimate.period_s)})"
    hints = [f"checkpoint period: {period}: set checkpoint.period_s, or leave it at 'auto'"]
    if estimate.policy == "stacked_quota_rejoin" and cluster.rejoin_s is not None:
        after = duration(cluster.rejoin_s)
        hints.append(f"lost groups must come back after {after}: rejoin.enabled, which is the default")
    return hints


def _placement(groups: int, redundancy: int) -> str:
    if redundancy == groups:
        return "full"
    return "golomb" if redundancy <= largest_redundancy(groups) else "consecutive"
