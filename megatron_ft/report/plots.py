"""The run record as pictures: the loss with failures marked, and the timeline of the groups."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from statistics import median

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from megatron_ft.faults.checkers import LOSS_TOLERANCE
from megatron_ft.report.record import Failure, RunRecord
from megatron_ft.report.words import ended

# Okabe and Ito's palette: told apart by colour-blind readers too.
COLOURS = {
    "compute": "#56B4E9",
    "forward": "#56B4E9",
    "backward": "#0072B2",
    "reduce": "#009E73",
    "patch": "#E69F00",
    "patch_forward": "#E69F00",
    "patch_backward": "#A66F00",
    "recover": "#D55E00",
    "update": "#CC79A7",
    "dead": "#3A3A3A",
}
NAMES = {
    "compute": "computing",
    "forward": "forward",
    "backward": "backward",
    "reduce": "reducing",
    "patch": "patching",
    "patch_forward": "patching, forward",
    "patch_backward": "patching, backward",
    "recover": "recovering",
    "update": "updating",
    "dead": "dead",
}
_ZOOMS = 4
_MOST_ROWS = 48
"""With more ranks only the first of each group is shown."""
_BEFORE = 1.5
"""Step durations shown before a fault, so that a normal step is there to compare with."""


def loss_plot(record: RunRecord, reference: RunRecord | None, path: Path) -> None:
    """Loss over steps with failures marked; below, the relative difference to the failure-free run."""
    rows = 2 if reference else 1
    figure, axes = plt.subplots(
        rows, 1, figsize=(9, 3.4 + 1.6 * (rows - 1)), sharex=True, squeeze=False, height_ratios=[3, 1][:rows]
    )
    top = axes[0][0]
    if reference is not None:
        _curve(top, reference.losses, color="#BBBBBB", linewidth=5, label="failure-free, same seed")
    _curve(top, record.losses, color="#0072B2", linewidth=1.6, label="this run")
    _mark_failures(top, record)
    top.set_ylabel("loss")
    top.legend(loc="lower left", framealpha=0.8, edgecolor="none")
    top.xaxis.set_major_locator(MaxNLocator(integer=True))
    top.grid(alpha=0.25)
    if reference is not None:
        _difference(axes[1][0], record, reference)
    axes[-1][0].set_xlabel("step")
    figure.tight_layout()
    _save(figure, path)


def _curve(axes: Axes, losses: dict[int, float], **style) -> None:
    steps = sorted(losses)
    axes.plot(steps, [losses[step] for step in steps], **style)


def _mark_failures(axes: Axes, record: RunRecord) -> None:
    """A line per interrupted step; groups lost together share it. Labels too close together are staggered."""
    by_step: dict[int, list[Failure]] = {}
    for failure in record.failures:
        if failure.recovery:
            by_step.setdefault(failure.recovery["step"], []).append(failure)
    last, row, previous = max(record.losses, default=0), 0, -math.inf
    for step, failures in sorted(by_step.items()):
        late = step > 0.75 * last  # its label goes to the left, or it would leave the picture
        row = row + 1 if step - previous < 0.3 * last else 0
        previous = step
        axes.axvline(step, color=COLOURS["recover"], linestyle="--", linewidth=1)
        axes.annotate(
            _lost(failures),
            xy=(step, 1),
            xycoords=("data", "axes fraction"),
            xytext=(-4 if late else 4, -4 - 12 * (row % 3)),
            textcoords="offset points",
            ha="right" if late else "left",
            va="top",
            fontsize=8,
            color=COLOURS["recover"],
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
        )


def _lost(failures: list[Failure]) -> str:
    """"group 2 lost (SIGKILL)", or "groups 1 2 lost (SIGKILL)" when one recovery was for several."""
    groups = " ".join(str(failure.fault["group"]) for failure in failures)
    causes = {textwrap.shorten(ended(failure.fault), 40, placeholder=" ..."): None for failure in failures}
    return f"group{'s' if len(failures) > 1 else ''} {groups} lost ({', '.join(causes)})"


def _difference(axes: Axes, record: RunRecord, reference: RunRecord) -> None:
    common = sorted(record.losses.keys() & reference.losses.keys())
    differences = [abs(record.losses[s] - reference.losses[s]) / abs(reference.losses[s]) for s in common]
    # A run that diverged must be seen to: the axis grows with the largest difference.
    largest = max((value for value in differences if math.isfinite(value)), default=0.0)
    top = 10.0 ** max(-4, math.ceil(math.log10(max(largest, 1e-9))) + 1)
    axes.plot(common, differences, color="#0072B2", linewidth=1.2, marker=".", markersize=3)
    axes.set_yscale("symlog", linthresh=1e-9)
    axes.set_ylim(0, top)
    axes.axhline(LOSS_TOLERANCE, color="#888888", linestyle=":", linewidth=1)
    axes.set_yticks([0, *(10.0**power for power in range(-9, round(math.log10(top)), 2))])
    axes.set_ylabel("relative\ndifference")
    axes.grid(alpha=0.25)


def timeline_plot(record: RunRecord, path: Path) -> None:
    """One row per rank over wall time: the whole run, then a closer look at each interruption."""
    zooms = _interruptions(record)[:_ZOOMS]
    rows = _rows(record)
    height = 0.9 + (0.32 if len(rows) == record.groups else 0.2) * len(rows)
    figure, axes = plt.subplots(1 + len(zooms), 1, figsize=(10, (1 + len(zooms)) * height + 0.8), squeeze=False)
    zero, end = _extent(record)
    _draw(axes[0][0], record, zero, zero, end)
    axes[0][0].set_title("whole run", loc="left", fontsize=9)
    for row, (start, stop, title) in zip(axes[1:], zooms, strict=True):
        _draw(row[0], record, zero, start, stop)
        row[0].set_title(title, loc="left", fontsize=9)
    axes[-1][0].set_xlabel("seconds since the first step began")
    seen = {span.phase for row in rows for span in record.timeline[row]} | {"dead"}
    handles = [Patch(color=colour, label=NAMES[phase]) for phase, colour in COLOURS.items() if phase in seen]
    figure.legend(handles=handles, loc="upper center", ncols=len(handles), frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.35 / figure.get_figheight()))
    _save(figure, path)


def _rows(record: RunRecord) -> list[tuple[int, int]]:
    """Which ranks are shown, (group, position), from top to bottom."""
    everybody = list(record.timeline)
    return everybody if len(everybody) <= _MOST_ROWS else [row for row in everybody if row[1] == 0]


def _extent(record: RunRecord) -> tuple[float, float]:
    spans = [span for spans in record.timeline.values() for span in spans]
    if not spans:
        return record.lines[0]["t"], record.lines[-1]["t"]
    return min(span.start for span in spans), max(span.end for span in spans)


def _interruptions(record: RunRecord) -> list[tuple[float, float, str]]:
    """(from, to, title) around each recovery: some steps' time before the first death until the step is committed."""
    committed = {line["step"]: line for line in record.steps}
    normal_s = median([line["duration_s"] for line in record.steps] or [0.0])
    by_epoch: dict[int, list[Failure]] = {}
    for failure in record.failures:
        if failure.recovery:
            by_epoch.setdefault(failure.recovery["epoch"], []).append(failure)
    found = []
    for failures in by_epoch.values():
        recovery = failures[0].recovery
        died = min(_died(record, failure) for failure in failures)
        over = committed.get(recovery["step"], recovery)["t"]  # not committed yet in a run that still goes on
        title = f"{_lost(failures)} in step {recovery['step']}: stall {recovery['stall_s']:.3f} s"
        found.append((died - _BEFORE * normal_s, max(died, over, recovery["t"]) + 0.4 * normal_s, title))
    return found


def _died(record: RunRecord, failure: Failure) -> float:
    """When the group died: when the signal was sent if it was injected, else as long before the notice as that says."""
    sent = [line["t"] for line in record.injects if line["pid"] == failure.fault["pid"] is not None]
    return sent[-1] if sent else failure.fault["t"] - (failure.fault["detected_s"] or 0.0)


def _draw(axes: Axes, record: RunRecord, zero: float, start: float, stop: float) -> None:
    rows = _rows(record)
    for row, rank in enumerate(rows):
        by_phase: dict[str, list[tuple[float, float]]] = {}
        for span in record.timeline[rank]:
            if span.end >= start and span.start <= stop:
                by_phase.setdefault(span.phase, []).append((span.start - zero, span.end - span.start))
        for phase, bars in by_phase.items():
            axes.broken_barh(bars, (row - 0.4, 0.8), color=COLOURS[phase], linewidth=0)
    for failure in record.failures:
        died = _died(record, failure)
        for row, (group, _) in enumerate(rows):
            if died < stop and group == failure.fault["group"]:
                axes.broken_barh([(died - zero, stop - died)], (row - 0.4, 0.8), color=COLOURS["dead"], linewidth=0)
    axes.set_xlim(start - zero, stop - zero)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    alone = len(rows) == record.groups
    names = [f"group {group}" if alone else f"group {group}, rank {position}" for group, position in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=8 if alone else 6)
    axes.tick_params(axis="x", labelsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _save(figure: plt.Figure, path: Path) -> None:
    figure.savefig(path, dpi=130)
    plt.close(figure)
