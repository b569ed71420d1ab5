"""The run record as pictures: the loss with failures marked, and the timeline of the groups."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from megatron_ft.report.record import Failure, RunRecord

# Okabe and Ito's palette: told apart by colour-blind readers too.
COLOURS = {
    "compute": "#56B4E9",
    "reduce": "#009E73",
    "patch": "#E69F00",
    "recover": "#D55E00",
    "update": "#CC79A7",
    "dead": "#3A3A3A",
}
NAMES = {
    "compute": "computing",
    "reduce": "reducing",
    "patch": "patching",
    "recover": "recovering",
    "update": "updating",
    "dead": "dead",
}
_ZOOMS = 4


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
    top.legend(loc="lower left", frameon=False)
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
    """A line per interrupted step; groups lost together share it."""
    by_step: dict[int, list[Failure]] = {}
    for failure in record.failures:
        if failure.recovery:
            by_step.setdefault(failure.recovery["step"], []).append(failure)
    for step, failures in sorted(by_step.items()):
        axes.axvline(step, color=COLOURS["recover"], linestyle="--", linewidth=1)
        what = failures[0].fault["signal"] or f"exit code {failures[0].fault['code']}"
        groups = " ".join(str(failure.fault["group"]) for failure in failures)
        axes.annotate(
            f"group {groups} lost\n{what}",
            xy=(step, 1),
            xycoords=("data", "axes fraction"),
            xytext=(4, -4),
            textcoords="offset points",
            va="top",
            fontsize=8,
            color=COLOURS["recover"],
        )


def _difference(axes: Axes, record: RunRecord, reference: RunRecord) -> None:
    common = sorted(record.losses.keys() & reference.losses.keys())
    differences = [abs(record.losses[s] - reference.losses[s]) / reference.losses[s] for s in common]
    axes.plot(common, differences, color="#0072B2", linewidth=1.2, marker=".", markersize=3)
    axes.set_yscale("symlog", linthresh=1e-9)
    axes.set_ylim(0, 1e-4)
    axes.axhline(1e-5, color="#888888", linestyle=":", linewidth=1)
    axes.set_yticks([0, 1e-9, 1e-7, 1e-5])
    axes.set_ylabel("relative\ndifference")
    axes.grid(alpha=0.25)


def timeline_plot(record: RunRecord, path: Path) -> None:
    """One row per group over wall time: the whole run, then a closer look at each interruption."""
    zooms = _interruptions(record)[:_ZOOMS]
    height = 0.9 + 0.32 * record.groups
    figure, axes = plt.subplots(1 + len(zooms), 1, figsize=(10, (1 + len(zooms)) * height + 0.8), squeeze=False)
    zero, end = _extent(record)
    _draw(axes[0][0], record, zero, zero, end)
    axes[0][0].set_title("whole run", loc="left", fontsize=9)
    for row, (start, stop, title) in zip(axes[1:], zooms, strict=True):
        _draw(row[0], record, zero, start, stop)
        row[0].set_title(title, loc="left", fontsize=9)
    axes[-1][0].set_xlabel("seconds since the first step began")
    handles = [Patch(color=colour, label=NAMES[phase]) for phase, colour in COLOURS.items()]
    figure.legend(handles=handles, loc="upper center", ncols=len(handles), frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.35 / figure.get_figheight()))
    _save(figure, path)


def _extent(record: RunRecord) -> tuple[float, float]:
    spans = [span for spans in record.timeline.values() for span in spans]
    if not spans:
        return record.lines[0]["t"], record.lines[-1]["t"]
    return min(span.start for span in spans), max(span.end for span in spans)


def _interruptions(record: RunRecord) -> list[tuple[float, float, str]]:
    """(from, to, title) around each recovery: half a step before the first death until the step is committed."""
    committed = {line["step"]: line for line in record.events("step")}
    by_epoch: dict[int, list[Failure]] = {}
    for failure in record.failures:
        if failure.recovery:
            by_epoch.setdefault(failure.recovery["epoch"], []).append(failure)
    found = []
    for failures in by_epoch.values():
        recovery = failures[0].recovery
        step = committed.get(recovery["step"])
        if step is None:
            continue
        died = min(_died(record, failure) for failure in failures)
        groups = " ".join(str(failure.fault["group"]) for failure in failures)
        margin = 0.4 * step["duration_s"]
        title = f"group {groups} lost in step {recovery['step']}: stall {recovery['stall_s']:.3f} s"
        found.append((min(died, step["t"] - step["duration_s"]) - margin, step["t"] + margin, title))
    return found


def _died(record: RunRecord, failure: Failure) -> float:
    """When the group died: when the signal was sent if it was injected, else when the agent noticed."""
    sent = [line["t"] for line in record.events("inject") if line["pid"] == failure.fault["pid"]]
    return sent[-1] if sent else failure.fault["t"]


def _draw(axes: Axes, record: RunRecord, zero: float, start: float, stop: float) -> None:
    for group, spans in record.timeline.items():
        by_phase: dict[str, list[tuple[float, float]]] = {}
        for span in spans:
            if span.end >= start and span.start <= stop:
                by_phase.setdefault(span.phase, []).append((span.start - zero, span.end - span.start))
        for phase, bars in by_phase.items():
            axes.broken_barh(bars, (group - 0.4, 0.8), color=COLOURS[phase], linewidth=0)
    for failure in record.failures:
        died = _died(record, failure)
        if died < stop:
            axes.broken_barh(
                [(died - zero, stop - died)], (failure.fault["group"] - 0.4, 0.8), color=COLOURS["dead"], linewidth=0
            )
    axes.set_xlim(start - zero, stop - zero)
    axes.set_ylim(record.groups - 0.5, -0.5)
    axes.set_yticks(range(record.groups), [f"group {group}" for group in range(record.groups)], fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _save(figure: plt.Figure, path: Path) -> None:
    figure.savefig(path, dpi=130)
    plt.close(figure)
