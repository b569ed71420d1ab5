"""The training thread of position 0: the loop that carries out, for its group, the decisions of
``core.protocol.machine``.

It owns history and protocol state. The watcher's thread only puts verdicts into a queue and lets the rank abort the
communicators they concern. The loop reads the queue between any two actions. The longest action computes as many
microbatches in parallel as the group has ranks.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NoReturn, cast

from megatron_ft import codec
from megatron_ft.checkpoint import restore
from megatron_ft.collectives.base import Broken
from megatron_ft.collectives.intra_group import Lost
from megatron_ft.config.schema import RunConfig, job_of
from megatron_ft.coordination.client import CoordinationClient
from megatron_ft.coordination.store import Fenced
from megatron_ft.core.detection.stragglers import Speeds
from megatron_ft.core.exactness import verification
from megatron_ft.core.lifecycle import store_failover
from megatron_ft.core.lifecycle.checkpoint_protocol import Saves, Stops
from megatron_ft.core.protocol import machine, signals
from megatron_ft.core.replication.placement import Placement
from megatron_ft.core.scheduling import pipeline_order
from megatron_ft.data.prefetch import Dataset
from megatron_ft.engines.port import DIGEST, Listed, StepResult
from megatron_ft.errors import DataError, GroupLeft, InvariantBroken, RunStopped, StartOver, WipedOut
from megatron_ft.runlog.history import History
from megatron_ft.types import GroupId, Microbatch, View, given
from megatron_ft.worker import data_identity, orders
from megatron_ft.worker.checkpointing.coordinator import CheckpointCoordinator
from megatron_ft.worker.evaluation import Sums
from megatron_ft.worker.group_executor import GroupExecutor
from megatron_ft.worker.orders import Needs
from megatron_ft.worker.rank_executor import Discard, RankExecutor
from megatron_ft.worker.recovery_metrics import RecoveryMetrics
from megatron_ft.worker.rejoin.joiner import ASTRAY, INTERRUPTED, RejoinCoordinator
from megatron_ft.worker.rejoin.last_save import LastSave
from megatron_ft.worker.step_record import StepRecord
from megatron_ft.worker.step_timer import StepTimer

_LAST_LINE_S = 10.0
"""How long the end of the run is tried to be written to a disk that is full."""
_POLL_S = 0.001
_FAR_S = 0.25
_SPARING = 4.0
"""After a look, the next waits for this multiple of its duration: a store of thousands of groups is busy."""


class GroupLeader:
    """One group's part in the protocol. ``first_view`` is the run's first view; None for a group that comes back."""

    def __init__(
        self,
        rank: RankExecutor,
        config: RunConfig,
        agreement: CoordinationClient,
        history: History,
        placement: Placement,
        first_view: View | None,
    ) -> None:
        self.group, self._incarnation = rank.group, rank.incarnation
        self._rank, self._executor = rank, GroupExecutor(rank)
        self._config, self._agreement, self._history = config, agreement, history
        self._placement = placement
        self._points, self._progress, self._timeline = rank.points, rank.progress, rank.timeline
        self._timer = StepTimer(rank.size)
        self._record = StepRecord(history, rank.group, first_view)
        self._recovery_metrics = RecoveryMetrics(history, rank.group)
        self._checkpoints = CheckpointCoordinator(self._executor, config)
        self._verdicts: queue.SimpleQueue[signals.Verdict] = queue.SimpleQueue()
        self._stirred = threading.Event()
        self._agreed, self._over, self._looked = 0, False, 0.0
        self._first_view = first_view
        self._memory = agreement.memory
        self._state: machine.GroupState  # from :meth:`enter` on
        self._next: machine.Action = machine.Finish(0)
        self._leaving, self._said_leaving, self._lingers = "", False, False
        self._last_save: LastSave | None = None  # of a group that comes back
        self._astray_since: float | None = None
        self._warm = 0.0
        if first_view is not None:
            agreement.adopted(first_view)

    @property
    def step(self) -> int:
        """The next step that the script has to train; a group that comes back knows it once it has its seat."""
        if hasattr(self, "_state"):
            return self._state.step
        return 0 if self._first_view is None else self._first_view.step

    def enter(self, total: int, comes_back: bool, origin: restore.Origin | None = None) -> None:
        """Begin the first step of ``total``, or return to the run as a group that comes back.

        The engine is attached, and has the state of ``origin``, if there is one."""
        begins_at = -1 if comes_back else given(self._first_view).step
        buckets = self._rank.num_buckets
        job = job_of(self._config, self._placement, buckets=buckets, steps=total, first=begins_at)
        if comes_back:
            self._come_back(job)
            return
        first = given(self._first_view)
        self._begin_with(first, job, origin)
        self._history.record("begin", steps=total, microbatches=self._config.microbatches, buckets=job.buckets)
        self._record.adopt(first)
        if origin is None:
            # A group that is behind gets another state, unless all that have it die.
            self._executor.carry_out(orders.ShareState())

    def _begin_with(self, view: View, job: machine.Job, origin: restore.Origin | None = None) -> None:
        self._state = machine.start(self.group, job, view)
        self._next = machine.next_action(self._state)
        self._history.set_writer(self.group == min(view.live))
        self._rank.carry = self._carried
        self._rank.epoch = lambda: self._state.view.epoch if self._state.synced else None
        self._checkpoints.begin(view, origin)

    def _come_back(self, job: machine.Job) -> None:
        """Follow other groups until this group has its seat."""
        self._warm = time.monotonic()
        self._progress.enter("waiting")
        self._points.reach("warm", 0)
        self._last_save = LastSave(self._executor, self._rank.following.env, job.steps)
        poll, save = self._hear_before, self._last_save.save
        view = RejoinCoordinator(self._rank.following, self._executor, poll, save).seat()
        self._agreement.adopted(view)
        self._first_view = self._record.view = view
        self._begin_with(view, job)
        self._record.adopt(view)
        self._rank.prepare(view, view.step)
        self._executor.carry_out(orders.Enter(view.step))

    def _hear_before(self) -> None:
        """Keep verdicts that arrive before this group has its seat until it has one."""
        if self._leaving:
            raise GroupLeft(f"group {self.group} has left before it was back: {self._leaving}")
        if self._rank.lost_because:
            raise Lost(self._rank.lost_because)

    def train_step(self, dataset: Dataset) -> StepResult:
        """Compute, reduce and commit one step, whatever dies meanwhile. Raises ``RunStopped``, ``StoreError``."""
        with self._until_fenced():
            return self._train_step(dataset)

    def _train_step(self, dataset: Dataset) -> StepResult:
        started = time.monotonic()
        step = self._state.step
        self._recovery_metrics.begin_step()
        self._resize()
        self._begin(dataset)
        while self._state.step == step:
            self._drain_verdicts()
            self._perform(self._next)
        tokens = getattr(dataset, "tokens_per_microbatch", 0)
        self._record.step(given(self._rank.result), time.monotonic() - started, tokens, self._batch(step))
        self._executor.carry_out(orders.EndStep(given(self._record.view).epoch, self._state.step))
        return given(self._rank.result)

    def _batch(self, step: int) -> dict[str, Any]:
        """Return what the record says of the batch of ``step``, if it is not that of the config."""
        sizes, job = self._rank.registered.sizes, self._state.job
        skipped = sorted(
            microbatch for microbatch in job.skip if microbatch.step == step and microbatch.index < sizes.at(step)
        )
        said: dict[str, Any] = {} if sizes.is_fixed else {"per_shard": sizes.at(step)}
        if skipped:
            said["skipped"] = list(map(str, skipped))
        return {**said, "of_microbatches": sizes.at(step) * job.shards - len(skipped)} if said else {}

    def _resize(self) -> None:
        """Take over the size of the batch that the script has set, or that came with the state."""
        per_shard = self._rank.registered.sizes.at(self._state.step)
        if per_shard != self._state.job.per_shard:
            self._feed(machine.BatchResized(per_shard))

    def log(self, values: Mapping[str, float | str]) -> None:
        """Record what the script has logged since the last step."""
        self._record.log(self.step - 1, values)

    def evaluate(self, lost: Callable[[View], Collection[GroupId]]) -> Sums:
        """Take part in the rank's evaluation. ``lost`` returns the members of a view that are known to be lost."""
        with self._until_fenced():
            self._share_model()
        view = self._state.view
        carry_out = lambda batches: self._executor.carry_out(  # noqa: E731
            orders.Evaluate([(one.start, one.stop) for one in batches])
        )
        with self._until_fenced():
            self._progress.enter("waiting")
            evaluation = given(self._rank.evaluation)
            # A group that has just got its seat has no state yet. The others had this evaluation before they let it in.
            mine = carry_out if self._state.synced else None
            total = evaluation.share(self._agreement, self.group, view.live, lambda: lost(view), mine)
        self._executor.carry_out(orders.EndEvaluation(total))
        return total

    def _share_model(self) -> None:
        """Before the first step: give all groups the same model now, and not within the step. If a group is lost
        meanwhile, the groups without it get it within the step."""
        self._rank.progress.enter("waiting")
        while self._state.needs_transfer and isinstance(self._next, machine.Connect | machine.Transfer):
            self._drain_verdicts()
            self._perform(self._next)

    def finish(self) -> None:
        """Stay reachable until every live group is done; the lowest of them completes the run record."""
        with self._until_fenced():
            self._finish()

    @contextmanager
    def _until_fenced(self) -> Iterator[None]:
        """Stop the group's other ranks when a claim leaves this group out, which may happen at any time."""
        try:
            yield
        except Fenced as error:
            self._stop(str(error), halted=False)

    def _finish(self) -> None:
        self._progress.enter("ended")
        self._agreement.done(self._incarnation, self._executor.carry_out(orders.Fingerprint()))
        self._points.reach("finish", self._state.step)
        patience_s = self._config.fault_tolerance.detector.longest_collective_s
        deadline = time.monotonic() + patience_s
        # no limit: after detector.collective_timeout_s the epoch ends, and groups that are not done are left out
        while not self._is_over():
            began = time.monotonic()
            self._drain_verdicts()
            if not isinstance(self._next, machine.Finish):
                self._perform(self._next)
                self._progress.enter("ended")
                deadline = time.monotonic() + patience_s
                continue
            self._recovery_metrics.resumed(self._state)
            self._checkpoints.boundary(self._state, 0.0)
            if self.group == min(self._state.view.live) and self._checkpoints.at_end(self._state) and self._write_end():
                break
            if time.monotonic() > deadline:
                self._break_epoch(f"not every live group is done {patience_s:g} s after this one")
            self._pause(_SPARING * (time.monotonic() - began))
        self._executor.carry_out(orders.End())
        self._checkpoints.close()

    def leave(self, why: str) -> None:
        """Leave in order after the present step. Callable from any thread and from a signal handler."""
        self._leaving = self._leaving or why

    def on_signal(self, verdict: signals.Verdict) -> None:
        """Watcher thread: queue a verdict for the training thread."""
        if isinstance(verdict, Saves | Stops):
            self._checkpoints.on_signal(verdict)
        elif isinstance(verdict, signals.LeaveRequested):
            self.leave(verdict.why)
        else:
            self._verdicts.put(verdict)
            self._stirred.set()

    def claims_changed(self) -> None:
        """Make the training thread check now if this group is left out. Callable from any thread."""
        self._stirred.set()

    def _write_end(self) -> bool:
        """As the lowest living group, record the end once all live groups are done with equal states; else False."""
        done = self._agreement.all_done(self._state.view)
        if done is None:
            return False
        states = {group: how["state"] for group, how in done.items()}
        self._rank.guard.accuse("after the last step", self._state.step, self._state.view, states)
        if len(set(states.values())) > 1:
            return False  # the verdict arrives with the notice
        for group, value in done.items():
            self._history.record("survivor", later=True, group=group, **value)  # with the end, in one piece
        if len({value["params_sha256"] for value in done.values()}) > 1:
            self._rank.guard.halt(self._state.step, f"the groups' parameters differ though their states do not: {done}")
        result = given(self._rank.result)
        saved: dict[str, Any] = self._checkpoints.newest(self._state.step)
        self._history.record("end", step=result.step, loss=result.loss, **saved, **done[self.group])
        self._agreement.put("ended", {"step": result.step, **saved})  # a full disk may have prevented the line
        self._agreement.announce(signals.RunFinished())
        self._history.write_last(_LAST_LINE_S)
        return True

    def _is_over(self) -> bool:
        """Return True if a group has written the end: it is announced, and looked for from time to time."""
        if not self._over and self._poll_is_due():
            self._looked = time.monotonic()
            self._over = self._agreement.get("ended") is not None
        return self._over

    # --- events
    # -----------------------------------------------------------------------------------------------------------

    def _say_leaving(self) -> None:
        said = signals.LeaveAnnounced(self.group, self._state.step, self._leaving, self._incarnation)
        self._said_leaving = True
        self._agreement.announce(said)
        self._history.note("leave", group=self.group, after=said.after, reason=said.why)
        self._feed(
            cast(machine.Event, signals.classify(said))
        )  # now: this group must not begin to reduce the next step

    def _drain_verdicts(self) -> None:
        self._agreement.check()
        self._follow_store()
        if self._leaving and not self._said_leaving:
            self._say_leaving()
        while not self._verdicts.empty():
            # no limit: it does not block: there is an entry, and only this thread takes any
            match verdict := self._verdicts.get():
                case signals.ViewAgreed(epoch=epoch):
                    self._agreed = max(epoch, self._agreed)
                    continue
                case signals.RunFinished():
                    self._over = True
                    continue
                case machine.GroupFailed() if self._rank.lost_because:
                    raise Lost(self._rank.lost_because)
            self._feed(cast(machine.Event, verdict))  # other objects receive the other verdicts

    # --- actions
    # ----------------------------------------------------------------------------------------------------------

    def _feed(self, event: machine.Event) -> None:
        """Pass an event to the core; carry out at once all actions but the training thread's next one."""
        self._state, actions = machine.step(self._state, event, time.monotonic())
        self._next = actions[-1]
        for action in actions[:-1]:
            match action:
                case machine.Abort(in_order=in_order):
                    self._recovery_metrics.noticed()
                    self._timer.disturbed()
                    self._lingers = in_order
                    if not in_order:
                        self._executor.carry_out(orders.CloseEpoch())
                case machine.Publish(report=report):
                    self._agreement.publish(report)
                    self._points.reach("recover", self._state.step)
                case machine.Announce(epoch=epoch, reason=reason, after=after):
                    self._rank.link.tell_broken(epoch, reason, after)
                case machine.Propose():
                    self._propose(action)
                    return

    def _propose(self, action: machine.Propose) -> None:
        view = action.view
        claims = self._agreement.fence(action.fence, view.reason) if action.reads_log else ()
        if claims is None:
            return  # the next look tries it again
        if any(claim.fenced for claim in claims):  # decide anew
            for claim in claims:
                for verdict in store_failover.verdicts(claim):
                    self._feed(verdict)
            return
        answer = self._agreement.propose(view, self._memory)
        if answer is None:
            self._follow_store()
            return
        standing, own = answer
        if own:
            self._agreement.announce(signals.ViewAgreed(standing.epoch))
        self._adopt(standing)

    def _follow_store(self) -> bool:
        """Return True if the store has another memory by now: then no report counts that was read before."""
        before, self._memory = self._memory, self._agreement.memory
        if before == self._memory:
            return False
        self._feed(machine.Replaced())
        return True

    def _perform(self, action: machine.Action) -> None:
        """Carry out the training thread's next action, and report the result to the core."""
        self._progress.enter("working" if isinstance(action, machine.Compute | machine.Update) else "waiting")
        match action:
            case machine.Compute():
                self._compute()
            case machine.Reduce(step=step, buckets=buckets):
                self._recovery_metrics.resumed(self._state)
                reduced = lambda bucket: self._feed(machine.Reduced(bucket))  # noqa: E731
                batches = self._rank.batches.chosen(self._state.plan, self._state.view)
                order = orders.Reduce(step, buckets, self._promoted(), self._digests(), batches, reduced)
                self._attempt(lambda: self._executor.carry_out(order))
                self._timer.collected(self._rank.collected)
            case machine.Update(step=step):
                if (
                    self._state.next_plan_origin is None
                ):  # else other groups have decided it, and the next step was interrupted
                    self._recovery_metrics.resumed(self._state)
                self._update(step)
            case machine.Connect(view=view):
                with self._timeline.span("recover"):
                    self._attempt(lambda: self._connect(view))
            case machine.Transfer(view=view):
                with self._timeline.span("recover"):
                    self._attempt(lambda: self._transfer(view))
            case machine.Follow(step=step):
                with self._timeline.span("recover"):
                    self._follow(step)
            case machine.AwaitView(epoch=epoch, missing=missing):
                with self._timeline.span("recover"):
                    self._await_view(epoch, missing)
            case machine.Stop(reason=reason, halted=halted):
                self._stop(reason, halted)
            case _:
                raise AssertionError(f"{action} is not for the training thread")

    def _stop(self, reason: str, halted: bool) -> NoReturn:
        kind: type[RunStopped] = WipedOut if self._state.wiped_out else RunStopped
        if halted:
            kind = InvariantBroken
        elif self._said_leaving:
            kind, reason = GroupLeft, f"group {self.group} has left: {self._leaving}"
        elif self._state.following and not self._state.wiped_out:
            kind = StartOver
        if kind is WipedOut and self._state.following:  # what its donors have sent is the newest state that is left
            reason += given(self._last_save).save()
        self._executor.carry_out(orders.Stop(reason, kind.__name__))
        raise kind(reason)

    def _begin(self, dataset: Dataset) -> None:
        state = self._state
        self._checkpoints.boundary(state, self._record.line.get("duration_s", 0.0))
        self._executor.carry_out(orders.Begin(state.step, cache(lambda: self._needs(state)), dataset))
        self._rank.say_seconds(self._timer.begin())

    def _needs(self, state: machine.GroupState) -> Needs:
        """Return the microbatches of the step that begins in ``state``."""
        job, everything = state.job, self._placement.redundancy == self._config.shards
        # A group that hosts all shards would hold the whole step; it holds its own share and reads what it takes over.
        hosted = () if everything else self._placement.stack(self.group)
        stack = [Microbatch(state.step, shard, index) for shard in hosted for index in range(job.per_shard)]
        ahead = machine.plan_ahead(state) if state.step + 1 < job.steps else None
        following = () if ahead is None else ahead.standby_of(self.group) + ahead.of(self.group)
        return Needs(state.todo, stack, following)

    def _promoted(self) -> tuple[int, ...]:
        """Return the standby parts that this group contributes."""
        return self._state.plan.promoted(self.group)

    def _digests(self) -> tuple[Microbatch, ...]:
        """Return the microbatches whose digests this group sends."""
        return verification.mine(self._state.checks, self.group)

    def _part(self, microbatch: Microbatch) -> int:
        """Return where a microbatch is added to (``Engine.add_to``). One that a flush has listed for its digest stays listed
        when a loss makes the check void."""
        plan = self._state.plan
        part = plan.part(self.group, microbatch)
        return part if part or microbatch in plan.of(self.group) else DIGEST

    def _compute(self) -> None:
        """Compute as many microbatches as the group computes at a time: all, if its ranks compute together."""
        if self._rank.joint:
            self._flush()
            return
        state = self._state
        microbatches = state.todo[: self._executor.width]
        patched = [microbatch in state.plan.patched for microbatch in microbatches]
        parts, asked = list(map(self._part, microbatches)), self._digests()
        digests = [microbatch in asked for microbatch in microbatches]
        ahead = None
        if self._complete_after(microbatches) and not any(parts) and not any(digests):
            ahead = self._rank.ahead(state.step, state.unfinished, asked)
        order = orders.Compute(microbatches, patched, parts, digests, state.view.epoch, ahead)
        prefetched, seconds = self._executor.carry_out(order)
        self._recovery_metrics.computed(microbatches[0], patched[0], prefetched, seconds)
        self._timer.computed(len(microbatches), seconds)
        for microbatch, part in zip(microbatches, parts, strict=True):
            self._feed(machine.Computed(microbatch, part == DIGEST))
        self._glance()

    def _complete_after(self, microbatches: Sequence[Microbatch]) -> bool:
        """Return whether this group's gradients of the step are complete after these microbatches, so that its buckets may
        be sent within them."""
        state = self._state
        return not state.reported and state.connected and set(state.todo) == set(microbatches) and not self._promoted()

    def _glance(self) -> None:
        """Look for the next view without waiting, if it is being agreed on."""
        awaited = machine.awaited(self._state)
        if awaited and self._poll_is_due(awaited.epoch) and not self._poll_store(awaited.epoch, awaited.missing):
            self._count()

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
                self._feed(machine.Computed(microbatch, part == DIGEST))
            self._recovery_metrics.computing(time.monotonic() - counted)
            self._drain_verdicts()
            self._glance()
            counted = time.monotonic()
            plan, standby, asked = self._state.plan, self._state.standby, self._digests()
            if new := [one for one in self._state.todo if one not in listing]:
                listing.update(dict.fromkeys(new))
                self._rank.want([one for one in new if one in plan.patched])
            order = pipeline_order.reorder(listing, standby, self._rank.held(listing))
            return [Listed(one, one in plan.patched, self._part(one), one in asked) for one in order]

        def closes(last: Sequence[Listed]) -> bool:
            whole = len(self._state.unfinished) == self._rank.num_buckets and not self._digests()
            return (
                whole and not any(one.part for one in last) and self._complete_after([one.microbatch for one in last])
            )

        self._executor.flush(orders.Flush(listed, lambda one, prefetched: ended.append((one, prefetched)), closes))
        listed()
        self._timer.computed(len(listing), time.monotonic() - started)

    def _update(self, step: int) -> None:
        speeds, measured = self._state.speeds, self._rank.measured()
        before = speeds.slow
        self._record.measure(measured, speeds, self._state.job.straggler_factor)
        state = self._state
        compares = self._rank.batches.sent()
        order = orders.Update(step, state.microbatches, state.checks, machine.discardable(state), compares)
        done = self._executor.carry_out(order)
        if isinstance(done, Discard):
            self._discard(step, done)
            return
        if self._rank.verified:
            self._history.record("verified", later=True, step=step, digests=self._rank.verified)
        self._record.view = self._state.view
        self._feed(machine.Updated(step, measured))
        slow = self._state.speeds.slow
        if slow != before:
            self._history.record("stragglers", step=step, slow={str(group): round(f, 2) for group, f in slow.items()})

    def _discard(self, step: int, discard: Discard) -> None:
        """Record that the step's sums were discarded, and begin its next attempt."""
        view, guilty = self._state.view, {str(group): microbatch for group, microbatch in discard.guilty.items()}
        starts = {str(group): view.incarnations.get(group, 0) for group in discard.guilty}
        what: dict[str, Any] = {"step": step, "attempt": self._state.attempt, "epoch": view.epoch, "why": discard.why}
        self._history.record("discarded", **what, guilty=guilty, starts=starts, doubtful=list(discard.doubtful))
        self._feed(machine.Discarded(step))

    def _connect(self, view: View) -> None:
        interrupted = lambda: not self._verdicts.empty()  # noqa: E731
        if self._executor.carry_out(orders.Connect(view, self._state.step, interrupted)):
            self._feed(machine.Connected(view.epoch))
        # If this failed, a verdict came in, and the next turn reads it.

    def _transfer(self, view: View) -> None:
        self._rank.carried = {"speeds": codec.encode(self._state.speeds), "measured": self._record.measured}
        self._executor.carry_out(orders.Transfer())
        speeds = None
        if self.group in view.behind:
            taken = self._rank.carried
            speeds = codec.decode(Speeds, taken["speeds"])
            self._record.measured = taken["measured"]
            if self._rank.result is not None:
                self._record.view = view
        self._feed(machine.Transferred(view.epoch, speeds))

    def _carried(self) -> Mapping[str, Any]:
        """Return the state beside the model: the groups' speeds, and the record's line of the step that made it."""
        return {"speeds": codec.encode(self._state.speeds), "line": self._record.line}

    def _follow(self, step: int) -> None:
        """Advance to the step from which the view starts, not beyond: a donor's version of it may be redone."""
        following = self._rank.following
        # no limit: a donor that sends nothing for detector.collective_timeout_s ends it; it returns after each pause
        while following.stands < step:
            answer = self._executor.carry_out(orders.MakeStep(lambda: not self._verdicts.empty()))
            if answer == INTERRUPTED:
                return
            if answer == ASTRAY:
                if self._awaits_verdict():
                    self._pause(_FAR_S)
                else:
                    self._feed(machine.CatchUpFailed(following.astray))
                return
        if following.stands > step:
            self._feed(machine.CatchUpFailed(f"it has made step {step}, which is made again"))
            return
        carried, self._rank.result = following.carried, following.result or self._rank.result
        self._executor.carry_out(orders.Arrive())
        self._resize()
        if carried["line"]:
            self._record.take(carried["line"])
        times = {"seconds": time.monotonic() - self._warm, "receive_s": following.received - self._warm}
        took = {**{name: round(value, 6) for name, value in times.items()}, "received_bytes": following.bytes}
        who = {"group": self.group, "incarnation": self._incarnation, "donors": list(following.donors)}
        self._history.note("rejoined", **who, step=step, **took)
        self._feed(machine.CaughtUp(codec.decode(Speeds, carried["speeds"])))

    def _awaits_verdict(self) -> bool:
        """Return whether the notice that a donor is lost may be on its way. The view after it decides whether the group has
        to start over, or all members are lost and it holds the newest state."""
        following, now = self._rank.following, time.monotonic()
        if not all(self._state.view.seats(*donor) for donor in following.donors.items()):
            return False
        if self._astray_since is None:
            self._astray_since = now if not following.donors_live() else float("-inf")
        return now - self._astray_since < self._config.fault_tolerance.detector.heartbeat_timeout_s

    def _await_view(self, epoch: int, missing: tuple[int, ...]) -> None:
        if not self._poll_is_due(epoch):
            self._pause(_FAR_S / 2)
        elif not self._poll_store(epoch, missing):
            self._count()
            self._pause(_SPARING * (time.monotonic() - self._looked))

    def _poll_store(self, epoch: int, missing: tuple[int, ...]) -> bool:
        """Look once for the next view, else for reports. Return True if there were any."""
        self._looked = time.monotonic()
        standing = self._agreement.view(epoch + 1)
        if standing is not None:
            self._adopt(standing)
            return True
        reports = self._agreement.reports(epoch, missing) if missing else ()
        if self._follow_store():
            return True
        if reports:
            self._feed(machine.ReportsSeen(reports))
        return bool(reports)

    def _count(self) -> None:
        """Count the time without a report since the last look, if all other groups could have read where to report."""
        if self._agreement.log_answers():
            self._feed(machine.Tick())

    def _poll_is_due(self, epoch: int | None = None) -> bool:
        """Return True if a look is due. The collecting group always looks; it tells the others, but may be lost."""
        told = epoch is not None and (self._state.collects or self._agreed > epoch)
        return told or time.monotonic() - self._looked > _FAR_S

    def _pause(self, longest_s: float) -> None:
        """Wait for the next event, at most ``longest_s`` seconds."""
        self._stirred.wait(max(_POLL_S, longest_s))
        self._stirred.clear()

    # --- interruptions ------------------------------------------------------------------------------------------------

    def _attempt(self, operation: Callable[[], None]) -> None:
        """Run an operation of the present epoch; if it breaks, tell the core and the other groups."""
        epoch = self._state.view.epoch
        try:
            operation()
        except Broken as error:
            reason, detail = str(error), error.detail
        else:
            return
        self._drain_verdicts()
        if not self._state.reported and self._state.view.epoch == epoch:
            self._break_epoch(reason, detail)

    def _break_epoch(self, reason: str, detail: str = "") -> None:
        """End the present epoch for all groups; this group is the first to know."""
        said = self._rank.link.tell_broken(self._state.view.epoch, reason, detail=detail)
        self._feed(cast(machine.Event, signals.classify(said)))

    def _adopt(self, view: View) -> None:
        if view.epoch <= self._state.view.epoch:
            return
        self._agreement.adopted(view)
        if view.lost and (stopped := self._rank.nonfinite.stopped()):
            step, why = stopped
            self._executor.carry_out(orders.Stop(why, nonfinite=step))
            raise RunStopped(why)
        self._end_if_refused(view)
        if self._lingers:
            self._lingers = False
            self._executor.carry_out(orders.CloseEpoch())
        if self.group in view.live:
            self._record.adopt(view)
            self._recovery_metrics.adopted(view)
            self._checkpoints.adopted(view)
            self._rank.prepare(view, self._state.step)
        self._feed(machine.ViewSeen(view))  # last: if the view is outdated already, this call adopts the next one

    def _end_if_refused(self, view: View) -> None:
        """End the run without a step if a group that is lost before the first step may have had other data."""
        first = self._first_view
        if view.lost and first is not None and not first.epoch and self._state.step == first.step:
            why = self._agreement.get(data_identity.REFUSED)
            if why is not None:
                self._executor.carry_out(orders.Stop(why))
                raise DataError(why)
