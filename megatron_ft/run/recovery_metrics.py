"""The cost of an interrupted step: the ``recovery`` and ``patch`` lines of the run record (docs/run-record.md)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_ft.core.protocol.machine import GroupState
from megatron_ft.core.protocol.takeovers import TakenOver
from megatron_ft.record.history import History
from megatron_ft.types import Microbatch, View


@dataclass
class _Interruption:
    """An epoch that ended, from its detection by this group until the group could go on."""

    since: float
    computing_s: float = 0.0
    view: View | None = None


class RecoveryMetrics:
    """One group's account of its interruptions, kept by its training thread."""

    def __init__(self, history: History, group: int) -> None:
        self._history = history
        self._group = group
        self._open: _Interruption | None = None
        self._counted = TakenOver()
        self._taken_over: dict[Microbatch, bool] = {}

    def begin_step(self) -> None:
        """Forget the patches of the step before. An interruption may continue: the next step then bears its cost."""
        self._counted, self._taken_over = TakenOver(), {}

    def noticed(self) -> None:
        """Note that this group has detected the end of the epoch."""
        self._open = self._open or _Interruption(time.monotonic())

    def adopted(self, view: View) -> None:
        """Note a view with which this group goes on."""
        if self._open is not None:
            self._open.view = view

    def computed(self, microbatch: Microbatch, patch: bool, prefetched: bool, seconds: float) -> None:
        """Note a computed microbatch; ``prefetched``: its samples were in memory when they were needed."""
        self.computing(seconds)
        if patch:
            self._taken_over[microbatch] = prefetched

    def computing(self, seconds: float) -> None:
        """Note that ``seconds`` of the time since an interruption was noticed were spent computing."""
        if self._open is not None:
            self._open.computing_s += seconds

    def resumed(self, state: GroupState) -> None:
        """Record the cost of the interruption: the interrupted step goes on."""
        stopped, self._open = self._open, None
        if stopped is None or stopped.view is None:
            return
        if self._taken_over:  # only this group knows which samples it had in memory
            note_patch(self._history, self._taken_over, step=state.step, epoch=state.view.epoch, group=self._group)
            self._taken_over = {}
        line, self._counted = self._counted.line(state), self._counted.after(state)
        self._history.record(
            "recovery", **line, stall_s=round(time.monotonic() - stopped.since - stopped.computing_s, 6)
        )


def note_patch(history: History, taken_over: Mapping[Microbatch, bool], **where: int) -> None:
    """Record taken-over microbatches, and if their samples were in memory; ``where``: the line's other fields."""
    prefetched = [str(microbatch) for microbatch, held in taken_over.items() if held]
    fetched = [str(microbatch) for microbatch, held in taken_over.items() if not held]
    history.note("patch", **where, prefetched=prefetched, fetched=fetched)
