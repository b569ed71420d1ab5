"""The training thread of position 0: the one loop that carries out, for its group, what ``core.recovery`` decides.

It owns history and protocol state. The watcher's thread only puts verdicts into a queue and lets the rank abort the
communicator they concern. The queue is read between any two actions; the computing of as many microbatches as the group has
ranks, at the same time, is the longest of them.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_ft.config import DROP, RunConfig
from megatron_ft.core import detector, recovery
from megatron_ft.core.replication import Placement
from megatron_ft.core.saving import Saves, Stops
from megatron_ft.core.stragglers import Speeds
from megatron_ft.data.prefetch import Dataset
from megatron_ft.engines.base import Listed, StepResult
from megatron_ft.errors import GroupLeft, RunStopped, StartOver
from megatron_ft.runtime import resume
from megatron_ft.runtime.agreement import Agreement
from megatron_ft.runtime.collecting import Checkpoints
from megatron_ft.runtime.comeback import ASTRAY, INTERRUPTED, Return
from megatron_ft.runtime.communicator import Broken
from megatron_ft.runtime.crew import Crew
from megatron_ft.runtime.history import History
from megatron_ft.runtime.inner import Lost
from megatron_ft.runtime.interruption import Interruptions
from megatron_ft.runtime.pace import Pace
from megatron_ft.runtime.rank import Needs, Rank
from megatron_ft.types import Microbatch, View

_POLL_S = 0.001
_FAR_S = 0.25
_SPARING = 4.0
"""So many times what a look takes, nobody looks: with thousands of groups, their store has enough to do."""


class Leader:
    """One group's part in the protocol. ``first_view`` is the one the run begins with; None for a group that comes back."""

    def __init__(
        self,
        rank: Rank,
        config: RunConfig,
        agreement: Agreement,
        history: History,
        placement: Placement,
        first_view: View | None,
    ) -> None:
        self.group, self._incarnation = rank.group, rank.incarnation
        self._rank, self._crew = rank, Crew(rank)
        self._config, self._agreement, self._history = config, agreement, history
        self._placement = placement
        self._points, self._pulse, self._timeline = rank.points, rank.pulse, rank.timeline
        self._pace = Pace(rank.size)
        self._measured: Mapping[int, float] = {}
        self._interruptions = Interruptions(history, rank.group, placement)
        self._checkpoints = Checkpoints(rank, self._crew, config, agreement, history)
        self._verdicts: queue.SimpleQueue[detector.Verdict] = queue.SimpleQueue()
        self._stirred = threading.Event()
        self._agreed, self._over, self._looked = 0, False, 0.0
        self._first_view = self._committed_under = first_view
        self._state: recovery.GroupState | None = None
        self._next: recovery.Action = recovery.Finish(0)
        self._leaving, self._said_leaving, self._lingers = "", False, False
        self._line: Mapping[str, Any] = {}
        self._warm = 0.0
        if first_view is not None:
            agreement.adopted(first_view)

    @property
    def step(self) -> int:
        """The next one the script has to train; of a group that comes back not known before it has its seat."""
        return self._state.step if self._state is not None else self._first_view.step if self._first_view is not None else 0

    def enter(self, total: int, comes_back: bool, origin: resume.Origin | None = None) -> None:
        """The first step of ``total`` is about to begin, or this group comes back into the run; the engine is attached, and
        has the state of ``origin``, if there is one."""
        settings = self._config.fault_tolerance
        job = recovery.Job(
            shards=self._config.shards,
            per_shard=self._config.microbatches_per_group,
            buckets=self._rank.num_buckets,
            steps=total,
            min_groups=settings.min_groups,
            report_timeout_s=settings.detector.report_timeout_s,
            straggler_factor=settings.detector.straggler_factor,
            straggler_steps=settings.detector.straggler_steps,
            placement=self._placement,
            drop=settings.policy == DROP,
        )
        if comes_back:
            self._come_back(job)
            return
        self._begin_with(self._first_view, job, origin)
        self._history.record("begin", steps=total, microbatches=job.microbatches, buckets=job.buckets)
        self._record_view(self._first_view)
        if origin is None:
            self._crew.share_state()  # who is behind will get another one, unless all die that have it

    def _begin_with(self, view: View, job: recovery.Job, origin: resume.Origin | None = None) -> None:
        self._state = recovery.start(self.group, job, view)
        self._next = recovery.next_action(self._state)
        self._history.set_writer(self.group == min(view.live))
        self._rank.carry = self._carried
        self._rank.epoch = lambda: self._state.view.epoch if self._state.synced else None
        self._checkpoints.begin(view, origin)

    def _come_back(self, job: recovery.Job) -> None:
        """Follow the others until this group has its seat."""
        self._warm = time.monotonic()
        self._pulse.enter("waiting")
        self._points.reach("warm", 0)
        view = Return(self._rank.following, self._crew, self._hear_before).seat()
        self._agreement.adopted(view)
        self._first_view = self._committed_under = view
        self._begin_with(view, job)
        self._record_view(view)
        self._rank.prepare(view, view.step)
        self._crew.enter(view.step)

    def _hear_before(self) -> None:
        """What is heard before this group has its seat is kept for then."""
        if self._leaving:
            raise GroupLeft(f"group {self.group} has left before it was back: {self._leaving}")
        if self._rank.lost_because:
            raise Lost(self._rank.lost_because)

    def train_step(self, dataset: Dataset) -> StepResult:
        """Compute, reduce and commit one step, whatever dies meanwhile. Raises ``RunStopped``, ``StoreError``."""
        started = time.monotonic()
        step = self._state.step
        self._interruptions.begin_step()
        self._begin(dataset)
        while self._state.step == step:
            self._drain_verdicts()
            self._perform(self._next)
        self._record_step(time.monotonic() - started)
        self._crew.end_step(self._committed_under.epoch, self._state.step)
        return self._rank.result

    def finish(self) -> None:
        """Stay reachable until every live group is done; the lowest of them completes the run record."""
        self._pulse.enter("waiting")
        norm, sha256 = self._crew.fingerprint()
        self._agreement.done(self._incarnation, {"params_norm": norm, "params_sha256": sha256})
        self._points.reach("finish", self._state.step)
        patience_s = self._config.fault_tolerance.detector.collective_timeout_s
        deadline = time.monotonic() + patience_s
        while not self._is_over():
            began = time.monotonic()
            self._drain_verdicts()
            if not isinstance(self._next, recovery.Finish):
                self._perform(self._next)
                deadline = time.monotonic() + patience_s
                continue
            self._interruptions.resumed(self._state)
            self._checkpoints.boundary(self._state, 0.0)
            if self.group == min(self._state.view.live) and self._checkpoints.at_end(self._state) and self._write_end():
                break
            if time.monotonic() > deadline:
                self._break_epoch(f"not every live group is done {patience_s:g} s after this one")
            self._pause(_SPARING * (time.monotonic() - began))
        self._crew.end()
        self._checkpoints.close()

    def leave(self, why: str) -> None:
        """Leave in order after the present step. Callable from any thread and from a signal handler."""
        self._leaving = self._leaving or why

    def hear(self, verdict: detector.Verdict) -> None:
        """Watcher thread."""
        if isinstance(verdict, Saves | Stops):
            self._checkpoints.hear(verdict)
        elif isinstance(verdict, detector.Dismissed):
            self.leave(verdict.why)
        else:
            self._verdicts.put(verdict)
            self._stirred.set()

    def _write_end(self) -> bool:
        """As the lowest living group: once every live group is done, record it. False while one is not."""
        done = self._agreement.all_done(self._state.view)
        if done is None:
            return False
        for group, value in done.items():
            self._history.record("survivor", later=True, group=group, **value)  # with the end, in one piece
        if len({value["params_sha256"] for value in done.values()}) > 1:
            raise RuntimeError(f"the survivors' parameters differ, which must never happen: {done}")
        result = self._rank.result
        self._history.record("end", step=result.step, loss=result.loss, **done[self.group])
        self._agreement.say("ended", True)
        self._agreement.announce(detector.Over())
        return True

    def _is_over(self) -> bool:
        """Whether somebody has written the end: it is announced, and looked for now and then."""
        if not self._over and self._look_is_due():
            self._looked = time.monotonic()
            self._over = self._agreement.get("ended") is not None
        return self._over

    # --- hearing ------------------------------------------------------------------------------------------------------

    def _say_leaving(self) -> None:
        said = detector.Leaving(self.group, self._state.step, self._leaving, self._incarnation)
        self._said_leaving = True
        self._agreement.announce(said)
        self._history.note("leave", group=self.group, after=said.after, reason=said.why)
        self._feed(detector.judge(said))  # now: it must not begin to reduce the next step

    def _drain_verdicts(self) -> None:
        if self._leaving and not self._said_leaving:
            self._say_leaving()
        while not self._verdicts.empty():
            match verdict := self._verdicts.get():
                case detector.Agreed(epoch=epoch):
                    self._agreed = max(epoch, self._agreed)
                    continue
                case detector.Over():
                    self._over = True
                    continue
                case recovery.Died() if self._rank.lost_because:
                    raise Lost(self._rank.lost_because)
            self._feed(verdict)

    # --- doing --------------------------------------------------------------------------------------------------------

    def _feed(self, event: recovery.Event) -> None:
        """Tell the core what happened; carry out at once what is not the training thread's next action."""
        self._state, actions = recovery.step(self._state, event, time.monotonic())
        self._next = actions[-1]
        for action in actions[:-1]:
            match action:
                case recovery.Abort(in_order=in_order):
                    self._interruptions.noticed()
                    self._pace.disturbed()
                    self._lingers = in_order
                    if not in_order:
                        self._crew.close_epoch()
                case recovery.Publish(report=report):
                    self._agreement.publish(report)
                    self._points.reach("recover", self._state.step)
                case recovery.Announce(epoch=epoch, reason=reason, after=after):
                    self._rank.tell_broken(epoch, reason, after)
                case recovery.Propose(view=view):
                    standing, own = self._agreement.propose(view)
                    if own:
                        self._agreement.announce(detector.Agreed(standing.epoch))
                    self._adopt(standing)
                    return

    def _perform(self, action: recovery.Action) -> None:
        """Do the one thing the training thread has to do now, and report it to the core."""
        self._pulse.enter("working" if isinstance(action, recovery.Compute | recovery.Update) else "waiting")
        match action:
            case recovery.Compute():
                self._compute()
            case recovery.Reduce(step=step, buckets=buckets):
                self._interruptions.resumed(self._state)
                reduced = lambda bucket: self._feed(recovery.Reduced(bucket))  # noqa: E731
                self._attempt(lambda: self._crew.reduce(step, buckets, reduced))
                self._pace.collected(self._rank.collected)
            case recovery.Update(step=step):
                if self._state.ahead is None:  # else others have decided it, and the next step is what was interrupted
                    self._interruptions.resumed(self._state)
                self._update(step)
            case recovery.Connect(view=view):
                with self._timeline.span("recover"):
                    self._attempt(lambda: self._connect(view))
            case recovery.Transfer(view=view):
                with self._timeline.span("recover"):
                    self._attempt(lambda: self._transfer(view))
            case recovery.Follow(step=step):
                with self._timeline.span("recover"):
                    self._follow(step)
            case recovery.AwaitView(epoch=epoch, missing=missing):
                with self._timeline.span("recover"):
                    self._await_view(epoch, missing)
            case recovery.Stop(reason=reason):
                left = self._said_leaving
                reason = f"group {self.group} has left: {self._leaving}" if left else reason
                self._crew.stop(reason, left)
                raise (GroupLeft if left else StartOver if self._state.following else RunStopped)(reason)
            case _:
                raise AssertionError(f"{action} is not for the training thread")

    def _begin(self, dataset: Dataset) -> None:
        state = self._state
        self._checkpoints.boundary(state, self._line.get("duration_s", 0.0))
        self._crew.begin(state.step, dataset, lambda: self._needs(state))
        self._rank.say_seconds(self._pace.begin())

    def _needs(self, state: recovery.GroupState) -> Needs:
        """Of the step that begins in ``state``."""
        job, everything = state.job, self._placement.redundancy == self._config.shards
        # Who hosts everything would hold the whole step; it holds its own share and reads what it takes over.
        hosted = () if everything else self._placement.stack(self.group)
        stack = [Microbatch(state.step, shard, index) for shard in hosted for index in range(job.per_shard)]
        following = recovery.plan_ahead(state).of(self.group) if state.step + 1 < job.steps else ()
        return Needs(state.plan.of(self.group), stack, following)

    def _compute(self) -> None:
        """As many microbatches as the group computes at a time: all of them, where its ranks compute together."""
        if self._rank.joint:
            self._flush()
            return
        state = self._state
        microbatches = state.todo[: self._crew.width]
        patched = [microbatch in state.plan.patched for microbatch in microbatches]
        ahead = None
        if not state.reported and state.connected and state.todo == microbatches:
            ahead = self._rank.ahead(state.step, state.unfinished)
        prefetched, seconds = self._crew.compute(microbatches, patched, ahead, state.view.epoch)
        self._interruptions.computed(microbatches[0], patched[0], prefetched, seconds)
        self._pace.computed(len(microbatches), seconds)
        for microbatch in microbatches:
            self._feed(recovery.Computed(microbatch))
        self._glance()

    def _glance(self) -> None:
        """Look for the next view, if it is being agreed on, without waiting for it."""
        awaited = recovery.awaited(self._state)
        if awaited and self._look_is_due(awaited.epoch) and not self._look(awaited.epoch, awaited.missing):
            self._feed(recovery.Tick())

    def _flush(self) -> None:
        """Between any two instructions the news are heard; what this group takes over meanwhile joins the running flush."""
        started = counted = time.monotonic()
        listing: list[Listed] = []
        ended: list[tuple[Microbatch, bool]] = []

        def listed() -> Sequence[Listed]:
            nonlocal counted
            while ended:
                microbatch, prefetched = ended.pop(0)
                self._interruptions.computed(microbatch, microbatch in self._state.plan.patched, prefetched, 0.0)
                self._feed(recovery.Computed(microbatch))
            self._interruptions.computing(time.monotonic() - counted)
            self._drain_verdicts()
            self._glance()
            counted = time.monotonic()
            known = {entry.microbatch for entry in listing}
            patched = self._state.plan.patched
            listing.extend(Listed(own, own in patched) for own in self._state.todo if own not in known)
            return listing

        self._crew.flush(listed, lambda microbatch, prefetched: ended.append((microbatch, prefetched)))
        listed()
        self._pace.computed(len(listing), time.monotonic() - started)

    def _update(self, step: int) -> None:
        before, self._measured = self._state.speeds.slow, self._rank.measured()
        self._crew.update(step, self._state.microbatches)
        self._committed_under = self._state.view  # the next view may be there before the step is recorded
        self._feed(recovery.Updated(step, self._measured))
        slow = self._state.speeds.slow
        if slow != before:
            self._history.record("stragglers", step=step, slow={str(group): round(f, 2) for group, f in slow.items()})

    def _connect(self, view: View) -> None:
        if self._crew.connect(view, self._state.step, lambda: not self._verdicts.empty()):
            self._feed(recovery.Connected(view.epoch))
        # Else a verdict came in, and the next turn hears it.

    def _transfer(self, view: View) -> None:
        measured = {str(group): seconds for group, seconds in self._measured.items()}
        self._rank.carried = {"speeds": self._state.speeds.to_json(), "measured": measured}
        self._crew.transfer()
        speeds = None
        if self.group in view.behind:
            taken = self._rank.carried
            speeds = Speeds.from_json(taken["speeds"])
            self._measured = {int(group): seconds for group, seconds in taken["measured"].items()}
            if self._rank.result is not None:
                self._committed_under = view
        self._feed(recovery.Transferred(view.epoch, speeds))

    def _carried(self) -> Mapping[str, Any]:
        """What belongs to the state beside the model: who is slow, and the record's line of the step that made it."""
        return {"speeds": self._state.speeds.to_json(), "line": self._line}

    def _follow(self, step: int) -> None:
        """Get to where the view's step starts from; not beyond it: what a donor has made of that step may be made again."""
        following = self._rank.following
        while following.stands < step:
            answer = self._crew.make_step(lambda: not self._verdicts.empty())
            if answer == INTERRUPTED:
                return
            if answer == ASTRAY:
                self._feed(recovery.Strayed(following.astray))
                return
        if following.stands > step:
            self._feed(recovery.Strayed(f"it has made step {step}, which is made again"))
            return
        carried, self._rank.result = following.carried, following.result or self._rank.result
        self._crew.arrive()
        if carried["line"]:
            self._take_line(carried["line"])
        took = {"seconds": round(time.monotonic() - self._warm, 6), "received_bytes": following.bytes}
        who = {"group": self.group, "incarnation": self._incarnation, "donors": list(following.donors)}
        self._history.note("rejoined", **who, step=step, **took)
        self._feed(recovery.Followed(Speeds.from_json(carried["speeds"])))

    def _take_line(self, line: Mapping[str, Any]) -> None:
        """The record's line of the last step before this group: its successors as writer may need it."""
        self._line = line
        self._measured = {int(group): seconds for group, seconds in line["measured"].items()}
        self._history.record("step", **line)

    def _await_view(self, epoch: int, missing: tuple[int, ...]) -> None:
        if not self._look_is_due(epoch):
            self._pause(_FAR_S / 2)
        elif not self._look(epoch, missing):
            self._feed(recovery.Tick())
            self._pause(_SPARING * (time.monotonic() - self._looked))

    def _look(self, epoch: int, missing: tuple[int, ...]) -> bool:
        """Look once for what the agreement waits for: the next view, else reports. Whether there was any."""
        self._looked = time.monotonic()
        standing = self._agreement.view(epoch + 1)
        if standing is not None:
            self._adopt(standing)
            return True
        reports = self._agreement.reports(epoch, missing) if missing else ()
        if reports:
            self._feed(recovery.ReportsSeen(reports))
        return bool(reports)

    def _look_is_due(self, epoch: int | None = None) -> bool:
        """Who collects looks all the time. The others are told, but who should tell them may be lost."""
        told = epoch is not None and (self._state.collects or self._agreed > epoch)
        return told or time.monotonic() - self._looked > _FAR_S

    def _pause(self, longest_s: float) -> None:
        """Until something is heard, or for so long."""
        self._stirred.wait(max(_POLL_S, longest_s))
        self._stirred.clear()

    # --- interruptions ------------------------------------------------------------------------------------------------

    def _attempt(self, operation: Callable[[], None]) -> None:
        """Run an operation of the present epoch; if it breaks, tell the core, and the others who may not know."""
        epoch = self._state.view.epoch
        try:
            operation()
        except Broken as error:
            reason = str(error)
        else:
            return
        self._drain_verdicts()
        if not self._state.reported and self._state.view.epoch == epoch:
            self._break_epoch(reason)

    def _break_epoch(self, reason: str) -> None:
        """End the present epoch for everybody; this group is the first to know."""
        epoch = self._state.view.epoch
        self._rank.tell_broken(epoch, reason)
        self._feed(recovery.Broke(epoch, f"group {self.group}: {reason}"))

    def _adopt(self, view: View) -> None:
        if view.epoch <= self._state.view.epoch:
            return
        self._agreement.adopted(view)
        if view.lost and (stopped := self._rank.nonfinite.stopped()):
            step, why = stopped
            self._crew.stop(why, False, nonfinite=step)
            raise RunStopped(why)
        if self._lingers:
            self._lingers = False
            self._crew.close_epoch()
        if self.group in view.live:
            self._history.set_writer(self.group == min(view.live))
            self._record_view(view)
            self._interruptions.adopted(view)
            self._checkpoints.adopted(view)
            self._rank.prepare(view, self._state.step)
        self._feed(recovery.ViewSeen(view))  # last: if the view is outdated already, the next one is adopted in there

    def _record_view(self, view: View) -> None:
        self._history.record("view", **view.to_json())

    def _record_step(self, duration_s: float) -> None:
        view, result = self._committed_under, self._rank.result
        self._line = {
            "step": result.step,
            "loss": result.loss,
            "microbatches": result.microbatches,
            "epoch": view.epoch,
            "live": list(view.live),
            "duration_s": round(duration_s, 6),
            "measured": {str(group): float(f"{seconds:.3g}") for group, seconds in self._measured.items()},
        }
        self._history.record("step", later=True, **self._line)  # crew.end_step decides when
