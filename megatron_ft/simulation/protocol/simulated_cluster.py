"""The simulated cluster: groups, agents, network and store on one kernel, the faults of a scenario, and the history.

:func:`play` runs a scenario to its end and returns the history as lines like those of a real run's ``history.jsonl``
(docs/run-record.md) with what only a simulation knows on top: who adopted, took and committed what. A history ends when
every living group has committed every step, when nobody is left, or, which is a violation, when neither has come to
pass long after the last fault.
"""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass, field
from typing import Any

from megatron_ft.core import detector, replication, saving
from megatron_ft.core.membership import first_view
from megatron_ft.core.recovery import Job
from megatron_ft.faults import checkers
from megatron_ft.sim.following import Following
from megatron_ft.sim.group import Group, Pace
from megatron_ft.sim.kernel import Kernel
from megatron_ft.sim.network import STORE, Network
from megatron_ft.sim.scenario import GENTLE, PATIENCE, REPORT_TIMEOUT, Fault, Scenario
from megatron_ft.sim.store import Store
from megatron_ft.types import Exit, GroupId, Microbatch, View

LIVENESS_BOUND = 600.0
"""So long after the last fault a history must have ended. A collective that lost a message is given up after 25, a silent
group left out after 15 more, and the longest job takes 90 on one group."""
SEEK_INTERVAL = 1.0
SAVE_SHARE = 0.5
"""Of the boundaries at which a checkpoint is ordered."""
FOLLOW_PATIENCE, SEAT_PATIENCE = 20.0, 60.0
"""So long a group that comes back waits for a state, before it asks other donors, and for a seat, before it gives up."""


@dataclass(frozen=True)
class History:
    """What happened, what is wrong with it, and a fingerprint of every call the kernel made."""

    scenario: Scenario
    lines: list[dict[str, Any]]
    violations: list[str]
    fingerprint: str


def play(scenario: Scenario) -> History:
    """Run a scenario to its end and judge it. A failed assertion of core is a violation like any other."""
    cluster = Cluster(scenario)
    violations: list[str] = []
    try:
        cluster.run()
    except AssertionError as error:
        cluster.record("end", reason="assertion")
        violations.append(f"core or shell asserts: {error}")
    violations += checkers.check_commits(cluster.lines)
    if all(fault.kind in GENTLE for fault in scenario.faults):
        violations += checkers.check_nobody_left_out(cluster.lines)
    text = json.dumps([cluster.lines, cluster.kernel.count, cluster.kernel.now])
    return History(scenario, cluster.lines, violations, hashlib.sha256(text.encode()).hexdigest())


@dataclass
class Seeker:
    """A new incarnation that is warm, follows donors and waits for its seat. ``inbox``: who has read the view that gives it
    one greets it before it has read that itself."""

    incarnation: int
    following: Following | None = None
    inbox: list[tuple[GroupId, tuple, Any]] = field(default_factory=list)
    gone: bool = False


class Cluster:
    """One history in the making."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.kernel = Kernel()
        self.rng = random.Random(f"cluster {scenario.seed}")
        self.network = Network(self.kernel, random.Random(f"network {scenario.seed}"))
        self.store = Store(self.kernel, self.network)
        self.job = _job(scenario)
        self.lines: list[dict[str, Any]] = []
        self.over = ""
        self.groups: dict[tuple[GroupId, int], Group] = {}
        """The living, by group and incarnation: a frozen one may wake up when its successor is there."""
        self.seekers: dict[GroupId, Seeker] = {}
        self.starts: dict[GroupId, int] = {}

    def run(self) -> None:
        job = self.job
        fields = {"groups": job.shards, "min_groups": job.min_groups, "buckets": job.buckets}
        self.record("begin", **fields, steps=job.steps, microbatches=job.microbatches)
        view = first_view(job.shards)
        self.store.values["view", 0] = view
        self.record("view", **view.to_json())
        for me in view.live:
            self._enter(me, view)
        for fault in self.scenario.faults:
            self.kernel.at(fault.at, lambda fault=fault: self._strike(fault), priority=-1)
        ended = self.kernel.run(self.scenario.quiet + LIVENESS_BOUND, lambda: bool(self.over))
        self.record("end", reason=self.over if ended else "stuck", members=self._members())

    def record(self, event: str, **fields: Any) -> None:
        self.lines.append({"t": round(self.kernel.now, 6), "event": event, **fields})

    def _members(self) -> list[list[Any]]:
        return [[*who, group.state.step, type(group.next).__name__] for who, group in sorted(self.groups.items())]

    def newest(self, me: GroupId) -> Group | None:
        """The living group of the newest incarnation, if there is one."""
        found = [group for (number, _), group in sorted(self.groups.items()) if number == me]
        return found[-1] if found else None

    # --- what groups call ---------------------------------------------------------------------------------------------

    def contribution(self, microbatch: Microbatch) -> int:
        return checkers.contribution(microbatch, self.job.shards, self.job.per_shard)

    def seconds(self, group: Group, microbatch: Microbatch) -> float:
        """What the group measures: often twice or four times what others do, now and then for several steps."""
        who = f"{self.scenario.seed} {group.me}.{group.incarnation}"
        lasting, passing = random.Random(f"lasting {who}"), random.Random(f"passing {who} {microbatch}")
        return lasting.choice([1, 1, 1, 3]) * passing.choice([1, 1, 1, 1, 2, 5]) * passing.uniform(0.5, 0.7)

    def order_to_save(self, group: Group) -> None:
        """Now and then. It is heard by everybody, sooner or later; what it says of the protocol's times changes nothing."""
        state, view = group.state, group.state.view
        dice = random.Random(f"save {self.scenario.seed} {group.me}.{group.incarnation} {state.step}")
        if dice.random() > SAVE_SHARE:
            return
        writers = saving.writers(view.live, {}, ())
        attempt = f"{group.me}.{group.incarnation}-{state.step}-{view.epoch}"
        order = saving.Saves(state.step + dice.randint(1, 2), view.epoch, attempt, writers, group.me)
        for _, other in sorted(self.groups.items()):
            self.kernel.after(dice.uniform(0.0, 6.0), lambda other=other: other.told_to_save(order))

    def deliver(self, sender: GroupId, target: GroupId, incarnation: int, key: tuple, value: Any) -> None:
        """Send to one incarnation, over a connection to that process; nobody else ever gets it."""

        def arrive() -> None:
            seeker = self.seekers.get(target)
            if (target, incarnation) in self.groups:
                self.groups[target, incarnation].receive(sender, key, value)
            elif seeker is not None and seeker.incarnation == incarnation:
                seeker.inbox.append((sender, key, value))

        self.network.send(sender, target, arrive)

    def decide(self, store: Store, by: GroupId, view: View) -> View:
        """At the store: the first view of an epoch stands."""
        standing = store.create(("view", view.epoch), view)
        if standing is view:
            self.record("view", by=by, **view.to_json())
        return standing

    def stopped(self, group: Group, reason: str) -> None:
        """The process ends by itself; its agent sees that like any other end."""
        fields = {"group": group.me, "incarnation": group.incarnation, "epoch": group.state.view.epoch}
        self.record("stop", **fields, reason=reason, synced=group.state.synced)
        self._gone(group)
        self._tell_end(group.me, group.incarnation, "stopped by itself")

    def look_for_end(self) -> None:
        """It is over when nobody is left, or every living group is done."""
        if not self.groups:
            self.over = "nobody is left"
        elif all(group.done for group in self.groups.values()):
            self.over = "finished"

    # --- life and death -----------------------------------------------------------------------------------------------

    def _enter(self, me: GroupId, view: View, following: Following | None = None) -> None:
        rng = self.rng
        pace = Pace(rng.uniform(0.5, 1.5), rng.uniform(0.1, 1.0), rng.uniform(0.3, 1.0), PATIENCE, rng.uniform(-9e5, 9e5))
        group = Group(self, me, view, pace, following)
        self.record("enter", group=me, incarnation=group.incarnation, epoch=view.epoch, view=view.to_json())
        self.groups[me, group.incarnation] = group
        group.start()

    def _gone(self, group: Group) -> None:
        group.die()
        del self.groups[group.me, group.incarnation]
        self.look_for_end()

    def _tell_end(self, me: GroupId, incarnation: int, detail: str) -> None:
        """An agent saw the process end, or somebody believes it did."""
        ended = detector.Ended(Exit(me, 0, 0, f"host{me}", None, 1, detail), incarnation)
        delay = self.rng.uniform(0.05, 3.0)
        self.kernel.after(delay, lambda: self.store.call(me, lambda store: store.append(ended), lambda: False))

    def _kill(self, me: GroupId, noticed: bool) -> None:
        if me in self.seekers:
            self._kill_seeker(me, "killed")
        group = self.newest(me)
        if group is None:
            return
        self.record("dead", group=me, incarnation=group.incarnation)
        self._gone(group)
        if noticed:
            self._tell_end(me, group.incarnation, "killed")
        for _, peer in sorted(self.groups.items()):
            if self.rng.random() < 0.5:
                self._reset(peer, group.state.view.epoch)
        if noticed:
            for _, following in group.followers:
                self.kernel.after(self.rng.uniform(0.01, 2.0), lambda f=following: f.lose((me, group.incarnation)))

    def aborted(self, group: Group, epoch: int) -> None:
        """Its connections of that epoch break; the peers see it sooner or later."""
        for _, peer in sorted(self.groups.items()):
            if peer is not group:
                self._reset(peer, epoch)

    def _reset(self, peer: Group, epoch: int) -> None:
        self.kernel.after(self.rng.uniform(0.01, 2.0), lambda: None if peer.ended else peer.reset(epoch))

    # --- coming back --------------------------------------------------------------------------------------------------

    def _start(self, me: GroupId) -> None:
        """A new incarnation is warm; a frozen old one may still be there."""
        older = self.newest(me)
        if me in self.seekers or (older is not None and not older.frozen):
            return
        self.starts[me] = self.starts.get(me, 0) + 1
        self.seekers[me] = Seeker(self.starts[me])
        self._seek(me, self.seekers[me])

    def _seek(self, me: GroupId, seeker: Seeker) -> None:
        """What a group that comes back does now and then, until it has its seat."""
        if seeker.gone or self.over:
            return
        following, now = seeker.following, self.kernel.now
        if following is not None and following.asked is not None:
            if following.lost or now > following.asked + SEAT_PATIENCE:
                self._kill_seeker(me, "gives up")
            else:
                self._look_for_seat(me, seeker)
            return
        if following is None or following.lost or now > following.since + FOLLOW_PATIENCE:
            seeker.following = self._follow(me, seeker)
        elif following.advance() is not None:
            following.asked = now
            asking = detector.Asking(me, seeker.incarnation, following.donors, following.newest)
            self.store.call(me, lambda store: store.append(asking), lambda: seeker.gone)
        self.kernel.after(SEEK_INTERVAL, lambda: self._seek(me, seeker))

    def _follow(self, me: GroupId, seeker: Seeker) -> Following | None:
        """Ask one or two groups for their state, and for what comes of it."""
        able = sorted(who for who, group in self.groups.items() if group.state.synced and who[0] != me)
        if not able:
            return None
        following = Following(tuple(self.rng.sample(able, min(len(able), self.rng.randint(1, 2)))), self.kernel.now)
        for donor in following.donors:
            group, who = self.groups[donor], (me, seeker.incarnation)
            self.network.send(me, donor[0], lambda group=group, who=who: group.followed_by(who, following))
        return following

    def _look_for_seat(self, me: GroupId, seeker: Seeker) -> None:
        def find(store: Store) -> View | bool:
            views = (value for key, value in store.values.items() if key[0] == "view")
            seats = (v for v in views if me in v.joined and v.incarnations[me] == seeker.incarnation)
            return next(seats, False)

        def answer(view: View | bool) -> None:
            if seeker.gone:
                return
            if view:
                del self.seekers[me]
                self._enter(me, view, seeker.following)
                for message in seeker.inbox:
                    if (me, seeker.incarnation) in self.groups:  # any of them may be its last
                        self.groups[me, seeker.incarnation].receive(*message)
            else:
                self.kernel.after(SEEK_INTERVAL, lambda: self._seek(me, seeker))

        self.store.call(me, find, lambda: seeker.gone).then(answer)

    def _kill_seeker(self, me: GroupId, how: str) -> None:
        seeker = self.seekers.pop(me)
        seeker.gone = True
        self.record("dead", group=me, incarnation=seeker.incarnation)
        self._tell_end(me, seeker.incarnation, f"{how} before it had a seat")
        self.look_for_end()

    # --- faults -------------------------------------------------------------------------------------------------------

    def _strike(self, fault: Fault) -> None:
        self.record("fault", what=str(fault))
        until = self.kernel.now + fault.lasts
        everybody = [STORE, *range(self.job.shards + 2)]
        group = self.newest(fault.targets[0]) if fault.targets else None
        match fault.kind, fault.targets:
            case ("kill" | "vanish"), (me,):
                self._kill(me, noticed=fault.kind == "kill")
            case "start", (me,):
                self._start(me)
            case "freeze", (me,) if group is not None:
                group.freeze(until)
            case "accuse", (me,) if group is not None:
                self._tell_end(me, group.incarnation, "taken for dead")
            case "break", (me,) if group is not None:
                group.reset(group.state.view.epoch)
            case "cut", (source, target):
                self.network.cut([source], [target], until)
            case "isolate", (me,):
                self.network.cut([me], everybody, until)
                self.network.cut(everybody, [me], until)
            case "slow", (me,):
                self.network.slow(me, 10.0, until)
            case "lose", ():
                self.network.lose(0.3, until)
            case "store dies", ():
                self.store.die(fault.lasts)
            case "store freezes", ():
                self.store.freeze(fault.lasts)


def _job(scenario: Scenario) -> Job:
    placement = None
    if scenario.redundancy:
        placement = replication.consecutive(scenario.groups, min(scenario.redundancy, scenario.groups))
    return Job(
        shards=scenario.groups,
        per_shard=scenario.per_shard,
        buckets=scenario.buckets,
        steps=scenario.steps,
        min_groups=scenario.min_groups,
        report_timeout_s=REPORT_TIMEOUT,
        placement=placement,
        straggler_steps=random.Random(f"stragglers {scenario.seed}").choice([1, 1, 2, 3]),
        collectors=random.Random(f"collectors {scenario.seed}").choice([1, 1, 2, 8]),
    )
