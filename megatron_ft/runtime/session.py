"""The session: one rank's part in the run, and the one loop that carries out what ``core.recovery`` decides.

The training thread owns engine, history and protocol state. The watcher thread only puts verdicts into a queue and
aborts the communicator they concern, so a training thread that waits in a collective returns within milliseconds. The
queue is read between any two actions (a microbatch is the longest of them).
"""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from megatron_ft import config as config_module
from megatron_ft.core import detector, recovery, scheduler
from megatron_ft.data.dataset import PackedDataset
from megatron_ft.data.order import microbatch_seed
from megatron_ft.data.prefetch import Dataset, Prefetcher
from megatron_ft.engines.base import Engine, Progress, Ready, StepResult
from megatron_ft.engines.torch_native import LossFn, TorchNativeEngine
from megatron_ft.errors import ConfigError, GroupLeft, RunStopped, StoreError
from megatron_ft.runtime import transfer
from megatron_ft.runtime.agreement import Agreement
from megatron_ft.runtime.connect import Connector
from megatron_ft.runtime.environment import RankEnvironment
from megatron_ft.runtime.finite import NonFinite
from megatron_ft.runtime.history import History
from megatron_ft.runtime.interruption import Interruptions
from megatron_ft.runtime.outer import Broken, OuterCommunicator
from megatron_ft.runtime.points import Points
from megatron_ft.runtime.pulse import Pulse
from megatron_ft.runtime.reduction import Reduction
from megatron_ft.runtime.store import ControlStore
from megatron_ft.runtime.timeline import Timeline
from megatron_ft.runtime.watcher import Watcher
from megatron_ft.types import Microbatch, View

_POLL_S = 0.001
_STORE_TIMEOUT_S = 10.0


def init(config: str | Path | None = None, *, seed: int | None = None) -> Session:
    """Join the run this process was started for.

    Args:
        config: path of the run's config; may be left out, the launcher has told. Given, it must say the same.
        seed: of the order of the samples and of dropout; beats ``fault_tolerance.seed``. The same in every group.

    Raises:
        LaunchError: the process was not started by ``megatron-ft launch``.
        ConfigError: ``config`` contradicts the one the run was launched with.
        StoreError: the control store does not answer.
    """
    env = RankEnvironment.from_env()
    if config is not None:
        own = config_module.load(config, groups=env.config.groups, ranks_per_group=env.config.ranks_per_group)
        if own != env.config:
            raise ConfigError(
                f"the script's config {config} differs from the one the run was launched with; pass the same file, or "
                f"call megatron_ft.init() without one"
            )
    if seed is not None:
        section = replace(env.config.fault_tolerance, seed=seed)
        section.check()
        env = replace(env, config=replace(env.config, fault_tolerance=section))
    return Session(env)


class Session:
    """What a training script holds. Use :meth:`wrap`, :meth:`steps` and :meth:`train_step`; see README."""

    def __init__(self, env: RankEnvironment) -> None:
        self.env = env
        self.config = env.config
        self.group = env.group
        self._points = Points.from_env(env.group, env.position, env.run_dir)
        self._pulse = Pulse.from_env()
        self._store = ControlStore(env.store, env.run_id, _STORE_TIMEOUT_S)
        self._agreement = Agreement(self._store, env.group, env.config.fault_tolerance.detector.collective_timeout_s)
        self._history = History(env.run_dir)
        self._nonfinite = NonFinite(env.config.fault_tolerance.nonfinite, env.group, self._history)
        self._timeline = Timeline(env.run_dir, env.group, env.position)
        self._verdicts: queue.SimpleQueue[detector.Verdict] = queue.SimpleQueue()
        self._outer: OuterCommunicator | None = None
        self._outer_lock = threading.Lock()
        self._connector = Connector(env, self._store, self._agreement)
        self._engine: Engine | None = None
        self._reduction: Reduction | None = None
        self._state: recovery.GroupState | None = None
        self._next: recovery.Action = recovery.Finish(0)
        self._result: StepResult | None = None
        self._total = 0
        self._leaving, self._said_leaving = "", False
        self._placement = config_module.placement_of(env.config)
        self._interruptions = Interruptions(self._history, env.group, self._placement)
        self._prefetcher = Prefetcher(random_state=lambda: torch.get_rng_state().tolist())
        self._store.check_begun()
        first = self._agreement.view(0)
        if first is None:
            raise StoreError(f"control store {env.store} knows no view of run {env.run_id}; start it again")
        self._first_view = self._committed_under = first
        self._agreement.adopted(first)
        told = (self._hear, self._store_is, self._store_is, self._agreement.restore)
        Watcher(self._store.clone(), *told).start()
        self._pulse.start()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, lambda *_: self.leave("SIGTERM"))

    # --- what a user touches ------------------------------------------------------------------------------------------

    def wrap(self, model: nn.Module, optimizer: Optimizer, loss_fn: LossFn, scheduler: Any = None) -> TorchNativeEngine:
        """Make an engine of a plain PyTorch model. Raises ``EngineError`` for a model it cannot train.

        The optimizer, learning-rate scheduler and gradients belong to the engine from here on.
        """
        return TorchNativeEngine(
            model,
            optimizer,
            loss_fn,
            scheduler=scheduler,
            bucket_mb=self.config.fault_tolerance.bucket_mb,
            gradient_clipping=self.config.gradient_clipping,
        )

    def dataset(self, path: str | Path, *, seq_len: int) -> PackedDataset:
        """The samples of every microbatch id, from a directory that ``megatron-ft prepare`` made.

        Called with a microbatch id it returns ``input_ids`` and ``labels``, int64 [samples, seq_len]. Raises
        ``DataError``. Any other pure function of the microbatch id can take its place.
        """
        return PackedDataset(
            path,
            seq_len=seq_len,
            samples_per_microbatch=self.config.samples_per_microbatch,
            groups=self.config.groups,
            microbatches_per_group=self.config.microbatches_per_group,
            seed=self.config.fault_tolerance.seed,
        )

    def steps(self, total: int) -> Iterator[int]:
        """The numbers of the steps this group has to train, in order, up to ``total``; every group passes the same.

        After the last one it waits until every live group is done, and the run record is complete.
        """
        if not isinstance(total, int) or isinstance(total, bool) or total < 1:
            raise ConfigError(f"session.steps({total!r}): the number of steps must be a whole number >= 1")
        self._total = total
        step = self._first_view.step
        while step < total:
            yield step
            if self._state is None or self._state.step <= step:
                raise ConfigError(f"step {step} was not trained; call session.train_step once in every step")
            step = self._state.step
        self._finish()

    def train_step(self, engine: Engine, dataset: Dataset) -> StepResult:
        """Compute, reduce and commit one step, whatever dies meanwhile. Returns when this group has committed it.

        Raises:
            RunStopped: this group was left out of the run, or fewer than ``min_groups`` are alive.
            StoreError: a recovery needed the control store and it is gone.
        """
        if self._state is None:
            self._enter(engine)
        started = time.monotonic()
        step = self._state.step
        engine.begin_step()
        self._interruptions.begin_step()
        self._begin_prefetch(dataset)
        self._points.reach("begin", step)
        while self._state.step == step:
            self._drain_verdicts()
            self._perform(self._next)
        self._record_step(time.monotonic() - started)
        self._nonfinite.check(self._result, self._engine)
        self._pulse.enter("outside")
        return self._result

    def leave(self, why: str) -> None:
        """This group leaves in order after the present step; for a maintenance notice or a handler of SIGTERM.

        The others go on without it and nothing is lost. Callable from any thread and from a signal handler.
        """
        self._leaving = self._leaving or why

    # --- entering and leaving -----------------------------------------------------------------------------------------

    def _enter(self, engine: Engine) -> None:
        self._engine = engine
        settings = self.config.fault_tolerance
        self._reduction = Reduction(engine, self._points, dtype=settings.reduce_dtype, overlap=settings.overlap)
        job = recovery.Job(
            shards=self.config.groups,
            per_shard=self.config.microbatches_per_group,
            buckets=engine.num_buckets,
            steps=self._total,
            min_groups=settings.min_groups,
            report_timeout_s=settings.detector.report_timeout_s,
            placement=self._placement,
        )
        self._state = recovery.start(self.group, job, self._first_view)
        self._next = recovery.next_action(self._state)
        self._history.set_writer(self.group == min(self._first_view.live))
        self._history.record("begin", steps=self._total, microbatches=job.microbatches, buckets=job.buckets)
        self._record_view(self._first_view)

    def _finish(self) -> None:
        """Stay reachable until every live group is done; the lowest of them completes the run record."""
        self._pulse.enter("waiting")
        self._prefetcher.close()
        norm, sha256 = self._engine.fingerprint()
        self._agreement.say(f"done/{self.group}", {"params_norm": norm, "params_sha256": sha256})
        self._points.reach("finish", self._state.step)
        patience_s = self.config.fault_tolerance.detector.collective_timeout_s
        deadline = time.monotonic() + patience_s
        while self._agreement.get("ended") is None:
            self._drain_verdicts()
            if not isinstance(self._next, recovery.Finish):
                self._perform(self._next)
                deadline = time.monotonic() + patience_s
                continue
            self._interruptions.resumed(self._state)
            if self.group == min(self._state.view.live) and self._write_end():
                break
            if time.monotonic() > deadline:
                self._break_epoch(f"not every live group is done {patience_s:g} s after this one")
            time.sleep(5 * _POLL_S)

    def _write_end(self) -> bool:
        """As the lowest living group: once every live group is done, record it. False while one is not."""
        done = {group: self._agreement.get(f"done/{group}") for group in self._state.view.live}
        if any(value is None for value in done.values()):
            return False
        for group, value in done.items():
            self._history.record("survivor", group=group, **value)
        if len({value["params_sha256"] for value in done.values()}) > 1:
            raise RuntimeError(f"the survivors' parameters differ, which must never happen: {done}")
        self._history.record("end", step=self._result.step, loss=self._result.loss, **done[self.group])
        self._agreement.say("ended", True)
        return True

    # --- hearing ------------------------------------------------------------------------------------------------------

    def _hear(self, verdict: detector.Verdict) -> None:
        """Watcher thread: unblock the training thread at once, and let it decide."""
        self._verdicts.put(verdict)
        with self._outer_lock:
            outer = self._outer
            if outer is not None and _concerns(verdict, outer):
                outer.abort()

    def _store_is(self, error: StoreError | None = None) -> None:
        news = "the control store answers again" if error is None else f"{error}; fault-free steps go on without it"
        print(f"megatron_ft: group {self.group}: {news}", flush=True)

    def _say_leaving(self) -> None:
        said = detector.Leaving(self.group, self._state.step, self._leaving)
        self._agreement.announce(said)
        self._history.note("leave", group=self.group, after=said.after, reason=said.why)
        self._said_leaving = True

    def _drain_verdicts(self) -> None:
        if self._leaving and not self._said_leaving:
            self._say_leaving()
        while not self._verdicts.empty():
            verdict = self._verdicts.get()
            if verdict.silent is not None:
                self._feed(recovery.Missed(*verdict.silent, verdict.reason, verdict.heard))
            elif verdict.after is not None:
                self._feed(recovery.Leaves(verdict.dead, verdict.after, verdict.reason, verdict.incarnation))
            elif verdict.dead is not None:
                self._feed(recovery.Died(verdict.dead, verdict.reason, verdict.incarnation))
            else:
                self._feed(recovery.Broke(verdict.broken, verdict.reason))

    # --- doing --------------------------------------------------------------------------------------------------------

    def _feed(self, event: recovery.Event) -> None:
        """Tell the core what happened; carry out at once what is not the training thread's next action."""
        self._state, actions = recovery.step(self._state, event, time.monotonic())
        self._next = actions[-1]
        for action in actions[:-1]:
            match action:
                case recovery.Abort():
                    self._close_epoch()
                case recovery.Publish(report=report):
                    self._agreement.publish(report)
                    self._points.reach("recover", self._state.step)
                case recovery.Announce(epoch=epoch, reason=reason):
                    self._agreement.announce(detector.Reset(epoch, self.group, reason))
                case recovery.Propose(view=view):
                    self._adopt(self._agreement.propose(view))
                    return

    def _perform(self, action: recovery.Action) -> None:
        """Do the one thing the training thread has to do now, and report it to the core."""
        self._pulse.enter("working" if isinstance(action, recovery.Compute | recovery.Update) else "waiting")
        match action:
            case recovery.Compute(microbatch=microbatch, patch=patch):
                self._compute(microbatch, patch)
            case recovery.Reduce(buckets=buckets):
                self._interruptions.resumed(self._state)
                self._timeline.write(self._state.step, self._state.view.epoch)
                with self._timeline.span("reduce"):
                    self._attempt(lambda: self._reduce(self._outer, buckets))
            case recovery.Update(step=step):
                if self._state.ahead is None:  # else others have decided it, and the next step is what was interrupted
                    self._interruptions.resumed(self._state)
                self._update(step)
            case recovery.Connect(view=view):
                with self._timeline.span("recover"):
                    self._attempt(lambda: self._connect(view))
            case recovery.Transfer(view=view):
                with self._timeline.span("recover"):
                    self._attempt(lambda: self._transfer(self._outer, view))
            case recovery.AwaitView(epoch=epoch, missing=missing):
                with self._timeline.span("recover"):
                    self._await_view(epoch, missing)
            case recovery.Stop(reason=reason):
                if self._said_leaving:
                    raise GroupLeft(f"group {self.group} has left: {self._leaving}")
                raise RunStopped(reason)
            case _:
                raise AssertionError(f"{action} is not for the training thread")

    def _compute(self, microbatch: Microbatch, patch: bool) -> None:
        step = self._state.step
        if patch:
            self._points.reach("patch", step)
        started = time.monotonic()
        with self._timeline.span("patch" if patch else "compute"):
            batch, prefetched = self._prefetcher.get(microbatch)
            seed = microbatch_seed(self.config.fault_tolerance.seed, microbatch)
            self._engine.compute(microbatch, batch, seed, self._progress(step), self._send_ahead(microbatch))
            self._points.corrupt(step, self._engine)
        self._interruptions.computed(microbatch, patch, prefetched, time.monotonic() - started)
        self._pulse.advance()
        self._feed(recovery.Computed(microbatch))

    def _begin_prefetch(self, dataset: Dataset) -> None:
        """Tell what this step needs, may need, and what the next one will if nobody dies or joins meanwhile."""
        state, job, everything = self._state, self._state.job, self._placement.redundancy == self.config.groups
        # Who hosts everything would hold the whole step; it holds its own share and reads what it takes over.
        hosted = () if everything else self._placement.stack(self.group)
        stack = [Microbatch(state.step, shard, index) for shard in hosted for index in range(job.per_shard)]
        following: tuple[Microbatch, ...] = ()
        if state.step + 1 < job.steps:
            plan = scheduler.plan_step(state.step + 1, job.shards, job.per_shard, state.view.live, self._placement)
            following = plan.of(self.group)
        self._prefetcher.begin(dataset, state.plan.of(self.group), stack, following)

    def _progress(self, step: int) -> Progress:
        return lambda point: self._points.reach(point, step)

    def _send_ahead(self, microbatch: Microbatch) -> Ready | None:
        """What to call with the buckets that are complete before ``microbatch`` is; None if more is to be computed."""
        state = self._state
        if state.reported or not state.connected or state.todo != (microbatch,):
            return None
        return self._reduction.ahead(self._outer, state.step, state.unfinished)

    def _reduce(self, outer: OuterCommunicator, buckets: tuple[int, ...]) -> None:
        self._reduction.reduce(outer, self._state.step, buckets, lambda bucket: self._feed(recovery.Reduced(bucket)))

    def _update(self, step: int) -> None:
        with self._timeline.span("update"):
            self._result = self._engine.update(step, self.config.microbatches, self._progress(step))
        self._pulse.advance()
        self._committed_under = self._state.view  # the next view may be there before the step is recorded
        self._feed(recovery.Updated(step))

    def _connect(self, view: View) -> None:
        self._points.reach("connect", self._state.step)
        outer = self._connector.connect(view, lambda: not self._verdicts.empty())
        if outer is None:
            return  # a verdict came in; the next turn hears it
        with self._outer_lock:
            self._outer = outer
        self._feed(recovery.Connected(view.epoch))

    def _transfer(self, outer: OuterCommunicator, view: View) -> None:
        """Hand over or take what the view says, in an order that cannot deadlock: state first, buckets ascending."""
        received = None
        if self.group == view.source:
            for group in view.behind:
                transfer.send_state(outer, self._full_state(), group)
        elif self.group in view.behind:
            received = transfer.receive_state(outer, view.source)
        for bucket, lacking in view.missing.items():
            if self.group == view.final[bucket]:
                for group in lacking:
                    outer.send(self._engine.reduced(bucket), group, bucket).wait()
            elif self.group in lacking:
                self._receive_bucket(outer, bucket, view.final[bucket])
        if received is not None:
            self._engine.load_state(received["engine"])
            if received["result"] is not None:
                self._result = StepResult(*received["result"])
                self._committed_under = view
        self._feed(recovery.Transferred(view.epoch))

    def _receive_bucket(self, outer: OuterCommunicator, bucket: int, owner: int) -> None:
        try:
            outer.receive(self._engine.reduced(bucket), owner, bucket).wait()
        except Broken:
            self._engine.replace_reduced(bucket)  # whatever may still arrive there
            raise

    def _full_state(self) -> Mapping[str, Any]:
        result = self._result
        return {
            "engine": self._engine.state(),
            "result": None if result is None else [result.step, result.loss, result.microbatches, result.gradient_norm],
        }

    def _await_view(self, epoch: int, missing: tuple[int, ...]) -> None:
        """Look once for what the agreement waits for: the next view, else reports."""
        standing = self._agreement.view(epoch + 1)
        if standing is not None:
            self._adopt(standing)
            return
        for group in missing:
            report = self._agreement.report(epoch, group)
            if report is not None:
                self._feed(recovery.ReportSeen(report))
                return
        time.sleep(_POLL_S)
        self._feed(recovery.Tick())

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
        self._agreement.announce(detector.Reset(epoch, self.group, reason))
        self._feed(recovery.Broke(epoch, f"group {self.group}: {reason}"))

    def _close_epoch(self) -> None:
        self._interruptions.noticed()
        with self._outer_lock:
            outer, self._outer = self._outer, None
        if outer is not None:
            outer.close()
            self._reduction.drop()

    def _adopt(self, view: View) -> None:
        if view.epoch <= self._state.view.epoch:
            return
        self._agreement.adopted(view)
        self._feed(recovery.ViewSeen(view))
        if self.group in view.live:
            self._history.set_writer(self.group == min(view.live))
            self._record_view(view)
            self._interruptions.adopted(view)

    def _record_view(self, view: View) -> None:
        self._history.record("view", **view.to_json())

    def _record_step(self, duration_s: float) -> None:
        view, result = self._committed_under, self._result
        self._history.record(
            "step",
            step=result.step,
            loss=result.loss,
            microbatches=result.microbatches,
            epoch=view.epoch,
            live=list(view.live),
            duration_s=round(duration_s, 6),
        )
        self._timeline.write(result.step, view.epoch)


def _concerns(verdict: detector.Verdict, outer: OuterCommunicator) -> bool:
    """Whether the verdict ends the epoch of this communicator; the core will say so too."""
    if verdict.silent is not None:
        return not verdict.heard and all(set(unit) & set(outer.members) for unit in verdict.silent)
    dead = verdict.dead in outer.members and verdict.after is None
    return dead or verdict.broken == outer.epoch
