"""Simulated hosts: an agent on each, and the control stores that they host one after the other.

Host i is that of group i; a spare host has no group. A host can die, with everything on it, freeze, or be cut off from other
hosts and not from the run directory; its agent alone can be stopped. Heartbeats are lost, late and doubled, and overtake
each other; the clock of each agent has a rate of its own.

An agent decides by the rules of a real one: which heartbeats count and which hosts are silent
(``core.detection.heartbeats``), which ranks are given up (``core.detection.rank_health``), which start follows
(``core.lifecycle.group_returns``), and who takes the store over (``core.lifecycle.store_succession``). :class:`Witness`
compares that with what the simulation knows.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from operator import methodcaller
from typing import TYPE_CHECKING, Any

from megatron_ft import codec
from megatron_ft.core.detection import rank_health
from megatron_ft.core.detection.heartbeats import Change, Listener, Said
from megatron_ft.core.detection.link_detector import AGREED, FIRST_S
from megatron_ft.core.lifecycle import group_returns, store_failover
from megatron_ft.core.lifecycle.store_failover import Claim, Seat
from megatron_ft.core.lifecycle.store_succession import PROBE_S, Here, Succession
from megatron_ft.core.protocol import machine, signals
from megatron_ft.core.protocol.membership import first_view
from megatron_ft.proof.kernel import Future, Thread
from megatron_ft.proof.network import Host
from megatron_ft.proof.simulated_disk import Disk
from megatron_ft.proof.simulated_store import Operation, Store
from megatron_ft.proof.store_client import Client, Process
from megatron_ft.types import View

if TYPE_CHECKING:
    from megatron_ft.proof.simulated_cluster import Cluster
    from megatron_ft.proof.simulated_group import Group

SECOND = 10.0
"""The units of the kernel that are a second of agents, whose rules have their times in seconds: a group agrees faster."""
TICK = 0.1 * SECOND
"""Between two looks of an agent. It sends a heartbeat at each: a real one does so twenty times a second."""
DRIFT = 0.05
"""The largest share by which the clock of an agent is too fast or too slow."""
LEAST_S, AGREED_S = 0.8, 0.8 * AGREED
"""A shorter silence of a host never counts; the second one where agents agree."""
FASTEST, SLOWEST, LATEST = 0.005 * SECOND, 0.05 * SECOND, 0.4 * SECOND
"""A heartbeat takes between the first two times; a share of them is late, or comes a second time later on, and the next one
then is not, so without a fault no silence is as long as ``AGREED_S``."""
ODD, DOUBLED_LATE = (0.0, 0.01, 0.1), 10 * SECOND
"""That share, one of these in each history, and the longest time between both."""
LIMITS = rank_health.Limits(stopped_s=0.25, hang_s=4.0, first_s=4.0)
"""For giving up a rank: no work of a simulated group takes half as long."""
PER_HOUR = 2
"""The allowed starts of a group in an hour, which no history lasts."""
RUN = "run"


class Hosts:
    """All hosts that have an agent, all stores there ever were, and the log of claims."""

    def __init__(self, cluster: Cluster, numbers: Sequence[Host]) -> None:
        self.cluster, self.kernel, self.network = cluster, cluster.kernel, cluster.network
        self.rng = random.Random(f"hosts {cluster.scenario.seed}")
        self.air = random.Random(f"heartbeats {cluster.scenario.seed}")
        self.odd = self.air.choice(ODD)
        self.boots = 0
        self.doubted: set[tuple[Host, int, Host]] = set()
        """Host, number of its heartbeat, another host that it had reason to doubt in it."""
        self.disk = Disk(self.kernel, random.Random(f"disk {cluster.scenario.seed}"), self._made)
        self.stores: dict[str, Store] = {}
        self.agents: dict[Host, Agent] = {}
        self.frozen: dict[Host, float] = {}
        self.doomed = False
        """The next host that takes the store over dies soon after."""
        first = Claim(0, RUN, 0, self.new_store(0), reason="the run starts")
        self.disk.log.append(first)
        self._made(first, [])
        for host in numbers:
            self.agents[host] = Agent(self, host, [first], birth=0)

    @property
    def newest(self) -> Store:
        """The store of the newest claim."""
        return self.stores[self.disk.log[-1].address]

    def new_store(self, host: Host) -> str:
        """A store begins to listen on that host; it is empty. Returns its address."""
        address = f"host{host}:{len(self.stores)}"
        self.stores[address] = Store(self.kernel, self.network, host, forgets=True)
        return address

    def client(self, host: Host, process: Process, like: Client | None = None) -> Client:
        """Returns the client of a process that has read as much as ``like`` has, by default as much as the host's agent."""
        like = like or self.agents[host].client
        return Client(self, host, process, like.claims, like.birth)

    def boot(self, host: Host) -> None:
        """Start an agent there, if there is none."""
        if host not in self.agents:
            self.boots += 1
            self.agents[host] = Agent(self, host, self.disk.log[:1], birth=None)

    def die(self, host: Host) -> None:
        """The host is gone, with its agent and its stores."""
        agent = self.agents.pop(host, None)
        if agent is not None:
            agent.gone = True
        for store in self.stores.values():
            if store.host == host:
                store.die(float("inf"))

    def freeze(self, host: Host, lasts: float) -> None:
        until = max(self.kernel.now + lasts, self.frozen.get(host, 0.0))
        self.frozen[host] = until
        if host in self.agents:
            self.agents[host].deaf_from = min(self.agents[host].deaf_from, self.kernel.now)
            self.agents[host].stop(until)
        for store in self.stores.values():
            if store.host == host and not store.dead:
                store.freeze(until - self.kernel.now)

    def runs(self, host: Host) -> bool:
        return host in self.agents and self.kernel.now >= self.agents[host].frozen_until

    def send_heartbeats(self, sender: Agent) -> None:
        """To every other agent. Datagrams wait in the socket of an agent that is stopped, and a frozen host gets none."""
        sender.sent += 1
        sender.witness.sends()
        said, rng = (sender.host, sender.sent, replace(sender.says, doubts=sender.listener.doubts)), self.air
        for other in self.agents.values():
            if other is sender or not self.network.open(sender.host, other.host):
                continue
            arrives, odd = self.kernel.now + rng.uniform(FASTEST, SLOWEST), rng.random() < self.odd
            if odd and sender.sent > sender.odd.get(other.host, -1) + 1:
                sender.odd[other.host] = sender.sent
                if rng.random() < 0.5:
                    arrives = self.kernel.now + rng.uniform(SLOWEST, LATEST)
                else:
                    other.arriving.append((arrives + rng.uniform(0.0, DOUBLED_LATE), *said))
            other.arriving.append((arrives, *said))

    def reaches(self, host: Host, store: Store) -> bool:
        """Returns True if the store would answer that host now."""
        both = self.network.open(host, store.host) and self.network.open(store.host, host)
        return both and not store.dead and not store.frozen

    def _made(self, claim: Claim, makers: Sequence[Seat]) -> None:
        self.cluster.record("claim", **codec.encode(claim), makers=[list(seat) for seat in makers])
        if self.doomed and not claim.fenced:
            self.doomed = False
            self.kernel.after(self.rng.uniform(0.0, 4.0), lambda: self.cluster.host_dies(claim.host))


class Agent(Process, Here):
    """One host's agent: the ports of the succession of the store and of the returns of groups."""

    def __init__(self, world: Hosts, host: Host, claims: Sequence[Claim], birth: int | None) -> None:
        self.world, self.cluster, self.host = world, world.cluster, host
        self.gone = False
        self.frozen_until = world.frozen.get(host, 0.0)
        rng = world.rng
        self._rate, self._offset = rng.uniform(1 - DRIFT, 1 + DRIFT), rng.uniform(-9e5, 9e5)
        self.keeps = {address for address, store in world.stores.items() if store.host == host and not store.dead}
        self.says, self.arriving = Said(), list[tuple[float, Host, int, Said]]()
        # A host that comes back has another number in a real run; here, its heartbeats have greater ones.
        self.sent, self.odd = 1_000_000 * world.boots, dict[Host, int]()
        self.deaf_from = float("inf")
        self.listener = Listener(LEAST_S, AGREED_S)
        self.witness = Witness(self)
        self.watched: dict[Seat, rank_health.Watched] = {}
        self.away, self._unsaid, self._heard = True, 0, 0
        self._news: list[signals.Signal] = []
        self._said: list[Any] = []
        job = self.cluster.job
        self.view = first_view(job.shards)
        here = {host: True} if birth is not None and host < job.shards else {}
        allowed, endless = PER_HOUR if self.cluster.scenario.rejoins else None, float("inf")
        rules = here, (), self.view, job.min_groups, allowed, endless, self.cluster.begun, self.now, self.is_fenced
        self.returns = group_returns.RestartManager(self, *rules)
        self.client = Client(world, host, self, claims, birth)
        self.succession = Succession(host, self.listener, self)
        if birth is None:  # what an agent that was here before has said of other hosts is over
            for other in sorted(world.agents):
                self.announce(self._silence(Change(other, 0.0, heard=True)))
            if self.cluster.scenario.rejoins and has_room(self.cluster.job, host):
                self.returns.adopt(host, True, False, self.cluster.starts.get(host, 0))
        self._listen()
        world.kernel.after(rng.uniform(0.0, TICK), lambda: self.client.awake(self._tick))
        Thread(self._succeed()).start()

    def stop(self, until: float) -> None:
        """Stopped until then; what arrives waits in the sockets."""
        self.frozen_until = max(until, self.frozen_until)

    def announce(self, signal: Any) -> None:
        """Append it to the notice log, now and wherever the store comes to be; not after it has been taken back."""
        of = getattr(signal, "units", None)
        self._said = [said for said in self._said if of is None or getattr(said, "units", None) != of]
        self._said.append(signal)
        self.witness.tells(signal)
        self._unsaid += 1
        said = self.client.call(lambda store: store.append(signal) if signal in self._said else True)
        said.then(lambda _: setattr(self, "_unsaid", self._unsaid - 1))
        self.returns.on_signal(signal)

    # --- the process of its client ------------------------------------------------------------------------------------

    def knows(self) -> list[Operation]:
        return [methodcaller("append", signal) for signal in self._said]

    def reads(self, claim: Claim) -> None: ...

    def moves(self) -> None:
        self._heard = 0

    def _listen(self) -> None:
        self.client.call(lambda store: store.news(self._heard)).then(self._hear_notices)

    def _hear_notices(self, notices: list[Any]) -> None:
        self._heard += len(notices)
        self._news += notices
        self._listen()

    # --- looking ------------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        if self.gone:
            return
        self.world.send_heartbeats(self)
        self._hear()
        self._look_at_store()
        for change in self.listener.look(self.now()):
            self.witness.changes(change)
            self.announce(self.returns.with_starts(self._silence(change)))
        self._look_at_ranks()
        self._bring_back()
        self.witness.looks()
        self.world.kernel.after(TICK, lambda: self.client.awake(self._tick))

    def _hear(self) -> None:
        now, waiting = self.world.kernel.now, self.arriving
        self.listener.listen_to(self.world.agents.keys() - self.listener.known() - {self.host})
        self.arriving = [datagram for datagram in waiting if datagram[0] > now]
        for arrived, host, count, said in sorted(waiting, key=lambda datagram: datagram[0]):
            if arrived <= now and arrived < self.deaf_from and host in self.listener.known():
                self.listener.hear(host, count, said, self.now())
                self.witness.hears(host, count)
        self.deaf_from = float("inf")

    def _look_at_store(self) -> None:
        """The client of an agent, which asks the store at intervals and gets its answers at once."""
        store = self.client.store
        self.away = not self.world.reaches(self.host, store)
        if self.away:
            return
        if store.birth != self.client.birth:  # it has nothing to ask, and would not find out
            self.client.forgotten()
        epochs = [key[1] for key in store.values if key[0] == "view"]
        if epochs:
            self.view = store.values["view", max(epochs)]

    def _silence(self, change: Change) -> signals.HostSilent:
        by, about = (groups_of(self.cluster.job, host) for host in (self.host, change.rank))
        return signals.HostSilent(str(self.host), str(change.rank), by, about, change.silent_s, change.heard)

    def _look_at_ranks(self) -> None:
        living = {seat: self.cluster.groups[seat] for seat in self.cluster.seats_on(self.host)}
        self.watched = {seat: self.watched.get(seat, rank_health.Watched()) for seat in living}
        seen = [(seat, one) for seat, one in self.watched.items() if not one.given_up]
        rank_health.look([(one, sample(living[seat])) for seat, one in seen], self.now(), LIMITS, lambda: False)
        for seat, one in seen:
            self.witness.judges(living[seat], one.given_up)
            if one.given_up:
                group, start = seat
                self.announce(signals.RankUnresponsive(group, 0, 0, f"host{self.host}", one.given_up, start))

    def _bring_back(self) -> None:
        heard, self._news = self._news, []
        self.returns.check(heard)
        unheard = {group for host in self.listener.silent() for group in groups_of(self.cluster.job, host)}
        for start in self.returns.due(unheard):
            older = [seat for seat in self.cluster.seats_on(self.host) if seat[0] == start.group]
            for seat in older:
                self.cluster.dropped(seat)
            if not older:
                self.witness.starts(start, unheard)
                self.returns.started(start)
                self.cluster.start_again(start)

    # --- what the succession of the store and the returns of groups are carried out with ------------------------------

    async def _succeed(self) -> None:
        # no limit: the history ends, and the agent is gone when its host dies
        while not self.gone:
            await self._sleep(TICK)
            await self.succession.look()

    def _sleep(self, duration: float) -> Future:
        future = Future()
        self.world.kernel.after(duration, lambda: self.client.awake(future.resolve))
        return future

    @property
    def claims(self) -> list[Claim]:
        return self.client.claims

    @property
    def serves(self) -> bool:
        return self.claims[-1].address in self.keeps

    def is_fenced(self, group: int, incarnation: int) -> bool:
        return (group, incarnation) in store_failover.fenced(self.claims)

    def now(self) -> float:
        return self._offset + self._rate * self.world.kernel.now / SECOND

    def name(self, host: Host) -> str:
        return f"host {host}"

    def seats(self) -> frozenset[Seat]:
        return frozenset(self.cluster.seats_on(self.host))

    def members(self) -> set[Seat]:
        return {*self.view.members, *self.seats()}

    def housing(self, groups: Collection[int]) -> frozenset[Host]:
        return frozenset(groups)

    def tell(self, said: Said) -> None:
        self.says = said

    async def read(self) -> bool:
        known = len(self.claims)
        await self.client.read()
        return len(self.claims) > known

    async def answers(self) -> bool:
        answer, store, send = Future(), self.client.store, self.world.network.send

        def arrive() -> None:
            if not (store.dead or store.frozen):
                send(store.host, self.host, lambda: self.client.awake(lambda: answer.resolve(True)))

        send(self.host, store.host, arrive)
        self.world.kernel.after(PROBE_S * SECOND, lambda: self.client.awake(lambda: answer.resolve(False)))
        return await answer

    def serve(self) -> str:
        address = self.world.new_store(self.host)
        self.keeps.add(address)
        return address

    async def create(self, claim: Claim) -> None:
        await self.client.create(claim, self.seats())
        await self.client.read()

    def follow(self, claim: Claim) -> None: ...

    @property
    def told(self) -> bool:
        return not self._unsaid

    def newest_view(self, known: View) -> View:
        return self.view

    def put(self, key: str, value: Any) -> bool:
        return True

    def get(self, key: str) -> Any:
        return None


def has_room(job: machine.Job, host: Host) -> bool:
    """Return whether that is the host of a group, of the first ones or of one that comes later."""
    return host < job.shards + 2


def groups_of(job: machine.Job, host: Host) -> tuple[int, ...]:
    """Return the group of a host; a spare host has none."""
    return (host,) if has_room(job, host) else ()


def sample(group: Group) -> rank_health.Sample:
    """Return what an agent sees of the process of a group."""
    state, ran = group.state, int(group.frozen_until if group.frozen else group.cluster.kernel.now)
    progress, phase = 100_000 * state.step + 1_000 * group.attempt + len(state.computed), group.phase
    return rank_health.Sample("T" if group.frozen else "S", ran, ran, progress, phase)


class Witness:
    """What the simulation knows of the hosts and ranks that an agent judges: a wrong judgement is a violation.

    Times are counted in looks, so the time in which the agent did not run is no time.
    """

    def __init__(self, agent: Agent) -> None:
        self.agent, self.look = agent, 0
        self.heard: dict[Host, tuple[int, int]] = {}
        """The look at which the newest heartbeat of a host had come, and its number."""
        self.gaps: dict[Host, int] = {}
        """The longest time between two."""
        self.since: dict[Host, int] = {}
        self.silent: set[Host] = set()
        """The hosts of which the agent has said so last."""
        self.stopped, self.stuck, self.restarts = Counter[Seat](), Counter[Seat](), 0
        self.stops: dict[Seat, float] = {}
        """When the last stop of a group ends."""

    def wrong(self, what: str) -> None:
        self.agent.cluster.record("wrong", what=f"the agent of host {self.agent.host} {what}")

    def hears(self, host: Host, count: int) -> None:
        look, newest = self.heard.get(host, (self.look, -1))
        if count > newest:
            if host not in self.silent:
                self.gaps[host] = max(self.gaps.get(host, 0), self.look - look)
            self.heard[host] = self.look, count

    def quiet_s(self, host: Host) -> float:
        last, _ = self.heard.get(host, (self.since.get(host, self.look), 0))
        return (self.look - last) * TICK / SECOND

    def changes(self, change: Change) -> None:
        quiet_s, by = self.quiet_s(change.rank), self.agent.host
        self.agent.cluster.record("silence", by=by, about=change.rank, heard=change.heard)
        said = f"host {change.rank} is {'heard again' if change.heard else 'silent'}, {quiet_s:g} s after its last heartbeat"
        least_s = AGREED_S if change.rank in self.heard else FIRST_S
        gap_s = 0.9 * (self.gaps.get(change.rank, 0) - 1) * TICK / SECOND  # agents forget it slowly
        if quiet_s if change.heard else quiet_s < least_s * (1 - DRIFT):
            self.wrong(f"says that {said}")
        elif not change.heard and quiet_s < 3 * gap_s * (1 - DRIFT):
            self.wrong(f"says that {said}; one was {gap_s:.1f} s late before")
        elif not change.heard and quiet_s < LEAST_S * (1 - DRIFT):
            self.agrees(change.rank, said)

    def agrees(self, about: Host, said: str) -> None:
        """Check that enough other hosts have said that they doubt this one, in the newest of their heartbeats here."""
        gone = self.silent | {host for host in self.heard if self.quiet_s(host) >= LEAST_S * (1 - DRIFT)}
        others = self.agent.listener.known() - gone - {about}
        fresh = {host: self.quiet_s(host) / AGREED_S for host in sorted(others & self.heard.keys())}
        doubting = [host for host in fresh if (host, self.heard[host][1], about) in self.agent.world.doubted]
        if deny := [host for host, age in fresh.items() if age < 1 - DRIFT and host not in doubting]:
            self.wrong(f"says that {said}, which the hosts {deny} do not doubt")
        if 2 * (sum(fresh[host] <= 1 + DRIFT for host in doubting) + 1) <= len(others) + 2:
            self.wrong(f"says that {said}, and of the others only the hosts {doubting} doubt that one")

    def sends(self) -> None:
        """Note which hosts the next heartbeat may doubt: those that were silent at the look before."""
        for host in self.heard:
            if self.quiet_s(host) - TICK / SECOND >= AGREED_S * (1 - DRIFT):
                self.agent.world.doubted.add((self.agent.host, self.agent.sent, host))

    def looks(self) -> None:
        """At the end of a look, when everything is said."""
        for host in self.agent.listener.known():
            self.since.setdefault(host, self.look)
            quiet_s = self.quiet_s(host)
            most_s = LEAST_S + 3 * self.gaps.get(host, 0) * TICK / SECOND
            if host in self.heard and quiet_s > most_s + 0.5 and host not in self.silent:
                self.wrong(f"does not say after {quiet_s:g} s that host {host} is silent")
            if host in self.heard and not quiet_s and host in self.silent:
                self.wrong(f"says that host {host} is silent, and hears it")
        self.look += 1

    def tells(self, signal: Any) -> None:
        if isinstance(signal, signals.HostSilent):
            (self.silent.discard if signal.heard else self.silent.add)(int(signal.about))

    def judges(self, group: Group, given_up: str) -> None:
        """Look at the process of a group, like the agent just now."""
        seat = group.me, group.incarnation
        if not group.frozen or self.stops.get(seat) != group.frozen_until:
            self.stopped[seat] = 0
        self.stops[seat] = group.frozen_until
        self.stopped[seat] += group.frozen
        self.stuck[seat] = self.stuck[seat] + (not group.frozen) if group.hung else 0
        stopped_s, stuck_s = ((looks[seat] - 1) * TICK / SECOND for looks in (self.stopped, self.stuck))
        about = f"group {group.me} (start {group.incarnation}), stopped for {stopped_s:g} s and stuck for {stuck_s:g} s"
        if given_up and stopped_s < LIMITS.stopped_s * (1 - DRIFT) and stuck_s < LIMITS.first_s * (1 - DRIFT) - 1.0:
            self.wrong(f"gives up {about}")
        stuck = group.phase == "working" and stuck_s > LIMITS.first_s + 1.0
        if not given_up and (stopped_s > LIMITS.stopped_s + 0.75 or stuck):
            self.wrong(f"does not give up {about}")

    def starts(self, start: group_returns.Start, unheard: Collection[int]) -> None:
        who = f"starts group {start.group} again"
        self.agent.cluster.record("restart", group=start.group, incarnation=start.incarnation)
        self.restarts += 1
        living = {group for group, _ in self.agent.cluster.groups}
        if needs := sorted(living.intersection(self.agent.view.live, unheard)):
            self.wrong(f"{who}, and does not hear the hosts of the groups {needs}")
        if self.restarts > PER_HOUR:
            self.wrong(f"{who}, {self.restarts} times in an hour")
