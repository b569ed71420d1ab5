"""A world that tries to break the protocol core: no processes, no clock, every interleaving the seed asks for.

Groups are :class:`GroupState` machines. The world plays store, network and agents, and it is malicious within the
assumptions of ``core.recovery``: notices arrive at any time, a dead group's last all-reduce may have finished at some
survivors and not at others, groups run at any relative speed, any group may die between any two actions.

What it checks at every update: the value of each bucket is the sum over exactly the step's N*G microbatches, each once.
And whenever two groups work on the same step of the same view: that they follow the same plan, whoever is slow.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from megatron_ft.core import recovery
from megatron_ft.core.membership import first_view
from megatron_ft.core.recovery import GroupState, Job
from megatron_ft.core.scheduler import microbatches_of_step
from megatron_ft.core.stragglers import Speeds
from megatron_ft.types import Assignment, GroupId, Microbatch, Report, View

Value = frozenset[Microbatch]


@dataclass
class Group:
    state: GroupState
    action: recovery.Action
    local: list[set[Microbatch]]
    reduced: dict[int, Value] = field(default_factory=dict)
    committed: list[tuple[Value, ...]] = field(default_factory=list)
    measured: dict[GroupId, float] = field(default_factory=dict)  # what came with bucket 0
    notices_seen: int = 0


class World:
    """Drive it with :meth:`run`, or by hand with :meth:`act`, :meth:`kill` and :meth:`notice` for a fixed story."""

    def __init__(self, job: Job, seed: int = 0, log: list[str] | None = None) -> None:
        self.job, self.rng, self.log = job, random.Random(seed), log
        self.seed = seed
        self.rates: dict[int, float] = {}  # seconds per microbatch, 1 for who is not in it
        self.erratic = False  # instead, random ones
        self.poison: Microbatch | None = None  # kills whoever computes it
        self.plans: dict[tuple[int, int], tuple[Assignment, Speeds]] = {}  # (epoch, step) -> what all must agree on
        self.views: dict[int, View] = {0: first_view(job.shards)}
        self.reports: dict[int, dict[int, Report]] = {}
        self.notices: list[recovery.Event] = []
        self.seekers: dict[int, int] = {}  # warm groups that asked for a seat, with their incarnation
        self.starts: dict[int, int] = {}  # group -> its newest incarnation
        self.arrived: dict[tuple[int, int, int], dict[int, Value]] = {}  # (epoch, step, bucket) -> contributions
        self.times: dict[tuple[int, int], dict[int, float]] = {}  # (epoch, step) -> seconds that come with bucket 0
        self.connected: dict[int, set[int]] = {}
        self.sent: dict[tuple[int, int], tuple[int, list, dict[int, Value], dict[int, float], Speeds]] = {}
        self.alive: dict[int, Group] = {}
        for me in range(job.shards):
            state = recovery.start(me, job, self.views[0])
            self.alive[me] = Group(state, recovery.next_action(state), [set() for _ in range(job.buckets)])
        self.ended: dict[int, Group] = {}
        self.frozen: set[int] = set()  # stopped processes: they neither act nor hear, until somebody thaws them
        self.ghosts: dict[int, Group] = {}  # frozen processes whose group has been started anew meanwhile
        self.store_up = True
        self.now = 0.0

    # --- faults -------------------------------------------------------------------------------------------------------

    def kill(self, me: int, computing: Microbatch | None = None) -> None:
        """The process is gone. Its agent notices; who hears of it when is up to the schedule."""
        how = "SIGKILL" if computing is None else f"exit code 1 in microbatch {computing}"
        self.say(f"{me} dies" if computing is None else f"{me} dies of microbatch {computing}")
        self.frozen.discard(me)
        self.ended[me] = self.alive.pop(me)
        self.notices.append(recovery.Died(me, f"group {me} ended with {how}", self.starts.get(me, 0), computing))

    def accuse(self, me: int) -> None:
        """Everybody is told that the group is dead; it is not."""
        self.say(f"{me} is taken for dead")
        self.notices.append(recovery.Died(me, f"group {me} is taken for dead", self.starts.get(me, 0)))

    def leave(self, me: int) -> None:
        """It was told to leave: it goes on to the end of its step, and everybody hears of it some time."""
        after = self.alive[me].state.step
        self.say(f"{me} leaves after step {after}")
        self.notices.append(recovery.Leaves(me, after, f"group {me} leaves after step {after}", self.starts.get(me, 0)))

    def ask(self, me: int) -> None:
        """A new incarnation of a dead or new group is warm and asks for a seat."""
        self.starts[me] = self.seekers[me] = self.starts.get(me, 0) + 1
        self.say(f"{me} asks for a seat")
        self.notices.append(recovery.Asked(me, self.seekers[me]))

    def kill_seeker(self, me: int) -> None:
        """It dies before, or just when, it gets its seat."""
        incarnation = self.seekers.pop(me)
        self.say(f"{me} dies waiting for its seat")
        self.notices.append(recovery.Died(me, f"group {me} ended with SIGKILL", incarnation))

    def freeze(self, me: int) -> None:
        """The process is stopped (SIGSTOP, a lost network, a long garbage collection); nobody is told."""
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
        """A connection of the group fails; nobody is dead, and nobody is accused."""
        self.say(f"{me} sees a connection reset")
        epoch = self.alive[me].state.view.epoch
        self.notices.append(recovery.Broke(epoch, f"group {me}: connection reset"))

    def miss(self, by: tuple[int, ...], about: tuple[int, ...], heard: bool = False) -> None:
        """The agent of a host hears nothing of another one, or does again; a host is its groups."""
        by_name, about_name = ("host " + "+".join("ABCDEF"[g] for g in unit) for unit in (by, about))
        reason = f"{by_name} hears {about_name} again" if heard else f"{by_name} hears nothing of {about_name}"
        self.say(reason)
        self.notices.append(recovery.Missed(by, about, reason, heard))

    def store_away(self) -> None:
        """No notice, report or view can be written or read."""
        self.say("the store is unreachable")
        self.store_up = False

    def store_back(self) -> None:
        self.say("the store is reachable again")
        self.store_up = True

    def wait(self, seconds: int) -> None:
        """So much time passes; who waits for a view looks for news every second."""
        self.say(f"{seconds} s pass")
        for _ in range(seconds):
            self.now += 1.0
            for me in sorted(self.alive):
                waits = isinstance(self.alive[me].action, recovery.AwaitView)
                if waits and self.store_up and me not in self.frozen and not self.act(me):
                    self.feed(me, recovery.Tick())  # the store answers, and there is nothing new

    def notice(self, me: int) -> None:
        """Deliver the next notice of the log to one group."""
        group = self.alive[me]
        event = self.notices[group.notices_seen]
        group.notices_seen += 1
        self.feed(me, event)

    # --- the shell of one group ---------------------------------------------------------------------------------------

    def feed(self, me: int, event: recovery.Event) -> None:
        group = self.alive[me]
        before = group.state
        group.state, actions = recovery.step(group.state, event, now=self.now)
        group.action = actions[-1]
        if group.state.stopped != before.stopped:
            self.say(f"{me} stops: {group.state.stopped}")
            if "same microbatch" in group.state.stopped:  # it has a seat, so its agent is heard
                self.notices.append(recovery.Died(me, f"group {me} ended by itself", self.starts.get(me, 0)))
        if group.state.plan is not before.plan:
            self.compare_plans(group.state)
        for action in actions:
            if isinstance(action, recovery.Publish):
                self.reports.setdefault(action.report.epoch, {})[me] = action.report
                why = group.state.closed_by
                self.say(f"{me} reports step {action.report.step} have {list(action.report.have)} because {why}")
            elif isinstance(action, recovery.Announce):
                self.notices.append(recovery.Broke(action.epoch, action.reason))
            elif isinstance(action, recovery.Propose):
                self.propose(me, action.view)
                return

    def compare_plans(self, state: GroupState) -> None:
        """Who has the state that the step starts from plans it like everybody else."""
        if not state.synced or state.stopped:
            return
        mine = {group: state.plan.of(group) for group in state.plan.assignment}, state.speeds
        others = self.plans.setdefault((state.view.epoch, state.step), mine)
        assert mine == others, f"group {state.me} plans step {state.step} as {mine}, others as {others}"

    def seconds(self, me: int, step: int) -> float:
        """What the group measures, which has nothing to do with when it acts."""
        if not self.erratic:
            return self.rates.get(me, 1.0)
        lasting, passing = (random.Random(f"{self.seed} {me} {of}") for of in (self.starts.get(me, 0), step))
        return lasting.choice([1, 1, 1, 3]) * passing.choice([1, 1, 1, 2, 5]) * passing.uniform(1.0, 1.3)

    def propose(self, me: int, view: View) -> None:
        if not self.store_up:
            return
        winner = self.views.setdefault(view.epoch, view)
        if winner is view:
            joined = f" joined {list(view.joined)}" if view.joined else ""
            final = f" final {list(view.final)}" if view.final else ""
            told = f"live {list(view.live)} lost {sorted(view.lost)}{joined}{final}"
            self.say(f"{me} writes view {view.epoch}: {told}")
            for group in view.joined:
                self.seat(group, view)
        self.feed(me, recovery.ViewSeen(winner))

    def seat(self, me: int, view: View) -> None:
        """The joiner reads the view that lets it in; unless it has died meanwhile."""
        if self.seekers.get(me) == view.incarnations[me]:
            del self.seekers[me]
            if me in self.alive and me in self.frozen:
                self.ghosts[me] = self.alive[me]
                self.frozen.discard(me)
            state = recovery.start(me, self.job, view)
            self.alive[me] = Group(state, recovery.next_action(state), [set() for _ in range(self.job.buckets)])

    def act(self, me: int) -> bool:
        """Let one group do its present action once; False when it can only wait."""
        if me in self.frozen:
            return False
        group = self.alive[me]
        action = group.action
        handler = getattr(self, f"_{type(action).__name__.lower()}")
        return handler(me, group, action)

    def _compute(self, me: int, group: Group, action: recovery.Compute) -> bool:
        if action.microbatch == self.poison:
            self.kill(me, computing=self.poison)
            return True
        for bucket in group.local:
            assert action.microbatch not in bucket
            bucket.add(action.microbatch)
        self.say(f"{me} computes {action.microbatch}{' (patch)' if action.patch else ''}")
        self.feed(me, recovery.Computed(action.microbatch))
        return True

    def _connect(self, me: int, group: Group, action: recovery.Connect) -> bool:
        epoch = action.view.epoch
        present = self.connected.setdefault(epoch, set())
        present.add(me)
        if present >= set(action.view.live):
            self.feed(me, recovery.Connected(epoch))
            return True
        return False

    def _transfer(self, me: int, group: Group, action: recovery.Transfer) -> bool:
        view = action.view
        if me == view.source or me in view.final.values():
            committed, reduced, state = list(group.committed), dict(group.reduced), group.state
            self.sent[view.epoch, me] = (state.step, committed, reduced, dict(group.measured), state.speeds)
        needs = {view.source} if me in view.behind else set()
        needs |= {owner for bucket, owner in view.final.items() if me in view.missing.get(bucket, ())}
        if any((view.epoch, owner) not in self.sent for owner in needs):
            return False
        speeds = None
        if me in view.behind:
            step, committed, _, _, speeds = self.sent[view.epoch, view.source]
            if step > group.state.step:
                self.say(f"{me} takes the state of step {step - 1} from {view.source}")
                self.reset_step(group)
            elif not group.state.synced:
                self.say(f"{me} receives the model of {view.source}, which stands before step {step}")
            group.committed = list(committed)
        for bucket, owner in view.final.items():
            if me in view.missing.get(bucket, ()):
                self.say(f"{me} takes bucket {bucket} from {owner}")
                group.reduced[bucket] = self.sent[view.epoch, owner][2][bucket]
                if bucket == 0:
                    group.measured = dict(self.sent[view.epoch, owner][3])
        self.feed(me, recovery.Transferred(view.epoch, speeds))
        return True

    def _reduce(self, me: int, group: Group, action: recovery.Reduce) -> bool:
        """Arrive at every bucket asked for; see at most one of them finish per call."""
        self.arrive(me)
        for bucket in action.buckets:
            key = (group.state.view.epoch, action.step, bucket)
            values = self.arrived[key]
            if set(values) >= set(group.state.view.live):
                count = Counter(m for value in values.values() for m in value)
                assert max(count.values()) == 1, f"summed twice in {key}: {[m for m, n in count.items() if n > 1]}"
                group.reduced[bucket] = frozenset(count)
                if bucket == 0:
                    group.measured = dict(self.times[key[:2]])
                self.say(f"{me} sees bucket {bucket} finish")
                self.feed(me, recovery.Reduced(bucket))
                return True
        return False

    def arrive(self, me: int) -> None:
        """The group has started all its all-reduces; from here its part can be in the sum, whatever becomes of it."""
        group = self.alive[me]
        for bucket in group.action.buckets:
            values = self.arrived.setdefault((group.state.view.epoch, group.action.step, bucket), {})
            values.setdefault(me, frozenset(group.local[bucket]))
            if bucket == 0 and group.local[0]:
                times = self.times.setdefault((group.state.view.epoch, group.action.step), {})
                times.setdefault(me, self.seconds(me, group.action.step))

    def _update(self, me: int, group: Group, action: recovery.Update) -> bool:
        expected = frozenset(microbatches_of_step(action.step, self.job.shards, self.job.per_shard))
        for bucket in range(self.job.buckets):
            got = group.reduced.get(bucket)
            assert got == expected, f"group {me} step {action.step} bucket {bucket}: lacks {set(expected) - set(got)}"
        assert len(group.committed) == action.step
        group.committed.append(tuple(group.reduced[b] for b in range(self.job.buckets)))
        measured = group.measured
        self.reset_step(group)
        self.say(f"{me} commits step {action.step}")
        self.feed(me, recovery.Updated(action.step, measured))
        return True

    def _awaitview(self, me: int, group: Group, action: recovery.AwaitView) -> bool:
        if not self.store_up:
            return False
        view = self.views.get(action.epoch + 1)
        if view is not None:
            self.feed(me, recovery.ViewSeen(view))
            return True
        for report in self.reports.get(action.epoch, {}).values():
            if report.group not in group.state.reports:
                self.feed(me, recovery.ReportSeen(report))
                return True
        return False

    def _finish(self, me: int, group: Group, action: recovery.Finish) -> bool:
        return False

    def _stop(self, me: int, group: Group, action: recovery.Stop) -> bool:
        return False

    def reset_step(self, group: Group) -> None:
        group.local = [set() for _ in range(self.job.buckets)]
        group.reduced = {}
        group.measured = {}

    # --- schedules ----------------------------------------------------------------------------------------------------

    def play(self, until=lambda: False) -> None:
        """The plainest schedule: groups in turn, notices heard at once; until the condition, or nothing moves."""
        moved = True
        while moved and not until():
            moved = False
            for me in sorted(self.alive):
                while self.pending(me):
                    self.notice(me)
                    moved = True
                moved |= self.act(me)
                if until():
                    return

    def come_or_go(self) -> bool:
        """A dead group, or a new one, asks for a seat, or one that waits for it dies; True for an ask."""
        if self.seekers and self.rng.random() < 0.3:
            self.kill_seeker(self.rng.choice(sorted(self.seekers)))
            return False
        free = [g for g in range(self.job.shards + 2) if g not in self.alive and g not in self.seekers]
        if not free:
            return False
        self.ask(self.rng.choice(free))
        return True

    def run(self, kills: int, joins: int = 0, cuts: int = 0, leaves: int = 0, max_turns: int = 20_000) -> None:
        """Random schedule with so many deaths, entries, cuts and orderly leaves; returns when every live group has finished.

        Liveness phase: once nothing else can move, the pending notices are delivered, so a stuck world is a bug.
        """
        self.erratic = True
        for _ in range(max_turns):
            if not self.alive:
                return
            if kills and len(self.alive) > 1 and self.rng.random() < 0.02:
                kills -= 1
                self.kill(self.rng.choice(sorted(self.alive)))
            if self.rng.random() < 0.05:
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
            heard = [me for me in movers if self.rng.random() < 0.1 and self.pending(me)]
            for me in heard:
                self.notice(me)
            if any(self.act(me) for me in movers[: self.rng.randint(1, len(movers))]) or heard:
                continue
            if any(self.act(me) for me in movers):
                continue
            for me in movers:
                if self.pending(me):
                    self.notice(me)
                    break
            else:
                if any(g.state.cut and g.state.reported and not g.state.stopped for g in self.alive.values()):
                    self.now += 1.0
                    for me in movers:
                        self.feed(me, recovery.Tick())
                    continue
                if all(isinstance(group.action, recovery.Finish | recovery.Stop) for group in self.alive.values()):
                    return
                raise AssertionError(f"stuck: {[(me, group.action) for me, group in sorted(self.alive.items())]}")
        raise AssertionError(f"no end after {max_turns} turns")

    def cut(self) -> None:
        """Two hosts of one group each do not hear each other, from one side or both; sometimes it heals."""
        by, about = ((group,) for group in self.rng.sample(range(self.job.shards), 2))
        self.miss(by, about)
        if self.rng.random() < 0.5:
            self.miss(about, by)
        if self.rng.random() < 0.3:
            self.miss(by, about, heard=True)

    def break_epoch(self) -> None:
        """A connection resets although nobody died; rare, and only one per epoch."""
        me = self.rng.choice(sorted(self.alive))
        epoch = self.alive[me].state.view.epoch
        broken = {event.epoch for event in self.notices if isinstance(event, recovery.Broke)}
        if self.rng.random() < 0.1 and epoch not in broken:
            self.reset(me)

    def pending(self, me: int) -> bool:
        """Is there a notice it can hear and has not heard?"""
        return self.store_up and me not in self.frozen and self.alive[me].notices_seen < len(self.notices)

    def check_end(self) -> None:
        """Every live group committed every step once, with equal values."""
        for me, group in self.alive.items():
            if group.state.stopped:
                assert not isinstance(group.action, recovery.Update)
                reasons = ("outside view", "min_groups", "died computing the same microbatch")
                assert any(reason in group.state.stopped for reason in reasons)
                continue
            assert isinstance(group.action, recovery.Finish), f"group {me} is stuck in {group.action}"
            assert len(group.committed) == self.job.steps, f"group {me} committed {len(group.committed)} steps"

    def say(self, line: str) -> None:
        if self.log is not None:
            self.log.append(line)
