"""The hosts of one run: how its agents find each other, and what each knows of the others.

Host 0 has the control store (``.keeper``), unless it is etcd: that of the first three hosts (``.members``), or the user's.
Every other agent reads there which run it is, compares the settings, and leaves its own address and groups. Nobody starts a
rank before all are there.

Hosts may come later (``launch.join``), with numbers from the number of the first ones on. Such a host says to all agents who
it is and what it runs (``core.detector.Housed``); that is how a rank gets from one host to another, too.
"""

from __future__ import annotations

import json
import socket
import time
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_ft.config import AUTO, ETCD, OWN_ETCD, RunConfig
from megatron_ft.core import detector, spares
from megatron_ft.core.checkpoints import partner
from megatron_ft.core.links import are_partners
from megatron_ft.errors import LaunchError, StoreError
from megatron_ft.launch import addresses, etcd_binary, founding, members
from megatron_ft.launch.addresses import local_address, own_address
from megatron_ft.launch.ask import STORE_KEY
from megatron_ft.launch.heartbeat import Beats, Change
from megatron_ft.launch.keeper import Keeper
from megatron_ft.runtime import store
from megatron_ft.types import GroupId

MEET_TIMEOUT_S = 300.0
_ASK_TIMEOUT_S = 2.0
"""Once all have met: at the end nobody waits longer for a store."""
_LOOPBACK = "127.0.0.1"
_BOOT = "boot"
_ONLY_JOB = "only"
_LOOK_S = 0.2
_HOSTS, _ALL_HOSTS, _LEFT = "hosts", "all hosts", "left"
_LINGER_S = 0.5
"""So long a member of the store is there for the others after it has seen that all have left; they look that often, too."""
_NO_USE_S = 20.0


@dataclass(frozen=True)
class Place:
    """Where this agent stands: host ``rank`` of ``hosts``; ``address``: the one by which the other hosts reach it.

    ``store``: where the control store is, or is to be: an embedded one of port 0 takes a free port. ``job``: tells this
    launch from others that use the same etcd. A ``rank`` beyond ``hosts`` is that of a host that came later.
    """

    hosts: int = 1
    rank: int = 0
    address: str = _LOOPBACK
    store: str = f"{_LOOPBACK}:0"
    job: str = _ONLY_JOB

    @property
    def late(self) -> bool:
        return self.rank >= self.hosts


def place(
    hosts: int,
    rank: int,
    address: str | None,
    store_address: str | None,
    port: int,
    job: str | None,
    config: RunConfig,
    run_dir: Path,
    target: str | None = None,
) -> Place:
    """From the launcher's options. Raises ``LaunchError`` for what cannot be.

    Without ``store_address``, host 0 takes a port and writes where its store is into ``run_dir``, beside ``job``; the others
    wait for that. ``target``: an address on the hosts' network, to choose host 0's own by.
    """
    groups, setting = config.groups, config.fault_tolerance.store
    per_group = config.ranks_per_group
    etcd = setting if setting.startswith(ETCD) else None
    if hosts < 1 or not 0 <= rank < hosts:
        raise LaunchError(f"--host-rank is {rank} and --hosts is {hosts}; hosts are numbered from 0 to --hosts less one")
    if setting == OWN_ETCD:
        etcd_binary.check(hosts, rank)
    if etcd and store_address is not None:
        raise LaunchError(f"--store is {store_address} and the config says store {setting!r}; leave --store out")
    if hosts == 1 and store_address is None and job is None:
        own = address or _LOOPBACK
        return Place(address=own, store=etcd or f"{own}:{port}", job=uuid.uuid4().hex)
    if groups < hosts and (hosts % groups or per_group % (hosts // groups)):
        raise LaunchError(
            f"--groups is {groups}, with {per_group} ranks each, and --hosts is {hosts}; a host has whole groups, or an "
            f"equal part of one: use another number of hosts"
        )
    if setting == OWN_ETCD:
        where = None if store_address is None else addresses.split(store_address)
        near = where[0] if where is not None else target
        if near is None and rank and address is None:
            near = founding.first_address(run_dir, MEET_TIMEOUT_S)
        return Place(hosts, rank, address or own_address(near), OWN_ETCD, job or _ONLY_JOB)
    if etcd:
        if job is None:
            raise LaunchError(
                "--job-id is missing; with etcd and several hosts it tells this launch from earlier ones there: give all "
                "hosts the same new name, such as the job's number"
            )
        first = etcd.removeprefix(ETCD).split(",")[0].rpartition(":")[0].strip("[]")
        return Place(hosts, rank, address or local_address(first), etcd, job)
    if store_address is None and job is not None:
        if rank == 0:
            own = address or own_address(target)
            return Place(hosts, rank, own, f"{own}:{port}", job)
        store_address = announced_store(run_dir, job)
    where = None if store_address is None else addresses.split(store_address)
    if where is None:
        raise LaunchError(
            f"--store is {store_address!r}; with several hosts all of them need HOST:PORT, the address of host 0 and a free "
            f"port there; or the same new --job-id, and a run directory that they share"
        )
    found = local_address(where[0])  # also refuses a name that nobody knows
    return Place(hosts, rank, address or found, store_address, job or _ONLY_JOB)


def announced_store(run_dir: Path, job: str) -> str:
    """Where host 0 of that launch says that its control store is. Raises ``LaunchError`` if it does not say so."""
    deadline = time.monotonic() + MEET_TIMEOUT_S
    while True:
        try:
            said = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))
            if said.get("job") == job:
                return said[STORE_KEY]
            why = f"{run_dir}/config.json is that of launch {said.get('job')}"
        except (OSError, ValueError, KeyError) as error:
            why = str(error)
        if time.monotonic() > deadline:
            raise LaunchError(
                f"host 0 of launch {job} has begun no run in {run_dir} within {MEET_TIMEOUT_S:g} s ({why}); see what it "
                f"says, and whether all hosts see that directory; else give all of them --store HOST:PORT"
            )
        time.sleep(_LOOK_S)


def ranks_of(rank: int, hosts: int, groups: int, per_group: int) -> tuple[tuple[GroupId, int], ...]:
    """Group and position of each rank of a host. Neighbouring groups share a host, as evenly as possible; where there are
    more hosts than groups, neighbouring hosts share a group."""
    if hosts <= groups:
        own = range(rank * groups // hosts, (rank + 1) * groups // hosts)
        return tuple((group, position) for group in own for position in range(per_group))
    across = hosts // groups
    group, part = divmod(rank, across)
    share = per_group // across
    return tuple((group, position) for position in range(part * share, (part + 1) * share))


def boot_store(address: str, job: str, timeout_s: float) -> store.ControlStore:
    """What a launch agrees on before its run has a name."""
    return store.ControlStore(address, f"{_BOOT}-{job}", timeout_s)


class Hosts:
    """All hosts of the run as one agent knows them, after :meth:`meet`. ``run_id``: of the run that host 0 begins, or that a
    later host joins; the others ask for it."""

    def __init__(self, where: Place, config: RunConfig, least_s: float, run_dir: Path, run_id: str | None = None) -> None:
        self.place, self._config, self._least_s = where, config, least_s
        self._keeper: Keeper | None = None
        self._members: members.Members | None = None
        self._said_left = False
        self._away_since: float | None = None
        if config.fault_tolerance.store == OWN_ETCD:
            first = (where.rank, where.hosts, where.address, run_dir, MEET_TIMEOUT_S)
            self._members = members.Members(*first, store=where.store if where.late else None)
        elif where.rank == 0 and not where.store.startswith(ETCD):
            self._keeper = Keeper(where.address, int(where.store.rpartition(":")[2]), run_dir)
        self._boot = self._boot_store(MEET_TIMEOUT_S)
        if where.rank == 0:
            settings = config.to_json()
            self.run_id = run_id or uuid.uuid4().hex[:12]
            self._boot.set("run", {"run_id": self.run_id, "hosts": where.hosts, "config": settings})
        else:
            self.run_id = run_id if where.late else self._join()
        self._cards: dict[int, Mapping[str, Any]] = {}
        self._names: dict[int, str] = {where.rank: socket.gethostname()}
        sizes = (where.hosts, config.groups, config.ranks_per_group)
        self._ranks = {rank: ranks_of(rank, *sizes) for rank in range(where.hosts)}
        self._since: dict[tuple[GroupId, int], int] = {}
        self.room = len(self._ranks.setdefault(where.rank, ())) or max(map(len, self._ranks.values()))
        """How many ranks this host can have: as many as it begins with, a spare as many as any of the first ones."""
        self.copies_port = 0
        self.beats = Beats(where.address, where.rank, self.run_id, least_s)

    @property
    def ranks(self) -> tuple[tuple[GroupId, int], ...]:
        """Group and position of those that this host runs."""
        return self._ranks[self.place.rank]

    @property
    def parts(self) -> list[spares.Part]:
        """Of all hosts."""
        return [part for host, ranks in self._ranks.items() for part in spares.parts_of(host, ranks)]

    @property
    def store_address(self) -> str:
        """For who needs it now; the run's own etcd moves."""
        if self._members is not None:
            return self._members.address
        return self.place.store if self._keeper is None else self._keeper.address

    @property
    def serves(self) -> bool:
        """Whether others need this host until they have left."""
        return self.place.rank == 0 or self._members is not None and self._members.keeping

    @property
    def speaks(self) -> bool:
        """Whether this host says how the run has ended, with host 0 lost: it has stayed for the others, and all before it
        are lost."""
        before = {rank for rank in self._ranks if rank < self.place.rank}
        return self.serves and before <= self.beats.silent()

    def look_after_store(self) -> None:
        """To be called now and then: if this host has the store, or a part of it, somebody must keep it."""
        for kept in (self._keeper, self._members):
            if kept is not None:
                kept.look()

    def pids(self) -> set[int]:
        """Of the processes that are started and waited for here."""
        if self._members is not None:
            return self._members.pids()
        return set() if self._keeper is None else {self._keeper.pid}

    def _boot_store(self, timeout_s: float) -> store.ControlStore:
        return boot_store(self.store_address, self.place.job, timeout_s)

    def name(self, rank: int | None = None) -> str:
        """Of a host, this one unless another is asked for."""
        return self._names[self.place.rank if rank is None else rank]

    def _join(self) -> str:
        """Which run it is. Raises ``LaunchError`` when it is not the one this agent was started for."""
        run = self._boot.wait("run", MEET_TIMEOUT_S)
        if run is None:
            raise LaunchError(f"store {self.store_address}: host 0 has begun no run within {MEET_TIMEOUT_S:g} s; start it")
        mine = {"hosts": self.place.hosts, "config": RunConfig.from_json(self._config.to_json()).to_json()}
        for name, value in mine.items():
            theirs = RunConfig.from_json(run[name]).to_json() if name == "config" else run[name]
            if value != theirs:
                raise LaunchError(
                    f"host {self.place.rank} has {name} {value}, host 0 has {theirs}; give the same options and config on "
                    f"all hosts"
                )
        return run["run_id"]

    @property
    def card(self) -> dict[str, Any]:
        """Who this host is and where its agent is to be reached: for beats, and for checkpoints' copies (0: it has none)."""
        ports = {"port": self.beats.port, "copies": self.copies_port}
        return {"name": socket.gethostname(), "address": self.place.address, **ports}

    def meet(self) -> None:
        """Wait until every host is there, then begin to listen to them."""
        if self.place.hosts == 1:
            return
        self._boot.add(_HOSTS, str(self.place.rank), self.card)
        deadline = time.monotonic() + MEET_TIMEOUT_S
        if self.place.rank == 0:  # one asks for all: they may be thousands
            found = self._boot.members(_HOSTS)
            while len(found) < self.place.hosts and time.monotonic() < deadline:
                time.sleep(_LOOK_S)
                found = self._boot.members(_HOSTS)
            if len(found) == self.place.hosts:
                self._boot.set(_ALL_HOSTS, found)
        found = self._boot.wait(_ALL_HOSTS, max(0.0, deadline - time.monotonic()) + 2 * _LOOK_S)
        if found is None:
            here = self._boot.members(_HOSTS)
            rank = next(rank for rank in range(self.place.hosts) if str(rank) not in here)
            raise LaunchError(
                f"host {rank} of {self.place.hosts} has not come within {MEET_TIMEOUT_S:g} s; start the launcher there "
                f"with --host-rank {rank}"
            )
        self._boot = self._boot_store(_ASK_TIMEOUT_S)
        self._know({int(rank): card for rank, card in found.items()})

    def greet(self, cards: Mapping[int, Mapping[str, Any]]) -> None:
        """As a host that comes later: listen to the first ones, of which these are known."""
        self._boot = self._boot_store(_ASK_TIMEOUT_S)
        self._know({**cards, self.place.rank: self.card})

    def hear(self, housed: detector.Housed) -> list[detector.Silent]:
        """A later host says who it is and what it runs. Returns what this host has to correct: which groups those hosts have
        that it does not hear."""
        card = {name: getattr(housed, name) for name in ("name", "address", "port", "copies")}
        self._know({housed.host: card})
        silences = self.beats.silences()
        said = [self.signal(replace(change, heard=True)) for change in silences]
        self.take(housed.host, housed.ranks, housed.incarnation)
        say = [self.signal(change) for change in silences]
        pairs = [(a, b) for a, b in zip(said, say, strict=True) if (a.units, a.since) != (b.units, b.since)]
        return [signal for pair in pairs for signal in pair]

    @property
    def copies(self) -> tuple[tuple[str, int], ...]:
        """Of the agents that hand out copies of checkpoints: this one's first, those that are not heard last."""
        silent, me = self.beats.silent(), self.place.rank
        known = {me: self.card, **self._cards}
        order = sorted(known, key=lambda rank: (rank in silent, rank != me, rank))
        return tuple((known[rank]["address"], known[rank]["copies"]) for rank in order if known[rank]["copies"])

    def copies_partner(self) -> tuple[str, int] | None:
        """To whom this host passes its copies on."""
        domains = self._config.fault_tolerance.failure_domains
        named = domains if domains != AUTO else ()
        silent = self.beats.silent()
        there = {rank: card for rank, card in self._cards.items() if card["copies"] and rank not in silent}
        places = {rank: {named[group] for group in self.groups(rank) if group < len(named)} for rank in there}
        other = partner(self.place.rank, places)
        return None if other is None else (there[other]["address"], there[other]["copies"])

    def take(self, host: int, ranks: Collection[tuple[GroupId, int]], incarnation: int) -> None:
        """From that start of their group on ``host`` runs these ranks, too, and nobody else. Older news changes nothing:
        when the store has forgotten, everybody says again what it has said, in any order."""
        moved = {rank for rank in ranks if self._since.get(rank, -1) < incarnation}
        self._since.update(dict.fromkeys(moved, incarnation))
        # Replaced, not changed: another thread may be looking.
        left = {other: tuple(rank for rank in own if rank not in moved) for other, own in self._ranks.items()}
        self._ranks = {**left, host: (*left.get(host, ()), *sorted(moved))}

    def _know(self, cards: Mapping[int, Mapping[str, Any]]) -> None:
        self._cards = {**self._cards, self.place.rank: self.card, **cards}
        # Several namespaces or containers can have one name: then the address says more.
        names = [card["name"] for card in self._cards.values()]
        self._names = {
            rank: card["name"] if names.count(card["name"]) == 1 else f"{card['name']}({card['address']})"
            for rank, card in self._cards.items()
        }
        partners = [rank for rank in cards if are_partners(rank, self.place.rank, self.place.hosts)]
        self.beats.add({rank: (cards[rank]["address"], cards[rank]["port"]) for rank in partners})
        if self._members is not None:
            self._members.watch(
                lambda: {change.rank: change.silent_s for change in self.beats.silences()},
                lambda: {rank: card["address"] for rank, card in self._cards.items()},
            )

    def signal(self, change: Change, incarnation: int = 0) -> detector.Silent:
        """What the beats say, for everybody; ``incarnation``: of a group that this host has a part of."""
        mine, other = self.place.rank, change.rank
        groups = (tuple(sorted(self.groups(rank))) for rank in (mine, other))
        names = (self._names[mine], self._names[other])
        named = self.groups(mine) | self.groups(other)
        since: dict[GroupId, int] = {}
        for (group, _), start in self._since.items():
            if group in named:
                since[group] = max(start, since.get(group, 0))
        return detector.Silent(*names, *groups, change.silent_s, change.heard, incarnation, tuple(sorted(since.items())))

    def shared(self) -> set[GroupId]:
        """Groups of this host that have ranks on others, too."""
        others = (self.groups(rank) for rank in self._ranks if rank != self.place.rank)
        return self.groups(self.place.rank) & set().union(*others)

    def unheard(self) -> set[GroupId]:
        """Groups with ranks on a host that is silent just now."""
        return set().union(*map(self.groups, self.beats.silent()))

    def groups(self, rank: int) -> set[GroupId]:
        """Those that have a rank on that host."""
        return {group for group, _ in self._ranks.get(rank, ())}

    def leave(self) -> None:
        """This host's part in the run is over, and the store's, if it is here."""
        self.beats.close()
        try:
            if self.beats.begun and not self._said_left:
                self._boot.add(_LEFT, str(self.place.rank), True)
        except StoreError:
            pass  # the store's host has left first
        finally:
            if self._said_left:
                time.sleep(_LINGER_S)
            for kept in (self._keeper, self._members):
                if kept is not None:
                    kept.close()

    def all_left(self) -> bool:
        """Whether every other host has left (asked by who keeps the store). One that cannot be asked for has not.

        Who keeps a part of it leaves with those that keep the others: each says so first, and waits for none that is lost.
        """
        others = self._ranks.keys() - {self.place.rank}
        try:
            if self._members is not None:
                others -= self.beats.silent()
                if not self._said_left:
                    self._boot.add(_LEFT, str(self.place.rank), True)
                    self._said_left = True
            left = {str(rank) for rank in others} <= self._boot.members(_LEFT).keys()
            self._away_since = None
            return left
        except StoreError:
            self._away_since = self._away_since or time.monotonic()
            # A part of a store that has no majority is of no use to anybody; who has another part thinks so, too.
            return self._members is not None and time.monotonic() - self._away_since > _NO_USE_S
