"""The simulated cluster: groups, agents, network and store on one kernel, the faults of a scenario, and the history.

:func:`play` runs a scenario to its end and returns the history as lines like those of a real run's ``history.jsonl``
(docs/run-record.md) with what only a simulation knows on top: the group and the version of each adoption, transfer and
commit. A history ends when every living group has committed every step, when no group is left, or, which is a violation,
when neither has come to pass long after the last fault.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from megatron_ft.core.exactness import verification
from megatron_ft.core.lifecycle import checkpoint_protocol, group_returns, last_state, store_failover
from megatron_ft.core.lifecycle.restart_policy import Seats
from megatron_ft.core.protocol import signals
from megatron_ft.core.protocol.machine import Job
from megatron_ft.core.protocol.membership import first_view
from megatron_ft.core.protocol.messages import GroupFailed
from megatron_ft.core.replication import placement as replication
from megatron_ft.core.scheduling import policies
from megatron_ft.errors import RunStopped, StartOver, WipedOut
from megatron_ft.proof.kernel import Kernel, Thread
from megatron_ft.proof.network import STORE, Network
from megatron_ft.proof.returning_group import RANKS, Following, Outcome
from megatron_ft.proof.scenario import (
    GENTLE,
    GENTLE_ON_DEVICE,
    GENTLE_TO_HOSTS,
    ON_DEVICE,
    PATIENCE,
    REPORT_TIMEOUT,
    Fault,
    Scenario,
)
from megatron_ft.proof.simulated_group import Group, Pace
from megatron_ft.proof.simulated_hosts import Hosts
from megatron_ft.proof.simulated_store import Operation, Store
from megatron_ft.proof.store_client import Client, Plain, Process
from megatron_ft.record import invariants, lineage
from megatron_ft.types import Exit, GroupId, Microbatch, View

LIVENESS_BOUND = 600.0
"""A history must have ended this long after the last fault. A collective that lost a message is given up after 25, a silent
group left out after 15 more, and the longest job takes 90 on one group."""
SEEK_INTERVAL = 1.0
SAVE_SHARE = 0.5
"""Share of the boundaries at which a checkpoint is ordered."""
REMOTE_ERROR_SHARE = 0.2
"""Share of the aborts and deaths of a group with a device that a peer ever sees by itself."""
FATE_PATIENCE = 10.0
"""A joining group that has asked and lost its donors waits this long for notices and views that tell what has become of the
members."""
LAST_PATIENCE = 40.0
"""With no group left, groups on their way back have this long to save what they hold."""
RANK_DIES = 0.15
"""Share of the last saves in which a rank of the group dies before its part is written."""
LONGEST_LAG = 8.0
"""Longest time in which a rank puts a state in place."""
FOLLOW_PATIENCE, SEAT_PATIENCE = 20.0, 60.0
"""A joining group waits this long for a state before it asks other donors, and to become a member before it gives up."""


@dataclass(frozen=True)
class History:
    """The lines of a played scenario, its violations, and a fingerprint of every call that the kernel made. ``resumed``: the
    lines of the job that goes on from what groups on their way back have saved, if no group is left."""

    scenario: Scenario
    lines: list[dict[str, Any]]
    violations: list[str]
    fingerprint: str
    resumed: Sequence[dict[str, Any]] = ()


def play(scenario: Scenario) -> History:
    """Run a scenario to its end and judge it. A failed assertion of core is a violation like any other."""
    cluster = Cluster(scenario)
    violations: list[str] = []
    try:
        cluster.run()
    except AssertionError as error:
        cluster.record("end", reason="assertion")
        violations.append(f"core or shell asserts: {error}")
    check = lineage.check if scenario.fails_over else invariants.check_commits
    violations += check(cluster.lines) + invariants.check_deaths(cluster.lines)
    violations += [line["what"] for line in cluster.lines if line["event"] == "wrong"]
    gentle = (
        GENTLE_TO_HOSTS.keys() | GENTLE_ON_DEVICE | {"claims race"}
        if scenario.fails_over
        else GENTLE.keys() | set(ON_DEVICE)
    )
    if all(fault.kind in gentle for fault in scenario.faults):
        check = lineage.check_nobody_ends if scenario.fails_over else invariants.check_nobody_left_out
        violations += check(cluster.lines)
    again = _resume(scenario, cluster)
    resumed = again.lines if again is not None else []
    violations += invariants.check_last_states(cluster.lines, resumed)
    text = json.dumps([cluster.lines, cluster.kernel.count, cluster.kernel.now, resumed])
    return History(scenario, cluster.lines, violations, hashlib.sha256(text.encode()).hexdigest(), resumed)


def _resume(scenario: Scenario, cluster: Cluster) -> Cluster | None:
    """Play the job that goes on from the newest state that a group on its way back has saved, without faults; None if no
    group has saved any."""
    if not cluster.kept or cluster.groups:
        return None
    newest = max(cluster.kept, key=lambda outcome: outcome.step)
    again = Cluster(replace(scenario, faults=(), discards=()), newest)
    again.run()
    return again


@dataclass
class Seeker(Process):
    """A new incarnation that is warm, follows donors and waits for its seat. ``inbox``: who has read the view that gives it
    one greets it before it has read that itself."""

    incarnation: int
    following: Following | None = None
    inbox: list[tuple[GroupId, tuple, Any]] = field(default_factory=list)
    gone: bool = False
    frozen_until: float = 0.0
    client: Client | Plain | None = None
    asking: signals.JoinRequested | None = None
    fenced: str = ""
    held: Following | None = None
    """The last attempt in which it has received a state."""
    lost_since: float | None = None

    def knows(self) -> list[Operation]:
        asking = self.asking
        return [lambda store: store.append(asking)] if asking else []

    def reads(self, claim: store_failover.Claim) -> None:
        if self.asking is not None and (self.asking.group, self.incarnation) in claim.fenced:
            self.fenced = f"is left out by claim {claim.number}"


class Cluster:
    """One history in the making. ``origin``: the state that a job goes on from."""

    def __init__(self, scenario: Scenario, origin: Outcome | None = None) -> None:
        self.scenario, self.origin = scenario, origin
        self.kept: list[Outcome] = []
        """The states that groups on their way back have saved."""
        self.kernel = Kernel()
        self.rng = random.Random(f"cluster {scenario.seed}")
        self.network = Network(self.kernel, random.Random(f"network {scenario.seed}"))
        self.store = Store(self.kernel, self.network)
        self.job = _job(scenario, 0 if origin is None else origin.step)
        self.lines: list[dict[str, Any]] = []
        self.written: set[str] = set()
        self.over = ""
        self.groups: dict[tuple[GroupId, int], Group] = {}
        """The living, by group and incarnation: a frozen one may wake up when its successor is there."""
        self.seekers: dict[GroupId, Seeker] = {}
        self.starts: dict[GroupId, int] = {}

    def run(self) -> None:
        job = self.job
        fields: dict[str, Any] = {"groups": job.shards, "min_groups": job.min_groups, "buckets": job.buckets}
        if job.policy.shrinks or job.policy.wipes_out:
            fields |= {"shrinks": job.policy.shrinks, "hosts": _able(job)}
        sizes = [self.scenario.per_shard_at(step) for step in range(job.steps)]
        self.record("begin", **fields, steps=job.steps, microbatches=sizes)
        view = first_view(job.shards, self.origin.step if self.origin else 0)
        self.hosts: Hosts | None = None
        if self.scenario.fails_over:
            self.hosts = Hosts(self, self.scenario.hosts)
            self.store = self.hosts.newest
        self.store.values["view", 0] = view
        self.record("view", **view.to_json(), **self._branch(view))
        for me in view.live:
            self._enter(me, view)
        for fault in self.scenario.faults:
            self.kernel.at(fault.at, partial(self._strike, fault), priority=-1)
        ended = self.kernel.run(self.scenario.quiet + LIVENESS_BOUND, lambda: bool(self.over))
        self.record("end", reason=self.over if ended else "stuck", members=self._members())

    def record(self, event: str, **fields: Any) -> None:
        self.lines.append({"t": round(self.kernel.now, 6), "event": event, **fields})

    def _members(self) -> list[list[Any]]:
        return [[*who, group.state.step, type(group.shell.next).__name__] for who, group in sorted(self.groups.items())]

    def newest(self, me: GroupId) -> Group | None:
        """The living group of the newest incarnation, if there is one."""
        found = [group for (number, _), group in sorted(self.groups.items()) if number == me]
        return found[-1] if found else None

    def seats_on(self, host: int) -> list[tuple[GroupId, int]]:
        """Returns the seats of the processes that live on this host."""
        return [seat for seat in self.groups if seat[0] == host]

    # --- what groups call ---------------------------------------------------------------------------------------------

    def client(self, me: GroupId, process: Process, like: Client | None = None) -> Client | Plain:
        """Returns the client through which a process of the group talks to the control store."""
        if self.hosts is None:
            return Plain(self.store, me, lambda: process.gone)
        return self.hosts.client(me, process, like)

    def _branch(self, view: View, after: View | None = None, log: int = 0, decided: int = 0) -> dict[str, Any]:
        """Returns the fields that tell views of one epoch apart, where there may be several. ``log``: number of claims that
        the writer had read; ``decided``: number of claims when it decided on the view."""
        if self.hosts is None:
            return {}
        return {"view": lineage.digest(view), "after": after and lineage.digest(after), "log": log, "decided": decided}

    def contribution(self, microbatch: Microbatch) -> int:
        return invariants.contribution(microbatch, self.job.shards, max(self.scenario.per_shard, self.scenario.ramp[1]))

    def seconds(self, group: Group, microbatch: Microbatch) -> float:
        """Returns the duration that the group measures: often a multiple of that of others, at times for several steps."""
        who = f"{self.scenario.seed} {group.me}.{group.incarnation}"
        lasting, passing = random.Random(f"lasting {who}"), random.Random(f"passing {who} {microbatch}")
        return lasting.choice([1, 1, 1, 3]) * passing.choice([1, 1, 1, 1, 2, 5]) * passing.uniform(0.5, 0.7)

    def order_to_save(self, group: Group) -> None:
        """Order a save at some boundaries. Each group is told of it at its own time."""
        state, view = group.state, group.state.view
        dice = random.Random(f"save {self.scenario.seed} {group.me}.{group.incarnation} {state.step}")
        if dice.random() > SAVE_SHARE:
            return
        writers = checkpoint_protocol.writers(view.live, {}, ())
        attempt = f"{group.me}.{group.incarnation}-{state.step}-{view.epoch}"
        order = checkpoint_protocol.Saves(state.step + dice.randint(1, 2), view.epoch, attempt, writers, group.me)
        for _, other in sorted(self.groups.items()):
            self.kernel.after(dice.uniform(0.0, 6.0), partial(other.told_to_save, order))

    def deliver(self, sender: GroupId, target: GroupId, incarnation: int, key: tuple, value: Any) -> None:
        """Send to one incarnation, over a connection to that process; no other incarnation gets it."""

        def arrive() -> None:
            seeker = self.seekers.get(target)
            if (target, incarnation) in self.groups:
                self.groups[target, incarnation].receive(sender, key, value)
            elif seeker is not None and seeker.incarnation == incarnation:
                seeker.inbox.append((sender, key, value))

        self.network.send(sender, target, arrive)

    def decide(self, store: Store, by: Group, view: View) -> View:
        """At the store: the first view of an epoch stands. One may be written to several stores."""
        standing = store.create(("view", view.epoch), view)
        if standing is view:
            branch = self._branch(view, by.state.view, by.read, by.decided) if self.hosts is not None else {}
            if not branch or branch["view"] not in self.written:
                self.record("view", by=by.me, **view.to_json(), **branch)
                self.written.add(branch.get("view", ""))
        return standing

    def stopped(self, group: Group, reason: str, epoch: int | None = None) -> None:
        """The process ends by itself; its agent sees that like any other end. ``epoch``: by default the present one."""
        state = group.state
        epoch = state.view.epoch if epoch is None else epoch
        group.record("stop", epoch=epoch, reason=reason, synced=state.synced, wiped_out=state.wiped_out)
        if state.wiped_out and group.following is not None:
            self._save_last(group.me, group.incarnation, group.following, state.view.epoch)
        if self.hosts is not None and group.me not in self.hosts.agents:
            self._gone(group)
            return
        self._gone(group)
        kind = WipedOut if state.wiped_out else StartOver if state.following else RunStopped
        self._tell_end(group.me, group.incarnation, "stopped by itself", kind.exit_code)

    def dropped(self, seat: tuple[GroupId, int]) -> None:
        """Its agent ends the process, which has been given up, for the next start of the group."""
        group = self.groups[seat]
        told = {"reason": "its agent starts the group again", "synced": False, "wiped_out": False}
        group.record("stop", epoch=group.epoch, **told)
        self._gone(group)

    def look_for_end(self) -> None:
        """The history is over when no group is left, or every living group is done."""
        if not self.groups:
            if any(seeker.held is not None for seeker in self.seekers.values()):
                self.kernel.after(LAST_PATIENCE, self._give_up)
            else:
                self.over = "nobody is left"
        elif all(group.done for group in self.groups.values()):
            self.over = "finished"

    def _give_up(self) -> None:
        if not self.groups:
            self.over = "nobody is left"

    # --- life and death -----------------------------------------------------------------------------------------------

    def _enter(self, me: GroupId, view: View, following: Following | None = None, like: Client | None = None) -> None:
        rng = self.rng
        pace = Pace(
            rng.uniform(0.5, 1.5), rng.uniform(0.1, 1.0), rng.uniform(0.3, 1.0), PATIENCE, rng.uniform(-9e5, 9e5)
        )
        group = Group(self, me, view, pace, following)
        branch = {"branch": lineage.digest(view)} if self.hosts is not None else {}
        group.record("enter", epoch=view.epoch, view=view.to_json(), **branch)
        group.client = self.client(me, group, like)
        self.groups[me, group.incarnation] = group
        group.start()

    def _gone(self, group: Group) -> None:
        group.die()
        del self.groups[group.me, group.incarnation]
        self.look_for_end()

    def replaced(self, group: Group, reason: str) -> None:
        """The process ends because it cannot go on; its agent, or where it does not start groups again, its launcher
        starts another in a while."""
        self.stopped(group, reason, group.epoch)
        if not self.scenario.rejoins:
            self.kernel.after(self.rng.uniform(1.0, 10.0), partial(self._start, group.me))

    def exits(self, group: Group, why: str = "") -> None:
        """The process ends without a word, at this moment. ``why``: the fault that does it."""
        if why:
            self.record("fault", what=f"at {self.kernel.now:.2f}: {why} {group.me}")
        group.record("dead")
        self._gone(group)
        self._tell_end(group.me, group.incarnation, "killed")

    def _tell_end(self, me: GroupId, incarnation: int, detail: str, code: int | None = None) -> None:
        """An agent saw the process end, or another process believes it did. ``code``: None for one that was killed."""
        signal = None if code is not None else "SIGKILL"
        ended = signals.RankExited(Exit(me, 0, 0, f"host{me}", signal, code, detail), incarnation)
        delay = self.rng.uniform(0.05, 3.0)
        if self.hosts is None:
            client = Plain(self.store, me, lambda: False)
            self.kernel.after(delay, lambda: client.call(lambda store: store.append(ended)))
        elif me in self.hosts.agents:
            agent = self.hosts.agents[me]
            self.kernel.after(delay, lambda: agent.client.awake(lambda: agent.announce(ended)))

    def host_dies(self, host: int) -> None:
        self.record("fault", what=f"at {self.kernel.now:.2f}: host dies {host}")
        self._kill(host, noticed=False)

    def _kill(self, me: GroupId, noticed: bool) -> None:
        if not noticed and self.hosts is not None:
            self.hosts.die(me)
        if me in self.seekers:
            self._kill_seeker(me, "killed")
        group = self.newest(me)
        if group is None:
            return
        if not noticed and self.hosts is not None:  # older starts, which were frozen, are gone with their host
            for older in [self.groups[seat] for seat in sorted(self.seats_on(me)) if seat[1] != group.incarnation]:
                older.record("dead")
                self._gone(older)
        group.record("dead")
        self._gone(group)
        if noticed:
            self._tell_end(me, group.incarnation, "killed")
        for _, peer in sorted(self.groups.items()):
            if self.rng.random() < 0.5:
                self._reset(peer, group.state.view.epoch)
        if noticed:
            for _, following in group.followers:
                self.kernel.after(self.rng.uniform(0.01, 2.0), partial(following.lose, (me, group.incarnation)))

    def aborted(self, group: Group, epoch: int) -> None:
        """Its connections of that epoch break; the peers see it sooner or later."""
        for _, peer in sorted(self.groups.items()):
            if peer is not group:
                self._reset(peer, epoch)

    def _reset(self, peer: Group, epoch: int) -> None:
        delay = self.rng.uniform(0.01, 2.0)
        if self.scenario.device:  # others see an error late, or never
            if self.rng.random() > REMOTE_ERROR_SHARE:
                return
            delay *= 10
        self.kernel.after(delay, lambda: None if peer.gone else peer.reset(epoch))

    # --- coming back --------------------------------------------------------------------------------------------------

    def _start(self, me: GroupId) -> None:
        """A new incarnation is warm; a frozen old one may still be there."""
        older = self.newest(me)
        if me in self.seekers or (older is not None and not older.frozen):
            return
        self.starts[me] = self.starts.get(me, 0) + 1
        self.seekers[me] = seeker = Seeker(self.starts[me])
        if self.hosts is not None:
            self.hosts.boot(me)
            seeker.frozen_until = self.hosts.frozen.get(me, 0.0)
        seeker.client = self.client(me, seeker)
        self._seek(me, seeker)

    def start_again(self, start: group_returns.Start) -> None:
        """An agent starts a group again."""
        self._start(start.group)
        started = self.seekers.get(start.group)
        assert started and started.incarnation == start.incarnation, f"{start} is made while the group lives"

    def begun(self, group: GroupId, incarnation: int) -> bool:
        """Return whether that start has had a part in a committed step."""
        seat = {"group": group, "incarnation": incarnation}
        return any(line["event"] == "commit" and seat.items() <= line.items() for line in self.lines)

    def _seek(self, me: GroupId, seeker: Seeker) -> None:
        """Let a joining group ask for a state or for membership, at intervals, until it is a member."""
        if seeker.gone or self.over:
            return
        if self.kernel.now < seeker.frozen_until:
            self.kernel.at(seeker.frozen_until, lambda: self._seek(me, seeker))
            return
        if seeker.fenced:
            self._kill_seeker(me, seeker.fenced, RunStopped.exit_code)
            return
        following, now = seeker.following, self.kernel.now
        if following is not None and following.asked is not None:
            self.advance(following)
            if now > following.asked + SEAT_PATIENCE:
                self._kill_seeker(me, "gives up", StartOver.exit_code)
            elif following.lost:
                seeker.lost_since = now if seeker.lost_since is None else seeker.lost_since
                self._look_at_members(me, seeker, lambda: self._await_fate(me, seeker))
            else:
                self._look_for_seat(me, seeker)
            return
        if following is None or following.lost or now > following.since + FOLLOW_PATIENCE:
            seeker.following = self._follow(me, seeker)
            if seeker.following is None and seeker.held is not None:
                self._look_at_members(
                    me, seeker, lambda: self.kernel.after(SEEK_INTERVAL, lambda: self._seek(me, seeker))
                )
                return
        elif self.advance(following) is not None:
            following.asked, seeker.held = now, following
            asking = signals.JoinRequested(me, seeker.incarnation, following.donors, following.newest)
            seeker.asking = asking
            assert seeker.client is not None
            seeker.client.call(lambda store: store.append(asking))
        self.kernel.after(SEEK_INTERVAL, lambda: self._seek(me, seeker))

    def _follow(self, me: GroupId, seeker: Seeker) -> Following | None:
        """Ask one or two groups for their state, and for what comes of it."""
        able = sorted(who for who, group in self.groups.items() if group.state.synced and who[0] != me)
        if not able:
            return None
        following = Following(tuple(self.rng.sample(able, min(len(able), self.rng.randint(1, 2)))), self.kernel.now)
        for donor in following.donors:
            group, who = self.groups[donor], (me, seeker.incarnation)
            self.network.send(me, donor[0], partial(group.followed_by, who, following))
        return following

    def advance(self, following: Following, limit: int | None = None) -> Outcome | None:
        """The ranks of a following group put in place what has come."""
        before = following.holds(0, float("inf"))
        outcome = following.advance(limit)
        if outcome is not None and (before is None or before.step != outcome.step):
            dice = random.Random(f"lags {self.scenario.seed} {following.donors} {following.since} {outcome.step}")
            following.hold(outcome, self.kernel.now, [0.0, *(dice.uniform(0.0, LONGEST_LAG) for _ in range(RANKS - 1))])
        return outcome

    def _look_at_members(self, me: GroupId, seeker: Seeker, otherwise: Callable[[], None]) -> None:
        """A joining group whose donors are lost looks whether any member is left, and saves what it holds if none is."""

        def read(store: Store) -> list[Any]:
            views = [value for key, value in store.values.items() if key[0] == "view"]
            return [max(views, key=lambda view: view.epoch, default=None), list(store.notices)]

        def answer(found: list[Any]) -> None:
            view, notices = found
            if seeker.gone:
                return
            held = seeker.held
            if view is None or held is None:
                otherwise()
                return
            members = Seats(view)
            for verdict in map(signals.classify, notices):
                if isinstance(verdict, GroupFailed):
                    members = members.without(verdict.group, verdict.incarnation)
            fate = last_state.fate(members, me, held.donors)
            if fate == "lost":
                self._save_last(me, seeker.incarnation, held, view.epoch)
                self._kill_seeker(me, "has saved the last state", WipedOut.exit_code)
            elif fate == "goes on" and seeker.lost_since is not None:
                self._kill_seeker(me, "gives up", StartOver.exit_code)
            else:
                otherwise()

        assert seeker.client is not None
        seeker.client.call(read).then(answer)

    def _await_fate(self, me: GroupId, seeker: Seeker) -> None:
        """The notices may be on their way, and so may the view with its seat."""
        assert seeker.lost_since is not None
        if self.kernel.now > seeker.lost_since + FATE_PATIENCE:
            self._kill_seeker(me, "gives up", StartOver.exit_code)
        else:
            self._look_for_seat(me, seeker)

    def _save_last(self, me: GroupId, incarnation: int, following: Following, epoch: int) -> None:
        """The ranks of a group on its way back write what each holds, and the group publishes it if it is one state."""
        dice, now = random.Random(f"last {self.scenario.seed} {me}.{incarnation}"), self.kernel.now
        held = {rank: following.holds(rank, now) for rank in range(RANKS) if dice.random() >= RANK_DIES}
        newest = following.holds(0, now)
        if newest is None or not newest.step:
            return
        parts = [last_state.Part(rank, None if one is None else one.step) for rank, one in held.items()]
        who: dict[str, Any] = {"group": me, "incarnation": incarnation, "epoch": epoch}
        who |= {"attempt": f"f{me}.{incarnation}", "step": newest.step}
        why = last_state.refusal(parts, RANKS, newest.step)
        if why:
            self.record("unsaved", **who, why=why)
            return
        for rank, one in held.items():
            step, params = (one.step, one.params) if one is not None else (None, "none")
            self.record("part", **{**who, "step": step}, part=0, parts=1, rank=rank, params=params)
        self.record("kept", **who, ranks=RANKS)
        self.kept.append(newest)

    def _look_for_seat(self, me: GroupId, seeker: Seeker) -> None:
        def find(store: Store) -> View | bool:
            views = (value for key, value in store.values.items() if key[0] == "view")
            seats = (v for v in views if me in v.joined and v.incarnations[me] == seeker.incarnation)
            return next(seats, False)

        def answer(view: View | bool) -> None:
            if seeker.gone:
                return
            if isinstance(view, View):
                del self.seekers[me]
                seeker.gone = self.hosts is not None  # its client has ended with it
                like = seeker.client if isinstance(seeker.client, Client) else None
                self._enter(me, view, seeker.following, like)
                for message in seeker.inbox:
                    if (me, seeker.incarnation) in self.groups:  # any of them may be its last
                        self.groups[me, seeker.incarnation].receive(*message)
            else:
                self.kernel.after(SEEK_INTERVAL, lambda: self._seek(me, seeker))

        assert seeker.client is not None
        seeker.client.call(find).then(answer)

    def _kill_seeker(self, me: GroupId, how: str, code: int | None = None) -> None:
        seeker = self.seekers.pop(me)
        seeker.gone = True
        self.record("dead", group=me, incarnation=seeker.incarnation)
        self._tell_end(me, seeker.incarnation, f"{how} before it had a seat", code)
        self.look_for_end()

    # --- faults -------------------------------------------------------------------------------------------------------

    def _strike(self, fault: Fault) -> None:
        self.record("fault", what=str(fault))
        until = self.kernel.now + fault.lasts
        everybody = [STORE, *range(self.job.shards + 3)]
        store = self.store if self.hosts is None else self.hosts.newest
        group = self.newest(fault.targets[0]) if fault.targets else None
        match fault.kind, fault.targets:
            case (("kill" | "vanish"), (me,)):
                self._kill(me, noticed=fault.kind == "kill")
            case "start", (me,) if self.hosts is not None and self.scenario.rejoins:
                self.hosts.boot(me)  # an agent starts its group by itself
            case "start", (me,):
                self._start(me)
            case "freeze", (me,) if group is not None:
                group.freeze(until)
            case "hangs", (me,) if group is not None:
                group.hang(until)
            case "accuse", (me,) if group is not None:
                self._accuse(group)
            case "break", (me,) if group is not None:
                group.reset(group.state.view.epoch)
            case kind, (me,) if kind in ON_DEVICE and group is not None and group.device is not None:
                group.device.dooms.add(kind)
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
                store.die(fault.lasts)
            case "store freezes", ():
                store.freeze(fault.lasts)
            case _ if self.hosts is not None:
                self._strike_host(self.hosts, fault)

    def _strike_host(self, hosts: Hosts, fault: Fault) -> None:
        """Faults of a world with fail-over; without a target, of the host of the newest claim."""
        until = self.kernel.now + fault.lasts
        target = fault.targets[0] if fault.targets else hosts.disk.log[-1].host
        match fault.kind:
            case "host dies":
                self._kill(target, noticed=False)
            case "successor dies":
                hosts.doomed = True
            case "host freezes":
                hosts.freeze(target, fault.lasts)
                for seat in self.seats_on(target):
                    self.groups[seat].freeze(until)
                if target in self.seekers:
                    self.seekers[target].frozen_until = until
            case "host isolated" | "split":
                side = fault.targets or [target]
                others = [other for other in {*hosts.agents, *self.scenario.hosts} if other not in side]
                self.network.cut(side, others, until)
                self.network.cut(others, side, until)
            case "disk away":
                hosts.disk.away(fault.targets, until)
            case "disk away from all":
                hosts.disk.away({*hosts.agents, *self.scenario.hosts}, until)
            case "disk slow":
                hosts.disk.slow(fault.targets, until)
            case "claims race":
                for host in fault.targets:
                    if hosts.runs(host):
                        agent = hosts.agents[host]
                        Thread(agent.succession.take_over(agent.claims[-1])).start()
            case "agent stops" if target in hosts.agents:
                hosts.agents[target].stop(until)

    def _accuse(self, group: Group) -> None:
        """All groups are told that it is dead; it is not."""
        if self.hosts is None:
            self._tell_end(group.me, group.incarnation, "taken for dead")
        elif group.me in self.hosts.agents:
            said = signals.RankUnresponsive(group.me, 0, 0, f"host{group.me}", "is taken for dead", group.incarnation)
            self.hosts.agents[group.me].announce(said)


def _job(scenario: Scenario, first: int = 0) -> Job:
    groups, copies = scenario.groups, scenario.redundancy or 1
    placement = replication.consecutive(groups, min(copies, groups)) if scenario.redundancy else None
    if scenario.policy == policies.REPLICATION:
        placement = replication.sets(groups, copies)
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
        policy=policies.policy(scenario.policy, copies=copies, slack=scenario.slack),
        verify=scenario.verify,
        digests=verification.slots(scenario.verify, scenario.groups),
        first=first,
    )


def _able(job: Job) -> list[list[GroupId]] | str | None:
    """Return the groups that can compute each shard (``invariants.wiped_out``)."""
    if not job.policy.wipes_out:
        return None
    return "everybody" if job.placement is None else [list(hosts) for hosts in job.placement.hosts]
