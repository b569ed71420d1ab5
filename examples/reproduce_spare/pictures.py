"""The pictures of the reproduction, from the lines that are in the CSV."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import published
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

Row = dict[str, Any]
# Okabe and Ito's palette, as in the planner's pictures.
COLOURS = {
    "spare": "#D55E00",
    "spare, consecutive": "#CC79A7",
    "replication": "#E69F00",
    "recover, G=16": "#56B4E9",
    "quota": "#0072B2",
    "quota, consecutive": "#56B4E9",
    "quota + rejoin": "#009E73",
    "quota, G=16": "#0072B2",
    "quota + rejoin, G=16": "#009E73",
    "quota + rejoin, G=64": "#CC79A7",
}
INPUTS = {
    "microbatches": "G, microbatches per shard",
    "detection_s": "detection, s",
    "rejoin_s": "until a lost group is back, s",
    "mtbf_s": "MTBF of the system, s",
    "rack_share": "share of failures that take 4 neighbours",
    "redundancy": "r, shards that a group hosts",
}


def draw(rows: dict[str, list[Row]], out: Path) -> None:
    _save(_over_redundancy(rows["table"]), out / "spare_time_to_train.png", legend=0.08)
    _save(_closed_forms(rows["mu"], rows["s_bar"]), out / "spare_closed_forms.png")
    _save(_sensitivity(rows["sensitivity"]), out / "spare_sensitivity.png")


def _save(figure: Figure, path: Path, legend: float = 0.0) -> None:
    """``legend``: share of the height that a legend above the axes takes."""
    figure.tight_layout(rect=(0, 0, 1, 1 - legend))
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _over_redundancy(rows: Sequence[Row]) -> Figure:
    """Time-to-train over r and availability below it, a column per N; published bests as crosses."""
    figure, axes = pyplot.subplots(2, 3, figsize=(11, 6), sharex=True, sharey="row", height_ratios=(3, 2))
    for column, N in enumerate(published.GROUPS):
        here = [row for row in rows if row["N"] == N and row["overhead"] != ""]
        for method, bests in published.PUBLISHED.items():
            of_method = [row for row in here if row["method"] == method]
            style = {"color": COLOURS[method], "marker": ".", "linewidth": 1.4}
            for row_axes, value in ((axes[0], "overhead"), (axes[1], "A_of_period")):
                row_axes[column].plot([r["r"] for r in of_method], [r[value] for r in of_method], label=method, **style)
            mark = {"color": COLOURS[method], "marker": "x", "markersize": 9, "linestyle": "", "markeredgewidth": 2}
            axes[0][column].plot(bests[N].r, bests[N].overhead, label=f"{method}, published", **mark)
            axes[1][column].plot(bests[N].r, bests[N].availability, **mark)
        for row in here:
            if row["method"] not in published.PUBLISHED:
                # recover and the quotas lie on each other without rejoin: a thin dark line on a broad one shows both.
                broad = row["method"].startswith("recover")
                line = {"linewidth": 5, "alpha": 0.6, "zorder": 1} if broad else {"linestyle": "--"}
                axes[0][column].axhline(row["overhead"], color=COLOURS[row["method"]], label=row["method"], **line)
        axes[0][column].set_title(f"N = {N}", fontsize=10)
        axes[1][column].set_xlabel("redundancy r")
    axes[0][0].set_yscale("log")
    axes[0][0].set_ylim(1, 30)
    axes[0][0].set_ylabel("time-to-train / failure-free\n(log scale)")
    axes[1][0].set_ylabel("availability A(T_c*)")
    for each in axes[0]:
        _plain_log(each.yaxis)
    for each in axes.flat:
        each.grid(alpha=0.25)
    handles, names = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, names, fontsize=8, loc="upper center", ncols=4, frameon=False)
    return figure


def _plain_log(axis: Any) -> None:
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}" if value in (2, 3, 5, 20) else ""))


def _closed_forms(mu: Sequence[Row], s_bar: Sequence[Row]) -> Figure:
    """Lines are closed forms, dots Monte Carlo."""
    figure, axes = pyplot.subplots(1, 3, figsize=(11, 3.8))
    for N, colour in zip(published.GROUPS, ("#0072B2", "#D55E00", "#009E73"), strict=True):
        _pair(axes[0], [row for row in mu if row["N"] == N], "closed_form", "golomb", colour, f"N = {N}")
        here = [row for row in s_bar if row["N"] == N]
        _pair(axes[1], here, "bound", "mc_bound", colour, f"N = {N}")
        _pair(axes[2], here, "with_patch", "mc_with_patch", colour, f"N = {N}")
        axes[2].plot([r["r"] for r in here], [r["simulated"] for r in here], "+", color=colour)
    titles = ("failures until a wipe-out, mu", "stacks per step, bound", "S_bar with patch (+: whole simulated runs)")
    for each, title in zip(axes, titles, strict=True):
        each.set_title(title, fontsize=10)
        each.set_xlabel("redundancy r (line: closed form, dots: Monte Carlo)", fontsize=8)
        each.grid(alpha=0.25)
    axes[0].legend(fontsize=8)
    return figure


def _pair(axes: Axes, rows: Sequence[Row], form: str, measured: str, colour: str, label: str) -> None:
    axes.plot([row["r"] for row in rows], [row[form] for row in rows], color=colour, label=label, linewidth=1.2)
    dots = [row for row in rows if row[measured] != ""]
    axes.plot([row["r"] for row in dots], [row[measured] for row in dots], "o", color=colour, markersize=3.5)


def _sensitivity(rows: Sequence[Row]) -> Figure:
    figure, axes = pyplot.subplots(2, 3, figsize=(11, 6.2))
    for each, (what, label) in zip(axes.flat, INPUTS.items(), strict=True):
        here = [row for row in rows if row["what"] == what and row["overhead"] != ""]
        for method in dict.fromkeys(row["method"] for row in here):
            line = [row for row in here if row["method"] == method]
            style = {"color": COLOURS[method], "linestyle": ":" if "consecutive" in method else "-"}
            each.plot([r["value"] for r in line], [r["overhead"] for r in line], marker=".", label=method, **style)
        each.set_xlabel(label)
        if what in ("microbatches", "rejoin_s", "mtbf_s"):
            each.set_xscale("log", base=2)
            each.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            each.xaxis.set_minor_formatter(NullFormatter())
            each.set_xticks([row["value"] for row in here if row["method"] == here[-1]["method"]])
            each.tick_params(axis="x", labelsize=8)
        each.set_ylim(bottom=1)
        each.grid(alpha=0.25)
        each.legend(fontsize=7)
    for each in axes[:, 0]:
        each.set_ylabel("time-to-train / failure-free")
    return figure
