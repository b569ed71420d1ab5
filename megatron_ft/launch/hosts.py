"""The hosts of one run: how its agents find each other, and what each knows of the others.

Host 0 has the control store (``.keeper``), unless it is etcd. Every other agent reads there which run it is, compares the
settings, and leaves its own address and groups. Nobody starts a rank before all are there.
"""

from __future__ import annotations

import socket
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from megatron_ft.config import ETCD, RunConfig
from megatron_ft.core import detector
from megatron_ft.errors import LaunchError, StoreError
from megatron_ft.launch.heartbeat import Beats, Change
from megatron_ft.launch.keeper import Keeper
from megatron_ft.runtime import store
from megatron_ft.types import GroupId

MEET_TIMEOUT_S = 300.0
_ASK_TIMEOUT_S = 2.0
"""Once all have met: at the end nobody waits longer for a store."""
_LOOPBACK = "127.0.0.1"
_BOOT = "boot"


@dataclass(frozen=True)
class Place:
    """Where this agent stands: host ``rank`` of ``hosts``; ``address``: the one by which the other hosts reach it.

    ``store``: where the control store is, or is to be: an embedded one of port 0 takes a free port. ``job``: tells this
    launch from others that use the same etcd.
    """

    hosts: int = 1
    rank: int = 0
    address: str = _LOOPBACK
    store: str = f"{_LOOPBACK}:0"
    job: str = "only"


def place(
    hosts: int, rank: int, address: str | None, store_address: str | None, port: int, job: str | None, config: RunConfig
) -> Place:
    """From the launcher's options. Raises ``LaunchError`` for what cannot be."""
    groups, setting = config.groups, config.fault_tolerance.store
    per_group = config.ranks_per_group
    etcd = setting if setting.startswith(ETCD) else None
    if hosts < 1 or not 0 <= rank < hosts:
        raise LaunchError(f"--host-rank is {rank} and --hosts is {hosts}; hosts are numbered from 0 to --hosts less one")
    if etcd and store_address is not None:
        raise LaunchError(f"--store is {store_address} and the config says store {setting!r}; leave --store out")
    if hosts == 1:
        return Place(store=etcd or f"{_LOOPBACK}:{port}", job=uuid.uuid4().hex)
    if groups < hosts and (hosts % groups or per_group % (hosts // groups)):
        raise LaunchError(
            f"--groups is {groups}, with {per_group} ranks each, and --hosts is {hosts}; a host has whole groups, or an "
            f"equal part of one: use another number of hosts"
        )
    if etcd:
        if job is None:
            raise LaunchError(
                "--job-id is missing; with etcd and several hosts it tells this launch from earlier ones there: give all "
                "hosts the same new name, such as the job's number"
            )
        first = etcd.removeprefix(ETCD).split(",")[0].rpartition(":")[0].strip("[]")
        return Place(hosts, rank, address or _local_address(first), etcd, job)
    if store_address is None or ":" not in store_address or not store_address.rpartition(":")[2].isdigit():
        raise LaunchError(
            f"--store is {store_address!r}; with several hosts all of them need HOST:PORT, the address of host 0 and a free "
            f"port there"
        )
    found = _local_address(store_address.rpartition(":")[0].strip("[]"))  # also refuses a name that nobody knows
    return Place(hosts, rank, address or found, store_address)


def _local_address(store_host: str) -> str:
    """The address of this host on its way to the store; nothing is sent."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(store_host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return probe.getsockname()[0]
    except OSError as error:
        raise LaunchError(f"--store: there is no way to {store_host} from here ({error}); check the address") from None


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


class Hosts:
    """All hosts of the run as one agent knows them, after :meth:`meet`."""

    def __init__(self, where: Place, config: RunConfig, least_s: float, run_dir: Path, run_id: str | None = None) -> None:
        self.place, self._config, self._least_s = where, config, least_s
        self._keeper: Keeper | None = None
        self.store_address = where.store
        if where.rank == 0 and not where.store.startswith(ETCD):
            self._keeper = Keeper(where.address, int(where.store.rpartition(":")[2]), run_dir)
            self.store_address = self._keeper.address
        self._boot = self._boot_store(MEET_TIMEOUT_S)
        if where.rank == 0:
            settings = config.to_json()
            self.run_id = run_id or uuid.uuid4().hex[:12]
            self._boot.set("run", {"run_id": self.run_id, "hosts": where.hosts, "config": settings})
        else:
            self.run_id = self._join()
        self._names: dict[int, str] = {where.rank: socket.gethostname()}
        self.beats = Beats(where.address, where.rank, self.run_id, least_s)

    @property
    def ranks(self) -> tuple[tuple[GroupId, int], ...]:
        """Group and position of those that this host runs."""
        return self._ranks(self.place.rank)

    def look_after_store(self) -> None:
        """To be called now and then: if this host has the store, somebody must keep it."""
        if self._keeper is not None:
            self._keeper.look()

    def pids(self) -> set[int]:
        """Of the processes that are started and waited for here."""
        return set() if self._keeper is None else {self._keeper.pid}

    def _boot_store(self, timeout_s: float) -> store.ControlStore:
        return store.ControlStore(self.store_address, f"{_BOOT}-{self.place.job}", timeout_s)

    def name(self) -> str:
        return self._names[self.place.rank]

    def _ranks(self, rank: int) -> tuple[tuple[GroupId, int], ...]:
        return ranks_of(rank, self.place.hosts, self._config.groups, self._config.ranks_per_group)

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

    def meet(self) -> None:
        """Wait until every host is there, then begin to listen to them."""
        if self.place.hosts == 1:
            return
        mine = {"name": self.name(), "address": self.place.address, "port": self.beats.port}
        self._boot.set(f"host/{self.place.rank}", mine)
        deadline = time.monotonic() + MEET_TIMEOUT_S
        found = {}
        for rank in range(self.place.hosts):
            other = self._boot.wait(f"host/{rank}", max(0.0, deadline - time.monotonic()))
            if other is None:
                raise LaunchError(
                    f"host {rank} of {self.place.hosts} has not come within {MEET_TIMEOUT_S:g} s; start the launcher there "
                    f"with --host-rank {rank}"
                )
            found[rank] = other
        # Several namespaces or containers can have one name: then the address says more.
        names = [other["name"] for other in found.values()]
        self._names = {
            rank: other["name"] if names.count(other["name"]) == 1 else f"{other['name']}({other['address']})"
            for rank, other in found.items()
        }
        self._boot = self._boot_store(_ASK_TIMEOUT_S)
        self.beats.start({rank: (other["address"], other["port"]) for rank, other in found.items()})

    def signal(self, change: Change, incarnation: int = 0) -> detector.Silent:
        """What the beats say, for everybody; ``incarnation``: of a group that this host has a part of."""
        mine, other = self.place.rank, change.rank
        groups = (tuple(sorted(self._groups(rank))) for rank in (mine, other))
        names = (self._names[mine], self._names[other])
        return detector.Silent(*names, *groups, change.silent_s, change.heard, incarnation)

    def shared(self) -> set[GroupId]:
        """Groups of this host that have ranks on others, too."""
        others = (self._groups(rank) for rank in range(self.place.hosts) if rank != self.place.rank)
        return self._groups(self.place.rank) & set().union(*others)

    def unheard(self) -> set[GroupId]:
        """Groups with ranks on a host that is silent just now."""
        return set().union(*map(self._groups, self.beats.silent()))

    def _groups(self, rank: int) -> set[GroupId]:
        return {group for group, _ in self._ranks(rank)}

    def leave(self) -> None:
        """This host's part in the run is over, and the store's, if it is here."""
        self.beats.close()
        try:
            if self.place.hosts > 1:
                self._boot.set(f"left/{self.place.rank}", True)
        except StoreError:
            pass  # the store's host has left first
        finally:
            if self._keeper is not None:
                self._keeper.close()

    def all_left(self) -> bool:
        """Whether every other host has left (asked by the store's host). One that cannot be asked for has not."""
        others = range(1, self.place.hosts)
        try:
            return all(self._boot.get(f"left/{rank}") is not None for rank in others)
        except StoreError:
            return False
