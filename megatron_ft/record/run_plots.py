"""Draw the run record: the loss with failures marked, and the timeline of the groups."""

from __future__ import annotations

import math
import textwrap
from array import array
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from megatron_ft.record.invariants import LOSS_TOLERANCE
from megatron_ft.record.presence import Stage, died, stages
from megatron_ft.record.run_record import Failure, RunRecord, Span
from megatron_ft.record.words import ended
from megatron_ft.types import given, named

# Okabe and Ito's palette, which colour-blind readers can distinguish.
STATES = {
    "compute": ("#56B4E9", "computing"),
    "forward": ("#56B4E9", "forward"),
    "backward": ("#0072B2", "backward"),
    "reduce": ("#009E73", "reducing"),
    "patch": ("#E69F00", "patching"),
    "patch_forward": ("#E69F00", "patching, forward"),
    "patch_backward": ("#A66F00", "patching, backward"),
    "recover": ("#D55E00", "recovering"),
    "update": ("#CC79A7", "updating"),
    "dead": ("#3A3A3A", "dead"),
    "starting": ("#9A9A9A", "starting again"),
    "receiving": ("#F0E442", "receiving the state"),
    "following": ("#B9B4E0", "following"),
    "left": ("#DDDDDD", "left in order"),
}
"""The colour and the name of what a rank or a group does."""
_UNSAID: dict[str, Any] = {"facecolor": "white", "edgecolor": "#BBBBBB", "hatch": "////"}
"""What a rank did between its last line and its death."""
_ZOOMS = 4
_LEGEND_COLUMNS = 6
_MOST_ROWS = 48
"""Largest number of rows. With more ranks only the first rank of each group is shown; with more groups, ``_MOST_GROUPS``."""
_MOST_GROUPS = 24
_COLUMNS = 2000
"""More than the whole run has pixels in the picture: what is shorter than a column is merged with its neighbours."""
_BEFORE = 1.5
"""Time before a fault that a zoom shows, in durations of a step: it has a normal step to compare with."""


def loss_plot(record: RunRecord, reference: RunRecord | None, path: Path) -> None:
    """Draw the loss over the steps with failures marked, and below it the relative difference to ``reference``."""
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
    """Draw a line per interrupted step, which groups lost together share. Labels that would overlap are staggered."""
    by_step: dict[int, list[Failure]] = {}
    for failure in record.failures:
        if failure.recovery:
            by_step.setdefault(failure.recovery["step"], []).append(failure)
    last, row, previous = max(record.losses, default=0), 0, -math.inf
    for step, failures in sorted(by_step.items()):
        late = step > 0.75 * last  # its label is on the left, to stay inside the picture
        row = row + 1 if step - previous < 0.3 * last else 0
        previous = step
        axes.axvline(step, color=STATES["recover"][0], linestyle="--", linewidth=1)
        axes.annotate(
            _lost(failures),
            xy=(step, 1),
            xycoords=("data", "axes fraction"),
            xytext=(-4 if late else 4, -4 - 12 * (row % 3)),
            textcoords="offset points",
            ha="right" if late else "left",
            va="top",
            fontsize=8,
            color=STATES["recover"][0],
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
        )


def _lost(failures: list[Failure]) -> str:
    """Return "group 2 lost (SIGKILL)", or "groups 1 2 lost (SIGKILL)" when they share a recovery."""
    groups = [failure.fault["group"] for failure in failures]
    causes = {textwrap.shorten(ended(failure.fault), 40, placeholder=" ..."): None for failure in failures}
    return f"{named(groups)} lost ({', '.join(causes)})"


def _difference(axes: Axes, record: RunRecord, reference: RunRecord) -> None:
    common = sorted(record.losses.keys() & reference.losses.keys())
    differences = [abs(record.losses[s] - reference.losses[s]) / abs(reference.losses[s]) for s in common]
    # The axis grows with the largest difference, so that a diverged run is visible.
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
    """Draw one row per rank over wall time: the whole run, then a zoom on each interruption."""
    zooms = _interruptions(record)[:_ZOOMS]
    rows = _rows(record)
    zero, end = _extent(record, rows)
    whole = f"whole run, {len(rows)} of {record.groups} groups" if len(rows) < record.groups else "whole run"
    panels = [(zero, end, whole), *zooms]
    height = 0.9 + (0.32 if len(rows) <= record.groups else 0.2) * len(rows)
    figure, axes = plt.subplots(len(panels), 1, figsize=(10, len(panels) * height + 0.8), squeeze=False)
    absent = stages(record)
    seen = {"dead", *(stage.state for found in absent.values() for stage in found)}
    for row, rank in enumerate(rows):  # a rank's file is read once, for all panels
        columns = _Columns(zero, end)
        recorded = dict.fromkeys((stage.start for stage in absent.get(rank[0], ()) if stage.state == "dead"), zero)
        close: list[dict[str, list[tuple[float, float]]]] = [{} for _ in zooms]
        for span in record.spans(rank):
            columns.add(span)
            recorded = {died: max(last, span.end) if span.end <= died else last for died, last in recorded.items()}
            for (start, stop, _), bars in zip(zooms, close, strict=True):
                if span.end >= start and span.start <= stop:
                    bars.setdefault(span.phase, []).append((span.start - zero, span.end - span.start))
        seen |= columns.seconds.keys()
        columns.draw(axes[0][0], row, zero)
        unsaid = [(last - zero, died - last) for died, last in recorded.items()]
        for panel in axes:
            panel[0].broken_barh(unsaid, (row - 0.4, 0.8), linewidth=0, **_UNSAID)
        for panel, bars in zip(axes[1:], close, strict=True):
            for phase, own in bars.items():
                panel[0].broken_barh(own, (row - 0.4, 0.8), color=STATES[phase][0], linewidth=0)
    for panel, (start, stop, title) in zip(axes, panels, strict=True):
        _draw(panel[0], record, rows, absent, (zero, start, stop))
        panel[0].set_title(title, loc="left", fontsize=9)
    axes[-1][0].set_xlabel("seconds since the first step began")
    handles = [Patch(color=colour, label=name) for phase, (colour, name) in STATES.items() if phase in seen]
    handles.append(Patch(label="alive, its record lost with it", **_UNSAID))
    handles.append(Patch(facecolor="white", edgecolor="#BBBBBB", label="no record"))
    across = min(len(handles), _LEGEND_COLUMNS)
    figure.legend(handles=handles, loc="upper center", ncols=across, frameon=False, fontsize=9)
    lines = math.ceil(len(handles) / across)
    figure.tight_layout(rect=(0, 0, 1, 1 - (0.15 + 0.2 * lines) / figure.get_figheight()))
    _save(figure, path)


class _Columns:
    """The time from ``start`` to ``end`` in equal columns, and how long each phase of one rank lasted in each."""

    def __init__(self, start: float, end: float) -> None:
        self._start, self._end = start, end
        self._width = max(end - start, 1e-9) / _COLUMNS
        self.seconds: dict[str, array] = {}

    def add(self, span: Span) -> None:
        """Neighbouring columns show what a column does not: no span is left out, however short."""
        seconds = self.seconds.get(span.phase)
        if seconds is None:
            seconds = self.seconds[span.phase] = array("d", bytes(8 * _COLUMNS))
        begin, end = (min(max((t - self._start) / self._width, 0.0), _COLUMNS) for t in (span.start, span.end))
        first, last = int(begin), min(int(end), _COLUMNS - 1)
        for column in range(first, last + 1):
            seconds[column] += max(0.0, min(end, column + 1) - max(begin, column))

    def draw(self, axes: Axes, row: int, zero: float) -> None:
        """Each column in the mixed colour of its phases; white is the time without a record."""
        picture = np.ones((1, _COLUMNS, 3))
        for phase, seconds in self.seconds.items():
            share = np.minimum(np.frombuffer(seconds), 1.0)[None, :, None]
            picture -= share * (1.0 - np.array(to_rgb(STATES[phase][0])))
        where = (self._start - zero, self._end - zero, row + 0.4, row - 0.4)
        axes.imshow(picture.clip(0.0, 1.0), extent=where, aspect="auto", interpolation="antialiased")


def _rows(record: RunRecord) -> list[tuple[int, int]]:
    """Return the ranks that are shown, (group, position), from top to bottom: of many groups, those that were lost first."""
    ranks = list(record.timelines)
    if len(ranks) <= _MOST_ROWS:
        return ranks
    groups = [group for group, position in ranks if position == 0]
    if len(groups) > _MOST_ROWS:
        lost = dict.fromkeys(failure.fault["group"] for failure in record.failures if failure.recovery)
        groups = sorted(list(dict.fromkeys([*lost, *groups]))[:_MOST_GROUPS])
    return [(group, 0) for group in groups]


def _extent(record: RunRecord, rows: list[tuple[int, int]]) -> tuple[float, float]:
    extents = [extent for extent in map(record.extent, rows) if extent is not None]
    if not extents:
        return record.lines[0]["t"], record.lines[-1]["t"]
    return min(start for start, _ in extents), max(end for _, end in extents)


def _interruptions(record: RunRecord) -> list[tuple[float, float, str]]:
    """Return (from, to, title) for each recovery: from ``_BEFORE`` steps before the first death to the step's
    commit."""
    committed = dict(zip(record.steps.numbers, record.steps.times, strict=True))
    normal_s = median(record.steps.durations or [0.0])
    by_epoch: dict[int, list[Failure]] = {}
    for failure in record.failures:
        if failure.recovery:
            by_epoch.setdefault(failure.recovery["epoch"], []).append(failure)
    found = []
    for failures in by_epoch.values():
        recovery = given(failures[0].recovery)
        first = min(died(record, failure.fault) for failure in failures)
        over = committed.get(recovery["step"], recovery["t"])  # a running step is not committed yet
        title = f"{_lost(failures)} in step {recovery['step']}: the others wait {recovery['stall_s']:.3f} s"
        found.append((first - _BEFORE * normal_s, max(first, over, recovery["t"]) + 0.4 * normal_s, title))
    return found


def _draw(
    axes: Axes,
    record: RunRecord,
    rows: list[tuple[int, int]],
    absent: dict[int, list[Stage]],
    when: tuple[float, float, float],
) -> None:
    """The states of the groups that were not there, over what their ranks did, and the axes of one panel. ``when``: the time
    that is 0 on the axis, the panel's first and its last one."""
    zero, start, stop = when
    for row, (group, _) in enumerate(rows):
        for state, begins, ends, _ in absent.get(group, ()):
            if state != "member" and begins < stop and ends > start:
                bar = (begins - zero, min(ends, stop) - begins)
                axes.broken_barh([bar], (row - 0.4, 0.8), color=STATES[state][0], linewidth=0)
    axes.set_xlim(start - zero, stop - zero)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    alone = len(rows) <= record.groups
    names = [f"group {group}" if alone else f"group {group}, rank {position}" for group, position in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=8 if alone else 6)
    axes.tick_params(axis="x", labelsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _save(figure: plt.Figure, path: Path) -> None:
    figure.savefig(path, dpi=130)
    plt.close(figure)
