"""What the loop of a group needs to be carried out: its ranks, the control store and a clock (``core.protocol.shell``).

There are four kinds of each: those of a real group (``run.leader_ranks``, ``run.leader_store``), of a simulated one
(``proof.simulated_group``), of the transcripts (``tests/world.py``), and of a run that is replayed from its
record (``proof.replay``). A port of a real group blocks its thread; one of a simulation suspends the coroutine. Methods
with a body here are for groups to which that does not happen, or that have nothing to do then.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NoReturn, Protocol

from megatron_ft.core.protocol import machine
from megatron_ft.core.protocol.messages import Action, AwaitView, Event, Propose
from megatron_ft.types import Bucket, Report, View

News = machine.ViewSeen | machine.ReportsSeen | machine.Replaced | machine.Tick


class Broken(Exception):
    """An operation did not complete: the epoch is over. An event, converted where the operation was started.

    The message is in plain language and goes into the run record; ``detail`` is the library's own text, for the rank's
    log.
    """

    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail

    @property
    def in_full(self) -> str:
        """Return message and detail."""
        return f"{self}: {self.detail}" if self.detail else str(self)


class Ranks(Protocol):
    """The ranks of the group, and their communicator with those of other groups.

    Failures it assumes: another group may be lost or end the epoch at any moment. ``connect``, ``transfer`` and ``reduce``
    then raise :class:`Broken`, and what they had to do may be done at some groups and not at others. A rank of the own
    group that is lost ends the process, from any method.
    """

    def doing(self, action: Action) -> AbstractContextManager[object]:
        """Return the context in which an action is carried out."""
        return nullcontext()

    async def begin(self) -> None:
        """A step begins."""
        return None

    async def compute(self) -> Sequence[machine.Computed]:
        """Compute as many microbatches of ``GroupState.todo`` as are computed at a time."""

    async def connect(self, view: View) -> machine.Connected | None:
        """Connect to all members of the view; None if a verdict came in first."""

    async def transfer(self, view: View) -> machine.Transferred | None:
        """Do this group's part of the transfers of the view; None if nothing has come of it yet."""

    async def follow(self, step: int) -> machine.CaughtUp | machine.CatchUpFailed | None:
        """Put the state that ``step`` starts from in place; None if a verdict came in first."""

    async def reduce(self, step: int, buckets: Sequence[Bucket]) -> machine.Reduced | None:
        """Reduce the buckets. An event is fed for each one as soon as all ranks have it: the last one may be returned."""

    async def update(self, step: int) -> machine.Updated | machine.Discarded | None:
        """Update the model with the sums of the step; None if the group ends for them."""

    async def end_step(self, step: int) -> None:
        """The step is committed, and the machine is in the next one."""
        return None

    async def abort(self) -> None:
        """The epoch is over: no operation of it counts any more, and none is waited for."""
        return None

    async def close(self) -> None:
        """Close the communicator."""
        return None

    async def adopt(self, view: View) -> None:
        """The group is about to follow ``view``."""
        return None

    async def prepare(self, view: View) -> None:
        """No communicator of an earlier view is open: what ``view`` needs can be begun."""
        return None

    async def await_others(self) -> bool:
        """All steps are committed: do what is due, and wait a while. Return True if this group has ended the run."""
        return False

    async def stop(self, action: machine.Stop) -> NoReturn:
        """End the group."""

    def per_shard(self, step: int) -> int:
        """Return the number of microbatches per shard that the script has set for ``step``."""


class Store(Protocol):
    """The control store, and the notice log in it.

    Failures it assumes: the store may be slow, or away: a method then asks again until it has its answer. It may forget;
    then each group writes there what it knows, and :class:`~.messages.Replaced` is among the verdicts. Notices come late,
    and more than once.
    """

    async def verdict(self) -> Event | None:
        """Return the next verdict that has come in, None if there is none now."""
        return None

    async def look(self, awaited: AwaitView) -> News | None:
        """Look once for the view, else for reports; ``Tick`` if there is nothing new. None if no look is due."""
        return None

    async def log_answers(self) -> bool:
        """Return whether all groups can read which store they are to write to; else the silence of one means nothing."""
        return True

    async def publish(self, report: Report) -> None: ...

    async def announce(self, said: machine.EpochAborted, detail: str = "") -> None:
        """Tell all groups that an epoch is over. ``detail`` is for the own log."""
        return None

    async def fence(self, proposal: Propose) -> Sequence[machine.GroupFailed] | None:
        """Fence the seats of the proposal, unless the log of claims has news: then return these. None: try it again."""
        return ()

    async def propose(self, view: View) -> View | None:
        """Compare-and-set: return the view that stands. None if the store is not that of the reports any more."""

    async def is_over(self) -> bool:
        """Return whether a group has ended the run."""
        return False


class Clock(Protocol):
    """A monotonic clock, which may be wrong by any constant."""

    def now(self) -> float: ...

    async def pause(self) -> None:
        """Wait until the next look for a view, or for a verdict."""
        return None
