"""Draw simulated training runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from megatron_ft.planning.cluster import Cluster
from megatron_ft.simulation.training.training_run import PARTS, Result

COLOURS = dict(zip(PARTS, ("#4c78a8", "#f58518", "#9ecae9", "#e45756", "#72b7b2", "#b279a2", "#bab0ac"), strict=True))


def where_the_time_went(cluster: Cluster, found: Mapping[str, Sequence[Result]], path: Path) -> None:
    """Draw a bar per policy, with the parts of its time in units of the failure-free time."""
    figure, axes = pyplot.subplots(figsize=(9, 0.6 * len(found) + 1.6))
    names = sorted(found, key=lambda policy: mean(result.time_s for result in found[policy]), reverse=True)
    given_up = {name for name in names if not all(result.finished for result in found[name])}
    labels = [f"{name}\n(stopped)" if name in given_up else name for name in names]
    left = [0.0] * len(names)
    for part in PARTS:
        widths = [
            mean(getattr(result, f"{part}_s") for result in found[name]) / cluster.failure_free_s for name in names
        ]
        axes.barh(labels, widths, left=left, label=part, color=COLOURS[part])
        left = [start + width for start, width in zip(left, widths, strict=True)]
    finished = [total for name, total in zip(names, left, strict=True) if name not in given_up]
    if finished and max(left) > 3 * max(finished):
        axes.set_xlim(0, 1.5 * max(finished))  # a policy without progress would hide all others
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel(f"time-to-train over the failure-free {cluster.failure_free_s / 86400:.1f} days")
    axes.legend(ncols=len(PARTS), fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
