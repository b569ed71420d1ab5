"""A plan as tables and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from math import isfinite
from typing import Any

from megatron_ft.plan.cluster import Cluster
from megatron_ft.plan.config_section import Section
from megatron_ft.plan.estimate import SEARCHED, Estimate, Recommendation, search
from megatron_ft.utils.durations import duration
from megatron_ft.utils.tables import Column, FittedTable

_LEGEND = (
    "mu: failures from one restart to the next. S_bar: stacks of compute per step, patch included. T_c*: checkpoint "
    "period. A: availability. J = S_bar / A. T: time-to-train, T_0 without a failure."
)
_DIGITS = 6
"""Significant digits of numbers in the JSON; more would differ between versions of scipy."""


def policy_table(plan: Recommendation) -> FittedTable:
    """Return a table with one row per policy, fastest first."""
    names = ("r", "mu", "S_bar", "T_c*", "A", "J", "T / T_0", "T", "GPU-h\nlost")
    least = {"J": 3, "A": 2, "mu": 1}
    columns = [Column("policy"), *(Column(name, right=True, last=least.get(name, 0)) for name in names)]
    rows = [_row(estimate) for estimate in plan.estimates]
    notes = [note for estimate in plan.estimates for note in estimate.notes]
    if any(estimate.policy in SEARCHED for estimate in plan.estimates):
        notes.insert(0, f"SPARe's r* = floor(log2 N + 0.833) = {plan.r_star}.")
    caption = "\n".join([_LEGEND, *notes])
    best = next(number for number, estimate in enumerate(plan.estimates) if estimate is plan.best)
    return FittedTable("Policies", columns, rows, "no policy fits the cluster", caption, best)


def _row(e: Estimate) -> list[str]:
    return [
        e.policy.replace("_rejoin", "\n+ rejoin"),
        str(e.redundancy) if e.redundancy > 1 else "-",
        f"{e.endured:.4g}" if isfinite(e.endured) else "never",
        _number(e.mean_stacks),
        short(e.period_s),
        f"{e.availability:.1%}",
        f"{e.objective:.3g}" if isfinite(e.objective) else "-",
        _number(e.relative_time),
        short(e.time_s),
        large(e.gpu_hours_lost),
    ]


def cluster_table(cluster: Cluster) -> FittedTable:
    """Return a table of the plan's input."""
    failures = cluster.failure_free_s / cluster.mtbf_s
    rejoin = "never" if cluster.rejoin_s is None else duration(cluster.rejoin_s)
    rows = (
        ("GPUs, in groups of", f"{cluster.gpus:,} / {cluster.gpus_per_group:,}"),
        ("groups (N), microbatches of each (G)", f"{cluster.groups:,} / {cluster.microbatches}"),
        ("a failure somewhere every", duration(cluster.mtbf_s)),
        ("step, of it all-reduce", f"{cluster.step_s:g} s / {cluster.allreduce_s:g} s"),
        ("steps, failure-free time", f"{cluster.steps:,} / {duration(cluster.failure_free_s)}"),
        ("failures in that time", f"{failures:,.1f}"),
        (
            "the whole job fails every",
            "not considered" if cluster.job_mtbf_hours is None else duration(cluster.job_mtbf_s),
        ),
        ("checkpoint, restart", f"{cluster.checkpoint_s:g} s / {duration(cluster.restart_s)}"),
        ("detection, reconfiguration", f"{cluster.detection_s:g} s / {cluster.reconfigure_s:g} s"),
        ("a lost group is back after", rejoin),
    )
    return FittedTable("Cluster", (Column(""), Column("", right=True)), rows, "")


def as_json(
    cluster: Cluster,
    plan: Recommendation,
    pasted: Section | None,
    hints: list[str],
    source: str | None,
    verified: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Return what the tables show, and the search over r. Infinite values are null. ``verified``: the rows about
    verification, if they were asked for."""
    searched = {p: search(cluster, p) for p in SEARCHED} if cluster.groups > 1 else {}
    derived = {
        "groups": cluster.groups,
        "nodes": cluster.nodes,
        "compute_s": cluster.compute_s,
        "failure_free_s": cluster.failure_free_s,
        "expected_failures": cluster.failure_free_s / cluster.mtbf_s,
    }
    return _plain(
        {
            "cluster": {**asdict(cluster), **derived, "source": source},
            "r_star": plan.r_star,
            "recommendation": {**_estimate(plan.best), "reason": plan.reason},
            "policies": [_estimate(estimate) for estimate in plan.estimates],
            "search": {policy: [_estimate(e) for e in found] for policy, found in searched.items()},
            "section": pasted,
            "hints": hints,
            **({} if verified is None else {"verification": verified}),
        }
    )


def _estimate(estimate: Estimate) -> dict[str, Any]:
    return {**asdict(estimate), "objective": estimate.objective}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if isfinite(value) else None
    return value


def short(seconds: float) -> str:
    """Return a duration like :func:`duration`, short enough for a table of 80 columns."""
    value, _, unit = duration(seconds).partition(" ")
    if not unit:
        return value
    number = float(value.replace(",", ""))
    return (f"{number:.0f}" if number >= 10 else f"{number:.2g}") + unit.replace("days", "d")


def large(value: float) -> str:
    """Return a number with three digits and a unit, such as 11.5M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if size <= value < float("inf"):
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}" if isfinite(value) else "-"


def _number(value: float) -> str:
    return f"{value:.4g}" if isfinite(value) else "-"
