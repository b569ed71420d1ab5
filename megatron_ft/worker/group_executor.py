"""The ranks of one group as its leader sees them: what it asks for, all of them do, itself included.

With one rank per group there is nobody to tell, and every method is a call of :class:`~megatron_ft.runtime.rank.Rank`.
With several, the ranks share the group's microbatches: each computes whole ones, as many at a time as there are ranks; or
they compute all of them together (``engines.base.JointEngine``).

Raises ``Lost`` anywhere when a rank of the group is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megatron_ft.core import detector
from megatron_ft.core.saving import Saves
from megatron_ft.data.prefetch import Dataset
from megatron_ft.engines.base import Listed, Ready, StepResult
from megatron_ft.runtime.communicator import Broken
from megatron_ft.runtime.rank import Needs, Rank
from megatron_ft.types import Bucket, Microbatch, View

BUILT, INTERRUPTED, BROKEN = 2, 1, 0
"""What a rank answers when it was asked to connect; the worst counts."""


class Crew:
    """``width`` microbatches are computed at a time."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.width = rank.size
        self._deferred: list[tuple[str, dict[str, Any]]] | None = None

    def _order(self, name: str, **fields: Any) -> None:
        if self._deferred is not None:  # nobody listens during a flush
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
        """At most ``width`` microbatches. Returns what is known of the first, which is this rank's; ``epoch`` is recorded.

        Does not wait for the others: what they owe is collected in the reduction, and if one of them dies so does the group.
        """
        self._order("compute", microbatches=microbatches, patched=patched, epoch=epoch)
        return self.rank.compute(microbatches[0], patched[0], ahead)

    def flush(
        self, listed: Callable[[], Sequence[Listed]], finished: Callable[[Microbatch, bool], None]
    ) -> None:
        """All ranks compute what is listed together. What they are ordered meanwhile they hear after it."""
        self._order("flush")
        self._deferred = []
        self.rank.flush(listed, finished)
        deferred, self._deferred = self._deferred, None
        for name, fields in deferred:
            self._order(name, **fields)

    def reduce(self, step: int, buckets: Sequence[Bucket], done: Callable[[Bucket], None]) -> None:
        """Raises ``Broken`` when the epoch is over."""
        self._order("reduce", step=step, buckets=buckets)
        self.rank.reduce(step, buckets, done)

    def connect(self, view: View, step: int, interrupted: Callable[[], bool]) -> bool:
        """Whether all ranks have built the communicators of ``view``. Raises ``Broken`` when one could not."""
        if self.rank.inner is None:
            return self.rank.connect(view, step, interrupted)
        self._order("connect", view=view.to_json(), step=step)
        worst = connect_together(self.rank, view, step, interrupted)
        if worst == BROKEN:
            raise Broken(f"a rank of group {self.rank.group} could not build its communicator of epoch {view.epoch}")
        return worst == BUILT

    def transfer(self) -> None:
        """Raises ``Broken``."""
        self._order("transfer")
        self.rank.transfer()

    def update(self, step: int, microbatches: int) -> StepResult:
        """Only after every bucket is final at all ranks: no peer may need the old parameters any more."""
        self._order("update", step=step, microbatches=microbatches)
        return self.rank.update(step, microbatches)

    def close_epoch(self) -> None:
        self._order("close")
        self.rank.close_epoch()

    def end_step(self, epoch: int, following: int) -> None:
        """All ranks return to the user's script, which goes on with step ``following``."""
        self._order("end_step", epoch=epoch, following=following)
        self.rank.end_step(epoch)

    def follow(self, donors: Sequence[tuple[int, int]], at: int, epoch: int) -> int:
        """All ranks ask (group, incarnation) for the state of step ``at``; the worst answer (``runtime.comeback``)."""
        self._order("follow", donors=donors, at=at, epoch=epoch)
        return self.rank.following.begin(donors, at, epoch)

    def take_state(self) -> int:
        self._order("take_state")
        return self.rank.following.take_state()

    def make_step(self, interrupted: Callable[[], bool] = lambda: False) -> int:
        self._order("make_step")
        return self.rank.following.make_step(interrupted)

    def enter(self, step: int) -> None:
        """The group has its seat; its scripts go on with ``step``."""
        self._order("enter", step=step)

    def arrive(self) -> None:
        """The group stands where the others do."""
        self._order("arrive")
        self.rank.arrive()

    def save(self, order: Saves) -> None:
        """All ranks copy their share of the state, and write it beside what follows."""
        self._order("save", order=detector.to_json(order))
        self.rank.saving.take(order, self.rank.engine)

    def share_state(self) -> None:
        """Before the first step: all ranks start from the leader's model."""
        if self.rank.inner is not None:
            self._order("share_state")
            self.rank.share_state()

    def fingerprint(self) -> tuple[float, str]:
        self._order("fingerprint")
        return self.rank.fingerprint()

    def end(self) -> None:
        """The run has ended."""
        self._order("end")

    def stop(self, reason: str, left: bool, nonfinite: int | None = None) -> None:
        """The group does not go on. ``nonfinite``: the step, if that is why, whose gradient may have been this group's."""
        self._order("stop", reason=reason, left=left, nonfinite=nonfinite)
        if nonfinite is not None:
            self.rank.nonfinite.name(nonfinite, self.rank.engine)


def connect_together(rank: Rank, view: View, step: int, interrupted: Callable[[], bool]) -> int:
    """One rank's side of connecting as a group: the worst answer of all its ranks."""
    try:
        answer = BUILT if rank.connect(view, step, interrupted) else INTERRUPTED
    except Broken as error:
        rank.tell_broken(view.epoch, f"rank {rank.position}: {error}")
        answer = BROKEN
    return rank.inner.least(answer)
