"""One simulated group: the ports of ``core.protocol.shell`` and ``run.store.watcher``, without processes and tensors.

Its training thread is the loop of a real group, and hears verdicts between two actions; the watcher hears at once and
aborts the communicator they concern. An all-reduce is every group sending its part to every other, so each bucket finishes
at some groups and not at others when one of them dies: more ways to break than a ring has. The communicator is gloo's,
whose connections break at the peers of a group that dies or aborts, or that of a
:class:`~megatron_ft.proof.simulated_device.Device`.

A gradient is a number with one counter per microbatch (``record.invariants.contribution``), the model a hash of all
gradients it has taken. How long a group *says* it needs has nothing to do with how long it takes: whatever is measured, all
must plan alike.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import methodcaller
from typing import TYPE_CHECKING, Any, NoReturn, cast

from megatron_ft import codec
from megatron_ft.core.detection import rank_health, state_divergence
from megatron_ft.core.lifecycle import checkpoint_protocol, store_failover
from megatron_ft.core.lifecycle.store_failover import Claim
from megatron_ft.core.protocol import group_locations, machine, ports, signals
from megatron_ft.core.protocol.ports import Broken, News
from megatron_ft.core.protocol.shell import Shell
from megatron_ft.proof.kernel import Future, Thread
from megatron_ft.proof.returning_group import Donor, Following, Outcome
from megatron_ft.proof.simulated_device import Device, Sum, added
from megatron_ft.proof.simulated_store import Operation, Store
from megatron_ft.proof.store_client import CONFLICT, Client, Plain, Process
from megatron_ft.record import invariants, lineage
from megatron_ft.types import GroupId, Microbatch, View, given

if TYPE_CHECKING:
    from megatron_ft.proof.simulated_cluster import Cluster


@dataclass(frozen=True)
class Pace:
    """How long a group takes, in the kernel's unit, and by how much its own clock is wrong."""

    compute: float = 1.0
    update: float = 0.5
    poll: float = 1.0
    patience: float = 25.0
    """A collective is given up after this time."""
    clock: float = 0.0


class Group(Process, ports.Ranks, ports.Store, ports.Clock):
    """One incarnation of a group, from its seat to its end: the ports ``Ranks``, ``Store`` and ``Clock`` of its loop.

    Large because the loop has three ports, and what one does is seen by the others at once, as in a real group.
    """

    def __init__(
        self, cluster: Cluster, me: GroupId, view: View, pace: Pace, following: Following | None = None
    ) -> None:
        self.me, self.cluster, self.pace = me, cluster, pace
        self.incarnation = view.incarnations.get(me, 0)
        self.shell = Shell(machine.start(me, cluster.job, view), self, self, self)
        self.params = f"initial model of {me}.{self.incarnation}"
        if cluster.origin is not None and not self.incarnation:
            self.params = cluster.origin.params
        self.committed_in = -1
        self.attempt = 0
        """The number of discarded attempts of the step whose reasons it knows: it saw their sums, or took the state."""
        self.reset_step()
        self.gone = False
        self.epoch = view.epoch
        """That of the view that it follows, or is about to."""
        self.frozen_until = self.hung_until = 0.0
        self.phase: rank_health.Phase = "waiting"
        self.followers: list[tuple[Donor, Following]] = []
        self.client: Client | Plain  # given by the cluster before :meth:`start`
        self.read = 0
        """Number of claims that it had read when it last proposed a view; ``decided``: that were there by then."""
        self.decided = 0
        self._report: machine.Report | None = None
        self._said: list[signals.EpochAborted] = []
        self._following = following
        if following is not None:
            following.arrived = self._poke
        self._backlog: list[Any] = []
        self._inbox: deque[machine.Event] = deque()
        self._inbound: dict[tuple, dict[GroupId, Any]] = {}
        self._open: View | None = None
        self._broken = ""
        self.device = Device(self) if cluster.scenario.device else None
        self._nudge: Future | None = None
        self._heard, self._places = 0, group_locations.GroupLocations()
        self._since = view.epoch
        self._orders: list[checkpoint_protocol.Saves] = []
        self._thread = Thread(self._train())

    def start(self) -> None:
        self._seated = self.cluster.kernel.now
        self._listen()
        self._thread.start()

    def reset_step(self) -> None:
        self.local = [0] * self.cluster.job.buckets
        self.parts: dict[int, list[int]] = {}
        """The sums of standby parts that are not contributed."""
        self.reduced: dict[int, Sum] = {}
        self.seconds: dict[GroupId, float] = {}

    def record(self, event: str, **fields: Any) -> None:
        self.cluster.record(event, group=self.me, incarnation=self.incarnation, **fields)

    @property
    def state(self) -> machine.GroupState:
        return self.shell.state

    @property
    def following(self) -> Following | None:
        """What a group that is on its way back has received; None once it has the state of its view."""
        return self._following if self.state.following else None

    @property
    def done(self) -> bool:
        return self.state.finished and isinstance(self.shell.next, machine.Finish)

    # --- what happens to the process ----------------------------------------------------------------------------------

    def die(self) -> None:
        self.gone = True
        self._thread.stop()

    def freeze(self, until: float) -> None:
        """Stopped (SIGSTOP) until then; what arrives waits in the sockets."""
        self.frozen_until = max(until, self.frozen_until)
        self._thread.suspend()
        self.cluster.kernel.at(self.frozen_until, self._thaw)

    def hang(self, until: float) -> None:
        """The training thread does nothing until then; what arrives is heard."""
        self.hung_until = max(until, self.hung_until)
        self._thread.suspend()
        self.cluster.kernel.at(self.hung_until, self._thaw)

    @property
    def frozen(self) -> bool:
        return self.cluster.kernel.now < self.frozen_until

    @property
    def hung(self) -> bool:
        return self.cluster.kernel.now < self.hung_until

    def _thaw(self) -> None:
        if self.gone or self.frozen:
            return
        waiting, self._backlog = self._backlog, []
        for notice in waiting:
            self._on_notice(notice)
        if not self.hung:
            self._thread.resume()

    # --- hearing ------------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """The watcher: wait for the next entries of the log, hear them, wait for those after."""
        self.client.call(lambda store: store.news(self._heard)).then(self._heard_notices)

    def _heard_notices(self, notices: list[Any]) -> None:
        self._heard += len(notices)
        for notice in notices:
            self._on_notice(notice)
        self._listen()

    def _on_notice(self, notice: Any) -> None:
        if self.gone:
            return
        if self.frozen:
            self._backlog.append(notice)
            return
        self._places, verdicts = group_locations.apply(self._places, notice)
        for verdict in verdicts:
            self._take_in(cast(machine.Event, verdict))

    def _take_in(self, event: machine.Event) -> None:
        self._inbox.append(event)
        verdict = cast(signals.Verdict, event)
        if self._open is not None and signals.ends(verdict, self._open, self.state.step):
            self._cut("aborted by a notice", in_order=signals.in_order(verdict))
        self._poke()

    def reset(self, epoch: int) -> None:
        """The connection to a member of the epoch breaks."""
        if self._open is not None and self._open.epoch == epoch:
            self._cut("connection reset by peer")
            self._poke()

    def _cut(self, reason: str, in_order: bool = False) -> None:
        """Nothing is waited for any more that has not ended; a communicator is aborted, unless the epoch ends in order."""
        self._broken = self._broken or reason
        if self.device is not None and not in_order:
            self.device.abort()

    def receive(self, sender: GroupId, key: tuple, value: Any) -> None:
        """A message of another group, kept until it is asked for; the key names the epoch it belongs to."""
        if self.device is not None and key[0] not in ("hello", "confirm"):
            self.device.arrived(sender, key, value)
        else:
            self.see(key, {sender: value})

    def see(self, key: tuple, values: Mapping[GroupId, Any]) -> None:
        """The process can see these messages, or that the device has ended an operation with them."""
        self._inbound.setdefault(key, {}).update(values)
        self._poke()

    def _poke(self) -> None:
        if self._nudge is not None:
            nudge, self._nudge = self._nudge, None
            nudge.resolve()

    # --- the training thread ------------------------------------------------------------------------------------------

    async def _train(self) -> None:
        while not self.state.finished:
            await self.shell.train_step()
        await self.shell.finish(self.pace.patience)

    def now(self) -> float:
        return self.cluster.kernel.now + self.pace.clock

    async def verdict(self) -> machine.Event | None:
        return self._inbox.popleft() if self._inbox else None

    def per_shard(self, step: int) -> int:
        return self.cluster.scenario.per_shard_at(step)

    async def compute(self) -> Sequence[machine.Computed]:
        microbatch = self.state.todo[0]
        self.phase = "working"
        await self.sleep(self.pace.compute)
        self.phase = "waiting"
        digest_only = microbatch in self.state.digest_only
        if not digest_only:
            self._add(microbatch)
        self.seconds[self.me] = self.cluster.seconds(self, microbatch)
        return [machine.Computed(microbatch, digest_only)]

    def _add(self, microbatch: Microbatch) -> None:
        """Add the gradient of a microbatch to every bucket, or to those of a standby part."""
        gradient, part = self.cluster.contribution(microbatch), self.state.plan.part(self.me, microbatch)
        before = self.parts.get(part, [0] * len(self.local)) if part else self.local
        after = [bucket + gradient for bucket in before]
        if part:
            self.parts[part] = after
        else:
            self.local = after

    def _contribute(self) -> None:
        """Add the standby parts that this group contributes to its own sums."""
        for part in self.state.plan.promoted(self.me):
            more = self.parts.pop(part, None)
            if more is not None:
                self.local = [bucket + other for bucket, other in zip(self.local, more, strict=True)]

    async def abort(self) -> None:
        self._open = None

    async def close(self) -> None:
        """One that is stuck ends the process, whose group is lost."""
        self.cluster.aborted(self, self.state.view.epoch)
        if self.device is not None and not await self.device.close():
            self.cluster.replaced(self, "the communicator is stuck")
            await Future()  # never

    async def publish(self, report: machine.Report) -> None:
        self._report = report
        await self.client.call(methodcaller("set", ("report", report.epoch, report.group), report))

    async def announce(self, said: signals.EpochAborted, detail: str = "") -> None:
        self._said = [*(earlier for earlier in self._said if earlier.epoch >= said.epoch), said]
        await self.client.call(lambda store: store.append(said))

    async def adopt(self, view: View) -> None:
        self.epoch = view.epoch
        self.record("adopt", view=view.to_json(), **self._branch("branch", view))

    def _branch(self, name: str, view: View) -> dict[str, str]:
        """Which of the views of its epoch that is, where there may be several."""
        return {name: lineage.digest(view)} if self.client.fails_over else {}

    @property
    def _claimant(self) -> Client:
        assert isinstance(self.client, Client), "only where the store fails over are there claims"
        return self.client

    # --- claims -------------------------------------------------------------------------------------------------------

    async def fence(self, proposal: machine.Propose) -> Sequence[machine.GroupFailed] | None:
        """Read the log of claims to its end, and fence the seats that may live. News are among the verdicts."""
        if not self.client.fails_over:
            return ()
        self.decided = len(self._claimant.world.disk.log)
        while True:
            decided = await self._decided_before(self._claimant.read())
            if decided or self._inbox:
                return None
            need = set(proposal.fence) - store_failover.fenced(self._claimant.claims)
            if not need:
                return ()
            if not store_failover.may_claim([self.seat], self._claimant.claims):
                return None
            why = proposal.view.reason
            claim = store_failover.fence(self._claimant.claims[-1], need, self.me, why)
            if await self._decided_before(self._claimant.create(claim, [self.seat])):
                return None

    async def _decided_before(self, done: Future) -> bool:
        """Wait for the directory, which may be slow; True as soon as the next view stands, by any writer."""
        epoch, answers = self.state.view.epoch, list[Any]()

        def answered(answer: Any) -> None:
            answers.append(answer)
            self._poke()

        done.then(answered)
        while not answers:
            await self._wait(self.cluster.kernel.now + self.pace.poll)
            if not answers:
                view, _ = await self.client.call(lambda store: read_view(store, epoch, ()))
                if view is not None:
                    return True
        return False

    async def log_answers(self) -> bool:
        return not self.client.fails_over or self._claimant.log_answers

    async def propose(self, view: View) -> View | None:
        if self.client.fails_over:
            self.read = len(self._claimant.claims)
        (standing,) = await self.client.call(self._decision(view))
        return standing

    def _decision(self, view: View) -> Operation:
        """Write the view, if no other stands; not to another store than the reports are from that it was decided by."""
        if not self.client.fails_over:
            return lambda store: [self.cluster.decide(store, self, view)]
        client = self._claimant
        token = client.token
        return lambda store: [self.cluster.decide(store, self, view) if token == client.token else None]

    @property
    def seat(self) -> store_failover.Seat:
        return self.me, self.incarnation

    def knows(self) -> list[Operation]:
        """The view comes first, so that no group that has missed it decides on another; then the entries of its epoch."""
        view, report = self.state.view, self._report
        operations: list[Operation] = [
            lambda store: [True] if store.create(("view", view.epoch), view) == view else CONFLICT
        ]
        if self.state.reported and report is not None and report.epoch == view.epoch:
            operations.append(lambda store: store.set(("report", report.epoch, report.group), report))
        said = [signal for signal in self._said if signal.epoch >= view.epoch]
        return operations + [lambda store, signal=signal: store.append(signal) for signal in said]

    def reads(self, claim: Claim) -> None:
        """The group ends if the claim fences it; the other fenced seats count as dead."""
        if self.seat in claim.fenced:
            self.cluster.stopped(self, f"left out by claim {claim.number}: {claim.reason}")
            return
        for died in store_failover.verdicts(claim):
            self._take_in(died)

    def moves(self) -> None:
        self._heard = 0
        self._take_in(machine.Replaced())

    def conflicts(self) -> None:
        epoch = self.state.view.epoch
        self.cluster.stopped(self, f"the store was rebuilt with another view {epoch} than this group follows")

    async def connect(self, view: View) -> machine.Connected | None:
        """Say hello to every member, and wait until all have; a notice ends it, and is heard first."""
        self._send(view.live, ("hello", self._name(view)), None)
        self._broken = ""
        there = await self._gather(("hello", self._name(view)), view.live, interruptible=True)
        if there and self.device is not None:
            ready = self.device.init(view)
            there = await self._until(ready, "init", self.device.gives_up, interruptible=True)
        if not there:
            return None
        self._open = view
        return machine.Connected(view.epoch)

    def _name(self, view: View) -> int:
        """What a communicator's messages are told from those of others by."""
        return view.epoch

    async def reduce(self, step: int, buckets: Sequence[int]) -> None:
        """Start all reductions, then take them in order; one counts when its completion is seen here, and on devices when
        all members have confirmed theirs."""
        view = self.state.view
        self._contribute()
        keys = {bucket: ("sum", self._name(view), step, self.attempt, bucket) for bucket in buckets}
        for bucket, key in keys.items():
            states = {} if bucket or not self._compares(view, step) else {self.me: self.params}
            part = Sum(self.local[bucket], {} if bucket else dict(self.seconds), frozenset({self.attempt}), states)
            if self.device is not None:
                self.device.all_reduce(key, part)
            else:
                self._send(view.live, key, part)
        if self.device is not None:
            for key in keys.values():
                await self._gather(key, view.live)
            await self._confirm(view, step)
        for bucket, key in keys.items():
            await self._gather(key, view.live)
            if self.device is not None:
                self.reduced[bucket] = cast(Sum, self.device.buffers[bucket].value)
            else:
                self.reduced[bucket] = added(self._inbound[key][group] for group in view.live)
            await self.shell.feed(machine.Reduced(bucket))

    def _compares(self, view: View, step: int) -> bool:
        """Whether the sums of the step carry the groups' states: in some steps, and where a group enters."""
        if not self.cluster.scenario.impure:  # all other differences are for the checkers of histories to find
            return False
        return not step % CHECK_STEPS or state_divergence.compares_all(view, step)

    async def _judge(self, step: int, states: Mapping[GroupId, str]) -> bool:
        """Compare the states that came with the sums, before the update; True if the sums must not be used."""
        found = state_divergence.compare(states, state_divergence.doubted(self.state.view, step, CHECK_STEPS))
        if self.me in found.minority or found.tied:
            self.record("differs", step=step, params=self.params, tied=bool(found.tied))
            await self._end(invariants.DIFFERS)
        return bool(set(found.minority) & set(machine.discardable(self.state)))

    async def _confirm(self, view: View, step: int) -> None:
        """Tell the members, not through the device, that all sums were seen here before an abort, and hear it of them."""
        key = ("confirm", self._name(view), step, self.attempt)
        self._send(view.live, key, None)
        await self._gather(key, view.live)

    async def transfer(self, view: View) -> machine.Transferred:
        """Hand over or take what the view says: state first, then buckets in ascending order."""
        outcome = None
        if self.me == view.source:
            self._send(view.behind, ("state", self._name(view)), self._outcome())
        elif self.me in view.behind:
            source, sent = given(view.source), ("state", self._name(view))
            await self._receive(sent, source, self._outcome())
            outcome = self._inbound[sent][source]
        received: dict[int, Sum] = {}
        for bucket, lacking in view.missing.items():
            key, owner = ("bucket", self._name(view), bucket), view.final[bucket]
            if self.me == owner:
                self._send(lacking, key, self.reduced[bucket])
            elif self.me in lacking:
                await self._receive(key, owner, Sum())
                received[bucket] = self._inbound[key][owner]
        if outcome is not None:
            self._take(outcome, view)
        self.reduced.update(received)
        return machine.Transferred(view.epoch, outcome and outcome.speeds)

    async def _receive(self, key: tuple, source: GroupId, into: Sum | Outcome) -> None:
        if self.device is not None:
            self.device.receive(key, source, into)
        await self._gather(key, (source,))

    def _outcome(self) -> Outcome:
        return Outcome(self.state.step, self.params, self.state.speeds, self.attempt, self.committed_in)

    def _take(self, outcome: Outcome, view: View) -> None:
        if (outcome.step, outcome.attempt) > (self.state.step, self.attempt):
            self.reset_step()
        self.params, self.attempt, self.committed_in = outcome.params, outcome.attempt, -1
        impure = self.cluster.scenario.impure
        mixed = impure and outcome.params.startswith("mixed")  # of donors one of which is wrong
        if view.source is None and (impure == "before" or mixed):
            self.params = invariants.WRONG + self.params
        told = {"step": outcome.step, "source": view.source, "params": self.params}
        self.record("state", epoch=view.epoch, **told)

    async def update(self, step: int) -> machine.Updated | machine.Discarded:
        await self.sleep(self.pace.update)
        parts = [self.reduced.get(bucket, Sum()) for bucket in range(self.cluster.job.buckets)]
        sums = [part.gradient for part in parts]
        attempts = {attempt for part in parts for attempt in part.attempts}
        assert attempts == {self.attempt} == {self.state.attempt}, f"step {step}: sums of the attempts {attempts}"
        discards = await self._judge(step, parts[0].states)
        if discards or (step, self.attempt) in self.cluster.scenario.discards:
            self.attempt += 1
            self.reset_step()
            return machine.Discarded(step)
        self.attempt = 0
        wrong = self.params.startswith(invariants.WRONG)
        wrong |= self.incarnation > 0 and self.cluster.scenario.impure == "after"
        self.params = hashlib.sha256(f"{self.params} {step} {sums}".encode()).hexdigest()[:16]
        self.params = invariants.WRONG + self.params if wrong else self.params
        view, known = self.state.view, codec.encode(self.state.speeds)
        self.committed_in = view.epoch
        told = {"step": step, "sums": sums, "params": self.params, "speeds": known}
        self.record("commit", epoch=view.epoch, **self._branch("view", view), **told)
        self.reset_step()
        return machine.Updated(step, parts[0].seconds)

    async def end_step(self, step: int) -> None:
        for who, following in self.followers:
            self._send_state(who, following)
        self._save()

    async def look(self, awaited: machine.AwaitView) -> News:
        epoch, missing = awaited.epoch, awaited.missing
        view, reports = await self.client.call(lambda store: read_view(store, epoch, missing))
        if view is not None:
            return machine.ViewSeen(view)
        return machine.ReportsSeen(tuple(reports)) if reports else machine.Tick()

    async def pause(self) -> None:
        await self.sleep(self.pace.poll)

    async def await_others(self) -> bool:
        self.cluster.look_for_end()
        await self._wait(self.cluster.kernel.now + self.pace.patience / 5)
        return False

    async def stop(self, action: machine.Stop) -> NoReturn:
        await self._end(action.reason)

    async def _end(self, reason: str) -> NoReturn:
        self.cluster.stopped(self, reason)
        while True:
            await Future()

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def told_to_save(self, order: checkpoint_protocol.Saves) -> None:
        """The order has come, at any time after it was given."""
        if not self.gone:
            self._orders.append(order)

    def _save(self) -> None:
        """At a boundary: write the parts that are due, and now and then give an order, if that is this group's to do."""
        state = self.state
        for order in list(self._orders):
            said = checkpoint_protocol.answer(order, self.me, state.step, state.view, state.synced, self._since)
            if said is None:
                continue
            self._orders.remove(order)
            if not said and (part := order.part_of(self.me)) is not None:
                named = {"attempt": order.attempt, "part": part, "parts": len(order.writers)}
                self.record("part", epoch=state.view.epoch, **named, step=state.step, params=self.params)
        if self.me == min(state.view.live) and not state.finished:
            self.cluster.order_to_save(self)

    # --- joining groups -----------------------------------------------------------------------------------------------

    def followed_by(self, who: Donor, following: Following) -> None:
        """Another process wants the state this one stands at, and all that comes of it."""
        if self.gone:
            return
        if self.frozen:
            self.cluster.kernel.at(self.frozen_until, lambda: self.followed_by(who, following))
        elif self.state.synced:
            self.followers.append((who, following))
            self._send_state(who, following)

    def _send_state(self, who: Donor, following: Following) -> None:
        me, outcome = (self.me, self.incarnation), self._outcome()
        self.cluster.network.send(self.me, who[0], lambda: following.take(me, outcome))

    async def follow(self, step: int) -> machine.CaughtUp | machine.CatchUpFailed | None:
        """Advance to the step of the view and not beyond: a donor's result of ``step`` may be made again."""
        deadline = self._seated + self.pace.patience
        following = given(self._following)
        while not self._inbox:
            outcome = self.cluster.advance(following, step)
            if outcome is not None and outcome.step >= step:
                if outcome.step > step:
                    return machine.CatchUpFailed(f"it stands at {outcome.step}, the others at {step}")
                self._take(outcome, self.state.view)
                return machine.CaughtUp(outcome.speeds)
            # The notice of a lost donor may be on its way; the view after it decides.
            out = not all(self.state.view.seats(*donor) for donor in following.donors)
            if (following.lost and out) or self.cluster.kernel.now >= deadline:
                return machine.CatchUpFailed("a donor is gone")
            await self._wait(deadline)
        return None

    # --- waiting and talking ------------------------------------------------------------------------------------------

    async def _gather(self, key: tuple, sources: Collection[GroupId], interruptible: bool = False) -> bool:
        """Wait for a message from each source. False if a notice came in first. Raises ``Broken``."""
        deadline = self.cluster.kernel.now + self.pace.patience
        there = lambda: all(group in self._inbound.get(key, ()) for group in sources)  # noqa: E731
        return await self._until(there, key[0], deadline, interruptible)

    async def _until(self, there: Callable[[], bool], what: str, deadline: float, interruptible: bool = False) -> bool:
        """Wait until it is there. False if a notice came in first. Raises ``Broken``: an abort always goes first."""
        began = self.cluster.kernel.now
        while True:
            if self._broken:
                raise Broken(self._broken)
            if interruptible and self._inbox:
                return False
            if there():
                return True
            if self.cluster.kernel.now >= deadline:
                if self.device is not None:
                    self.device.abort()
                raise Broken(f"no end of {what} within {deadline - began:g}")
            await self._wait(deadline)

    def _wait(self, deadline: float) -> Future:
        """Wait for a notice or a message, at most until the deadline."""
        self._nudge = Future()
        self.cluster.kernel.at(max(deadline, self.cluster.kernel.now), self._nudge.resolve)
        return self._nudge

    def sleep(self, duration: float) -> Future:
        future = Future()
        self.cluster.kernel.after(duration, future.resolve)
        return future

    def _send(self, targets: Iterable[GroupId], key: tuple, value: Any) -> None:
        for target in targets:
            if target == self.me:
                self.receive(self.me, key, value)
            else:
                self.cluster.deliver(self.me, target, self.state.view.incarnations.get(target, 0), key, value)


CHECK_STEPS = 3
"""Groups compare their states in every step whose number is a multiple of this."""


def read_view(store: Store, epoch: int, missing: Collection[GroupId]) -> tuple[View | None, list[machine.Report]]:
    """The view after ``epoch`` if there is one, and the reports of these groups that are there."""
    keys = [("report", epoch, group) for group in missing]
    later = [key for key in store.values if key[0] == "view" and key[1] > epoch] if store.forgets else ()
    following = min(later, default=("view", epoch + 1))
    return store.values.get(following), [store.values[key] for key in keys if key in store.values]
