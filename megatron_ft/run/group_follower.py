"""The training thread of a rank that is not its group's leader: it carries out orders in the order of their arrival.

It does not know the protocol. Its own decisions are to stop waiting for other groups when it is told that the present
epoch is over, and to report the end of the epoch if it is the first to see it.

Failures it assumes: those of ``run.rank_executor``. ``Lost`` ends its part: the group is gone with its leader, or
any other rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, TypeVar

from megatron_ft.core.protocol import signals
from megatron_ft.data.prefetch import Dataset
from megatron_ft.run import orders
from megatron_ft.run.checkpoint import restore
from megatron_ft.run.collectives.base import Broken
from megatron_ft.run.engines.port import StepResult
from megatron_ft.run.evaluation import Sums
from megatron_ft.run.final_save import FinalSave
from megatron_ft.run.orders import Order
from megatron_ft.run.rank_executor import RankExecutor
from megatron_ft.types import GroupId, View, given

Kind = TypeVar("Kind", bound=Order[Any])


class GroupFollower:
    """One following rank. ``step`` is the next one the script has to train. ``first_view``: see :class:`.GroupLeader`."""

    def __init__(self, executor: RankExecutor, first_view: View | None) -> None:
        self.step = 0 if first_view is None else first_view.step
        self._executor, self._rank = executor, executor.rank
        self._dataset: Dataset | None = None
        self._said_leaving = False

    def enter(self, total: int, comes_back: bool, origin: restore.Origin | None = None) -> None:
        """Wait for the first step, or in a group that comes back for its seat."""
        if comes_back:
            self._obey_until(orders.Enter)

    def train_step(self, dataset: Dataset) -> StepResult:
        """Carry out orders until the step is committed. Raises ``RunStopped``."""
        self._dataset = dataset
        self._obey_until(orders.EndStep)
        return given(self._executor.state.result)

    def evaluate(self, lost: Callable[[View], Collection[GroupId]]) -> Sums:
        """Carry out orders until the evaluation has ended."""
        return self._obey_until(orders.EndEvaluation).total

    def save_together(self, save: FinalSave) -> None:
        """Carry out orders until the save has ended."""
        self._obey_until(orders.EndTogether)

    def end(self, told: Callable[[], bool]) -> None:
        """Nothing: the leader decides which step is the last."""

    def finish(self) -> None:
        """Carry out orders until the run has ended everywhere. Raises ``RunStopped``."""
        self._obey_until(orders.End)

    def log(self, values: Mapping[str, float | str]) -> None:
        """Drop what the script has logged: the leader records it."""

    def leave(self, why: str) -> None:
        """Note that this rank was told that its group leaves; the leader says after which step."""
        if not self._said_leaving:
            self._said_leaving = True
            self._rank.agreement.announce(signals.LeaveRequested(self._rank.group, why))

    def on_signal(self, verdict: signals.Verdict) -> None:
        """Watcher thread: note a request to leave; the rank handles all other verdicts."""
        if isinstance(verdict, signals.LeaveRequested):
            self._said_leaving = True

    def _obey_until(self, last: type[Kind]) -> Kind:
        """Carry out orders up to one of that kind, and return it."""
        while not isinstance(order := self._obey(), last):
            continue
        return order

    def _obey(self) -> Order[Any]:
        """Carry out the next order, and return it."""
        rank = self._rank
        rank.progress.enter("waiting")
        order = orders.named(*given(rank.inner).next_order())
        match order:
            case orders.Begin():
                order = replace(order, dataset=self._dataset)
            case orders.EndStep(following=step) | orders.Enter(step=step):
                self.step = step
        try:
            with nullcontext() if order.span is None else rank.timeline.span(order.span):
                order.run(self._executor)
        except Broken:  # the answer of all ranks tells the leader, and other groups were told
            if not order.between_groups:
                raise
        return order
