"""Draw a plan: time-to-train over the redundancy, and over the size of the cluster."""

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

# Okabe and Ito's palette, which colour-blind readers can distinguish; line styles repeat the distinction.
STYLES: dict[Policy, tuple[str, str]] = {
    "restart": ("#3A3A3A", ":"),
    "replication": ("#E69F00", "--"),
    "spare": ("#D55E00", "-"),
    "recover": ("#56B4E9", "--"),
    "stacked_quota": ("#0072B2", "-."),
    "stacked_quota_rejoin": ("#009E73", "-"),
}
_ENDS = (".png", ".pdf", ".svg")
_FACTORS = 2.0 ** np.arange(-3, 3.5, 0.5)
"""Sizes of the drawn clusters, relative to the given one."""
_TOP = 30.0
"""Largest time that is drawn, in units of the failure-free time."""


def check_path(path: Path) -> None:
    """Raise ``ConfigError`` for a name with an unknown ending. It is called before anything is computed."""
    if path.suffix.lower() not in _ENDS:
        raise ConfigError(f"--plot is {path}; the name must end in one of: {' '.join(_ENDS)}")


def plan_plot(cluster: Cluster, plan: Recommendation, path: Path) -> None:
    """Draw two panels, both with the time-to-train in units of the failure-free time."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.4), sharey=True)
    _over_redundancy(axes[0], cluster, plan)
    _over_size(axes[1], cluster, [estimate.policy for estimate in plan.estimates])
    for each in axes:
        _time_axis(each)
    axes[0].set_ylabel("time-to-train / failure-free time")
    handles, names = axes[1].get_legend_handles_labels()
    figure.legend(handles, names, loc="upper center", ncols=len(names), frameon=False, fontsize=8.5, handlelength=2.6)
    figure.tight_layout(rect=(0, 0, 1, 0.93))
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _over_redundancy(axes: Axes, cluster: Cluster, plan: Recommendation) -> None:
    for estimate in plan.estimates:
        colour, line = STYLES[estimate.policy]
        if estimate.policy not in SEARCHED:
            axes.axhline(_shown(estimate), color=colour, linestyle=line, linewidth=1.6)
            continue
        found = search(cluster, estimate.policy)
        axes.plot([e.redundancy for e in found], [_shown(e) for e in found], color=colour, linestyle=line, marker=".")
        axes.plot(estimate.redundancy, _shown(estimate), "o", color=colour, markersize=8, fillstyle="none")
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
        colour, line = STYLES[policy]
        able = [size for size in sizes if size > 1 or policy == "restart"]
        times = [_shown(evaluate(cluster.scaled(size), policy)) for size in able]
        gpus = [size * cluster.gpus_per_group for size in able]
        axes.plot(
            gpus, times, color=colour, linestyle=line, linewidth=1.6, label=policy.replace("_rejoin", " + rejoin")
        )
    axes.axvline(cluster.gpus, color="#BBBBBB", linewidth=1, zorder=0)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("GPUs (constant failure rate per node)")


def _time_axis(axes: Axes) -> None:
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.set_ylim(max(0.98, min(low, 1.0)), min(_TOP, max(high, 1.1)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}" if value in (2, 3, 5, 20) else ""))
    axes.grid(alpha=0.25, which="both")


def _shown(estimate: Estimate) -> float:
    """Return the relative time; no progress is far above the picture."""
    return estimate.relative_time if isfinite(estimate.relative_time) else 1e3 * _TOP
