"""The record's lines about views and steps, as the leader of a group makes them.

Every leader makes them: its history is written only while its group is the lowest live one, or becomes it
(``record.history``).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

from megatron_ft.core.detection import stragglers
from megatron_ft.core.detection.stragglers import Speeds
from megatron_ft.record.history import History
from megatron_ft.run.engines.port import StepResult
from megatron_ft.types import GroupId, View, given


class StepRecord:
    """``line`` is that of the last step, ``measured`` the times of its microbatches. ``view`` is the one under which the
    last step was committed: the next view may be adopted before the step is recorded."""

    def __init__(self, history: History, group: GroupId, view: View | None) -> None:
        self.view = view
        self.line: Mapping[str, Any] = {}
        self.measured: Mapping[str, Any] = {"measured": {}}
        self._history, self._group = history, group

    def adopt(self, view: View) -> None:
        """Record a view with this group, whose lowest group writes the record."""
        # The lowest group may have just come, and have none of the lines that a lost writer has left out.
        if self._group == min(set(view.live) - set(view.joined), default=None):
            self._history.set_writer(True)
        self._history.set_writer(self._group == min(view.live))
        self._history.record("view", **view.to_json())

    def measure(self, seconds: Mapping[GroupId, float], speeds: Speeds, factor: float) -> None:
        """Take the seconds per microbatch of every group that computed in the step, before it is committed."""
        self.measured = stragglers.brief(seconds, speeds, factor)

    def step(self, result: StepResult, duration_s: float, tokens_per_microbatch: int, batch: Mapping[str, Any]) -> None:
        """Record a committed step; the end of the step decides when it is written. ``batch``: what is not the same in all
        steps."""
        view = given(self.view)
        tokens = result.tokens or result.microbatches * tokens_per_microbatch
        self.line = {
            "step": result.step,
            "loss": result.loss,
            "microbatches": result.microbatches,
            **batch,
            "epoch": view.epoch,
            "live": list(view.live),
            "duration_s": round(duration_s, 6),
            "gradient_norm": result.gradient_norm if isfinite(result.gradient_norm) else None,
            "learning_rate": result.learning_rate,
            **({"tokens": tokens} if tokens else {}),
            **self.measured,
        }
        self._history.record("step", later=True, **self.line)

    def log(self, step: int, values: Mapping[str, float | str]) -> None:
        """Record what the script has logged after ``step``."""
        self._history.record("log", later=True, step=step, values=values)

    def take(self, line: Mapping[str, Any]) -> None:
        """Take another group's line of the last step before this group: its successors as writer may need it."""
        self.line = line
        self.measured = {name: line[name] for name in ("measured", "measured_rest") if name in line}
        self._history.record("step", **line)
