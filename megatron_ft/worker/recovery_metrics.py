"""What an interrupted step cost: the ``recovery`` and ``patch`` lines of the run record (docs/run-record.md)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_ft.core import scheduler
from megatron_ft.core.recovery import GroupState
from megatron_ft.core.replication import Placement
from megatron_ft.runtime.history import History
from megatron_ft.types import Microbatch, Plan, View


@dataclass
class _Interruption:
    """An epoch that ended, from the moment this group noticed until it could go on."""

    since: float
    computing_s: float = 0.0
    view: View | None = None


class Interruptions:
    """One group's account of them, kept by its training thread."""

    def __init__(self, history: History, group: int, placement: Placement) -> None:
        self._history = history
        self._group = group
        self._placement = placement
        self._open: _Interruption | None = None
        self._patched: frozenset[Microbatch] = frozenset()
        self._taken_over: dict[Microbatch, bool] = {}

    def begin_step(self) -> None:
        """Forget what the step before was patched with. An interruption may go on: the next step pays for it."""
        self._patched, self._taken_over = frozenset(), {}

    def noticed(self) -> None:
        """The epoch is over here."""
        self._open = self._open or _Interruption(time.monotonic())

    def adopted(self, view: View) -> None:
        """A view that this group goes on with."""
        if self._open is not None:
            self._open.view = view

    def computed(self, microbatch: Microbatch, patch: bool, prefetched: bool, seconds: float) -> None:
        """A microbatch was computed; ``prefetched`` says that its samples were in memory when they were needed."""
        self.computing(seconds)
        if patch:
            self._taken_over[microbatch] = prefetched

    def computing(self, seconds: float) -> None:
        """So much of the time since an interruption was noticed was spent computing."""
        if self._open is not None:
            self._open.computing_s += seconds

    def resumed(self, state: GroupState) -> None:
        """The interrupted step goes on; say what it cost."""
        stopped, self._open = self._open, None
        if stopped is None or stopped.view is None:
            return
        self._note_patch(state)
        # With every bucket final nothing had to be taken over, whatever the plan would have been.
        new = state.plan.patched - self._patched if state.unfinished else frozenset()
        self._patched |= new
        patched_by = {group: len(new.intersection(own)) for group, own in state.plan.assignment.items()}
        self._history.record(
            "recovery",
            step=state.step,
            epoch=stopped.view.epoch,
            patched=len(new),
            patched_by={str(group): count for group, count in patched_by.items() if count},
            unhosted=self._unhosted(state.plan, new),
            buckets_kept=len(state.final),
            buckets_redone=len(state.unfinished),
            state_from=stopped.view.source,
            stall_s=round(time.monotonic() - stopped.since - stopped.computing_s, 6),
        )

    def _note_patch(self, state: GroupState) -> None:
        """What this group took over itself: nobody else knows what it had in memory."""
        if not self._taken_over:
            return
        taken_over, self._taken_over = self._taken_over, {}
        note_patch(self._history, taken_over, step=state.step, epoch=state.view.epoch, group=self._group)

    def _unhosted(self, plan: Plan, patched: frozenset[Microbatch]) -> int:
        """How many of ``patched`` went to a group that does not host their shard: no host of it is left."""
        shares = ((group, patched.intersection(own)) for group, own in plan.assignment.items())
        return sum(len(scheduler.fetched(share, group, self._placement)) for group, share in shares)


def note_patch(history: History, taken_over: Mapping[Microbatch, bool], **where: int) -> None:
    """What somebody took over, and whether its samples were in memory; ``where``: the line's other fields."""
    prefetched = [str(microbatch) for microbatch, held in taken_over.items() if held]
    fetched = [str(microbatch) for microbatch, held in taken_over.items() if not held]
    history.note("patch", **where, prefetched=prefetched, fetched=fetched)
