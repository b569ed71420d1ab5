"""The ranks of a real group, for its loop: a port of ``core.protocol.shell``.

Every action becomes an order, which all ranks of the group carry out (``run.group_executor``), and is accounted for in
the run record. The longest action computes as many microbatches in parallel as the group has ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NoReturn

from megatron_ft import codec
from megatron_ft.core.detection.stragglers import Speeds
from megatron_ft.core.exactness import verification
from megatron_ft.core.protocol import machine, signals
from megatron_ft.core.protocol.messages import Action
from megatron_ft.core.protocol.ports import Ranks
from megatron_ft.core.protocol.shell import Shell, carry_out, resumes
from megatron_ft.core.replication.placement import Placement
from megatron_ft.core.scheduling import pipeline_order
from megatron_ft.data.prefetch import Dataset
from megatron_ft.errors import DataError, GroupLeft, InvariantBroken, RunStopped, StartOver, WipedOut
from megatron_ft.run import data_identity, orders
from megatron_ft.run.engines.port import DIGEST, Listed, StepResult
from megatron_ft.run.finishing import Discard
from megatron_ft.run.group_executor import GroupExecutor
from megatron_ft.run.leader_store import FAR_S, LeaderStore
from megatron_ft.run.orders import Needs
from megatron_ft.run.recovery_metrics import RecoveryMetrics
from megatron_ft.run.rejoin.joiner import ASTRAY, INTERRUPTED
from megatron_ft.run.rejoin.last_save import LastSave
from megatron_ft.run.saves.coordinator import CheckpointCoordinator
from megatron_ft.run.step_record import StepRecord
from megatron_ft.run.step_timer import StepTimer
from megatron_ft.types import Bucket, GroupId, Microbatch, View, given

_LAST_LINE_S = 10.0
"""How long the end of the run is tried to be written to a disk that is full."""
_RECOVERS = machine.Connect | machine.Transfer | machine.Follow | machine.AwaitView
"""Actions whose time the timeline shows as recovery."""


class LeaderRanks(Ranks):
    """The port ``Ranks``. ``dataset``: of the present step. ``last_save``, ``warm``: of a group that comes back, and when it
    began to follow others.

    Large because the port is: the loop has a method for each of its actions, and all act on the ranks of one group.
    """

    def __init__(
        self, executor: GroupExecutor, placement: Placement, store: LeaderStore, first_view: View | None
    ) -> None:
        rank, history, config = executor.rank, executor.rank.history, executor.rank.env.config
        self.shell: Shell
        self.dataset: Dataset
        self.last_save: LastSave | None = None
        self.warm = 0.0
        self.record = StepRecord(history, rank.group, first_view)
        self.checkpoints = CheckpointCoordinator(executor, config)
        self.early: Callable[[], dict[str, Any]] = dict
        """Returns what the ``end`` line says of a run that ends before its last step."""
        self._rank, self._local, self._executor = rank, executor.local, executor
        self._config, self._placement = config, placement
        self._agreement, self._store, self._history = rank.agreement, store, history
        self._timer = StepTimer(rank.size)
        self._recovery_metrics = RecoveryMetrics(history, rank.group)
        self._first_view = first_view
        self._slow: Mapping[GroupId, float] = {}
        self._astray_since: float | None = None

    @property
    def _state(self) -> machine.GroupState:
        return self.shell.state

    def doing(self, action: Action) -> AbstractContextManager[object]:
        working = isinstance(action, machine.Compute | machine.Update)
        self._rank.progress.enter("working" if working else "waiting")
        if resumes(self._state, action):
            self._recovery_metrics.resumed(self._state)
        return self._rank.timeline.span("recover") if isinstance(action, _RECOVERS) else nullcontext()

    # --- a step -------------------------------------------------------------------------------------------------------

    async def begin(self) -> None:
        state = self._state
        self._recovery_metrics.begin_step()
        self.checkpoints.boundary(state, self.record.line.get("duration_s", 0.0))
        self._executor.carry_out(orders.Begin(state.step, cache(lambda: self._needs(state)), self.dataset))
        self._local.guard.slots.say_seconds(self._timer.begin())

    def per_shard(self, step: int) -> int:
        return self._local.registered.sizes.at(step)

    def _needs(self, state: machine.GroupState) -> Needs:
        """Return the microbatches of the step that begins in ``state``."""
        job, everything = state.job, self._placement.redundancy == self._config.shards
        # A group that hosts all shards would hold the whole step; it holds its own share and reads what it takes over.
        hosted = () if everything else self._placement.stack(state.me)
        stack = [Microbatch(state.step, shard, index) for shard in hosted for index in range(job.per_shard)]
        ahead = machine.plan_ahead(state) if state.step + 1 < job.steps else None
        following = () if ahead is None else ahead.standby_of(state.me) + ahead.of(state.me)
        return Needs(state.todo, stack, following)

    def _promoted(self) -> tuple[int, ...]:
        """Return the standby parts that this group contributes."""
        return self._state.plan.promoted(self._state.me)

    def _digests(self) -> tuple[Microbatch, ...]:
        """Return the microbatches whose digests this group sends."""
        return verification.mine(self._state.checks, self._state.me)

    def _part(self, microbatch: Microbatch) -> int:
        """Return where a microbatch is added to (``Engine.add_to``). One that a flush has listed for its digest stays listed
        when a loss makes the check void."""
        plan, me = self._state.plan, self._state.me
        part = plan.part(me, microbatch)
        return part if part or microbatch in plan.of(me) else DIGEST

    async def compute(self) -> Sequence[machine.Computed]:
        """Compute as many microbatches as the group computes at a time: all, if its ranks compute together."""
        if self._local.computing.joint is not None:
            self._flush()
            return ()
        state = self._state
        microbatches = state.todo[: self._executor.width]
        patched = [microbatch in state.plan.patched for microbatch in microbatches]
        parts, asked = list(map(self._part, microbatches)), self._digests()
        digests = [microbatch in asked for microbatch in microbatches]
        ahead = None
        if self._complete_after(microbatches) and not any(parts) and not any(digests):
            ahead = self._local.reducing.ahead(state.step, state.unfinished, asked)
        order = orders.Compute(microbatches, patched, parts, digests, state.view.epoch, ahead)
        prefetched, seconds = self._executor.carry_out(order)
        self._recovery_metrics.computed(microbatches[0], patched[0], prefetched, seconds)
        self._timer.computed(len(microbatches), seconds)
        return [machine.Computed(one, part == DIGEST) for one, part in zip(microbatches, parts, strict=True)]

    def _complete_after(self, microbatches: Sequence[Microbatch]) -> bool:
        """Return whether this group's gradients of the step are complete after these microbatches, so that its buckets may
        be sent within them."""
        state = self._state
        return not state.reported and state.connected and set(state.todo) == set(microbatches) and not self._promoted()

    def _flush(self) -> None:
        """Compute a flush; between instructions verdicts are read, microbatches taken over join the flush, and what has not
        begun is put in order again."""
        started = counted = time.monotonic()
        listing: dict[Microbatch, None] = {}
        ended: list[tuple[Listed, bool]] = []

        def listed() -> Sequence[Listed]:
            nonlocal counted
            while ended:
                (microbatch, _, part, _), prefetched = ended.pop(0)
                self._recovery_metrics.computed(microbatch, microbatch in self._state.plan.patched, prefetched, 0.0)
                carry_out(self.shell.feed(machine.Computed(microbatch, part == DIGEST)))
            self._recovery_metrics.computing(time.monotonic() - counted)
            carry_out(self.shell.hear())
            carry_out(self.shell.look())
            counted = time.monotonic()
            plan, standby, asked = self._state.plan, self._state.standby, self._digests()
            if new := [one for one in self._state.todo if one not in listing]:
                listing.update(dict.fromkeys(new))
                self._local.prefetcher.want([one for one in new if one in plan.patched])
            order = pipeline_order.reorder(listing, standby, self._local.prefetcher.held(listing))
            return [Listed(one, one in plan.patched, self._part(one), one in asked) for one in order]

        def closes(last: Sequence[Listed]) -> bool:
            whole = len(self._state.unfinished) == self._local.reducing.gradients.num_buckets and not self._digests()
            return (
                whole and not any(one.part for one in last) and self._complete_after([one.microbatch for one in last])
            )

        self._executor.flush(orders.Flush(listed, lambda one, prefetched: ended.append((one, prefetched)), closes))
        listed()
        self._timer.computed(len(listing), time.monotonic() - started)

    async def reduce(self, step: int, buckets: Sequence[Bucket]) -> None:
        def reduced(bucket: Bucket) -> None:
            carry_out(self.shell.feed(machine.Reduced(bucket)))

        batches = self._local.computing.batches.chosen(self._state.plan, self._state.view)
        self._executor.carry_out(orders.Reduce(step, buckets, self._promoted(), self._digests(), batches, reduced))
        self._timer.collected(self._local.reducing.collected)

    async def update(self, step: int) -> machine.Updated | machine.Discarded:
        state, local = self._state, self._local
        measured = {group: seconds for group, seconds in enumerate(local.guard.slots.seconds()) if seconds}
        self.record.measure(measured, state.speeds, state.job.straggler_factor)
        compares = local.computing.batches.sent()
        order = orders.Update(step, state.microbatches, state.checks, machine.discardable(state), compares)
        done = self._executor.carry_out(order)
        if isinstance(done, Discard):
            self._note_discarded(step, done)
            return machine.Discarded(step)
        if verified := local.finishing.verified:
            self._history.record("verified", later=True, step=step, digests=verified)
        self.record.view = state.view
        self._slow = state.speeds.slow
        return machine.Updated(step, measured)

    def _note_discarded(self, step: int, discard: Discard) -> None:
        view, guilty = self._state.view, {str(group): microbatch for group, microbatch in discard.guilty.items()}
        starts = {str(group): view.incarnations.get(group, 0) for group in discard.guilty}
        what: dict[str, Any] = {"step": step, "attempt": self._state.attempt, "epoch": view.epoch, "why": discard.why}
        self._history.record("discarded", **what, guilty=guilty, starts=starts, doubtful=list(discard.doubtful))

    async def end_step(self, step: int) -> None:
        slow = self._state.speeds.slow
        if slow != self._slow:
            self._history.record("stragglers", step=step, slow={str(group): round(f, 2) for group, f in slow.items()})

    def record_step(self, step: int, duration_s: float) -> StepResult:
        """Record ``step``, which is committed, and let all ranks return to the user's script."""
        result = given(self._local.state.result)
        tokens = getattr(self.dataset, "tokens_per_microbatch", 0)
        self.record.step(result, duration_s, tokens, self._batch(step))
        self._executor.carry_out(orders.EndStep(given(self.record.view).epoch, self._state.step))
        return result

    def _batch(self, step: int) -> dict[str, Any]:
        """Return what the record says of the batch of ``step``, if it is not that of the config."""
        sizes, job = self._local.registered.sizes, self._state.job
        skipped = sorted(
            microbatch for microbatch in job.skip if microbatch.step == step and microbatch.index < sizes.at(step)
        )
        said: dict[str, Any] = {} if sizes.is_fixed else {"per_shard": sizes.at(step)}
        if skipped:
            said["skipped"] = list(map(str, skipped))
        return {**said, "of_microbatches": sizes.at(step) * job.shards - len(skipped)} if said else {}

    # --- an epoch -----------------------------------------------------------------------------------------------------

    async def connect(self, view: View) -> machine.Connected | None:
        connected = self._executor.carry_out(orders.Connect(view, self._state.step, self._store.pending))
        return machine.Connected(view.epoch) if connected else None

    async def transfer(self, view: View) -> machine.Transferred:
        self._local.state.carried = {"speeds": codec.encode(self._state.speeds), "measured": self.record.measured}
        self._executor.carry_out(orders.Transfer())
        if self._state.me not in view.behind:
            return machine.Transferred(view.epoch)
        taken = self._local.state.carried
        self.record.measured = taken["measured"]
        if self._local.state.result is not None:
            self.record.view = view
        return machine.Transferred(view.epoch, codec.decode(Speeds, taken["speeds"]))

    def carried(self) -> Mapping[str, Any]:
        """Return the state beside the model: the groups' speeds, and the record's line of the step that made it."""
        return {"speeds": codec.encode(self._state.speeds), "line": self.record.line}

    async def follow(self, step: int) -> machine.CaughtUp | machine.CatchUpFailed | None:
        """Advance to the step from which the view starts, not beyond: a donor's version of it may be redone."""
        following, mine = self._local.following, self._local.state
        # no limit: a donor that sends nothing for detector.collective_timeout_s ends it; it returns after each pause
        while following.stands < step:
            answer = self._executor.carry_out(orders.MakeStep(self._store.pending))
            if answer == INTERRUPTED:
                return None
            if answer == ASTRAY:
                if not self._awaits_verdict():
                    return machine.CatchUpFailed(following.astray)
                self._store.wait(FAR_S)
                return None
        if following.stands > step:
            return machine.CatchUpFailed(f"it has made step {step}, which is made again")
        held = given(following.receiver).held
        carried, mine.result = held.carried, held.result or mine.result
        self._executor.carry_out(orders.Arrive())
        if carried["line"]:
            self.record.take(carried["line"])
        times = {"seconds": time.monotonic() - self.warm, "receive_s": following.received - self.warm}
        took = {**{name: round(value, 6) for name, value in times.items()}, "received_bytes": following.bytes}
        who = {"group": self._rank.group, "incarnation": self._rank.env.incarnation, "donors": list(following.donors)}
        self._history.note("rejoined", **who, step=step, **took)
        return machine.CaughtUp(codec.decode(Speeds, carried["speeds"]))

    def _awaits_verdict(self) -> bool:
        """Return whether the notice that a donor is lost may be on its way. The view after it decides whether the group has
        to start over, or all members are lost and it holds the newest state."""
        following, now = self._local.following, time.monotonic()
        if not all(self._state.view.seats(*donor) for donor in following.donors.items()):
            return False
        if self._astray_since is None:
            self._astray_since = now if not following.donors_live() else float("-inf")
        return now - self._astray_since < self._config.fault_tolerance.detector.heartbeat_timeout_s

    async def abort(self) -> None:
        """The watcher has ended all waits already; what the ranks have in hand counts no more."""
        self._recovery_metrics.noticed()
        self._timer.disturbed()

    async def close(self) -> None:
        self._executor.carry_out(orders.CloseEpoch())

    async def adopt(self, view: View) -> None:
        self._agreement.adopted(view)
        if view.lost and (stopped := self._local.guard.nonfinite.stopped()):
            step, why = stopped
            self._executor.carry_out(orders.Stop(why, nonfinite=step))
            raise RunStopped(why)
        self._end_if_refused(view)

    async def prepare(self, view: View) -> None:
        if self._state.me in view.live:
            self.record.adopt(view)
            self._recovery_metrics.adopted(view)
            self.checkpoints.adopted(view)
            self._local.prepare(view, self._state.step)

    def _end_if_refused(self, view: View) -> None:
        """End the run without a step if a group that is lost before the first step may have had other data."""
        first = self._first_view
        if view.lost and first is not None and not first.epoch and self._state.step == first.step:
            why = self._agreement.get(data_identity.REFUSED)
            if why is not None:
                self._executor.carry_out(orders.Stop(why))
                raise DataError(why)

    # --- the end ------------------------------------------------------------------------------------------------------

    async def await_others(self) -> bool:
        self._rank.progress.enter("ended")
        state = self._state
        self._recovery_metrics.resumed(state)
        self.checkpoints.boundary(state, 0.0)
        if state.me == min(state.view.live) and self.checkpoints.at_end(state) and self._write_end():
            return True
        await self._store.pause()
        return False

    def _write_end(self) -> bool:
        """As the lowest living group, record the end once all live groups are done with equal states; else False."""
        done = self._agreement.all_done(self._state.view)
        if done is None:
            return False
        states = {group: how["state"] for group, how in done.items()}
        self._local.guard.accuse("after the last step", self._state.step, self._state.view, states)
        if len(set(states.values())) > 1:
            return False  # the verdict arrives with the notice
        for group, value in done.items():
            self._history.record("survivor", later=True, group=group, **value)  # with the end, in one piece
        if len({value["params_sha256"] for value in done.values()}) > 1:
            self._local.guard.halt(
                self._state.step, f"the groups' parameters differ though their states do not: {done}"
            )
        result = given(self._local.state.result)
        saved: dict[str, Any] = {**self.early(), **self.checkpoints.newest(self._state.step)}
        self._history.record("end", step=result.step, loss=result.loss, **saved, **done[self._state.me])
        self._agreement.put("ended", {"step": result.step, **saved})  # a full disk may have prevented the line
        self._agreement.announce(signals.RunFinished())
        self._history.write_last(_LAST_LINE_S)
        return True

    async def stop(self, action: machine.Stop) -> NoReturn:
        self.stop_all(action.reason, action.halted)

    def stop_all(self, reason: str, halted: bool = False) -> NoReturn:
        """End all ranks of the group, each with the same error."""
        wiped_out, following = self._state.wiped_out, self._state.following
        kind: type[RunStopped] = WipedOut if wiped_out else RunStopped
        if halted:
            kind = InvariantBroken
        elif self._store.left:
            kind, reason = GroupLeft, f"group {self._state.me} has left: {self._store.leaving}"
        elif following and not wiped_out:
            kind = StartOver
        if kind is WipedOut and following:  # what its donors have sent is the newest state that is left
            reason += given(self.last_save).save()
        self._executor.carry_out(orders.Stop(reason, kind.__name__))
        raise kind(reason)
