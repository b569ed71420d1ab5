"""What one rank does with its engine and its communicators, whoever orders it; it decides nothing.

The leader of a group (``runtime.leader``) and its followers (``runtime.follower``) both drive one. The training thread calls
everything here but :meth:`Rank.hear` and :meth:`Rank.lose`, which the watcher's thread does: they abort the communicators
that the news concern, so a training thread that waits in a collective returns within milliseconds.

Failures it assumes: any operation between groups may fail (``Broken``: the epoch is over) or, inside the group, end the
group (``Lost``). News may come before what they concern: they are kept, and looked at when a view's communicator stands.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch

from megatron_ft.core import detector
from megatron_ft.core.protocol import Broke, Missed
from megatron_ft.data.order import microbatch_seed
from megatron_ft.data.prefetch import Dataset, Prefetcher
from megatron_ft.engines.base import Engine, JointEngine, Listed, Ready, StepResult
from megatron_ft.errors import EngineError, FTError
from megatron_ft.runtime import transfer
from megatron_ft.runtime.agreement import Agreement
from megatron_ft.runtime.comeback import Following, address_key
from megatron_ft.runtime.communicator import Broken, Communicator, sweep
from megatron_ft.runtime.connect import Connector
from megatron_ft.runtime.donor import Donor
from megatron_ft.runtime.environment import RankEnvironment
from megatron_ft.runtime.finite import NonFinite
from megatron_ft.runtime.history import History
from megatron_ft.runtime.inner import Inner, Lost
from megatron_ft.runtime.joint import JointWork, broken_inside, lost_inside
from megatron_ft.runtime.lines import Lines
from megatron_ft.runtime.pace import Slots
from megatron_ft.runtime.points import Points
from megatron_ft.runtime.pulse import Pulse
from megatron_ft.runtime.reduction import Reduction
from megatron_ft.runtime.saving import Saving
from megatron_ft.runtime.shared import OwnGradients, SharedGradients
from megatron_ft.runtime.timeline import Timeline
from megatron_ft.types import Bucket, Microbatch, View

_LONG_S = 0.01
"""After a step that takes less, nothing is loaded ahead, and the record is written not always, but about as often as this:
either would cost such a step more than it is worth."""


T = TypeVar("T")


class Needs(NamedTuple):
    """The microbatches of a group: its own in a step, those of the shards it hosts, and its own in the next step, if
    nobody dies or joins meanwhile."""

    own: Sequence[Microbatch]
    stack: Sequence[Microbatch]
    following: Sequence[Microbatch]


class Rank:
    """One of the ``size`` ranks of a group, at ``position``.

    ``result`` is of the last step committed here, ``carried`` what its leader hands over with the model, as ``carry`` says.
    ``epoch`` is the leader's, or None while the group has no state to give. ``collected`` is when the group's ranks had last
    summed up what they had computed.
    """

    def __init__(self, env: RankEnvironment, agreement: Agreement, history: History) -> None:
        self.group, self.position, self.size = env.group, env.position, env.config.ranks_per_group
        self.incarnation = env.incarnation
        self.agreement, self.history = agreement, history
        self.points = Points.from_env(env.group, env.position, env.run_dir)
        self.pulse = Pulse.from_env()
        self.timeline = Timeline(env.run_dir, env.group, env.position)
        self.inner: Inner | None = None
        self.result: StepResult | None = None
        self.carried: Mapping[str, Any] = {}
        self.carry: Callable[[], Mapping[str, Any]] = dict
        self.epoch: Callable[[], int | None] = lambda: None
        self.following = Following(self, env, agreement)
        self.saving = Saving(env, agreement, lambda: self.lost_because)
        self.collected = 0.0
        self._began = self._written = 0.0
        self.lost_because = ""
        self._env, self._config, self._settings = env, env.config, env.config.fault_tolerance
        self.nonfinite = NonFinite(self._settings.nonfinite, env.group, history, agreement)
        self._connector = Connector(env, agreement)
        self._prefetcher = Prefetcher(random_state=lambda: torch.get_rng_state().tolist())
        self.engine: Engine | JointEngine | None = None
        self._slots: Slots | None = None
        self._reduction: Reduction | None = None
        self._shared: SharedGradients | OwnGradients | None = None
        self._lines: Lines | None = None
        self.joint = False
        self._outer: Communicator | None = None
        self._view: View | None = None
        self._step = -1
        self._donor: Donor | None = None
        self._updated: StepResult | None = None
        self._heard: list[detector.Verdict] = []
        self._lock = threading.Lock()
        self._told = -1

    def join(self, inner: Inner) -> None:
        """The group's ranks have met."""
        self.inner = inner
        if self.lost_because:  # one was gone again before that line
            inner.abort()

    def attach(self, engine: Engine) -> None:
        """Before the first step."""
        self.engine, self._slots = engine, Slots(engine, self.group)
        self.joint = hasattr(engine, "flush")
        settings = self._settings
        if self.joint:
            if settings.nonfinite == "recompute":
                raise EngineError(
                    'fault_tolerance.nonfinite is "recompute", which looks at gradients after each microbatch; a pipeline '
                    'has complete ones only after a flush: use "skip" or "stop"'
                )
            lines = Lines.build(self._env, self.agreement, engine.peers, lambda: bool(self.lost_because))
            self._lines = lines
            if self.lost_because:
                lines.abort()
        if self.inner is not None:
            self._shared = OwnGradients(engine, self.inner) if self.joint else SharedGradients(engine, self.inner)
        if settings.rejoin.enabled:
            where = lambda place: self.agreement.say(address_key(self.group, self.position), place)  # noqa: E731
            self._donor = Donor(self._env, engine, lambda: self.epoch(), where)
        overlap = settings.overlap and self._shared is None and settings.nonfinite != "recompute"
        self._reduction = Reduction(self._gradients, self.points, dtype=settings.reduce_dtype, overlap=overlap)

    @property
    def num_buckets(self) -> int:
        """Of the whole group."""
        return self._gradients.num_buckets

    @property
    def _gradients(self) -> Engine | SharedGradients | OwnGradients:
        return self._shared or self.engine

    # --- news, in the watcher's thread --------------------------------------------------------------------------------

    def hear(self, verdict: detector.Verdict) -> None:
        """Unblock the training thread if it waits for somebody who is gone."""
        self.following.hear(verdict)
        with self._lock:
            if isinstance(verdict, Missed) and verdict.heard:
                self._heard = [earlier for earlier in self._heard if not _takes_back(verdict, earlier)]
                return
            self._heard.append(verdict)
            if self._outer is not None:
                self._unblock(self._outer, [verdict])

    def _unblock(self, outer: Communicator, verdicts: Iterable[detector.Verdict]) -> None:
        """Who waits in ``outer``, if one of these ends its epoch."""
        for verdict in verdicts:
            if detector.ends(verdict, self._view, self._step):
                outer.leave() if detector.in_order(verdict) else outer.abort()

    def lose(self, reason: str) -> None:
        """Another rank of this group is gone: nothing that this one waits for will come."""
        self.lost_because = self.lost_because or reason
        for means in (self.inner, self._lines):
            if means is not None:
                means.abort()
        with self._lock:
            if self._outer is not None:
                self._outer.abort()

    def concerned(self, view: View, step: int | None = None) -> bool:
        """Whether something that was heard so far ends the epoch of ``view``, for who works on ``step``: the present one."""
        with self._lock:
            return any(detector.ends(verdict, view, self._step if step is None else step) for verdict in self._heard)

    def tell_broken(self, epoch: int, reason: str, after: int = -1) -> None:
        """Tell all groups, once, that ``epoch`` is over, for those who work on a step later than ``after``."""
        if epoch > self._told:
            self._told = epoch
            self.agreement.announce(detector.Reset(epoch, self.group, reason, after))

    # --- computing ----------------------------------------------------------------------------------------------------

    def begin(self, step: int, dataset: Dataset, needs: Callable[[], Needs]) -> None:
        """A step starts."""
        now = time.monotonic()
        short, self._began = now - self._began < _LONG_S, now
        self._step = step
        with self._lock:  # what others have ended the epoch for, with this step, may have been heard in the one before
            if self._outer is not None:
                self._unblock(self._outer, self._heard)
        if self._donor is not None:
            self._donor.boundary(step, self._updated, self.carry)
        self.engine.begin_step()
        if short:
            self._prefetcher.rest(dataset, step)
        else:
            self._prefetcher.begin(dataset, *map(self._part, needs()))
        self.points.reach("begin", step)

    def arrive(self) -> None:
        """After following others into the step that has begun: its gradients are clean again."""
        self.following.end()
        self.engine.begin_step()

    def _part(self, microbatches: Sequence[Microbatch]) -> Sequence[Microbatch]:
        """What this rank loads of them."""
        if self.joint:
            return microbatches if self.engine.loads else ()
        return microbatches[self.position :: self.size]

    def flush(
        self, listed: Callable[[], Sequence[Listed]], finished: Callable[[Microbatch, bool], None]
    ) -> None:
        """Compute what is listed, jointly with the other ranks of the group; ``finished`` is told each microbatch when it
        is, and whether its samples were in memory. Both are used at position 0 only."""
        self._inside(lambda: self.engine.flush(self._lines, JointWork(self, self._settings.seed, listed, finished)))

    def samples(self, microbatch: Microbatch) -> tuple[Any, bool]:
        """Of a microbatch, and whether they were in memory."""
        return self._prefetcher.get(microbatch)

    def _inside(self, operation: Callable[[], T]) -> T:
        """Something in which the engine talks to the other ranks of the group."""
        if self.inner is None:
            return operation()
        with lost_inside(lambda: self.lost_because):
            return operation()

    def compute(self, microbatch: Microbatch, patch: bool, ahead: Ready | None = None) -> tuple[bool, float]:
        """Forward and backward of one; whether its samples were in memory, and the seconds it took."""
        step = microbatch.step
        if patch:
            self.points.reach("patch", step)
        started = time.monotonic()
        with self.timeline.span("patch" if patch else "compute"), self.blame(microbatch):
            batch, prefetched = self._prefetcher.get(microbatch)
            seed = microbatch_seed(self._settings.seed, microbatch)
            self.engine.compute(microbatch, batch, seed, lambda point: self.points.reach(point, step), ahead)
            self.points.corrupt(step, self.engine)
            self.nonfinite.computed(microbatch, self.engine, self._members() > self._settings.min_groups)
        self.pulse.advance()
        return prefetched, time.monotonic() - started

    def _members(self) -> int:
        """How many groups the present view has."""
        return len(self._view.live) if self._view is not None else self._config.groups

    def ahead(self, step: int, buckets: Sequence[Bucket]) -> Ready | None:
        """What to call with the buckets that are complete before the last microbatch is."""
        self._settle(state=False)
        return None if self.points.corrupts(step) else self._reduction.ahead(self._outer, step, buckets)

    def say_seconds(self, seconds: float) -> None:
        """After :meth:`begin`: what a microbatch has taken this group in the step before, for everybody to know."""
        self._slots.say(seconds)

    def measured(self) -> dict[int, float]:
        """What all groups have said, once bucket 0 is reduced and before the update: seconds, of those that computed."""
        return {group: seconds for group, seconds in enumerate(self._slots.read()) if seconds}

    # --- between groups -----------------------------------------------------------------------------------------------

    def take_seat(self, view: View, agreement: Agreement) -> None:
        """Another thread has found the view in which this group has its seat: the others wait for its connections."""
        self._connector.begin(view, agreement)

    def prepare(self, view: View, step: int) -> None:
        """Begin to build the communicator of ``view``, beside whatever has to be computed before it is needed."""
        self.points.reach("connect", step)
        self.following.see(view)
        self._connector.begin(view)

    def connect(self, view: View, step: int, interrupted: Callable[[], bool]) -> bool:
        """Build the communicator of ``view``; False when ``interrupted`` became true first. Raises ``Broken``."""
        if self._view == view and self._outer is not None:  # built before another rank of the group was interrupted
            return True
        self.prepare(view, step)
        outer = self._connector.connect(view, interrupted)
        if outer is None:
            return False
        with self._lock:
            self._outer, self._view = outer, view
            self._heard = [verdict for verdict in self._heard if not _is_over(verdict, view)]
            self._unblock(outer, self._heard)
        return True

    def close_epoch(self) -> None:
        """Nothing of the present epoch finishes here any more."""
        self._write_down()
        with self._lock:
            outer, self._outer = self._outer, None
        if outer is not None:
            outer.close()
            self._reduction.drop()

    def reduce(self, step: int, buckets: Sequence[Bucket], done: Callable[[Bucket], None]) -> None:
        """Sum ``buckets`` over the members of the epoch; ``done`` is called with each that is, in order.

        Raises ``Broken``; where the group has several ranks, after all of them have ended what they were at.
        """
        self.timeline.assign(step, self._outer.epoch)
        self._settle(state=False)
        with self.timeline.span("reduce"):
            if self._shared is None:
                self._reduction.reduce(self._outer, step, buckets, done, self._meanwhile)
            else:
                self._reduce_together(step, buckets, done)

    def _reduce_together(self, step: int, buckets: Sequence[Bucket], done: Callable[[Bucket], None]) -> None:
        self._shared.collect(buckets)
        self.collected = time.monotonic()
        final: set[Bucket] = set()
        try:
            self._reduction.reduce(self._outer, step, self._shared.mine(buckets), final.add, self._meanwhile)
        except Broken as error:
            self._say_broken(error)
        flags = torch.tensor([bucket in final for bucket in buckets], dtype=torch.int64)
        self.inner.sum(flags)
        for bucket, flag in zip(buckets, flags.tolist(), strict=True):
            if flag:
                self._shared.spread(bucket)
                done(bucket)
        if not flags.all():
            raise Broken("a rank of the group could not finish its reductions")

    def _say_broken(self, error: Broken) -> None:
        """The other groups' ranks at this position may wait for this one; the leader hears of it only later."""
        if not self.concerned(self._view):
            self.tell_broken(self._view.epoch, f"rank {self.position}: {error}")

    def transfer(self) -> None:
        """Hand over or take what the present view says, in an order that cannot deadlock: state first, buckets ascending.

        All ranks of a group take what they got, or none of them does. Raises ``Broken``.
        """
        view, received, broken = self._view, None, None
        self._settle(state=True)
        try:
            received = self._exchange(view)
        except Broken as error:
            broken = error
        if self._shared is not None:
            if broken is not None:
                self._say_broken(broken)
            if not self.inner.least(broken is None):
                raise Broken("a rank of the group could not finish the view's transfers")
            for bucket, lacking in view.missing.items():
                if self.group in lacking:
                    self._shared.spread(bucket)
        elif broken is not None:
            raise broken
        if received is not None:
            self._load_state(received)

    def _exchange(self, view: View) -> Mapping[str, Any] | None:
        outer, received = self._outer, None
        if self.group == view.source:
            for group in view.behind:
                transfer.send_state(outer, self._full_state(), group)
        elif self.group in view.behind:
            received = transfer.receive_state(outer, view.source)
        for bucket, lacking in view.missing.items():
            if self._shared is not None and self._shared.owner(bucket) != self.position:
                continue
            if self.group == view.final[bucket]:
                for group in lacking:
                    outer.send(self._gradients.reduced(bucket), group, bucket).wait()
            elif self.group in lacking:
                self._receive_bucket(bucket, view.final[bucket])
        return received

    def _receive_bucket(self, bucket: Bucket, owner: int) -> None:
        try:
            self._outer.receive(self._gradients.reduced(bucket), owner, bucket).wait()
        except Broken:
            self._gradients.replace_reduced(bucket)  # whatever may still arrive there
            raise

    def _full_state(self) -> Mapping[str, Any]:
        result = self.result
        return {
            "carried": self.carried,
            "engine": self.engine.state(),
            "result": None if result is None else result.to_json(),
        }

    def _load_state(self, state: Mapping[str, Any]) -> None:
        self.engine.load_state(state["engine"])
        self.carried = state["carried"]
        self._updated = None  # who follows this group has to see the gradients of every step
        if state["result"] is not None:
            self.result = StepResult(*state["result"])

    # --- the step's end -----------------------------------------------------------------------------------------------

    def update(self, step: int, microbatches: int) -> StepResult:
        """Commit the step here; ``microbatches``: so many must be in it."""
        self._settle(state=True)
        with self.timeline.span("update"):
            self.result = self._inside(
                lambda: self.engine.update(step, microbatches, lambda point: self.points.reach(point, step))
            )
        self._updated = self.result
        self.pulse.advance()
        return self.result

    def _settle(self, state: bool) -> None:
        """What is being handed over to who follows is about to change."""
        if self._donor is not None:
            self._donor.settle(state)

    def end_step(self, epoch: int) -> None:
        """The step is committed and recorded. Raises ``RunStopped`` when the run must not go on after it."""
        self.timeline.assign(self.result.step, epoch)
        if time.monotonic() - self._began > _LONG_S:
            self._write_down()  # at once: the next chance may be minutes away
        self.nonfinite.check(self.result, self.engine)

    def _meanwhile(self) -> None:
        """What is done while reductions are on their way."""
        sweep()  # destroying a process group takes 10 ms and more: not in the middle of a recovery
        if time.monotonic() - self._written > _LONG_S:
            self._write_down()

    def _write_down(self) -> None:
        self._written = time.monotonic()
        self.timeline.write()
        self.history.write()

    def share_state(self) -> None:
        """Make the other ranks of the group stand where its leader stands, where all hold the same."""
        if not self.engine.alike:
            return
        if self.position == 0:
            for position in range(1, self.size):
                self.inner.hand_over(lambda peer, to=position: transfer.send_state(peer, self._full_state(), to))
        else:
            self._load_state(self.inner.hand_over(lambda peer: transfer.receive_state(peer, 0)))

    def fingerprint(self) -> tuple[float, str]:
        """L2 norm and sha256 of the parameters. Raises ``AssertionError`` where the group's ranks do not agree on them."""
        norm, sha256 = self.engine.fingerprint()
        if self.joint and self.inner is not None:
            return self._combined(norm, sha256)
        if self.inner is not None:
            said = torch.tensor(list(bytes.fromhex(sha256)), dtype=torch.uint8)
            self.inner.share(said, 0)
            leader = bytes(said.tolist()).hex()
            alike = self.inner.least(leader == sha256)
            assert alike, f"rank {self.position} of group {self.group} has parameters {sha256}, rank 0 {leader}"
        return norm, sha256

    def _combined(self, norm: float, sha256: str) -> tuple[float, str]:
        """Of the whole model, from each rank's part of it."""
        square = torch.tensor([norm**2], dtype=torch.float64)
        digests = torch.zeros(self.size, len(sha256) // 2, dtype=torch.uint8)
        digests[self.position] = torch.tensor(list(bytes.fromhex(sha256)), dtype=torch.uint8)
        self.inner.sum(square, digests)
        return float(square) ** 0.5, hashlib.sha256(bytes(digests.flatten().tolist())).hexdigest()

    def close(self) -> None:
        """No step follows."""
        self._prefetcher.close()
        self._write_down()

    @contextmanager
    def blame(self, microbatch: Microbatch) -> Iterator[None]:
        """An exception that ends this rank says what it was computing: if that kills another group too, the run has to
        stop. What broke because another rank of the group is gone is not the microbatch's fault."""
        try:
            yield
        except (FTError, Lost):
            raise
        except Exception as error:
            if self.lost_because or broken_inside(error):
                raise
            error.add_note(f"megatron_ft: while computing microbatch {microbatch}")
            error.microbatch = str(microbatch)
            raise


def _takes_back(verdict: Missed, earlier: detector.Verdict) -> bool:
    return isinstance(earlier, Missed) and (earlier.by, earlier.about) == (verdict.by, verdict.about)


def _is_over(verdict: detector.Verdict, view: View) -> bool:
    """Whether it can concern no view from this one on."""
    return isinstance(verdict, Broke) and verdict.epoch < view.epoch
