"""The ranks of one group from the leader's side: all of them, itself included, carry out each operation that it calls.

With one rank per group every method is just a call of :class:`~megatron_ft.worker.rank_executor.RankExecutor`.
With several, the ranks share the group's microbatches: each computes whole ones, as many at a time as there are ranks;
or they compute all of them together (``engines.port.JointEngine``).

Every method raises ``Lost`` when a rank of the group is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megatron_ft.collectives.communicator import Broken
from megatron_ft.core.lifecycle.checkpoint_protocol import Saves
from megatron_ft.core.protocol import signals
from megatron_ft.data.prefetch import Dataset
from megatron_ft.engines.port import Listed, Ready, StepResult
from megatron_ft.errors import RunStopped
from megatron_ft.types import Bucket, Microbatch, View, given
from megatron_ft.worker.rank_executor import Needs, RankExecutor

BUILT, INTERRUPTED, BROKEN = 2, 1, 0
"""A rank's answers to the order to connect; the worst answer counts."""


class GroupExecutor:
    """The ranks of one group. ``width`` microbatches are computed at a time."""

    def __init__(self, rank: RankExecutor) -> None:
        self.rank = rank
        self.width = rank.size
        self._deferred: list[tuple[str, dict[str, Any]]] | None = None

    def _order(self, name: str, **fields: Any) -> None:
        if self._deferred is not None:  # no rank receives orders during a flush
            self._deferred.append((name, fields))
        elif self.rank.inner is not None:
            self.rank.inner.order(name, **fields)

    def begin(self, step: int, dataset: Dataset, needs: Callable[[], Needs]) -> None:
        if self.rank.inner is not None:
            made = needs()
            self._order("begin", step=step, needs=made)
            needs = lambda: made  # noqa: E731
        self.rank.begin(step, dataset, needs)

    def compute(
        self, microbatches: Sequence[Microbatch], patched: Sequence[bool], ahead: Ready | None, epoch: int
    ) -> tuple[bool, float]:
        """Compute at most ``width`` microbatches. Return the values for the first, this rank's; ``epoch`` is recorded.

        Does not wait for the other ranks: the reduction collects their results, and a rank that dies ends the group.
        """
        self._order("compute", microbatches=microbatches, patched=patched, epoch=epoch)
        return self.rank.compute(microbatches[0], patched[0], ahead)

    def flush(self, listed: Callable[[], Sequence[Listed]], finished: Callable[[Microbatch, bool], None]) -> None:
        """Compute the listed microbatches together. The ranks receive orders of that time after it."""
        self._order("flush")
        self._deferred = []
        self.rank.flush(listed, finished)
        deferred, self._deferred = self._deferred, None
        for name, fields in deferred:
            self._order(name, **fields)

    def reduce(self, step: int, buckets: Sequence[Bucket], done: Callable[[Bucket], None]) -> None:
        """Reduce at all ranks. Raises ``Broken`` when the epoch is over."""
        self._order("reduce", step=step, buckets=buckets)
        self.rank.reduce(step, buckets, done)

    def connect(self, view: View, step: int, interrupted: Callable[[], bool]) -> bool:
        """Return True if all ranks have built the communicators of ``view``. Raises ``Broken`` when one could not."""
        if self.rank.inner is None:
            return self.rank.connect(view, step, interrupted)
        self._order("connect", view=view.to_json(), step=step)
        worst = connect_together(self.rank, view, step, interrupted)
        if worst == BROKEN:
            raise Broken(f"a rank of group {self.rank.group} could not build its communicator of epoch {view.epoch}")
        return worst == BUILT

    def transfer(self) -> None:
        """Make the transfers of the present view at all ranks. Raises ``Broken``."""
        self._order("transfer")
        self.rank.transfer()

    def update(self, step: int, microbatches: int) -> StepResult:
        """Update, only after every bucket is final at all ranks: no peer may need the old parameters any more."""
        self._order("update", step=step, microbatches=microbatches)
        return self.rank.update(step, microbatches)

    def close_epoch(self) -> None:
        self._order("close")
        self.rank.close_epoch()

    def end_step(self, epoch: int, following: int) -> None:
        """End the step: all ranks return to the user's script, which goes on with step ``following``."""
        self._order("end_step", epoch=epoch, following=following)
        self.rank.end_step(epoch)

    def follow(self, donors: Sequence[tuple[int, int]], margin: int, epoch: int) -> int:
        """Make all ranks ask (group, incarnation) for the state of one step, ``margin`` steps later than is expected to
        be soon enough. Return the worst answer."""
        self._order("follow", donors=donors, margin=margin, epoch=epoch)
        return self.rank.following.begin(donors, margin, epoch)

    def take_state(self) -> int:
        self._order("take_state")
        return self.rank.following.take_state()

    def make_step(self, interrupted: Callable[[], bool] = lambda: False) -> int:
        self._order("make_step")
        return self.rank.following.make_step(interrupted)

    def enter(self, step: int) -> None:
        """Enter the run with the group's seat: its scripts go on with ``step``."""
        self._order("enter", step=step)

    def arrive(self) -> None:
        """Note at all ranks that the group has reached the step of the others."""
        self._order("arrive")
        self.rank.arrive()

    def save(self, order: Saves) -> None:
        """Make all ranks copy their share of the state, and write it during the next steps."""
        self._order("save", order=signals.to_json(order))
        self.rank.saving.take(order, self.rank.engine, self.rank.states)

    def share_state(self) -> None:
        """Before the first step: start all ranks from the leader's model."""
        if self.rank.inner is not None:
            self._order("share_state")
            self.rank.share_state()

    def fingerprint(self) -> dict[str, Any]:
        self._order("fingerprint")
        return self.rank.fingerprint()

    def end(self) -> None:
        """End the run at all ranks."""
        self._order("end")

    def stop(self, reason: str, kind: type[RunStopped] = RunStopped, nonfinite: int | None = None) -> None:
        """Stop the group; the other ranks raise ``kind``. ``nonfinite``: the step whose gradient may have been this
        group's, if that is the reason."""
        self._order("stop", reason=reason, kind=kind.__name__, nonfinite=nonfinite)
        if nonfinite is not None:
            self.rank.nonfinite.name(nonfinite, self.rank.engine)


def connect_together(rank: RankExecutor, view: View, step: int, interrupted: Callable[[], bool]) -> int:
    """Connect as one rank of a group. Return the worst answer of all its ranks."""
    try:
        answer = BUILT if rank.connect(view, step, interrupted) else INTERRUPTED
    except Broken as error:
        rank.tell_broken(view.epoch, f"rank {rank.position}: {error}", detail=error.detail)
        answer = BROKEN
    return given(rank.inner).least(answer)
