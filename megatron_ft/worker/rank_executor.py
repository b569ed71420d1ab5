"""The operations of one rank on its engine and its communicators. It makes no decisions.

The leader of a group (``worker.group_leader``) and its followers (``worker.group_follower``) both drive one. The
training thread calls everything here except :meth:`RankExecutor.on_signal` and :meth:`RankExecutor.lose`, which the
watcher's thread calls: they abort the communicators that a verdict concerns, so a training thread that waits in a
collective returns within milliseconds.

Failures it assumes: any operation between groups may fail (``Broken``: the epoch is over) or, inside the group, end the
group (``Lost``). Verdicts may arrive before their view: they are kept until that view's communicator stands.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch

from megatron_ft.collectives import state_transfer
from megatron_ft.collectives.base import Broken, Communicator, stuck, sweep
from megatron_ft.collectives.bucket_allreduce import Changed, Reduction
from megatron_ft.collectives.communicator_choice import NCCL, Offer
from megatron_ft.collectives.intra_group import IntraGroup, Lost
from megatron_ft.collectives.intra_group_gradients import OwnGradients, SharedGradients
from megatron_ft.collectives.p2p_channel import P2PChannels
from megatron_ft.config.rank_env import Audit, RankEnvironment
from megatron_ft.config.schema import check_standby_memory
from megatron_ft.coordination.client import CoordinationClient
from megatron_ft.core.detection import state_divergence
from megatron_ft.core.exactness import verification
from megatron_ft.core.exactness.verification import Check
from megatron_ft.core.protocol import signals
from megatron_ft.data.order import BatchSchedule, microbatch_seed
from megatron_ft.data.prefetch import Dataset, Prefetcher
from megatron_ft.engines.port import OWN, Engine, Gradients, JointEngine, Listed, Miscount, Ready, StepResult
from megatron_ft.errors import EngineError, FTError, InvariantBroken, StartOver
from megatron_ft.faults.injection_points import Corruptible, InjectionPoints
from megatron_ft.runlog.history import History
from megatron_ft.runlog.timeline import Timeline
from megatron_ft.types import Bucket, Microbatch, View, given
from megatron_ft.utils import heap
from megatron_ft.utils.log import first_line
from megatron_ft.worker import registered_state
from megatron_ft.worker.batch_check import BatchCheck
from megatron_ft.worker.checkpointing.participant import CheckpointParticipant
from megatron_ft.worker.data_identity import Identities
from megatron_ft.worker.epoch_link import EpochLink
from megatron_ft.worker.evaluation import Evaluation
from megatron_ft.worker.joint_compute import FirstMicrobatch, JointWork, broken_inside
from megatron_ft.worker.nonfinite import NonFinite
from megatron_ft.worker.orders import Flush, Needs, Reduce, Update
from megatron_ft.worker.progress_counters import ProgressCounters
from megatron_ft.worker.registered_state import Registered
from megatron_ft.worker.rejoin.joiner import RejoinClient, address_key
from megatron_ft.worker.rejoin.state_sender import StateSender
from megatron_ft.worker.state_checksum import StateCheck
from megatron_ft.worker.state_guard import StateGuard
from megatron_ft.worker.step_timer import Slots

_log = logging.getLogger(__name__)

_LONG_S = 0.01
"""Seconds. After a shorter step nothing is loaded ahead, and the record is written about this often: both would cost
such a step more than they are worth."""


_STATE_DIGITS = 16

T = TypeVar("T")


class Discard(NamedTuple):
    """Why the sums of a step must not be used: a gradient was too large for the ``grid``, ``digests`` differ, there was a
    ``corruption``, or a group that has come back contributed with another ``state`` or another ``batch``.
    ``guilty``: group -> the microbatch that it computed wrongly, None if only another rank of this group knows it, or all;
    ``doubtful``: microbatches whose digests differ."""

    why: str
    guilty: Mapping[int, str | None]
    doubtful: tuple[str, ...]


class RankExecutor:
    """One of the ``size`` ranks of a group, at ``position``.

    ``result`` is that of the last step committed here. ``carried`` are the values that its leader sends with the model,
    made by ``carry``. ``await_commit``: returns when a script with a loop of its own has committed the step. ``epoch``
    is that of the communicator, at the leader its own; None while the group has no state to give. ``collected`` is the
    time at which the group's ranks had last summed up their results.
    """

    def __init__(self, env: RankEnvironment, agreement: CoordinationClient, history: History) -> None:
        self.group, self.position, self.size = env.group, env.position, env.config.ranks_per_group
        self.incarnation, self.host_rank = env.incarnation, env.host_rank
        self.agreement, self.history = agreement, history
        self.points = InjectionPoints.from_env(env.group, env.position, env.incarnation, env.run_dir)
        self.progress = ProgressCounters.from_env()
        self.timeline = Timeline(env.run_dir, env.group, env.position)
        self.inner: IntraGroup | None = None
        self.result: StepResult | None = None
        self.carried: Mapping[str, Any] = {}
        begins = env.incarnation == 0
        self.identities = Identities(agreement, env.group, env.position, begins, env.host_rank)
        self.carry: Callable[[], Mapping[str, Any]] = dict
        self.epoch: Callable[[], int | None] = lambda: None if self.link.view is None else self.link.view.epoch
        self.following = RejoinClient(self, env, agreement)
        self.registered = Registered(BatchSchedule(env.config.microbatches_per_group))
        self.evaluation: Evaluation | None = None
        self.together: Callable[[Path], object] | None = None  # what the group's ranks write together
        self.await_commit: Callable[[], None] | None = None
        self.saving = CheckpointParticipant(env, agreement, self.registered, lambda: self.lost_because)
        self.collected = 0.0
        self._began = self._written = 0.0
        self.lost_because = ""
        self._env, self._config, self._settings = env, env.config, env.config.fault_tolerance
        self.nonfinite = NonFinite(self._settings.nonfinite, env.group, history, agreement)
        self.link = EpochLink(env, agreement)
        self._prefetcher = Prefetcher(self._settings.seed, self.progress.dataset)
        # Set by :meth:`attach`, before the first step.
        self.engine: Engine
        self._slots: Slots
        self.states: StateCheck
        self.guard: StateGuard
        self.batches: BatchCheck
        self._reduction: Reduction
        self._shared: SharedGradients | OwnGradients | None = None
        self._lines: P2PChannels | None = None
        self.joint = False
        self._step = -1
        self._sender: StateSender | None = None
        self._updated: StepResult | None = None
        # Whether the gradient of a microbatch is still to be compared with the slope of its loss.
        self._unchecked = True
        self._guarded = False  # whether ``states`` and ``guard`` are there; the watcher may hear notices before
        self._contributed: set[int] = set()  # standby parts of the present step
        self._digests: dict[Microbatch, int] = {}  # of gradients of this step
        self._earlier: dict[Microbatch, int] = {}  # of the attempt before
        audit = Audit.from_env()
        self._audited = -1 if audit is None else audit.digests  # the step of which all digests are recorded
        self.verified: dict[str, dict[str, int]] = {}  # microbatch -> group -> digest, of the last step
        self._swept = False  # whether the last sweep destroyed a process group

    def resize(self, step: int, per_shard: int) -> None:
        """Set the number of microbatches in a shard, from ``step`` on; samples of these steps may be loaded already."""
        self._prefetcher.drop()
        self.registered.sizes.change(step, per_shard)

    def join(self, inner: IntraGroup) -> None:
        """Take the group's communicator: its ranks have met."""
        self.inner = inner
        if self.lost_because:  # a rank was lost before that line
            inner.abort()

    def attach(self, engine: Engine) -> None:
        """Take the engine, before the first step."""
        self.engine = engine
        self.joint = hasattr(engine, "flush")
        settings = self._settings
        buckets = [engine.local(bucket) for bucket in range(engine.num_buckets)]
        check_standby_memory(self._config, sum(bucket.nbytes for bucket in buckets))
        device = next((one.device for one in buckets if one.is_cuda), buckets[0].device)
        offer = Offer.of(settings.communicator, device, self._env.address)
        self.link.connector.use(device, offer)
        if self.inner is not None:
            self.inner.use(device, offer, f"inner/{self._env.seat}/{NCCL}", self.agreement.rendezvous)
        positions = 1 if self.joint else self.size
        self._slots = Slots(engine, self.group, self.position, positions, self._config.digests)
        self.states = StateCheck(engine, settings.detector.state_check_steps, self.registered.tensors)
        self.guard = StateGuard(self._env, self._slots, self.states, self.nonfinite, self.agreement, self.history)
        self._guarded = True
        load = self.load if getattr(engine, "needs_samples", True) else None
        self.batches = BatchCheck(self._env, self._slots, self.agreement, load, self.guard.halt)
        if self.joint:
            if settings.nonfinite == "recompute":
                raise EngineError(
                    'fault_tolerance.nonfinite is "recompute", which looks at gradients after each microbatch; a pipeline '
                    'has complete ones only after a flush: use "skip" or "stop"'
                )
            peers = self._joint_engine.peers
            self._lines = P2PChannels.build(self._env, self.inner, peers, lambda: bool(self.lost_because))
            if self.lost_because:
                self._lines.abort()
        if self.inner is not None:
            self._shared = OwnGradients(engine, self.inner) if self.joint else SharedGradients(engine, self.inner)
        if settings.rejoin.enabled:
            where = lambda place: self.agreement.put(address_key(self.group, self.position), place)  # noqa: E731
            self._sender = StateSender(self._env, engine, self.states, self.registered, lambda: self.epoch(), where)
        alone = self._shared is None or self.joint
        overlap = settings.overlap and alone and settings.nonfinite != "recompute"
        self._reduction = Reduction(self._gradients, self.points, dtype=settings.reduce_dtype, overlap=overlap)

    @property
    def num_buckets(self) -> int:
        """The number of buckets of the whole group."""
        return self._gradients.num_buckets

    @property
    def _joint_engine(self) -> JointEngine:
        assert self.joint
        return cast(JointEngine, self.engine)

    @property
    def _gradients(self) -> Gradients:
        return self._shared or self.engine

    # --- verdicts, in the watcher's thread ----------------------------------------------------------------------------

    def on_signal(self, verdict: signals.Verdict) -> None:
        """Unblock the training thread if it waits for a group or rank that is gone."""
        self.following.on_signal(verdict)
        self.link.on_signal(verdict)

    def publish_checksums(self, asked: signals.ChecksumsRequested) -> None:
        """Publish this rank's checksum of each tensor, if its group is asked and it has one for that state."""
        if self.group in asked.groups and self._guarded:
            self.guard.publish(asked.step)

    def lose(self, reason: str) -> None:
        """End all waits of this rank: another rank of this group is gone."""
        self.lost_because = self.lost_because or reason
        for means in (self.inner, self._lines):
            if means is not None:
                means.abort()
        self.link.abort()

    # --- computing ----------------------------------------------------------------------------------------------------

    def begin(self, step: int, dataset: Dataset, needs: Callable[[], Needs]) -> None:
        """Begin a step."""
        self.batches.begin()
        now = time.monotonic()
        short, self._began = now - self._began < _LONG_S, now
        self._step = step
        self.link.begin_step(step)
        if self._sender is not None:
            self._sender.boundary(step, self._updated, self.carry)
        self._clear()
        if short:
            self._prefetcher.rest(dataset, step)
        else:
            self._prefetcher.begin(dataset, *map(self._part, needs()))
        self.points.reach("begin", step)

    def arrive(self) -> None:
        """Enter the step that has begun, after following other groups: clear the gradients again, and begin with the
        hyperparameters with which the donors have begun it. The script has set its own before the last steps were
        followed."""
        self.engine.hyperparameters.write(self.following.hyperparameters)
        self.following.end()
        self._unchecked = False  # its donors have checked theirs, and would wait
        self._prefetcher.drop()  # the state may have brought another size of the batch
        self._clear()

    def _clear(self) -> None:
        """Clear all that was computed in the present step."""
        self.engine.begin_step(self._config.shards * self.registered.sizes.at(self._step))
        self._contributed.clear()
        self._digests, self._earlier = {}, {}
        self.guard.say(self._step, self.engine.hyperparameters)

    def _part(self, microbatches: Sequence[Microbatch]) -> Sequence[Microbatch]:
        """Return those of ``microbatches`` that this rank loads."""
        if self.joint:
            return microbatches if self._joint_engine.needs_samples else ()
        return microbatches[self.position :: self.size]

    def flush(self, flush: Flush) -> None:
        """Compute the listed microbatches jointly with the group's other ranks."""
        if self._unchecked and self._checks_by_flushes:
            self._check_by_flushes(flush.listed)
        work = JointWork(self, flush)
        self.inside(lambda: self._joint_engine.flush(given(self._lines), work))

    @property
    def _checks_by_flushes(self) -> bool:
        return self.joint and self._joint_engine.checks_by_flushes

    def _check_by_flushes(self, listed: Callable[[], Sequence[Listed]]) -> None:
        """Compare the gradient of the first microbatch with the slope of its loss."""
        engine, work = self._joint_engine, FirstMicrobatch(self, listed)
        flush = partial(engine.flush, given(self._lines), work)
        self._unchecked = not self.inside(lambda: engine.check_by_flushes(flush, self._sizes()))
        for microbatch, batch in work.batches.items():
            self._prefetcher.put_back(microbatch, batch)
        self._clear()

    def want(self, microbatches: Sequence[Microbatch]) -> None:
        """Load the samples of these microbatches ahead, before all others: the group has taken them over."""
        self._prefetcher.want(microbatches)

    def held(self, microbatches: Iterable[Microbatch]) -> set[Microbatch]:
        """Return those of ``microbatches`` whose samples are in memory."""
        return self._prefetcher.held(microbatches)

    def samples(self, microbatch: Microbatch) -> tuple[Any, bool]:
        """Return the samples of a microbatch, and True if they were in memory."""
        found = self._prefetcher.get(microbatch)
        self.batches.loaded(microbatch, found[0], self.link.view)
        return found

    def seed(self, microbatch: Microbatch) -> int:
        """Return the seed of all random choices for ``microbatch``."""
        return microbatch_seed(self._settings.seed, microbatch)

    def load(self, microbatch: Microbatch) -> Any:
        """Return the samples of a microbatch that is not computed for the step, for a comparison."""
        with self.blame(microbatch):
            return self._prefetcher.get(microbatch)[0]

    def inside(self, operation: Callable[[], T]) -> T:
        """Run an operation in which the engine communicates with the other ranks of the group. Raises ``Lost`` for an error
        of it if another rank is gone or cut off."""
        if self.inner is None:
            return operation()
        self.progress.engine()
        try:
            return operation()
        except RuntimeError as error:
            if not (broken_inside(error) or self.lost_because):
                raise
            raise Lost(self.lost_because or f"a collective inside the group broke: {first_line(error)}") from None
        finally:
            self.progress.engine()

    def compute(
        self, microbatch: Microbatch, patch: bool, part: int = OWN, digest: bool = False, ahead: Ready | None = None
    ) -> tuple[bool, float]:
        """Run forward and backward of one. Return True if its samples were in memory, and the seconds it took.

        ``part``: the standby part that it is added to; ``digest``: the digest of its gradient is asked for."""
        step = microbatch.step
        if patch:
            self.points.reach("patch", step)
        started = time.monotonic()
        kind = "patch" if patch else "standby" if part else "compute"
        with self.timeline.span(kind), self.blame(microbatch):
            batch, prefetched = self.samples(microbatch)
            seed = self.seed(microbatch)
            self.engine.add_to(part)
            self.points.corrupt_activation(step, cast(Corruptible, self.engine))
            digest = digest or step == self._audited
            keep = digest or (part == OWN and self.points.corrupts(step))
            self.engine.compute(microbatch, batch, seed, lambda point: self.points.reach(point, step), ahead, keep)
            if part == OWN:  # what is corrupted is contributed
                self.points.corrupt(step, cast(Corruptible, self.engine))
            self.collect(microbatch, digest)
            groups = self._config.groups if self.link.view is None else len(self.link.view.live)
            self.nonfinite.computed(microbatch, self.engine, groups > self._settings.min_groups)
        self.progress.advance()
        return prefetched, time.monotonic() - started

    def collect(self, microbatch: Microbatch, digest: bool) -> None:
        """Take the gradient of a microbatch after its backward pass, and keep its digest if that is asked for."""
        digest = digest or microbatch.step == self._audited
        found = self.engine.collect(digest)
        if digest:
            self._digests[microbatch] = found
        if self._unchecked and not self._checks_by_flushes:
            self._unchecked = False
            if self.await_commit is None:  # a loop of the script's own would see the microbatch again
                self.engine.check_gradient(self._sizes())

    def _sizes(self) -> dict[str, int]:
        """Return the numbers by which a library might divide gradients."""
        config = self._config
        each = self.registered.sizes.at(self._step)
        return {
            "inner_shards": config.inner_shards,
            "ranks of a group": self.size,
            "gradient_accumulation_steps": each,
            "groups": config.shards,
            "microbatches of a step": config.shards * each,
        }

    def ahead(self, step: int, buckets: Sequence[Bucket], digests: Sequence[Microbatch]) -> Ready | None:
        """Return the function to call with each bucket that is complete before the last microbatch is, or None."""
        self._settle(state=False)
        self._say_digests(digests)
        # The check of the gradient uses the buckets that will hold the sums; what is compared is known when all is computed.
        view, first = given(self.link.view), self._unchecked or self.points.corrupts(step)
        if first or self._compares_all(step) or self.batches.due(view):
            return None
        return self._reduction.ahead(given(self.link.outer), step, buckets)

    def _compares_all(self, step: int) -> bool:
        return state_divergence.compares_all(given(self.link.view), step)

    def ahead_together(self) -> Ready | None:
        """Return :meth:`ahead` for all buckets of a rank that computes together with the others of its group."""
        shared = self._shared
        if shared is None:
            return self.ahead(self._step, range(self.num_buckets), ())
        assert isinstance(shared, OwnGradients)
        ready = self.ahead(self._step, shared.mine(range(shared.num_buckets)), ())
        return None if ready is None else lambda bucket: ready(shared.number(bucket))

    def _say_digests(self, digests: Sequence[Microbatch]) -> None:
        if digests:
            now, before = ([known.get(one, 0) for one in digests] for known in (self._digests, self._earlier))
            self._slots.say_digests(now, before)

    def say_seconds(self, seconds: float) -> None:
        """After :meth:`begin`: send all groups this group's seconds per microbatch in the step before."""
        self._slots.say_seconds(seconds)

    def measured(self) -> dict[int, float]:
        """Return the seconds of all groups that computed, once bucket 0 is reduced and before the update."""
        return {group: seconds for group, seconds in enumerate(self._slots.seconds()) if seconds}

    # --- between groups -----------------------------------------------------------------------------------------------

    def prepare(self, view: View, step: int) -> None:
        """Begin to build the communicator of ``view``, in parallel with the computation before its first use."""
        self.points.reach("connect", step)
        self.following.see(view)
        self.link.connector.begin(view)

    def connect(self, view: View, step: int, interrupted: Callable[[], bool]) -> bool:
        """Build the communicator of ``view``; False when ``interrupted`` became true first. Raises ``Broken``."""
        if self.link.view == view and self.link.outer is not None:  # built before another rank was interrupted
            return True
        self.progress.take_seat()
        self.prepare(view, step)
        return self.link.enter(view, interrupted)

    def close_epoch(self) -> None:
        """Close the communicator and drop all pending operations of the present epoch."""
        self._write_down()
        if self.link.close():
            self._reduction.drop()
        if reason := stuck():
            raise StartOver(f"group {self.group}, rank {self.position}: {reason}; another process takes its place")

    def reduce(self, order: Reduce) -> None:
        """Sum buckets over the members of the epoch. A part is added to the local gradients once in a step.

        Raises ``Broken``; in a group of several ranks only after all of them have ended their operations."""
        outer, step = given(self.link.outer), order.step
        self.timeline.assign(step, outer.epoch)
        self._settle(state=False)
        self.batches.say(order.batches)
        self._say_digests(order.digests)
        if self._compares_all(step):  # here, where no forward pass has changed a buffer
            self.guard.say_all(step)
        for part in (part for part in order.parts if part not in self._contributed):
            self.engine.contribute(part)
            self._contributed.add(part)
        with self.timeline.span("reduce"):
            if self._shared is None:
                self._reduce(outer, step, order.buckets, order.done)
            else:
                self._reduce_together(self._shared, outer, order)

    def _reduce(
        self, outer: Communicator, step: int, buckets: Sequence[Bucket], done: Callable[[Bucket], None]
    ) -> None:
        with self._telling_changes(step):
            self._reduction.reduce(outer, step, buckets, done, self._meanwhile)

    @contextmanager
    def _telling_changes(self, step: int) -> Iterator[None]:
        try:
            yield
        except Changed as error:
            self.history.note(
                "bucket_changed", group=self.group, position=self.position, step=step, bucket=error.bucket
            )
            raise
        except InvariantBroken as error:
            self.guard.halt(step, f"group {self.group}, rank {self.position}: {error}")

    def _reduce_together(self, shared: SharedGradients | OwnGradients, outer: Communicator, order: Reduce) -> None:
        inner, step, buckets = given(self.inner), order.step, order.buckets
        shared.collect(buckets)
        self.collected = time.monotonic()
        mine, final = shared.mine(buckets), set[Bucket]()
        if outer.confirms:
            # By this rank only for all ranks of the group, whose computation the abort of one may have spoilt.
            self._together(lambda: self._complete(outer, step, mine))
        try:
            self._reduce(outer, step, mine, final.add)
        except Broken as error:
            self._say_broken(error)
        flags = torch.tensor([bucket in final for bucket in buckets], dtype=torch.int64)
        inner.sum(flags)
        for bucket, flag in zip(buckets, flags.tolist(), strict=True):
            if flag:
                shared.broadcast(bucket)
                order.done(bucket)
        if not flags.all():
            raise Broken("a rank of the group could not finish its reductions")

    def _complete(self, outer: Communicator, step: int, mine: Sequence[Bucket]) -> None:
        with self._telling_changes(step):
            self._reduction.complete(outer, step, mine, self._meanwhile)

    def _together(self, operation: Callable[[], T]) -> T:
        """Run an operation between groups. Raises ``Broken`` at all ranks of the group if it broke at one, after all of them
        have ended theirs."""
        result, complete = None, True
        try:
            result = operation()
        except Broken as error:
            if self.inner is None:
                raise
            self._say_broken(error)
            complete = False
        if self.inner is not None and not self.inner.all_reduce_min(complete):
            raise Broken("a rank of the group could not finish its part")
        return cast(T, result)

    def _say_broken(self, error: Broken) -> None:
        """Tell the other groups, whose ranks at this position may wait for this one; the leader learns of it later."""
        view = given(self.link.view)
        if not self.link.concerned(view):
            self.link.tell_broken(view.epoch, f"rank {self.position}: {error}", detail=error.detail)

    def transfer(self) -> None:
        """Send or receive the transfers of the present view, in an order that cannot deadlock: state first, buckets
        ascending.

        All ranks of a group put what they received in place, or none of them does. Raises ``Broken``.
        """
        view = given(self.link.view)
        self._settle(state=True)
        received = self._together(lambda: self._exchange(view))
        if self._shared is not None:
            for bucket, lacking in view.missing.items():
                if self.group in lacking:
                    self._shared.broadcast(bucket)
        if received is not None:
            self._load_state(received)

    def _exchange(self, view: View) -> Mapping[str, Any] | None:
        outer, received = given(self.link.outer), None
        if self.group == view.source:
            for group in view.behind:
                state_transfer.send_state(outer, self._full_state(), group)
        elif self.group in view.behind:
            received = state_transfer.receive_state(outer, given(view.source))
        for bucket, lacking in view.missing.items():
            if self._shared is not None and self._shared.owner(bucket) != self.position:
                continue
            if self.group == view.final[bucket]:
                for group in lacking:
                    # no limit: detector.collective_timeout_s between groups; an abort ends it when a rank is lost
                    outer.send(self._gradients.reduced(bucket), group, bucket).wait()
            elif self.group in lacking:
                self._receive_bucket(bucket, view.final[bucket])
        return received

    def _receive_bucket(self, bucket: Bucket, owner: int) -> None:
        try:
            # no limit: detector.collective_timeout_s between groups; an abort ends it when a rank is lost
            given(self.link.outer).receive(self._gradients.reduced(bucket), owner, bucket).wait()
        except Broken:
            self._gradients.replace_reduced(bucket)  # late data may still arrive in the old one
            raise

    def _full_state(self) -> Mapping[str, Any]:
        """Return what a group that is behind takes. Its script makes the step's end by itself, so the script's objects
        are part of it only before the first step."""
        result = self.result
        first = {registered_state.KEY: self.registered.state()} if result is None else {}
        return {
            "carried": self.carried,
            "engine": self.engine.state(),
            "result": None if result is None else result.to_json(),
            "hyperparameters": self.engine.hyperparameters.left,
            **first,
        }

    def _load_state(self, state: Mapping[str, Any]) -> None:
        result = None if state["result"] is None else StepResult.from_json(state["result"])
        if result is not None and result.step == self._step and not math.isfinite(result.gradient_norm):
            # The others have committed this step; the gradient that this group gave to it is cleared below.
            self.nonfinite.name(result.step, self.engine)
        self.engine.load_state(state["engine"])
        values = self.engine.hyperparameters
        values.made, values.left = None, state["hyperparameters"]
        values.write(values.left)  # the other script may have set others for the next step already
        self.registered.load(state.get(registered_state.KEY, {}))
        self.carried = state["carried"]
        self._updated = None  # followers of this group have to see the gradients of every step
        if self._step >= 0:
            self._clear()
        self.result = result or self.result

    # --- the step's end -----------------------------------------------------------------------------------------------

    def update(self, order: Update) -> StepResult | Discard:
        """Commit the step here; it must contain exactly the order's microbatches. Its sums may have to be discarded, in all
        groups alike; the step is then begun again. Raises ``StartOver`` where this group's state, batch or gradient was
        wrong, ``InvariantBroken`` where it is unknown whose was."""
        step, microbatches = order.step, order.microbatches
        self._settle(state=True)
        if order.batches and (wrong := self._union(self.batches.compare(step, given(self.link.view)))):
            if self.group in wrong:
                raise StartOver(f"group {self.group} leaves: the batch of one of its other ranks is not the right one")
            self._clear()
            return Discard("batch", dict.fromkeys(sorted(wrong)), ())
        wrong = set(self.guard.compare(step, given(self.link.view))) & set(order.contributors)
        if order.contributors and (wrong := self._union(wrong)):
            self._clear()
            return Discard("state", dict.fromkeys(sorted(wrong)), ())
        if self._config.exact_bits and (discard := self._judge(step, microbatches, order.checks)):
            return discard
        if self.await_commit is not None:
            self._commit_by_script(self.await_commit)
        with self.timeline.span("update"):
            try:
                result = self.inside(
                    lambda: self.engine.update(step, microbatches, lambda point: self.points.reach(point, step))
                )
            except Miscount as error:  # no group may go on with such a sum
                self.guard.halt(step, str(error))
        self.result = self._updated = result
        if step == self._audited:
            said = {str(microbatch): digest for microbatch, digest in self._digests.items()}
            self.history.note("digests", step=step, position=self.position, digests=said)
        self.progress.advance()
        return result

    def _union(self, groups: set[int]) -> set[int]:
        """Return the groups that any rank of this group names."""
        return groups if self.inner is None else set().union(*self.inner.gather(sorted(groups)))

    def _commit_by_script(self, await_commit: Callable[[], None]) -> None:
        """Wait for the script's commit. Raises ``EngineError`` if it has changed gradients before, which are summed
        already."""
        changes = [self.engine.local(bucket)._version for bucket in range(self.engine.num_buckets)]
        self.progress.enter("outside")
        await_commit()
        self.progress.enter("working")
        if changes != [self.engine.local(bucket)._version for bucket in range(self.engine.num_buckets)]:
            raise EngineError(
                "the script has changed gradients between its last session.backward and session.commit (clip_grad_norm_, "
                "zero_grad?): they are summed already, so it has no effect. gradient_clipping in the config clips the "
                "norm; any other "
                "change belongs into optimizer.register_step_pre_hook, where .grad has the gradients of the step"
            )

    def _judge(self, step: int, microbatches: int, checks: Sequence[Check]) -> Discard | None:
        """Return why the sums must not be used; None: they can be used. All ranks of the group decide the same."""
        try:
            too_large = self.engine.must_discard(microbatches)
        except InvariantBroken as error:
            self.guard.halt(step, f"step {step}: {error}")
        digests = self._slots.digests() if checks else ({}, {})
        found = verification.verdict(checks, *digests)
        self.verified = verification.by_microbatch(checks, digests[0])
        said = torch.zeros(3 + self._config.max_groups, dtype=torch.int64)
        said[0], said[1], said[2] = too_large, bool(found.doubtful), found.tied is not None
        said[[3 + group for group in found.guilty]] = 1
        if self.inner is not None:
            self.inner.sum(said)
        large, doubtful, tied, *guilty = said.tolist()
        accused = [group for group, flag in enumerate(guilty) if flag]
        if tied:
            which = "" if found.tied is None else f" {found.tied[0]} on {state_divergence.words(found.tied[1])}"
            self.guard.halt(
                step,
                f"the gradients of microbatch{which} differ in step {step}, and most groups agree with none: do all hosts "
                f"have the same hardware and libraries, and is the model deterministic (docs/exactness.md)?",
            )
        if self.group in accused:
            microbatch = found.guilty.get(self.group)
            which = "a microbatch" if microbatch is None else f"microbatch {microbatch}"
            raise StartOver(
                f"group {self.group} leaves: its gradient of {which} in step {step} is not that of the other groups. It "
                f"takes their state; if this happens again, take the host out (docs/exactness.md)"
            )
        if not (large or doubtful or accused):
            return None
        self.nonfinite.name(step, self.engine)  # the next attempt may not show it any more
        earlier = self._digests if doubtful or accused else {}
        if not (doubtful or accused):
            self.engine.discard(microbatches)
        self._clear()
        self._earlier = earlier
        why = "corruption" if accused else "digests" if doubtful else "grid"
        blamed = {group: None if group not in found.guilty else str(found.guilty[group]) for group in accused}
        return Discard(why, blamed, tuple(map(str, found.doubtful)))

    def _settle(self, state: bool) -> None:
        """Copy unsent data of followers that is about to change."""
        if self._sender is not None:
            self._sender.settle(state)

    def end_step(self, epoch: int) -> None:
        """End a step that is committed and recorded. Raises ``RunStopped`` when the run must not go on after it."""
        result = given(self.result)
        self.timeline.assign(result.step, epoch)
        if time.monotonic() - self._began > _LONG_S:
            self._write_down()  # at once: the next chance may be minutes away
        self.nonfinite.check(result, self.engine)

    def _meanwhile(self) -> None:
        """Do minor work while reductions run."""
        if self._swept:
            heap.give_back()  # one reduction later: the recovery is over
        self._swept = sweep()  # destroying a process group takes 10 ms and more: not in the middle of a recovery
        if time.monotonic() - self._written > _LONG_S:
            self._write_down()

    def _write_down(self) -> None:
        self._written = time.monotonic()
        self.timeline.write()
        self.history.write()

    def share_state(self) -> None:
        """Copy the leader's state to the other ranks of the group, if all hold the same."""
        if not self.engine.replicated:
            return
        inner = given(self.inner)
        if self.position == 0:
            for position in range(1, self.size):
                inner.hand_over(partial(state_transfer.send_state, state=self._full_state(), to=position))
        else:
            self._load_state(inner.hand_over(lambda peer: state_transfer.receive_state(peer, 0)))

    def fingerprint(self) -> dict[str, Any]:
        """Return ``params_norm`` and ``params_sha256``: L2 norm and sha256 of the group's parameters; ``state``: a
        checksum of all its ranks' states. Raises ``StartOver`` if ranks that share their parameters hold different
        ones."""
        mine = (*self.engine.fingerprint(), self.states.whole(self._step + 1))
        norms, hashes, states = zip(*([mine] if self.inner is None else self.inner.gather(mine)), strict=True)
        norm, sha256 = norms[0], hashes[0]
        if self.joint and self.inner is not None:  # each rank has a part of the model
            norm, sha256 = math.hypot(*norms), hashlib.sha256(bytes.fromhex("".join(hashes))).hexdigest()
        elif len(set(hashes)) > 1:
            raise StartOver(f"group {self.group} leaves: its ranks hold different parameters after the last step")
        whole = hashlib.sha256(repr(states).encode()).hexdigest()[:_STATE_DIGITS]
        return {"params_norm": norm, "params_sha256": sha256, "state": whole}

    def close(self) -> None:
        """Release resources after the last step."""
        self._prefetcher.close()
        self._write_down()

    @contextmanager
    def blame(self, microbatch: Microbatch) -> Iterator[None]:
        """Add the microbatch to an exception that ends this rank: if it kills another group too, the run has to stop. A
        failure because another rank of the group is gone is not the microbatch's fault."""
        try:
            yield
        except (FTError, Lost):
            raise
        except Exception as error:
            if self.lost_because or broken_inside(error):
                raise
            error.add_note(f"megatron_ft: while computing microbatch {microbatch}")
            error.microbatch = str(microbatch)  # type: ignore[attr-defined]  # read by ``agent.rank_bootstrap``
            raise
