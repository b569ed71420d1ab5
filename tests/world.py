"""A world that tries to break the protocol core: no processes, no clock, every interleaving the seed asks for.

Each group is the loop that trains (``core.protocol.shell``), one turn at a time; its ports do no more than they can do at
once. The world plays store, network and agents, and it is malicious within the assumptions of ``core.protocol.machine``:
notices arrive at any time, a dead group's last all-reduce may have finished at
some survivors and not at others, groups run at any relative speed, any group may die between any two actions.

A group that comes back follows one or two donors: each sends its own part of the model, and then what every step adds to
it. Messages overtake each other, and some of what a donor had sent is lost with the donor.

The world checks at every update that the value of each bucket is the sum over exactly the step's N*G microbatches, each
once. When two groups work on the same step of the same view, it checks that they follow the same plan, whichever group is
slow, and hold the same version of every earlier step: the epochs in which its buckets were summed.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from megatron_ft.core.detection import state_divergence
from megatron_ft.core.detection.stragglers import Speeds
from megatron_ft.core.lifecycle import last_state
from megatron_ft.core.lifecycle.restart_policy import Seats
from megatron_ft.core.protocol import group_locations, machine, signals
from megatron_ft.core.protocol.machine import GroupState, Job
from megatron_ft.core.protocol.membership import first_view
from megatron_ft.core.protocol.ports import Broken, Clock, Ranks, Store
from megatron_ft.core.protocol.shell import Shell, carry_out
from megatron_ft.core.scheduling.assignment import microbatches_of_step
from megatron_ft.types import Assignment, GroupId, Microbatch, Report, View

ABORTED = "aborted by a notice"
Value = frozenset[Microbatch]
Donor = tuple[GroupId, int]


class Bucket(NamedTuple):
    """A sum, and the epoch in which it was made: its version. ``differ``: the states that came with it for a comparison:
    True for a group that has come back with another one; all of these have the same one."""

    value: Value
    epoch: int
    differ: dict[GroupId, bool] = {}


class Model(NamedTuple):
    """All that a group has committed; ``speeds`` belong to it."""

    steps: tuple[tuple[Bucket, ...], ...]
    speeds: Speeds


class Sent(NamedTuple):
    """A message to a joining group: a donor's whole model, what one more step has added to it, or (None) that it is lost."""

    donor: Donor
    step: int
    whole: Model | None


@dataclass
class Following:
    """One joining incarnation and what it has received before its state is complete; each donor sends its own part."""

    me: GroupId
    incarnation: int
    requests: dict[Donor, Group] = field(default_factory=dict)
    donors: tuple[Donor, ...] = ()
    mail: list[Sent] = field(default_factory=list)
    first: dict[Donor, int] = field(default_factory=dict)  # the step that each donor's part begins with
    kept: dict[Donor, dict[int, Model]] = field(default_factory=dict)  # arrived, by the step to go on with
    parts: dict[Donor, int] = field(default_factory=dict)  # where each donor's part stands
    lost: set[Donor] = field(default_factory=set)
    asked: bool = False
    gone: bool = False

    def arrive(self, sent: Sent) -> None:
        if sent.whole is None:
            self.lost.add(sent.donor)
        elif sent.donor in self.donors:  # and not of an attempt before
            self.kept.setdefault(sent.donor, {})[sent.step] = sent.whole

    def apply(self, limit: int | None) -> None:
        """Bring every donor's part as far as what it sent goes, one step after the other, up to ``limit``."""
        for donor, models in self.kept.items():
            if donor not in self.parts and self.first.get(donor) in models:
                self.parts[donor] = self.first[donor]
            while donor in self.parts and self.parts[donor] + 1 in models and self.parts[donor] != limit:
                self.parts[donor] += 1

    @property
    def stands(self) -> int | None:
        """The step to go on with, once all parts belong to the same step; None before."""
        found = set(self.parts.values())
        return found.pop() if len(self.parts) == len(self.donors) and len(found) == 1 else None

    @property
    def newest(self) -> int:
        return max(step for models in self.kept.values() for step in models)

    @property
    def model(self) -> Model:
        """The received model. All parts have to be of one version: a lost step that was made again is another version."""
        models = {donor: self.kept[donor][step] for donor, step in self.parts.items()}
        (first, *others) = models.values()
        assert all(other == first for other in others), f"group {self.me} has parts of different models: {models}"
        return first


class Group(Ranks, Store, Clock):
    """One group: its loop, and the ports of it, which do what can be done at once."""

    def __init__(
        self, world: World, state: GroupState, following: Following | None = None, differs: bool = False
    ) -> None:
        self.world, self.me = world, state.me
        self.following = following  # what it enters with
        self.differs = differs  # it lacks what only its script knows
        self.followers: list[Following] = []
        self.done: list[tuple[Bucket, ...]] = []
        self.notices_seen = 0
        self.aborted = False  # a notice has ended the communicator under its hands
        self.reset_step()
        self.shell = _Loop(self, state)
        self.looks = self.ticks = self.moved = False

    @property
    def state(self) -> GroupState:
        return self.shell.state

    @property
    def action(self) -> machine.Action:
        return self.shell.next

    @property
    def committed(self) -> list[tuple[Value, ...]]:
        return [tuple(bucket.value for bucket in step) for step in self.done]

    @property
    def model(self) -> Model:
        return Model(tuple(self.done), self.state.speeds)

    def reset_step(self) -> None:
        self.local: list[set[Microbatch]] = [set() for _ in range(self.world.job.buckets)]
        self.parts: dict[int, list[set[Microbatch]]] = {}  # standby parts that are not contributed
        self.reduced: dict[int, Bucket] = {}
        self.measured: dict[GroupId, float] = {}  # what came with bucket 0

    def do(self, part, looks: bool, ticks: bool) -> bool:
        """Carry out a part of the loop; False if nothing has come of it. ``looks``: it can look for a view meanwhile."""
        before, self.looks, self.ticks, self.moved = self.state, looks, ticks, False
        found = carry_out(part())
        ticked = ticks and not found and not self.moved
        self.looks = False
        return self.moved or self.state is not before and not ticked

    # --- the ranks ----------------------------------------------------------------------------------------------------

    def per_shard(self, step: int) -> int:
        return self.world.job.per_shard

    async def adopt(self, view: View) -> None:
        self.world.adopts(self, view)

    async def compute(self) -> list[machine.Computed]:
        microbatch, world = self.state.todo[0], self.world
        if microbatch == world.poison:
            world.kill(self.me, computing=microbatch)
            self.moved = True
            return []
        part = self.state.plan.part(self.me, microbatch)
        for bucket in self.parts.setdefault(part, [set() for _ in self.local]) if part else self.local:
            assert microbatch not in bucket
            bucket.add(microbatch)
        kind = " (patch)" if self.action.patch else " (standby)" if microbatch in self.state.standby else ""
        world.say(f"{self.me} computes {microbatch}{kind}")
        return [machine.Computed(microbatch)]

    async def connect(self, view: View) -> machine.Connected | None:
        present = self.world.connected.setdefault(view.epoch, set())
        present.add(self.me)
        if not present >= set(view.live):
            return None
        self.aborted = False
        return machine.Connected(view.epoch)

    def _check_abort(self) -> None:
        """Raise ``Broken`` if a notice aborted the communicator, and core did not close the epoch for it."""
        if self.aborted:
            self.moved = True
            raise Broken(ABORTED)

    async def transfer(self, view: View) -> machine.Transferred | None:
        self._check_abort()
        me, world = self.me, self.world
        if me == view.source or me in view.final.values():
            world.sent[view.epoch, me] = (self.state.step, self.model, dict(self.reduced), dict(self.measured))
        needs = {view.source} if me in view.behind else set()
        needs |= {owner for bucket, owner in view.final.items() if me in view.missing.get(bucket, ())}
        if any((view.epoch, owner) not in world.sent for owner in needs):
            return None
        speeds = None
        if me in view.behind:
            step, model, _, _ = world.sent[view.epoch, view.source]
            speeds = model.speeds
            if step > self.state.step:
                world.say(f"{me} takes the state of step {step - 1} from {view.source}")
                self.reset_step()
                world.abandon(self)  # it knows the state after that step, and not what the step has added
            elif not self.state.synced:
                world.say(f"{me} receives the model of {view.source}, which stands before step {step}")
            self.done = list(model.steps)
        for bucket, owner in view.final.items():
            if me in view.missing.get(bucket, ()):
                world.say(f"{me} takes bucket {bucket} from {owner}")
                self.reduced[bucket] = world.sent[view.epoch, owner][2][bucket]
                if bucket == 0:
                    self.measured = dict(world.sent[view.epoch, owner][3])
        return machine.Transferred(view.epoch, speeds)

    async def follow(self, step: int) -> machine.CaughtUp | machine.CatchUpFailed | None:
        """Apply what the donors sent up to the step that the view continues, and not beyond."""
        me, world, following = self.me, self.world, self.following
        self.moved = world.receive(following)
        following.apply(step)
        ahead = {donor: at for donor, at in following.parts.items() if at > step}
        assert not ahead, f"group {me} has to get to step {step}, and stands at {ahead}"
        if following.stands == step:
            self.done = list(following.model.steps)
            following.gone = True
            world.entries["followed"] += 1
            world.say(f"{me} has the state of its donors, which stands before step {step}")
            return machine.CaughtUp(following.model.speeds)
        unread = [one for one in world.notices[self.notices_seen :] if isinstance(one, machine.GroupFailed)]
        if any((one.group, one.incarnation) in following.lost for one in unread):
            return None  # the notice of the donor's loss is on its way, and the view after it decides
        if following.lost and not following.mail:
            world.entries["strayed"] += 1
            names = " and ".join(str(group) for group, _ in sorted(following.lost))
            return machine.CatchUpFailed(f"group {names} is lost and has not handed over its part")
        self.moved |= world.erratic and bool(following.mail)
        return None

    async def reduce(self, step: int, buckets: tuple[int, ...]) -> machine.Reduced | None:
        """Arrive at every bucket asked for; see at most one of them finish per call."""
        self._check_abort()
        self.arrive()
        for bucket in buckets:
            view, world = self.state.view, self.world
            key = (view.epoch, step, self.state.attempt, bucket)
            values = world.arrived[key]
            if set(values) >= set(view.live):
                count = Counter(m for value in values.values() for m in value)
                assert max(count.values()) == 1, f"summed twice in {key}: {[m for m, n in count.items() if n > 1]}"
                differ = world.differ.get(key[:3], {}) if bucket == 0 else {}
                self.reduced[bucket] = Bucket(frozenset(count), view.epoch, differ)
                if bucket == 0:
                    self.measured = dict(world.times[key[:3]])
                world.say(f"{self.me} sees bucket {bucket} finish")
                return machine.Reduced(bucket)
        return None

    def arrive(self) -> None:
        """The group has started all its all-reduces; from here its part can be in the sum, even if the group dies."""
        me, world, state, action = self.me, self.world, self.state, self.action
        for part in state.plan.promoted(me):
            for own, more in zip(self.local, self.parts.pop(part, ()), strict=False):
                assert not own & more
                own |= more
        key = (state.view.epoch, action.step, state.attempt)
        if 0 in action.buckets and state_divergence.compares_all(state.view, action.step):
            world.differ.setdefault(key, {}).setdefault(me, self.differs)
        for bucket in action.buckets:
            world.arrived.setdefault((*key, bucket), {}).setdefault(me, frozenset(self.local[bucket]))
            if bucket == 0 and self.local[0]:
                world.times.setdefault(key, {}).setdefault(me, world.seconds(me, action.step))

    async def update(self, step: int) -> machine.Updated | machine.Discarded | None:
        job = self.world.job
        whole = microbatches_of_step(step, job.shards, job.per_shard)
        expected = frozenset(chain(*self.state.plan.assignment.values()) if job.policy.shrinks else whole)
        for bucket in range(job.buckets):
            got = self.reduced.get(bucket, Bucket(frozenset(), -1)).value
            assert got == expected, f"group {self.me} step {step} bucket {bucket}: lacks {set(expected) - set(got)}"
        found = state_divergence.compare(
            self.reduced[0].differ, state_divergence.doubted(self.state.view, step, pass_steps=0)
        )
        assert not found.tied, f"it is not known which state is right: {found.tied}"
        if self.me in found.minority:
            self._end_for_state(found.minority)
            return None
        if set(found.minority) & set(machine.discardable(self.state)):
            wrong = state_divergence.words((found.minority,))
            self.world.say(f"{self.me} discards the sums of step {step}: no part of {wrong} may count")
            self.reset_step()
            return machine.Discarded(step)
        assert len(self.done) == step
        self.done.append(tuple(self.reduced[b] for b in range(job.buckets)))
        measured = self.measured
        self.reset_step()
        self.world.say(f"{self.me} commits step {step}")
        return machine.Updated(step, measured)

    def _end_for_state(self, minority: tuple[GroupId, ...]) -> None:
        right = state_divergence.words((tuple(sorted(self.reduced[0].differ.keys() - set(minority))),))
        self.world.say(f"{self.me} does not enter: its state is not that of {right}")
        self.world.ended[self.me] = self.world.alive.pop(self.me)
        self.world.abandon(self)
        why = f"group {self.me} ended by itself: its state differs"
        self.world.notices.append(machine.GroupFailed(self.me, why, self.state.incarnation))
        self.moved = True

    async def end_step(self, step: int) -> None:
        self.world.hand_on(self)

    # --- store and clock ----------------------------------------------------------------------------------------------

    async def look(self, awaited: machine.AwaitView) -> machine.Event | None:
        if not self.looks or not self.world.store_up:
            return None
        view = self.world.views.get(awaited.epoch + 1)
        if view is not None:
            return machine.ViewSeen(view)
        told = self.world.reports.get(awaited.epoch, {})
        found = tuple(told[other] for other in awaited.missing if other in told)
        return machine.ReportsSeen(found) if found else machine.Tick()

    async def log_answers(self) -> bool:
        return self.ticks

    async def publish(self, report: Report) -> None:
        self.world.reports.setdefault(report.epoch, {})[self.me] = report
        have, why = list(report.reduced_buckets), self.state.closed_by
        self.world.say(f"{self.me} reports step {report.step} have {have} because {why}")

    async def announce(self, said: machine.EpochAborted, detail: str = "") -> None:
        why = said.reason if said.why == ABORTED else said.why
        self.world.notices.append(machine.EpochAborted(said.epoch, why, said.after))

    async def propose(self, view: View) -> View | None:
        world = self.world
        if not world.store_up:
            return None
        winner = world.views.setdefault(view.epoch, view)
        if winner is view:
            joined = f" joined {list(view.joined)}" if view.joined else ""
            final = f" final {list(view.final)}" if view.final else ""
            told = f"live {list(view.live)} lost {sorted(view.lost)}{joined}{final}"
            for why in view.lost.values() if view.live else ():
                assert why in view.reason or "; and " in view.reason, (
                    f"view {view.epoch}: {view.reason}, lost {view.lost}"
                )
            because = f" because {view.reason} (noticed: {view.noticed})" if view.noticed else ""
            world.say(f"{self.me} writes view {view.epoch}: {told}{because}")
            for group in view.joined:
                world.seat(group, view)
        return winner

    def now(self) -> float:
        return self.world.now


class _Loop(Shell):
    """The loop of a group; the world looks at each state of it."""

    def __init__(self, group: Group, state: GroupState) -> None:
        self._group, self._state = group, state
        super().__init__(state, group, group, group)

    async def feed(self, event: machine.Event | None) -> None:
        if event is not None:
            self._group.world.hears(self._group, event)
        await super().feed(event)

    @property
    def state(self) -> GroupState:
        return self._state

    @state.setter
    def state(self, state: GroupState) -> None:
        before, self._state = self._state, state
        if state.stopped != before.stopped:
            self._group.world.stops(self._group)
        if state.plan is not before.plan:
            self._group.world.compare_plans(self._group)


class World:
    """Drive it with :meth:`run`, or by hand with :meth:`act`, :meth:`kill` and :meth:`notice` for a fixed story."""

    def __init__(self, job: Job, seed: int = 0, log: list[str] | None = None) -> None:
        self.job, self.rng, self.log = job, random.Random(seed), log
        self.seed = seed
        self.rates: dict[int, float] = {}  # seconds per microbatch, by default 1
        self.erratic = False  # random seconds per microbatch, and messages that overtake each other
        self.poison: Microbatch | None = None  # kills every group that computes it
        self.plans: dict[tuple[int, int], tuple[Assignment, Model]] = {}  # (epoch, step) -> what all must agree on
        self.views: dict[int, View] = {0: first_view(job.shards)}
        self.reports: dict[int, dict[int, Report]] = {}
        self.notices: list[machine.Event] = []
        self.places = group_locations.GroupLocations()
        self.seekers: dict[int, Following] = {}  # warm groups without a seat
        self.entries: Counter[str] = Counter()  # how the joins ended, counted
        self.starts: dict[int, int] = {}  # group -> its newest incarnation
        self.arrived: dict[tuple[int, ...], dict[int, Value]] = {}  # (epoch, step, attempt, bucket) -> contributions
        self.times: dict[tuple[int, ...], dict[int, float]] = {}  # (epoch, step, attempt) -> seconds, with bucket 0
        self.differ: dict[
            tuple[int, ...], dict[int, bool]
        ] = {}  # the same -> states, with bucket 0 where a group enters
        self.differing: set[int] = set()  # groups whose next start comes back with another state
        self.connected: dict[int, set[int]] = {}
        self.sent: dict[tuple[int, int], tuple[int, Model, dict[int, Bucket], dict[int, float]]] = {}
        self.alive: dict[int, Group] = {}
        for me in range(job.shards):
            self.alive[me] = Group(self, machine.start(me, job, self.views[0]))
        self.ended: dict[int, Group] = {}
        self.held: set[int] = set()  # joining groups whose messages do not arrive for now
        self.frozen: set[int] = set()  # stopped processes: they neither act nor read notices until `thaw`
        self.deaf: set[int] = set()  # groups to which no notice is delivered
        self.ghosts: dict[int, Group] = {}  # frozen processes whose group has been started anew meanwhile
        self.saved: list[tuple[int, int]] = []  # groups on their way back that have saved the state of a step
        self.store_up = True
        self.now = 0.0

    # --- faults -------------------------------------------------------------------------------------------------------

    def kill(self, me: int, computing: Microbatch | None = None) -> None:
        """The process dies and its agent writes a notice. The schedule decides when each group reads it."""
        how = "SIGKILL" if computing is None else f"exit code 1 in microbatch {computing}"
        self.say(f"{me} dies" if computing is None else f"{me} dies of microbatch {computing}")
        self.frozen.discard(me)
        self.ended[me] = self.alive.pop(me)
        self.abandon(self.ended[me])
        self.notices.append(
            machine.GroupFailed(me, f"group {me} ended with {how}", self.ended[me].state.incarnation, computing)
        )

    def accuse(self, me: int) -> None:
        """An agent writes a notice that the group is dead, although it lives."""
        self.say(f"{me} is taken for dead")
        self.notices.append(machine.GroupFailed(me, f"group {me} is taken for dead", self.alive[me].state.incarnation))

    def leave(self, me: int) -> None:
        """The group is told to leave after its present step; the other groups read the notice at any time."""
        state = self.alive[me].state
        self.say(f"{me} leaves after step {state.step}")
        said = machine.LeaveAnnounced(me, state.step, "told to", state.incarnation)
        self.notices.append(said)
        self.feed(me, said)

    # --- coming back --------------------------------------------------------------------------------------------------

    def come(self, me: int, *donors: int) -> None:
        """A new incarnation of a dead or new group begins to receive the donors' state; default donor: the lowest group."""
        self.starts[me] = self.starts.get(me, 0) + 1
        self.seekers[me] = Following(me, self.starts[me])
        self.follow(me, *donors)

    def follow(self, me: int, *donors: int) -> None:
        """The joining group asks the donors for their state, and for what every later step adds to it."""
        following = self.seekers[me]
        able = [g for g in sorted(self.alive) if self.alive[g].state.synced and not self.alive[g].state.stopped]
        names = donors or able[:1]
        if not names:
            return
        self.say(f"{me} follows {' and '.join(map(str, names))}")
        found = {(name, self.alive[name].state.incarnation): self.alive[name] for name in names}
        self.seekers[me] = Following(me, following.incarnation, found, tuple(found))
        following.gone = True
        for donor in found.values():
            donor.followers.append(self.seekers[me])

    def answer(self, following: Following, donor: Donor) -> bool:
        """The donor hands over its state, as soon as it has one."""
        group = following.requests[donor]
        if not group.state.synced or group.state.stopped or donor[0] in self.frozen:
            return False
        del following.requests[donor]
        following.first[donor] = group.state.step
        following.mail.append(Sent(donor, group.state.step, group.model))
        return True

    def hand_on(self, group: Group) -> None:
        """The group has committed a step: joining groups that have its state get what the step adds."""
        donor = group.state.me, group.state.incarnation
        for following in group.followers:
            if not following.gone and donor in following.first:
                following.mail.append(Sent(donor, group.state.step, group.model))

    def abandon(self, group: Group) -> None:
        """Joining groups get no more from this group; some of the messages on their way may be lost, too."""
        donor = group.state.me, group.state.incarnation
        for following in group.followers:
            following.requests.pop(donor, None)
            if self.erratic:
                following.mail = [sent for sent in following.mail if sent.donor != donor or self.rng.random() < 0.5]
            following.mail.append(Sent(donor, 0, None))
        group.followers.clear()

    def lose(self, me: int, donor: int) -> None:
        """Messages of the donor that have not arrived are lost."""
        following = self.seekers[me] if me in self.seekers else self.alive[me].following
        assert any(sent.whole for sent in following.mail if sent.donor[0] == donor), "there is nothing to lose"
        following.mail = [sent for sent in following.mail if sent.donor[0] != donor or sent.whole is None]
        self.say(f"what {donor} has sent to {me} is lost")

    def receive(self, following: Following) -> bool:
        """One message arrives, in an erratic world any one, and late."""
        if not following.mail or following.me in self.held or self.erratic and self.rng.random() < 0.8:
            return False
        following.arrive(following.mail.pop(self.rng.randrange(len(following.mail)) if self.erratic else 0))
        return True

    def ask(self, me: int) -> None:
        """The joining group has a state, and asks to join."""
        following = self.seekers[me]
        following.asked = True
        self.say(f"{me} asks for a seat after step {following.newest}")
        self.tell(signals.JoinRequested(me, following.incarnation, following.donors, following.newest))

    def back(self, me: int, *donors: int) -> None:
        """A new incarnation comes, receives the donors' state and asks to join."""
        self.come(me, *donors)
        while self.seek(me):
            pass

    def seek(self, me: int) -> bool:
        """Let a joining group do one thing; False when it can only wait."""
        following = self.seekers[me]
        for donor in sorted(following.requests):
            if self.answer(following, donor):
                return True
        if self.receive(following):
            following.apply(None)
            return True
        late = self.erratic and bool(following.mail)
        if following.asked:
            fate = self.fate(following) if following.lost and not late else "unknown"
            if fate == "unknown":
                return late
            if fate == "lost":
                self.save(following)
                self.kill_seeker(me, "ends")
                return True
            self.say(f"{me} gives up waiting for its seat")
            self.kill_seeker(me)
            return True
        if following.lost or not following.donors:
            able = [g for g in sorted(self.alive) if self.alive[g].state.synced and not self.alive[g].state.stopped]
            if not able:
                saves = following.stands is not None and self.fate(following) == "lost"
                if saves:
                    self.save(following)
                    self.kill_seeker(me, "ends")
                return saves
            self.follow(
                me, *self.rng.sample(able, self.rng.randint(1, min(2, len(able)))) if self.erratic else able[:1]
            )
            return True
        if following.stands is None:
            return late
        self.ask(me)
        return True

    def fate(self, following: Following) -> last_state.Fate:
        """What a joining group that has lost a donor can know of the members."""
        members = Seats(self.views[max(self.views)])
        for notice in self.notices:
            if isinstance(notice, machine.GroupFailed):
                members = members.without(notice.group, notice.incarnation)
        return last_state.fate(members, following.me, following.donors)

    def save(self, following: Following) -> None:
        """The group saves what it holds, the last complete state of the run."""
        while following.mail and following.me not in self.held:
            following.arrive(following.mail.pop(0))
        following.apply(None)
        models = [following.kept[donor][step] for donor, step in following.parts.items()]
        if following.stands and all(model == models[0] for model in models):  # and not of two versions of a step
            assert len(following.model.steps) == following.stands
            self.saved.append((following.me, following.stands))
            self.say(f"{following.me} saves the state that step {following.stands} starts from")

    def kill_seeker(self, me: int, how: str = "dies waiting for its seat") -> None:
        """The joining group dies before, or just when, it becomes a member."""
        following = self.seekers.pop(me)
        following.gone = True
        self.say(f"{me} {how}")
        self.notices.append(machine.GroupFailed(me, f"group {me} ended with SIGKILL", following.incarnation))

    def seat(self, me: int, view: View) -> None:
        """The joining group reads the view that lets it in, unless it has died meanwhile."""
        following = self.seekers.get(me)
        if following is None or following.incarnation != view.incarnations[me]:
            return
        del self.seekers[me]
        if me in self.alive and me in self.frozen:
            self.ghosts[me] = self.alive[me]
            self.frozen.discard(me)
        self.alive[me] = Group(self, machine.start(me, self.job, view), following, differs=me in self.differing)
        self.differing.discard(me)
        self.entries["entered"] += 1
        if len(view.joined) > 1:
            self.entries["beside another"] += 1
        assert not view.behind and not view.final, f"group {me} enters where something is handed over: {view}"

    def freeze(self, me: int) -> None:
        """The process is stopped (SIGSTOP, a lost network, a long garbage collection); no notice is written."""
        self.say(f"{me} is frozen")
        self.frozen.add(me)

    def thaw(self, me: int) -> None:
        self.say(f"{me} goes on")
        self.frozen.discard(me)

    def wake_ghost(self, me: int) -> Group:
        """The frozen process of an older incarnation goes on, as far as it can by itself; the new one has its seat."""
        self.say(f"the old process of {me} goes on")
        new, ghost = self.alive.get(me), self.ghosts.pop(me)
        self.alive[me] = ghost
        moved = True
        while moved:
            moved = self.pending(me)
            if moved:
                self.notice(me)
            moved |= self.act(me)
        del self.alive[me]
        if new is not None:
            self.alive[me] = new
        return ghost

    def reset(self, me: int) -> None:
        """A connection of the group fails; no group is dead, and none is accused."""
        self.say(f"{me} sees a connection reset")
        epoch = self.alive[me].state.view.epoch
        self.notices.append(machine.EpochAborted(epoch, "a connection broke", by=me))

    def miss(self, by: tuple[int, ...], about: tuple[int, ...], heard: bool = False) -> None:
        """The agent of host ``by`` hears nothing of host ``about``, or hears it again, and says so; a host is its groups."""
        by_name, about_name = ("+".join(map(str, unit)) for unit in (by, about))
        what = f"host {about_name} again" if heard else f"nothing of host {about_name}"
        self.say(f"host {by_name} hears {what}")
        self.tell(signals.HostSilent(by_name, about_name, by, about, 1.0, heard))

    def move(self, me: int) -> None:
        """Another host takes the group over, with its next start."""
        self.say(f"another host takes {me} over")
        self.tell(signals.HostAssigned(9, "spare", "", 0, 0, ((me, 0),), self.starts.get(me, 0) + 1))

    def tell(self, signal: signals.Signal) -> None:
        """Append a signal to the log, as the verdict that every reader of the log derives from it."""
        self.places, verdicts = group_locations.apply(self.places, signal)
        self.notices += [verdict for verdict in verdicts if not isinstance(verdict, signals.HostAssigned)]

    def store_away(self) -> None:
        """No notice, report or view can be written or read."""
        self.say("the store is unreachable")
        self.store_up = False

    def store_back(self) -> None:
        self.say("the store is reachable again")
        self.store_up = True

    def wait(self, seconds: int) -> None:
        """Time passes; groups that wait for a view look for it every second."""
        self.say(f"{seconds} s pass")
        for _ in range(seconds):
            self.now += 1.0
            for me in sorted(self.alive):
                if isinstance(self.alive[me].action, machine.AwaitView):
                    self.act(me, ticks=True)

    def notice(self, me: int) -> None:
        """Deliver the next notice of the log to one group."""
        group = self.alive[me]
        event = self.notices[group.notices_seen]
        group.notices_seen += 1
        group.aborted |= group.state.connected and signals.ends(event, group.state.view, group.state.step)
        self.feed(me, event)

    def hears(self, group: Group, event: machine.Event) -> None:
        """An event is about to reach a group."""

    def adopts(self, group: Group, view: View) -> None:
        """A group is about to follow a view."""

    def stops(self, group: Group) -> None:
        """The group ends by itself."""
        me, state = group.me, group.state
        self.say(f"{me} stops: {state.stopped}")
        if state.wiped_out and state.following and group.following is not None:
            self.save(group.following)
        self.abandon(group)
        if "outside view" not in state.stopped:  # it has a seat, so its agent is heard
            self.notices.append(machine.GroupFailed(me, f"group {me} ended by itself", state.incarnation))
        if "has to start over" in state.stopped:
            self.ended[me] = self.alive.pop(me)

    def compare_plans(self, group: Group) -> None:
        """All groups that have the state that a step starts from have the same state and the same plan."""
        state = group.state
        if not state.synced or state.stopped:
            return
        mine = {number: state.plan.of(number) for number in state.plan.assignment}, group.model
        others = self.plans.setdefault((state.view.epoch, state.step), mine)
        assert mine == others, f"group {state.me} plans step {state.step} as {mine}, others as {others}"

    def seconds(self, me: int, step: int) -> float:
        """The duration that the group measures; it is independent of when the group acts."""
        if not self.erratic:
            return self.rates.get(me, 1.0)
        lasting, passing = (random.Random(f"{self.seed} {me} {of}") for of in (self.starts.get(me, 0), step))
        return lasting.choice([1, 1, 1, 3]) * passing.choice([1, 1, 1, 2, 5]) * passing.uniform(1.0, 1.3)

    # --- the groups ---------------------------------------------------------------------------------------------------

    def feed(self, me: int, event: machine.Event) -> None:
        carry_out(self.alive[me].shell.feed(event))

    def act(self, me: int, ticks: bool = False) -> bool:
        """Let one group do its present action once; False when it can only wait. ``ticks``: time passes meanwhile."""
        group = self.alive[me]
        if me in self.frozen or isinstance(group.action, machine.Finish | machine.Stop):
            return False
        return group.do(group.shell.turn, looks=isinstance(group.action, machine.AwaitView), ticks=ticks)

    def glance(self, me: int) -> bool:
        """Between two microbatches the group looks for an awaited view. Returns True if it found something."""
        group = self.alive[me]
        if me in self.frozen or not machine.awaited(group.state):
            return False
        return group.do(group.shell.look, looks=True, ticks=True)

    def arrive(self, me: int) -> None:
        self.alive[me].arrive()

    # --- schedules ----------------------------------------------------------------------------------------------------

    def play(self, until=lambda: False) -> None:
        """The plainest schedule: groups in turn, notices heard at once; until the condition, or nothing moves."""
        moved = True
        while moved and not until():
            moved = False
            for me in sorted(self.seekers):
                moved |= me in self.seekers and self.seek(me)
                if until():
                    return
            for me in sorted(self.alive):
                while me in self.alive and self.pending(me):
                    self.notice(me)
                    moved = True
                moved |= me in self.alive and self.act(me)
                if until():
                    return

    def come_or_go(self) -> bool:
        """A dead or new group comes, or a joining group dies; True if one comes."""
        if self.seekers and self.rng.random() < 0.3:
            self.kill_seeker(self.rng.choice(sorted(self.seekers)))
            return False
        free = [g for g in range(self.job.shards + 2) if g not in self.alive and g not in self.seekers]
        if not free:
            return False
        gone = [g for g in free if g in self.ended]
        me = self.rng.choice(gone if gone and self.rng.random() < 0.7 else free)
        able = [g for g in sorted(self.alive) if self.alive[g].state.synced and not self.alive[g].state.stopped]
        self.come(me, *self.rng.sample(able, min(len(able), self.rng.randint(1, 2))))
        return True

    def kill_any(self) -> None:
        """Kill a group, often one from which a joining group receives its state."""
        donors = {donor for f in self.following() for donor, _ in f.donors} & set(self.alive)
        self.kill(self.rng.choice(sorted(donors if donors and self.rng.random() < 0.7 else self.alive)))

    def following(self) -> list[Following]:
        entering = [group.following for group in self.alive.values() if group.state.following]
        return [*self.seekers.values(), *(following for following in entering if following is not None)]

    def run(
        self, kills: int, joins: int = 0, cuts: int = 0, leaves: int = 0, resets: bool = True, max_turns: int = 20_000
    ) -> None:
        """Random schedule with these numbers of deaths, joins, cuts and orderly leaves, until every live group has finished.
        ``resets``: connections fail now and then.

        Liveness phase: once nothing else can move, the pending notices are delivered, so a stuck world is a bug.
        """
        self.erratic = True
        for _ in range(max_turns):
            if not self.alive:
                return
            entering = any(group.state.following for group in self.alive.values())
            if kills and len(self.alive) > 1 and self.rng.random() < (0.15 if entering else 0.02):
                kills -= 1
                self.kill_any()
            if resets and self.rng.random() < 0.05:
                self.break_epoch()
            if joins and self.rng.random() < 0.03:
                joins -= self.come_or_go()
            if leaves and len(self.alive) > 1 and self.rng.random() < 0.03:
                leaves -= 1
                self.leave(self.rng.choice(sorted(self.alive)))
            if cuts and self.rng.random() < 0.03:
                cuts -= 1
                self.cut()
            movers = sorted(self.alive)
            self.rng.shuffle(movers)
            for me in sorted(self.seekers):
                if self.rng.random() < 0.5:
                    self.seek(me)
            heard = [me for me in movers if self.rng.random() < 0.1 and self.pending(me)]
            for me in heard:
                self.notice(me)
            glancing = [me for me in movers if self.rng.random() < 0.3] if self.seed % 2 else []  # in every other world
            found = [me for me in glancing if me in self.alive and self.glance(me)]
            if any(self.act(me) for me in movers[: self.rng.randint(1, len(movers))]) or heard or found:
                continue
            if any(self.act(me) for me in movers) or any(self.seek(me) for me in sorted(self.seekers)):
                continue
            for me in movers:
                if self.pending(me):
                    self.notice(me)
                    break
            else:
                waiting = [g.state for g in self.alive.values() if g.state.reported and not g.state.stopped]
                if any(state.cut or not state.collects for state in waiting):
                    self.now += 1.0
                    for me in movers:
                        self.feed(me, machine.Tick())
                    continue
                if all(isinstance(group.action, machine.Finish | machine.Stop) for group in self.alive.values()):
                    return
                raise AssertionError(f"stuck: {[(me, group.action) for me, group in sorted(self.alive.items())]}")
        raise AssertionError(f"no end after {max_turns} turns")

    def cut(self) -> None:
        """Two hosts of one group each do not hear each other, from one side or both; sometimes the link heals."""
        by, about = ((group,) for group in self.rng.sample(range(self.job.shards), 2))
        self.miss(by, about)
        if self.rng.random() < 0.5:
            self.miss(about, by)
        if self.rng.random() < 0.3:
            self.miss(by, about, heard=True)

    def break_epoch(self) -> None:
        """A connection resets although no group died; rare, and only one per epoch."""
        me = self.rng.choice(sorted(self.alive))
        epoch = self.alive[me].state.view.epoch
        broken = {event.epoch for event in self.notices if isinstance(event, machine.EpochAborted)}
        if self.rng.random() < 0.1 and epoch not in broken:
            self.reset(me)

    def pending(self, me: int) -> bool:
        """Returns True if there is a notice that the group can read and has not read."""
        hears = self.store_up and me not in self.frozen and me not in self.deaf
        return hears and self.alive[me].notices_seen < len(self.notices)

    def check_end(self) -> None:
        """Every live group committed every step once, with equal values."""
        for me, group in self.alive.items():
            if group.state.stopped:
                assert not isinstance(group.action, machine.Update)
                reasons = (
                    "outside view",
                    "min_groups",
                    "died computing the same microbatch",
                    "wipe-out",
                    "ends the attempt",
                )
                assert any(reason in group.state.stopped for reason in reasons)
                continue
            assert isinstance(group.action, machine.Finish), f"group {me} is stuck in {group.action}"
            assert len(group.committed) == self.job.steps, f"group {me} committed {len(group.committed)} steps"

    def say(self, line: str) -> None:
        if self.log is not None:
            self.log.append(line)
