"""The hosts of one run: how its agents find each other, and what each agent knows of the others.

Host 0 has the control store (``.store_keeper``) until another host takes it over (``.store_takeover``), unless the
store is an etcd of the user's. Every other agent reads the run's id there, compares the settings, and writes its own
address and groups. No rank is started before all hosts are there.

Hosts may come later (``host.join``); their numbers follow those of the first hosts. Such a host announces to all
agents its host record and its ranks (``core.protocol.signals.HostAssigned``); a rank moves from one host to another in the
same way.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ft.config.schema import AUTO, RunConfig
from megatron_ft.config.store_address import EtcdAddress, is_etcd
from megatron_ft.core.detection.heartbeats import Change
from megatron_ft.core.detection.link_detector import are_partners
from megatron_ft.core.lifecycle import spare_policy
from megatron_ft.core.lifecycle.checkpoint_policy import partner
from megatron_ft.core.lifecycle.store_failover import Claim, fenced
from megatron_ft.core.protocol import signals
from megatron_ft.errors import LaunchError, StoreError
from megatron_ft.host.heartbeat import HeartbeatService
from megatron_ft.host.operator_requests import STORE_KEY
from megatron_ft.host.store_keeper import StoreSupervisor
from megatron_ft.run import store
from megatron_ft.run.store.run_store import ControlStore
from megatron_ft.types import GroupId, given, host_name
from megatron_ft.utils import net, shared_file, wait_notice
from megatron_ft.utils.auth import secret as secrets
from megatron_ft.utils.auth.secret import Key, Secret
from megatron_ft.utils.console import say
from megatron_ft.utils.net import local_address, own_address

if TYPE_CHECKING:
    from megatron_ft.host.node_agent import LaunchOptions

MEET_TIMEOUT_S = 300.0
_ASK_TIMEOUT_S = 2.0
"""Timeout of calls after all hosts have met: at the end no host waits longer for a store."""
_ONLY_JOB = "only"
_LOOK_S = 0.2
_NAMED = 8
"""Hosts that a line of a host that waits names at most."""
_HOSTS, _LEFT, _STORE = "hosts", "left", "store"
_SHARES = "shares"
"""Key beside a host's record when it meets the others: whether its run directory is that of host 0."""
_SHARED_S = 5.0


@dataclass(frozen=True)
class Place:
    """The place of one agent among the hosts of its run.

    Attributes:
        hosts: number of hosts that begin the run.
        rank: number of this host, from 0; that of a host that came later is not below ``hosts``.
        address: the address by which the other hosts reach this one.
        store: address of the control store; an embedded one with port 0 takes a free port.
        job: distinguishes this launch from others that use the same etcd.
        grows: other hosts may come later: host 0 listens where they reach it.
    """

    hosts: int = 1
    rank: int = 0
    address: str = "127.0.0.1"
    store: str = "127.0.0.1:0"
    job: str = _ONLY_JOB
    grows: bool = False

    @property
    def late(self) -> bool:
        return self.rank >= self.hosts

    @property
    def others(self) -> bool:
        """Return whether there are other hosts, or may be some later."""
        return self.hosts > 1 or self.late or self.grows


def place(options: LaunchOptions) -> Place:
    """Return the place that the launcher's options describe. Raises ``LaunchError`` for impossible options.

    Without a store's address, host 0 takes a port and writes that address into the run directory, beside the job; the
    others wait for it.
    """
    _refuse_impossible(options)
    setting, job, own = options.config.fault_tolerance.store, options.job_id, options.address
    if options.hosts == 1 and options.store is None and job is None:
        own = own or net.loopback()
        at = setting if is_etcd(setting) else net.joined(own, options.port)
        return Place(address=own, store=at, job=uuid.uuid4().hex, grows=options.address is not None)
    if is_etcd(setting):
        at, own = setting, own or net.address_for(EtcdAddress.parse(setting).endpoints[0][0], 0, options.target)
    elif options.store is None and job is not None and options.host_rank == 0:
        own = own or own_address(options.target)
        at = net.joined(own, options.port)
    else:
        at, host_0 = _meeting_point(options)
        own = own or net.address_for(host_0, options.host_rank, options.target)
    return Place(options.hosts, options.host_rank, own, at, job or _ONLY_JOB, grows=True)


def _refuse_impossible(options: LaunchOptions) -> None:
    """Raise ``LaunchError`` for options that contradict each other, or of which one is missing."""
    hosts, groups, per_group = options.hosts, options.config.groups, options.config.ranks_per_group
    setting = options.config.fault_tolerance.store
    if not 0 <= options.host_rank < hosts:
        raise LaunchError(
            f"--host-rank is {options.host_rank} and --hosts is {hosts}; hosts are numbered from 0 to --hosts less one"
        )
    if groups < hosts and (hosts % groups or per_group % (hosts // groups)):
        raise LaunchError(
            f"--groups is {groups}, with {per_group} ranks each, and --hosts is {hosts}; a host has whole groups, or an "
            f"equal part of one: use another number of hosts"
        )
    if is_etcd(setting) and options.store is not None:
        raise LaunchError(f"--store is {options.store} and the config says store {setting!r}; leave --store out")
    if is_etcd(setting) and options.job_id is None and hosts > 1:
        raise LaunchError(
            "--job-id is missing; with etcd and several hosts it tells this launch from earlier ones there: give all "
            "hosts the same new name, such as the job's number"
        )


def _meeting_point(options: LaunchOptions) -> tuple[str, str]:
    """Return the address of host 0's store, and host 0 in it. Without ``--store``, wait until host 0 announces it."""
    at, job = options.store, options.job_id
    if at is None and job is not None:
        line = f"host {options.host_rank} waits for host 0 to begin launch {job} in {options.run_dir}"
        with _waiting(options.config, lambda: line):
            at = announced_store(options.run_dir, job)
    if at is None or (where := net.split(at)) is None:
        raise LaunchError(
            f"--store is {at!r}; with several hosts all of them need HOST:PORT, the address of host 0 and a free port "
            f"there; or the same new --job-id, and a run directory that they share"
        )
    local_address(where[0])  # refuses a name that cannot be resolved
    return at, where[0]


def _waiting(config: RunConfig, text: Callable[[], str]) -> contextlib.AbstractContextManager[None]:
    return wait_notice.notices(text, config.fault_tolerance.detector.stall_notice_s)


def await_secret(where: Place, config: RunConfig, run_dir: Path) -> Secret:
    """Return the secret that host 0 writes into the run directory. Raises ``LaunchError`` if it writes none in time."""
    line = f"host {where.rank} waits for host 0, at {where.store}, to write the secret of the run into {run_dir}"
    with _waiting(config, lambda: line):
        return secrets.load(run_dir, MEET_TIMEOUT_S)


def announced_store(run_dir: Path, job: str) -> str:
    """Return the store address that host 0 of that launch has written. Raises ``LaunchError`` if it writes none in time."""
    deadline = time.monotonic() + MEET_TIMEOUT_S
    while True:
        try:
            said = json.loads(shared_file.read_record(run_dir / "config.json"))
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
    """Return group and position of each rank of a host. Neighbouring groups share a host, as evenly as possible; where
    there are more hosts than groups, neighbouring hosts share a group."""
    if hosts <= groups:
        own = range(rank * groups // hosts, (rank + 1) * groups // hosts)
        return tuple((group, position) for group in own for position in range(per_group))
    across = hosts // groups
    group, part = divmod(rank, across)
    share = per_group // across
    return tuple((group, position) for position in range(part * share, (part + 1) * share))


class Hosts:
    """All hosts of the run as one agent knows them, after :meth:`meet`. ``run_id``: id of the run that host 0 begins or
    a later host joins; the first hosts read it from the store. ``secret``: from the run directory or the environment."""

    def __init__(
        self,
        where: Place,
        config: RunConfig,
        least_s: float,
        run_dir: Path,
        run_id: str | None = None,
        secret: Secret | None = None,
    ) -> None:
        self.place, self._config = where, config
        self.secret = secret or secrets.here()
        self._run_dir = run_dir
        self.keeper: StoreSupervisor | None = None
        self.locator: store.Locator | None = None
        self.succeeds = False
        """True if another host takes over the embedded store if its host is lost; known after :meth:`meet`."""
        if not is_etcd(where.store):
            port = int(where.store.rpartition(":")[2]) if where.rank == 0 else 0
            self.keeper = StoreSupervisor(where.address, port, run_dir, serves=where.rank == 0)
        self._boot = self._reach_store()
        if where.rank == 0:
            self.run_id = run_id or uuid.uuid4().hex[:12]
            # For the other hosts, and for hosts that come later; they compare the config with theirs.
            run = {"run_id": self.run_id, "hosts": where.hosts, "config": config.to_json(), _STORE: self.store_address}
            self._boot.set("run", run)
            address = self.store_address
        elif where.late:
            self.run_id, address = given(run_id), self.store_address
        else:
            self.run_id, address = self._join()
        if where.others and self.keeper is not None:
            self.locator = store.Locator(store.Log(run_dir, self.run_id, self.secret), address)
        self._host_records: dict[int, Mapping[str, Any]] = {}
        self._names: dict[int, str] = {where.rank: socket.gethostname()}
        sizes = (where.hosts, config.groups, config.ranks_per_group)
        self._ranks = {rank: ranks_of(rank, *sizes) for rank in range(where.hosts)}
        self._since: dict[tuple[GroupId, int], int] = {}
        self.max_ranks = len(self._ranks.setdefault(where.rank, ())) or max(map(len, self._ranks.values()))
        """The number of ranks this host can have: its number at the start; for a spare, the largest of the first hosts."""
        self.copies_port = 0
        self.heartbeats = HeartbeatService(where.address, where.rank, self.key, least_s)

    @property
    def key(self) -> Key:
        """The key from which the keys of this run's own connections are derived."""
        return self.secret.of(self.run_id)

    @property
    def ranks(self) -> tuple[tuple[GroupId, int], ...]:
        """Group and position of each rank of this host."""
        return self._ranks[self.place.rank]

    @property
    def parts(self) -> list[spare_policy.Part]:
        """The parts of groups on all hosts."""
        return [part for host, ranks in self._ranks.items() for part in spare_policy.parts_of(host, ranks)]

    @property
    def used(self) -> set[int]:
        """The numbers of the hosts that have ranks."""
        return {host for host, ranks in self._ranks.items() if ranks}

    @property
    def store_address(self) -> str:
        """The store's address for a process that connects now."""
        if self.locator is not None:
            return self.locator.text
        return self.keeper.address if self.keeper is not None and self.keeper.serves else self.place.store

    @property
    def store(self) -> store.Address:
        """The store's address for clients that follow it when it moves."""
        return self.store_address if self.locator is None else self.locator

    @property
    def serves(self) -> bool:
        """Return whether others need this host until they have left."""
        return self.place.rank == 0 if self.keeper is None else self.keeper.serves

    @property
    def speaks(self) -> bool:
        """Return whether this host records how the run has ended when host 0 is lost: it has stayed for the others, and
        all hosts before it are lost, or no other host has the store."""
        return self.serves and (self.foremost or self.succeeds)

    def replaced(self) -> bool:
        """Return whether another host has the embedded store, by the newest claim; True also when the log cannot be
        read. Then this host does not record how the run has ended: the run may go on without it."""
        if not self.succeeds:
            return False
        try:
            given(self.locator).poll()
        except store.LogAway:
            return True
        return given(self.locator).claims[-1].host != self.place.rank

    @property
    def foremost(self) -> bool:
        """Return whether all hosts before this one are lost."""
        return {rank for rank in self._ranks if rank < self.place.rank} <= self.heartbeats.silent()

    def look_after_store(self) -> None:
        """Restart a dead keeper of this host's store. Called regularly."""
        if self.keeper is not None:
            self.keeper.poll()

    def pids(self) -> set[int]:
        """Return the pids of the processes that are started and waited for here."""
        pid = None if self.keeper is None else self.keeper.pid
        return set() if pid is None else {pid}

    def _waiting(self, awaited: Callable[[], str]) -> contextlib.AbstractContextManager[None]:
        """Say during the block for which hosts this one waits, and where they are to meet."""
        me, here = self.place.rank, self.place.address
        return _waiting(
            self._config,
            lambda: (
                f"host {me} waits for {awaited()}: the control store is at {self.store_address}, this host at {here}"
            ),
        )

    def _reach_store(self) -> ControlStore:
        """Return the store where the hosts meet, once it answers. Raises ``StoreError``."""
        try:
            with self._waiting(lambda: "host 0, whose control store does not answer"):
                return self._boot_store(MEET_TIMEOUT_S)
        except StoreError as error:
            if self.place.rank == 0:
                raise
            raise StoreError(
                f"host {self.place.rank} has not reached host 0 at {self.store_address} within {MEET_TIMEOUT_S:g} s; start "
                f"the launcher there with --host-rank 0, and check that this is its address for the other hosts ({error})"
            ) from None

    def _boot_store(self, timeout_s: float) -> ControlStore:
        """Return a store for the agreements of a launch whose run has no id yet."""
        return ControlStore(self.store, f"boot-{self.place.job}", timeout_s, secret=self.secret)

    def name(self, rank: int | None = None) -> str:
        """Return the name of a host (default: this one) as the record has it, for programs."""
        return self._names[self.place.rank if rank is None else rank]

    def said(self, rank: int) -> str:
        """Return the name of a host for messages: ``host 1 (n3)``."""
        return host_name(self._names[rank], rank if self.several else None)

    @property
    def who(self) -> dict[str, Any]:
        """The fields that name this host in lines of the record; see :func:`megatron_ft.types.host_name`."""
        return {"host": self.name(), "host_rank": self.place.rank if self.several else None}

    @property
    def several(self) -> bool:
        """Return whether the run has other hosts."""
        return self.place.hosts > 1 or len(self._host_records) > 1 or self.succeeds

    def _join(self) -> tuple[str, str]:
        """Return the run's id, and the address at which host 0 itself reaches the store: ``--store`` may have its name,
        which is another address there. Raises ``LaunchError`` when this agent was started for another run."""
        with self._waiting(lambda: "host 0 to begin a run"):
            run = self._boot.wait("run", MEET_TIMEOUT_S)
        if run is None:
            raise LaunchError(
                f"store {self.store_address}: host 0 has begun no run within {MEET_TIMEOUT_S:g} s; start it"
            )
        mine = {"hosts": self.place.hosts, "config": RunConfig.from_json(self._config.to_json()).to_json()}
        for name, value in mine.items():
            theirs = RunConfig.from_json(run[name]).to_json() if name == "config" else run[name]
            if value != theirs:
                raise LaunchError(
                    f"host {self.place.rank} has {name} {value}, host 0 has {theirs}; give the same options and config on "
                    f"all hosts"
                )
        return run["run_id"], run[_STORE]

    @property
    def partners(self) -> dict[int, Mapping[str, Any]]:
        """The host records of the first hosts that this host listens to."""
        return {rank: self._host_records[rank] for rank in self.heartbeats.known() if rank < self.place.hosts}

    @property
    def host_record(self) -> dict[str, Any]:
        """The name of this host and its agent's address, with ports for heartbeats and for copies of checkpoints (0:
        none)."""
        ports = {"port": self.heartbeats.port, "copies": self.copies_port}
        return {"name": socket.gethostname(), "address": self.place.address, **ports}

    def meet(self) -> None:
        """Wait until every host is there, then begin to listen to them."""
        if self.place.hosts == 1:
            self._prepare_succession(shared=True)  # a host that comes later has read this directory
            return
        found = self._gather({**self.host_record, _SHARES: self._shares_directory})
        self._boot = self._boot_store(_ASK_TIMEOUT_S)
        shares = [host_record.pop(_SHARES) for host_record in found.values()]
        self._know(found)
        self._prepare_succession(all(shares))

    def _gather(self, own: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
        """Return the host records of all hosts, once all have come. Raises ``LaunchError`` naming a host that is missing."""
        self._boot.add(_HOSTS, str(self.place.rank), own)
        deadline = time.monotonic() + MEET_TIMEOUT_S
        found: dict[str, Any] = {str(self.place.rank): own}

        def absent() -> list[int]:
            return [rank for rank in range(self.place.hosts) if str(rank) not in found]

        def awaited() -> str:
            return (
                f"hosts {' '.join(map(str, absent()[:_NAMED]))}"
                if self.place.rank == 0
                else "host 0 to meet all others"
            )

        with self._waiting(awaited):
            if self.place.rank == 0:  # only one host polls: there may be thousands
                found = self._boot.members(_HOSTS)
                while len(found) < self.place.hosts and time.monotonic() < deadline:
                    time.sleep(_LOOK_S)
                    self.look_after_store()
                    found = self._boot.members(_HOSTS)
                if len(found) == self.place.hosts:
                    self._boot.set(f"all {_HOSTS}", found)
            told = self._boot.wait(f"all {_HOSTS}", max(0.0, deadline - time.monotonic()) + 2 * _LOOK_S)
        if told is None:
            found = self._boot.members(_HOSTS)
            rank = absent()[0]
            raise LaunchError(
                f"host {rank} of {self.place.hosts} has not come to {self.store_address} within {MEET_TIMEOUT_S:g} s; start "
                f"the launcher there with --host-rank {rank}, and check that it reaches that address"
            )
        return {int(rank): said for rank, said in told.items()}

    @cached_property
    def _shares_directory(self) -> bool:
        """Return whether host 0's run directory is this one; it is if the secret was read there and host 0 accepts it."""
        if secrets.given() is None:
            return True
        deadline = time.monotonic() + _SHARED_S
        while True:
            with contextlib.suppress(OSError, ValueError):
                if json.loads(shared_file.read_record(self._run_dir / "config.json")).get("run_id") == self.run_id:
                    return True
            if time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_S)

    def _prepare_succession(self, shared: bool) -> None:
        """Make the run's first claim, or find that a run that this host joins keeps no claims."""
        if self.locator is None:
            return
        try:
            if shared and not self.place.late:
                self.locator.create(Claim(0, self.run_id, 0, self.locator.text, reason="the run begins"))
            elif shared:
                self.locator.poll()
        except store.LogAway as error:
            say(f"{error}; the run ends with the host of its control store")
        self.succeeds = bool(self.locator.claims)
        if not self.succeeds and self.keeper is not None and not self.keeper.serves:
            self.keeper.close()
            self.keeper = None

    def greet(self, host_records: Mapping[int, Mapping[str, Any]]) -> None:
        """Listen to the first hosts, whose host records are given, as a host that comes later."""
        self._boot = self._boot_store(_ASK_TIMEOUT_S)
        self._know({**host_records, self.place.rank: self.host_record})
        self._prepare_succession(shared=True)

    def on_signal(self, housed: signals.HostAssigned) -> list[signals.HostSilent]:
        """Take in a later host's record and ranks. Return the corrections of :meth:`move`."""
        host_record = {name: getattr(housed, name) for name in ("name", "address", "port", "copies")}
        self._know({housed.host: host_record})
        return self.move(housed.host, housed.ranks, housed.incarnation)

    def move(self, host: int, ranks: Collection[tuple[GroupId, int]], incarnation: int) -> list[signals.HostSilent]:
        """Note that ``host`` alone runs these ranks from start ``incarnation`` of their group on. Older news changes
        nothing: after the store has forgotten, all agents repeat their signals, in any order.

        Return signals that correct earlier ones of this host: its own groups, and those of hosts that it does not hear,
        may have changed.
        """
        silences = self.heartbeats.silences()
        said = [self.signal(replace(change, heard=True)) for change in silences]
        moved = {rank for rank in ranks if self._since.get(rank, -1) < incarnation}
        self._since.update(dict.fromkeys(moved, incarnation))
        # Replaced, not changed: another thread may be reading it.
        left = {other: tuple(rank for rank in own if rank not in moved) for other, own in self._ranks.items()}
        self._ranks = {**left, host: (*left.get(host, ()), *sorted(moved))}
        say = [self.signal(change) for change in silences]
        pairs = [(a, b) for a, b in zip(said, say, strict=True) if (a.units, a.since) != (b.units, b.since)]
        return [signal for pair in pairs for signal in pair]

    @property
    def copies(self) -> tuple[tuple[str, int], ...]:
        """Addresses of the agents that provide copies of checkpoints: this one's first, silent hosts last."""
        silent, me = self.heartbeats.silent(), self.place.rank
        known = {me: self.host_record, **self._host_records}
        order = sorted(known, key=lambda rank: (rank in silent, rank != me, rank))
        return tuple((known[rank]["address"], known[rank]["copies"]) for rank in order if known[rank]["copies"])

    def copies_partner(self) -> tuple[str, int] | None:
        """Return the address of the agent to which this host passes its copies on."""
        domains = self._config.fault_tolerance.failure_domains
        named = domains if domains != AUTO else ()
        silent = self.heartbeats.silent()
        there = {
            rank: host_record
            for rank, host_record in self._host_records.items()
            if host_record["copies"] and rank not in silent
        }
        places = {rank: {named[group] for group in self.groups(rank) if group < len(named)} for rank in there}
        other = partner(self.place.rank, places)
        return None if other is None else (there[other]["address"], there[other]["copies"])

    def _know(self, host_records: Mapping[int, Mapping[str, Any]]) -> None:
        self._host_records = {**self._host_records, self.place.rank: self.host_record, **host_records}
        self._names = net.distinct_names(self._host_records)
        partners = [rank for rank in host_records if are_partners(rank, self.place.rank, self.place.hosts)]
        self.heartbeats.add({rank: (host_records[rank]["address"], host_records[rank]["port"]) for rank in partners})

    def signal(self, change: Change, incarnation: int = 0) -> signals.HostSilent:
        """Return a change of the heartbeats as a signal. ``incarnation``: of a group of which this host has a part."""
        mine, other = self.place.rank, change.rank
        named = self.groups(mine) | self.groups(other)
        since: dict[GroupId, int] = {}
        for (group, _), start in self._since.items():
            if group in named:
                since[group] = max(start, since.get(group, 0))
        return signals.HostSilent(
            by=self._names[mine],
            about=self._names[other],
            groups_by=tuple(sorted(self.groups(mine))),
            groups_about=tuple(sorted(self.groups(other))),
            silent_s=change.silent_s,
            heard=change.heard,
            incarnation=incarnation,
            since=tuple(sorted(since.items())),
            hosts=(mine, other),
        )

    def shared(self) -> set[GroupId]:
        """Return the groups of this host that have ranks on other hosts, too."""
        others = (self.groups(rank) for rank in self._ranks if rank != self.place.rank)
        return self.groups(self.place.rank) & set().union(*others)

    def unheard(self) -> set[GroupId]:
        """Return the groups with ranks on a host that is silent now."""
        return set().union(*map(self.groups, self.heartbeats.silent()))

    @property
    def store_said(self) -> str:
        """A sentence about the control store's place, and about which losses it survives."""
        if is_etcd(self.place.store):  # a host that never has the embedded one has no keeper either
            own = "any host of the run may be lost, and what that etcd can lose itself"
            return f"control store: {self.store_address}; {own}"
        claims = self.locator.claims if self.locator is not None else ()
        here = f"control store: embedded, on {self.said(claims[-1].host if claims else 0)} at {self.store_address}"
        if self.succeeds:
            return f"{here}; any host may be lost: another one takes the store over"
        why = "the hosts share no run directory for the claims: share --run-dir"
        if self.place.hosts == 1:
            why = "it was begun on one host without --address and keeps no claims: begin it with --address"
        return f"{here}; when that host is lost the run ends, because {why}"

    def is_fenced(self, group: GroupId, incarnation: int) -> bool:
        """Return whether a claim leaves that start of a group out of the run."""
        return self.succeeds and (group, incarnation) in fenced(given(self.locator).claims)

    def housing(self, groups: Collection[GroupId]) -> frozenset[int]:
        """Return the hosts that have a rank of one of these groups."""
        return frozenset(rank for rank in self._ranks if self.groups(rank) & set(groups))

    def groups(self, rank: int) -> set[GroupId]:
        """Return the groups that have a rank on that host."""
        return {group for group, _ in self._ranks.get(rank, ())}

    def leave(self, run_store: ControlStore) -> None:
        """End this host's part in the run, and the store if it is here.

        In an etcd that outlives the run, the last host to leave deletes the run's keys. Silent hosts do not count; a
        host that was only cut off finds no keys then, and the run is over for it, too.
        """
        others = {str(rank) for rank in self._ranks.keys() - {self.place.rank} - self.heartbeats.silent()}
        many = self.heartbeats.known()
        self.heartbeats.close()
        try:
            if many:
                self._boot.add(_LEFT, str(self.place.rank), True)
            if self.keeper is None:
                run_store.add(_LEFT, str(self.place.rank), True)
                if others <= run_store.members(_LEFT).keys():
                    run_store.forget()
        except StoreError:
            pass  # the store's host has left first
        finally:
            if self.keeper is not None:
                self.keeper.close()

    def all_left(self) -> bool:
        """Return whether every other host has left; asked by the host of the store. A store that is away tells nothing."""
        others = {str(rank) for rank in self._ranks.keys() - {self.place.rank}}
        try:
            return others <= self._boot.members(_LEFT).keys()
        except StoreError:
            return False
