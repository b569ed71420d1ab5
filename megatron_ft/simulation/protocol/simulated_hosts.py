"""Simulated hosts: an agent on each, and the control stores that they host one after the other
(``core.lifecycle.store_failover``).

Host i is that of group i; a spare host has no group. A host can die, with everything on it, freeze, or be cut off from other
hosts and not from the run directory. An agent looks up which hosts it hears, instead of being sent their beats.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from operator import methodcaller
from typing import TYPE_CHECKING, Any

from megatron_ft import codec
from megatron_ft.core.lifecycle import store_failover
from megatron_ft.core.lifecycle.store_failover import Claim, Outlook, Seat
from megatron_ft.core.protocol import signals
from megatron_ft.simulation.protocol.network import Host
from megatron_ft.simulation.protocol.simulated_disk import Disk
from megatron_ft.simulation.protocol.simulated_store import Operation, Store
from megatron_ft.simulation.protocol.store_client import Client, Process

if TYPE_CHECKING:
    from megatron_ft.simulation.protocol.simulated_cluster import Cluster

TICK = 1.0
SILENCE = 3.0
"""A host that is silent for this long is taken for lost, as is a store that does not answer for this long."""
RUN = "run"


class Hosts:
    """All hosts that have an agent, all stores there ever were, and the log of claims."""

    def __init__(self, cluster: Cluster, numbers: Sequence[Host]) -> None:
        self.cluster, self.kernel, self.network = cluster, cluster.kernel, cluster.network
        self.rng = random.Random(f"hosts {cluster.scenario.seed}")
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
            self.agents[host].frozen_until = until
        for store in self.stores.values():
            if store.host == host and not store.dead:
                store.freeze(until - self.kernel.now)

    def runs(self, host: Host) -> bool:
        return host in self.agents and self.kernel.now >= self.frozen.get(host, 0.0)

    def reaches(self, host: Host, store: Store) -> bool:
        """Returns True if the store would answer that host now."""
        both = self.network.open(host, store.host) and self.network.open(store.host, host)
        return both and not store.dead and not store.frozen

    def _made(self, claim: Claim, makers: Sequence[Seat]) -> None:
        self.cluster.record("claim", **codec.encode(claim), makers=[list(seat) for seat in makers])
        if self.doomed and not claim.fenced:
            self.doomed = False
            self.kernel.after(self.rng.uniform(0.0, 4.0), lambda: self.cluster.host_dies(claim.host))


class Agent(Process):
    """One host's agent: says which processes have ended and which hosts are silent, and takes the store over."""

    def __init__(self, world: Hosts, host: Host, claims: Sequence[Claim], birth: int | None) -> None:
        self.world, self.host = world, host
        self.gone = False
        self.frozen_until = world.frozen.get(host, 0.0)
        now = world.kernel.now
        self.looked = self.answered = now
        self.lost_since: float | None = None
        self.claiming = False
        self.keeps = {address for address, store in world.stores.items() if store.host == host and not store.dead}
        self.heard: dict[Host, float] = dict.fromkeys(world.agents, now)
        self.flags: dict[Host, tuple[Host, bool]] = {}
        self.missed: set[Host] = set()
        self.members: frozenset[Host] = frozenset()
        self.seated: frozenset[Seat] = frozenset((group, 0) for group in range(world.cluster.job.shards))
        self._said: list[Any] = []
        self.client = Client(world, host, self, claims, birth)
        if birth is None:  # what an agent that was here before has said of other hosts is over
            for other in sorted(world.agents):
                self.say(self._silent(other, 0.0, heard=True))
        world.kernel.after(world.rng.uniform(0.0, TICK), self._tick)

    def say(self, signal: Any) -> None:
        """Append it to the notice log, now and wherever the store comes to be; not after it has been taken back."""
        of = getattr(signal, "units", None)
        self._said = [said for said in self._said if of is None or getattr(said, "units", None) != of]
        self._said.append(signal)
        self.client.call(lambda store: store.append(signal) if signal in self._said else True)

    # --- the process of its client ------------------------------------------------------------------------------------

    def knows(self) -> list[Operation]:
        return [methodcaller("append", signal) for signal in self._said]

    def reads(self, claim: Claim) -> None:
        self.lost_since = None
        self.answered = self.world.kernel.now  # a store that has just been made is given the same time

    # --- looking ------------------------------------------------------------------------------------------------------

    @property
    def seats(self) -> frozenset[Seat]:
        """The seats of the groups' processes on this host."""
        return frozenset(self.world.cluster.seats_on(self.host))

    def _tick(self) -> None:
        if self.gone:
            return
        now, world = self.world.kernel.now, self.world
        if now - self.looked > SILENCE / 2:  # it did not run itself, and has not heard silence
            self.heard = dict.fromkeys(self.heard, now)
            self.answered = now
            self.lost_since = None
        self.looked = now
        store = self.client.store
        if world.reaches(self.host, store):
            self.answered = now
            if store.birth != self.client.birth:  # it has nothing to ask, and would not find out
                self.client.forgotten()
            epochs = [key[1] for key in store.values if key[0] == "view"]
            if epochs:
                view = store.values["view", max(epochs)]
                self.members, self.seated = frozenset(view.live), frozenset(view.members)
        for host, other in world.agents.items():
            if host != self.host and world.runs(host) and world.network.open(host, self.host):
                self.heard[host] = now
                self.flags[host] = other.client.store.host, other.reaching
        self._say_silences(now)
        self._may_take_over(now)
        world.kernel.after(TICK, lambda: self.client.awake(self._tick))

    @property
    def hearing(self) -> frozenset[Host]:
        heard = (host for host, when in self.heard.items() if self.world.kernel.now - when <= SILENCE)
        return frozenset(heard) | {self.host}

    @property
    def reaching(self) -> bool:
        """The content of the agent's heartbeats: the store answers it, or it hears the store's host."""
        return self.answers or self.client.store.host in self.hearing

    @property
    def answers(self) -> bool:
        return self.world.kernel.now - self.answered <= SILENCE

    def _say_silences(self, now: float) -> None:
        hearing = self.hearing
        silent = {host for host in self.heard if host in self.members and host not in hearing}
        if self.host in self.members:
            for host in sorted(silent - self.missed):
                self.say(self._silent(host, now - self.heard[host]))
        for host in sorted(self.missed & hearing):
            self.say(self._silent(host, 0.0, heard=True))
        self.missed = (self.missed | silent if self.host in self.members else self.missed) - hearing

    def _silent(self, about: Host, silent_s: float, heard: bool = False) -> signals.HostSilent:
        return signals.HostSilent(str(self.host), str(about), (self.host,), (about,), silent_s, heard)

    # --- fail-over ----------------------------------------------------------------------------------------------------

    def outlook(self) -> Outlook:
        claims, heard = self.client.claims, self.hearing
        store = claims[-1].host
        reaching = frozenset(h for h in heard if self.flags.get(h) == (store, True))
        hosts = store_failover.unfenced(self.seated | self.seats, claims)
        out, keeps = store_failover.fenced(claims), claims[-1].address in self.keeps
        return Outlook(self.host, hosts, heard, reaching, store, self.answers, self.seats, out, keeps)

    def _may_take_over(self, now: float) -> None:
        due = None if self.answers else store_failover.due_s(self.outlook())
        if due is None:
            self.lost_since = None
            return
        self.lost_since = now if self.lost_since is None else self.lost_since
        if now - self.lost_since >= due:
            self.take_over(f"host {self.client.claims[-1].host} is silent")

    def take_over(self, reason: str) -> None:
        """Claim the store for this host, unless that is going on."""
        claims = self.client.claims
        if self.claiming or not store_failover.may_claim(self.seats, claims):
            return
        address = self.world.new_store(self.host)
        self.keeps.add(address)
        claim = store_failover.taken_over(claims[-1], self.host, address, reason)
        self.claiming = True
        self.client.create(claim, self.seats).then(lambda made: self.client.read().then(self._claimed))

    def _claimed(self, _: Any) -> None:
        self.claiming = False
