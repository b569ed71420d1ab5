"""Draw a plan: what failures cost over the size of the cluster, and over the redundancy."""

from __future__ import annotations

from math import isfinite
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from megatron_ft.errors import ConfigError
from megatron_ft.planning.cluster import Cluster
from megatron_ft.planning.estimate import SEARCHED, Estimate, Policy, Recommendation, evaluate, search

# Okabe and Ito's palette, which colour-blind readers can distinguish; lines and markers repeat the distinction.
STYLES: dict[Policy, tuple[str, str, str]] = {
    "restart": ("#3A3A3A", ":", "s"),
    "replication": ("#E69F00", "--", "^"),
    "spare": ("#D55E00", "-", "v"),
    "recover": ("#56B4E9", "--", "x"),
    "stacked_quota": ("#0072B2", "-.", "D"),
    "stacked_quota_rejoin": ("#009E73", "-", "o"),
}
_ENDS = (".png", ".pdf", ".svg")
_FACTORS = 2.0 ** np.arange(-3, 3.5, 0.5)
"""Sizes of the drawn clusters, relative to the given one."""
_LEAST, _MOST = 0.001, 3000.0
"""Costs that are drawn, in percent of the failure-free time."""


def check_path(path: Path) -> None:
    """Raise ``ConfigError`` for a name with an unknown ending. It is called before anything is computed."""
    if path.suffix.lower() not in _ENDS:
        raise ConfigError(f"--plot is {path}; the name must end in one of: {' '.join(_ENDS)}")


def plan_plot(cluster: Cluster, plan: Recommendation, path: Path) -> None:
    """Draw the time that failures and checkpoints cost over the size of the cluster, in percent of the failure-free time;
    with a policy whose time depends on the redundancy, a second panel over the redundancy."""
    searched = any(estimate.policy in SEARCHED for estimate in plan.estimates)
    figure, panels = plt.subplots(1, 1 + searched, figsize=(6 + 5 * searched, 4.6), sharey=True, squeeze=False)
    _over_size(panels[0][-1], cluster, [estimate.policy for estimate in plan.estimates])
    if searched:
        _over_redundancy(panels[0][0], cluster, plan)
    for axes in panels[0]:
        _cost_axis(axes)
    panels[0][0].set_ylabel("time beyond the failure-free time")
    handles, names = panels[0][-1].get_legend_handles_labels()
    figure.legend(handles, names, loc="upper center", ncols=len(names), frameon=False, fontsize=8.5, handlelength=3.2)
    figure.tight_layout(rect=(0, 0, 1, 0.93))
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _over_redundancy(axes: Axes, cluster: Cluster, plan: Recommendation) -> None:
    for estimate in plan.estimates:
        colour, line, marker = STYLES[estimate.policy]
        if estimate.policy not in SEARCHED:
            axes.axhline(_cost(estimate), color=colour, linestyle=line, linewidth=1.6)
            continue
        found = search(cluster, estimate.policy)
        axes.plot([e.redundancy for e in found], [_cost(e) for e in found], color=colour, linestyle=line, marker=marker)
    axes.axvline(plan.r_star, color="#BBBBBB", linewidth=1, zorder=0)
    axes.annotate(
        f"r* = {plan.r_star}", xy=(plan.r_star, 0), xycoords=("data", "axes fraction"), xytext=(4, 4),
        textcoords="offset points", fontsize=8, color="#666666",
    )  # fmt: skip
    axes.set_xlabel(f"redundancy r (N = {cluster.groups} groups)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _over_size(axes: Axes, cluster: Cluster, policies: list[Policy]) -> None:
    """Draw the panel over the size, with a constant failure rate per node. Sizes with MTBF below one step are left
    out."""
    sizes = sorted({max(1, round(cluster.groups * factor)) for factor in _FACTORS})
    least_s = cluster.step_s / (cluster.mtbf_s * cluster.groups)
    sizes = [size for size in sizes if size * least_s <= 1]
    for policy in policies:
        colour, line, marker = STYLES[policy]
        able = [size for size in sizes if size > 1 or policy == "restart"]
        costs = [_cost(evaluate(cluster.scaled(size), policy)) for size in able]
        gpus = [size * cluster.gpus_per_group for size in able]
        name = policy.replace("_rejoin", " + rejoin")
        # Hollow markers: of two policies that cost the same, both are seen.
        axes.plot(
            gpus,
            costs,
            color=colour,
            linestyle=line,
            marker=marker,
            markersize=12 if marker == "x" else 6,
            fillstyle="none",
            linewidth=1.6,
            label=name,
        )
    axes.axvline(cluster.gpus, color="#BBBBBB", linewidth=1, zorder=0)
    axes.annotate(
        "this cluster", xy=(cluster.gpus, 1), xycoords=("data", "axes fraction"), xytext=(4, -10),
        textcoords="offset points", fontsize=8, color="#666666",
    )  # fmt: skip
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("GPUs (constant failure rate per node)")


def _cost_axis(axes: Axes) -> None:
    """A logarithm of the cost, not of the time: 0.3% and 0.6% are as far apart as 30% and 60%."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.set_ylim(max(_LEAST, low), min(_MOST, high))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}%"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.25, which="both")


def _cost(estimate: Estimate) -> float:
    """Return the time beyond the failure-free one in percent of it; no progress is far above the picture."""
    return max(_LEAST, 100 * (estimate.relative_time - 1)) if isfinite(estimate.relative_time) else 1e3 * _MOST
