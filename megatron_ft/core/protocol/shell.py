"""The training loop of one group: a step from plan to commit, with recovery, return and end.

:mod:`~megatron_ft.core.protocol.machine` decides; :class:`Shell` carries its decisions out, in order, and tells it what has
come of them. The work itself is done by :mod:`~megatron_ft.core.protocol.ports`. So what is tested in transcripts and in
simulated histories is the loop that trains.

There is no event loop. A port of a real group blocks until it has its result, so the coroutines here never suspend, and
:func:`carry_out` runs one like a function. A port of a simulation may suspend.
"""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, TypeVar, cast

from megatron_ft.core.protocol import machine
from megatron_ft.core.protocol.messages import Action, Event, Propose
from megatron_ft.core.protocol.ports import Broken, Clock, Ranks, Store
from megatron_ft.core.protocol.state import GroupState, changed
from megatron_ft.types import View

Result = TypeVar("Result")


class Shell:
    """The loop of one group, which begins in ``state``. ``next`` is what it has to do then."""

    def __init__(self, state: GroupState, ranks: Ranks, store: Store, clock: Clock) -> None:
        self.state, self.next = state, machine.next_action(state)
        self._ranks, self._store, self._clock = ranks, store, clock
        self._lingers = False  # an epoch has ended in order, and its communicator is open until the next view stands

    async def train_step(self) -> None:
        """Compute, reduce and commit one step, whatever dies meanwhile."""
        step = self.state.step
        await self.resize()
        await self._ranks.begin()
        while self.state.step == step:
            await self.turn()

    async def share_model(self) -> None:
        """Before the first step: give all groups the same model. If a group is lost meanwhile, the step does it."""
        while self.state.needs_transfer and isinstance(self.next, machine.Connect | machine.Transfer):
            await self.turn()

    def end(self) -> None:
        """Let the last step that is committed be the last of the run; every group does it after the same step."""
        self.state = changed(self.state, job=replace(self.state.job, steps=self.state.step))
        self.next = machine.next_action(self.state)

    async def finish(self, patience_s: float) -> None:
        """Stay reachable until the run is over; the epoch ends if it is not ``patience_s`` after this group was done."""
        since = self._clock.now()
        while not await self._store.is_over():
            await self.hear()
            if not isinstance(self.next, machine.Finish):
                await self._perform(self.next)
                since = self._clock.now()
            elif self._clock.now() >= since + patience_s:
                await self._end_epoch(f"not every live group is done {patience_s:g} s after this one")
                since = self._clock.now()
            elif await self._ranks.await_others():
                return

    async def turn(self) -> None:
        """Hear what has happened, then carry out the next action."""
        await self.hear()
        await self._perform(self.next)

    async def hear(self) -> None:
        """Take in all verdicts that have come in."""
        while (verdict := await self._store.verdict()) is not None:
            await self.feed(verdict)

    async def _perform(self, action: Action) -> None:
        """Carry out the training thread's next action, and feed what has come of it."""
        with self._ranks.doing(action):
            match action:
                case machine.Compute():
                    for computed in await self._ranks.compute():
                        await self.feed(computed)
                    await self.look()
                case machine.Connect(view=view):
                    # no limit: a verdict ends it, and a port that has waited for too long
                    await self._attempt(self._ranks.connect(view))
                case machine.Transfer(view=view):
                    await self._attempt(self._ranks.transfer(view))
                case machine.Reduce(step=step, buckets=buckets):
                    await self._attempt(self._ranks.reduce(step, buckets))
                case machine.Follow(step=step):
                    caught_up = await self._ranks.follow(step)
                    if isinstance(caught_up, machine.CaughtUp):
                        await self.resize()  # it has come with the state
                    await self.feed(caught_up)
                case machine.Update(step=step):
                    updated = await self._ranks.update(step)
                    await self.feed(updated)
                    if isinstance(updated, machine.Updated):
                        await self._ranks.end_step(step)
                case machine.AwaitView():
                    if not await self.look():
                        await self._clock.pause()
                case machine.Stop():
                    await self._ranks.stop(action)

    async def feed(self, event: Event | None) -> None:
        """Pass an event to the machine, if there is one; carry out at once all its actions but the training thread's."""
        if event is None:
            return
        self.state, (*actions, self.next) = machine.step(self.state, event, self._clock.now())
        for action in actions:
            match action:
                case machine.Abort(in_order=in_order):
                    await self._ranks.abort()
                    self._lingers = in_order
                    if not in_order:
                        await self._ranks.close()
                case machine.Publish(report=report):
                    await self._store.publish(report)
                case machine.Announce(epoch=epoch, reason=reason, after=after):
                    await self._store.announce(machine.EpochAborted(epoch, reason, after, self.state.me))
                case machine.Propose():
                    await self._propose(action)
                    return

    async def resize(self) -> None:
        """Before the first microbatch of a step: take over the size of the batch."""
        per_shard = self._ranks.per_shard(self.state.step)
        if per_shard != self.state.job.per_shard:
            await self.feed(machine.BatchResized(per_shard))

    async def look(self) -> bool:
        """Look once for the next view, else for reports, if one is being agreed on. Return True if there was news."""
        awaited = machine.awaited(self.state)
        event = await self._store.look(awaited) if awaited is not None else None
        match event:
            case machine.ViewSeen(view=view):
                await self._adopt(view)
            case machine.ReportsSeen() | machine.Replaced():
                await self.feed(event)
            case machine.Tick() if await self._store.log_answers():
                await self.feed(event)
        return event is not None and not isinstance(event, machine.Tick)

    async def _propose(self, proposal: Propose) -> None:
        """Fence the seats that the view leaves out and that may live, then write the view and adopt the one that stands."""
        news = await self._store.fence(proposal) if proposal.reads_log else ()
        if news is None:
            return  # the next look tries it again
        for verdict in news:
            await self.feed(verdict)  # decides anew
        if not news:
            await self._adopt(await self._store.propose(proposal.view))

    async def _adopt(self, view: View | None) -> None:
        """Adopt a view that stands, if there is one and it is newer."""
        if view is None or view.epoch <= self.state.view.epoch:
            return
        await self._ranks.adopt(view)
        if self._lingers:
            self._lingers = False
            await self._ranks.close()
        await self._ranks.prepare(view)
        await self.feed(machine.ViewSeen(view))  # last: if the view is outdated already, this call adopts the next one

    async def _attempt(self, operation: Coroutine[Any, Any, Event | None]) -> None:
        """Carry out an operation of the present epoch; if it breaks, tell the machine and the other groups."""
        epoch = self.state.view.epoch
        try:
            await self.feed(await operation)
            return
        except Broken as error:
            reason, detail = str(error), error.detail
        await self.hear()
        if not self.state.reported and self.state.view.epoch == epoch:
            await self._end_epoch(reason, detail)

    async def _end_epoch(self, reason: str, detail: str = "") -> None:
        """End the present epoch for all groups; this group is the first to know."""
        said = machine.EpochAborted(self.state.view.epoch, reason, by=self.state.me)
        await self._store.announce(said, detail)
        await self.feed(said)


def resumes(state: GroupState, action: Action) -> bool:
    """Return whether an interrupted step goes on with this action, so that the account of its recovery is closed.

    An update that other groups have decided goes on with nothing: it is the step after it that was interrupted.
    """
    own_update = isinstance(action, machine.Update) and state.next_plan_origin is None
    return own_update or isinstance(action, machine.Reduce | machine.Finish)


def carry_out(steps: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine whose ports block, and return its result."""
    try:
        steps.send(None)
    except StopIteration as end:
        return cast(Result, end.value)
    raise AssertionError("a port that blocks never suspends")
