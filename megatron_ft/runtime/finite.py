"""What happens when a step's gradient is not finite: nobody takes it, and who it came from is named.

All groups see the same reduced numbers, to the bit, so they come to the same decision without a word to each other. Whose
gradient it was shows in what each has kept of its own.
"""

from __future__ import annotations

from math import isfinite

from megatron_ft.engines.base import Engine, StepResult
from megatron_ft.errors import RunStopped
from megatron_ft.runtime.history import History

MOST_IN_A_ROW = 10
"""A model that has diverged does not recover by skipping: after so many steps in a row the run stops."""


class NonFinite:
    """One group's account of steps without a finite gradient. ``policy``: skip (the step counts, the update is left out) or
    stop."""

    def __init__(self, policy: str, group: int, history: History) -> None:
        self._policy, self._group, self._history = policy, group, history
        self._in_a_row = 0

    def check(self, result: StepResult, engine: Engine) -> None:
        """After each update. Raises ``RunStopped`` when the run must not go on, in every group alike."""
        if isfinite(result.gradient_norm):
            self._in_a_row = 0
            return
        self._in_a_row += 1
        if not engine.local_finite():
            self._history.note("nonfinite", group=self._group, step=result.step, policy=self._policy)
        what = f"step {result.step}: the gradient's norm is {result.gradient_norm}"
        if self._policy == "stop":
            raise RunStopped(f"{what}, and nonfinite is 'stop'; the groups it came from are in the run record")
        if self._in_a_row >= MOST_IN_A_ROW:
            raise RunStopped(f"{what}, like those of the {MOST_IN_A_ROW - 1} steps before; the model has diverged")
        print(f"megatron_ft: group {self._group}: {what}; the update is skipped", flush=True)
