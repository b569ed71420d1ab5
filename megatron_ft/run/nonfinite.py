"""The reaction to a gradient that is not finite: no group applies it, and the record names the rank it came from.

All groups see the same reduced numbers, to the bit, so they make the same decision without communication. The local
gradients, which each group has kept, show the origin.

**Recompute elsewhere**: a group checks its own gradients after each microbatch, which costs a pass over them; buckets
are therefore not sent during the backward pass. The first group of a step that finds inf or nan leaves the run before
it has contributed anything, so the others compute its microbatches again, on other hardware. If the step comes out
finite, the hardware was at fault; if not, the model or the data is, the update is skipped, and no other group leaves
while it lasts. Of several groups that find one in the same step only the first leaves: the model may well be the cause.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from math import isfinite

from megatron_ft.errors import RunStopped, StoreError
from megatron_ft.record.history import History
from megatron_ft.run.engines.port import Engine, StepResult
from megatron_ft.run.store.client import CoordinationClient
from megatron_ft.types import Microbatch

_log = logging.getLogger(__name__)

_STOP = "nonfinite/stop"
SUSPECT_AFTER = 3
"""A group whose own gradient was not finite in this number of steps in a row reports it to the other groups
(``core.detection.state_divergence.nonfinite_minority``)."""
MOST_IN_A_ROW = 10
"""The run stops after this number of skipped steps in a row: a model that has diverged does not recover by skipping."""


class NonFinite:
    """One rank's account of steps without a finite gradient. ``policy``: skip (the step counts, the update is omitted),
    recompute (elsewhere, then skip) or stop."""

    def __init__(self, policy: str, group: int, history: History, agreement: CoordinationClient) -> None:
        self._policy, self._group, self._history, self._agreement = policy, group, history, agreement
        self._in_a_row = self._own_in_a_row = 0
        self._kept: int | None = None
        self._named: int | None = None

    def computed(self, microbatch: Microbatch, engine: Engine, may_leave: bool) -> None:
        """Check after a microbatch. Raises ``RunStopped`` if this group leaves for it; ``may_leave``: others remain."""
        step = microbatch.step
        if self._policy != "recompute" or self._in_a_row or self._kept == step or engine.local_finite():
            return
        mine = {"group": self._group, "microbatch": str(microbatch)}
        if may_leave and self._agreement.create(f"nonfinite/{step}", mine) == mine:
            self._history.note("nonfinite", group=self._group, step=step, policy=self._policy)
            raise RunStopped(
                f"group {self._group} leaves: microbatch {microbatch} gave it a gradient that is not finite; others compute "
                f"it again. If theirs is finite, look at this group's hardware"
            )
        self._kept = step

    def stopped(self) -> tuple[int, str] | None:
        """Return the step in which other groups ended and why, if it was a gradient. Called when groups are lost.

        A group still in that step would compute their microbatches again, perhaps get a finite sum, and go on alone."""
        said = self._agreement.get(_STOP) if self._policy == "stop" else None
        return (said["step"], said["why"]) if said else None

    @property
    def suspect(self) -> bool:
        """True if this rank's own gradient was not finite in several steps in a row."""
        return self._own_in_a_row >= SUSPECT_AFTER

    def name(self, step: int, engine: Engine) -> None:
        """Record that the gradient was this rank's, if it was. The engine must still have the gradient: what clears it
        before the step's end calls this first."""
        if step == self._named:
            return
        if engine.local_finite():
            self._own_in_a_row = 0
            return
        self._named = step
        self._own_in_a_row += 1
        self._history.note("nonfinite", group=self._group, step=step, policy=self._policy)

    def check(self, result: StepResult, engine: Engine) -> None:
        """Check after an update. Raises ``RunStopped`` in all groups alike when the run must not go on."""
        if isfinite(result.gradient_norm):
            self._in_a_row = self._own_in_a_row = 0
            return
        what = f"step {result.step}: the gradient's norm is {result.gradient_norm}"
        if engine.searches_scale:  # neither the model's fault nor a group's, until the scale is the smallest one
            _log.info(f"group {self._group}: {what}; the update is skipped, as the loss scale may be too large")
            return
        self._in_a_row += 1
        self.name(result.step, engine)
        if self._policy == "stop":
            why = f"{what}, and nonfinite is 'stop'; the groups it came from are in the run record"
            with suppress(StoreError):  # before it ends: a group that is still in that step receives an end, and asks
                self._agreement.put(_STOP, {"step": result.step, "why": why})
            raise RunStopped(why)
        if self._in_a_row >= MOST_IN_A_ROW:
            raise RunStopped(f"{what}, like those of the {MOST_IN_A_ROW - 1} steps before; the model has diverged")
        _log.info(f"group {self._group}: {what}; the update is skipped")
