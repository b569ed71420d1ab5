"""What happens when a gradient is not finite: nobody takes it, and who it came from is named.

A step's sum: all groups see the same reduced numbers, to the bit, so they come to the same decision without a word to each
other. Whose gradient it was shows in what each has kept of its own.

**Recompute elsewhere**: a group looks at its own gradients after each microbatch, which costs a pass over them and is why
buckets are then not sent during the backward pass. The first group of a step in which it finds inf or nan leaves the run
before it has contributed anything, so the others compute its microbatches again, on other hardware. If the step comes out
finite it was the hardware's fault; if not it is the model's or the data's, the update is skipped, and as long as it lasts
nobody else leaves. Of several groups that find one in the same step only the first leaves: it may well be the model.
"""

from __future__ import annotations

from contextlib import suppress
from math import isfinite

from megatron_ft.engines.base import Engine, StepResult
from megatron_ft.errors import RunStopped, StoreError
from megatron_ft.runtime.agreement import Agreement
from megatron_ft.runtime.history import History
from megatron_ft.types import Microbatch

_STOP = "nonfinite/stop"
MOST_IN_A_ROW = 10
"""A model that has diverged does not recover by skipping: after so many steps in a row the run stops."""


class NonFinite:
    """One rank's account of steps without a finite gradient. ``policy``: skip (the step counts, the update is left out),
    recompute (elsewhere, then skip) or stop."""

    def __init__(self, policy: str, group: int, history: History, agreement: Agreement) -> None:
        self._policy, self._group, self._history, self._agreement = policy, group, history, agreement
        self._in_a_row = 0
        self._kept: int | None = None

    def computed(self, microbatch: Microbatch, engine: Engine, may_leave: bool) -> None:
        """After each microbatch. Raises ``RunStopped`` in the one group that leaves for it; ``may_leave``: others remain."""
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
        """The step in which the others have ended, and why, if it is this; asked when groups are lost. A group that was
        still in that step would compute theirs again, perhaps get a gradient that is finite, and go on alone."""
        said = self._agreement.get(_STOP) if self._policy == "stop" else None
        return (said["step"], said["why"]) if said else None

    def name(self, step: int, engine: Engine) -> None:
        """Put into the run record whose gradient it was, if it was this rank's."""
        if not engine.local_finite():
            self._history.note("nonfinite", group=self._group, step=step, policy=self._policy)

    def check(self, result: StepResult, engine: Engine) -> None:
        """After each update. Raises ``RunStopped`` when the run must not go on, in every group alike."""
        if isfinite(result.gradient_norm):
            self._in_a_row = 0
            return
        self._in_a_row += 1
        self.name(result.step, engine)
        what = f"step {result.step}: the gradient's norm is {result.gradient_norm}"
        if self._policy == "stop":
            why = f"{what}, and nonfinite is 'stop'; the groups it came from are in the run record"
            with suppress(StoreError):  # before it ends: who is still in that step hears of an end, and asks
                self._agreement.say(_STOP, {"step": result.step, "why": why})
            raise RunStopped(why)
        if self._in_a_row >= MOST_IN_A_ROW:
            raise RunStopped(f"{what}, like those of the {MOST_IN_A_ROW - 1} steps before; the model has diverged")
        print(f"megatron_ft: group {self._group}: {what}; the update is skipped", flush=True)
