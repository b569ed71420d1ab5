"""The run's own etcd, as one agent keeps it up: a member on each of the first hosts, others in place of lost ones.

``core.lifecycle.etcd_membership`` decides what is to change, ``agent.etcd.founding`` brings the first members together,
``agent.etcd.member_keeper`` keeps this host's member running. A thread asks for changes, since a store without a majority
may be silent for long; only the agent's main thread starts processes, because they end with the thread that started them.

Failures it assumes: members and keepers die at any time; a host is lost, or seems so and comes back; the store is away. As
long as a majority of the members lives nothing is lost. When it is gone the run stops at its next loss, as without a store.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_ft.agent import operator_requests, process_keeper
from megatron_ft.agent.etcd import binary, founding, member_keeper
from megatron_ft.agent.etcd import tls as etcd_tls
from megatron_ft.config.store_address import EtcdAddress
from megatron_ft.coordination.store.etcd_access import Access
from megatron_ft.coordination.store.etcd_http import Endpoints, Gateway
from megatron_ft.core.lifecycle import etcd_membership
from megatron_ft.errors import LaunchError, StoreError
from megatron_ft.runlog import history, run_directory
from megatron_ft.types import given, host_name
from megatron_ft.utils import net
from megatron_ft.utils.console import say
from megatron_ft.utils.vital_thread import described

FIRST = tuple(range(etcd_membership.SIZE))
"""The hosts of the first members, where no others have been chosen."""
_LOOK_S, _NEXT_S, _SETTLED_S = 1.0, 0.2, 10.0
"""Seconds to the next look for silent hosts: usually; after a change; while nothing can be done about a silent host."""
_AGAIN_S = 30.0
"""A host whose members do not last waits this long before it has the next one, longer each time."""
_ASK_S, _OWN_S = 5.0, 1.0
_END_S = 5.0


class _Own:
    """This host's member: its ports, its directory, its keeper."""

    def __init__(self, rank: int, number: int, address: str, run_dir: Path) -> None:
        self.name = f"h{rank}.{number}" if number else f"h{rank}"
        self._run_dir = run_dir
        self._program, self._version = binary.find()
        # Bound and not listening: etcd may listen there repeatedly, and no other process gets the port.
        self._held = [_hold(address) for _ in range(2)]
        numeric = self._held[0].getsockname()[0]
        self.client, self.peer = (net.joined(numeric, held.getsockname()[1]) for held in self._held)
        self.directory = Path(tempfile.mkdtemp(prefix=f"megatron_ft.etcd.{rank}."))
        self._entry = run_dir / run_directory.ETCD / f"{self.name}.member"
        self._keeper: subprocess.Popen | None = None
        self._command: list[str] = []

    @property
    def started(self) -> bool:
        return self._keeper is not None

    @property
    def pid(self) -> int | None:
        return None if self._keeper is None else self._keeper.pid

    def start(self, cluster: str, joins: bool, tls: Path) -> None:
        """Start the keeper. ``tls``: the directory of the run's certificates."""
        own = member_keeper.arguments(
            self.name, self.directory, f"https://{self.client}", f"https://{self.peer}", cluster, joins
        )
        numeric = given(net.split(self.client))[0]
        certificate = etcd_tls.member(tls, self.directory, numeric)
        self._command = [self._program, *own, *etcd_tls.options(tls, *certificate)]
        self._keep(again=False)

    def poll(self) -> bool:
        """Return whether this is still a member; start another keeper if this one has been killed."""
        if self._keeper is None or self._keeper.poll() is None:
            return True
        if self._keeper.returncode >= 0:
            return False  # the keeper has printed why
        say(
            f"the keeper of member {self.name} of the control store (pid {self._keeper.pid}) "
            f"{process_keeper.ended_with(self._keeper.returncode)}, and took it along; another is started"
        )
        self._keep(again=True)
        return True

    def close(self) -> None:
        """End the member; no process or file stays behind."""
        if self._keeper is not None:
            self._keeper.terminate()
            try:
                self._keeper.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._keeper.kill()
                self._keeper.wait()
            with contextlib.suppress(OSError):
                self._entry.unlink(missing_ok=True)  # the keeper does this itself if it has the time
        shutil.rmtree(self.directory, ignore_errors=True)
        for held in self._held:
            held.close()

    def _keep(self, again: bool) -> None:
        own = ["--agent", os.getpid(), "--run-dir", self._run_dir, "--directory", self.directory]
        own += ["--entry", self._entry]
        own += ["--again"] * again + ["--once"] * (not binary.keeps_its_word(self._version))
        words = [*own, "--", *self._command]
        self._keeper = subprocess.Popen(
            [sys.executable, "-m", "megatron_ft.agent.etcd.member_keeper", *map(str, words)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )


def _hold(address: str) -> socket.socket:
    family, _, _, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    held = socket.socket(family, socket.SOCK_STREAM)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(where)
    except OSError as error:
        held.close()
        raise LaunchError(f"the control store cannot listen on {address}: {error.strerror or error}") from None
    return held


class EtcdCluster:
    """The members of the run's own etcd. Host ``rank`` of ``hosts`` founds it together with the others, on
    ``founders``; a host that comes later gets its address as ``store``.

    ``address`` (of the store) changes with the members. Raises ``LaunchError``.
    """

    def __init__(
        self,
        rank: int,
        hosts: int,
        address: str,
        run_dir: Path,
        timeout_s: float,
        store: str | None = None,
        founders: Sequence[int] = FIRST,
    ) -> None:
        self._rank, self._host, self._run_dir = rank, address, run_dir
        self.founders = founders
        self._own: _Own | None = None
        self._voter, self._numbers = False, 0
        if store is None:
            seeds = self._found(hosts, timeout_s)
        else:
            there = EtcdAddress.parse(store)
            seeds, self._tls = there.endpoints, Path(there.ca).parent
        self._gateway = self._reach(seeds, _ASK_S, learns=True)
        self._vacant, self._not_before = False, 0.0
        self._to_start: str | None = None
        self._over = threading.Event()
        self._watching: threading.Thread | None = None
        self._silences: Callable[[], Mapping[int, float]] = dict
        self._addresses: Callable[[], Mapping[int, str]] = dict
        self._others: set[int] = set(founders)
        self._told = ""

    @property
    def address(self) -> str:
        """The store's address for new clients; earlier clients ask the store for its nodes themselves."""
        return str(_address(self._gateway.endpoints, self._tls))

    @property
    def keeping(self) -> bool:
        """Return whether this host has a member, so that others need it."""
        return self._own is not None and self._own.started

    def pids(self) -> set[int]:
        own = self._own
        return set() if own is None or own.pid is None else {own.pid}

    def poll(self) -> None:
        """Start and end processes; the agent's main thread calls this regularly."""
        own = self._own
        if own is None:
            return
        try:
            if self._to_start is not None:
                own.start(self._to_start, joins=True, tls=self._tls)
                self._to_start = None
            elif not own.poll():
                own.close()
                self._own, self._voter, self._vacant = None, False, True
                self._not_before = time.monotonic() + _AGAIN_S * self._numbers
        except OSError as error:  # no process or memory available now
            self._say(f"the member of the control store cannot be started here: {error}; it is tried again")

    def watch(self, silences: Callable[[], Mapping[int, float]], hosts: Callable[[], Mapping[int, str]]) -> None:
        """From now on replace members whose hosts are lost. ``silences``: for how long hosts have not been heard;
        ``hosts``: all known hosts, with their addresses."""
        self._silences, self._addresses = silences, hosts
        if self._watching is None:
            self._watching = threading.Thread(target=self._watch, name="megatron_ft-members", daemon=True)
            self._watching.start()

    def close(self) -> None:
        self._over.set()
        if self._watching is not None:
            self._watching.join(timeout=_END_S)
        if self._own is not None:
            self._own.close()

    # --- the first ones -----------------------------------------------------------------------------------------------

    def _found(self, hosts: int, timeout_s: float) -> Endpoints:
        card = {"name": socket.gethostname(), "address": self._host}
        if self._rank == self.founders[0]:
            (self._run_dir / run_directory.ETCD).mkdir(exist_ok=True)
            card["tls"] = etcd_tls.found(self._run_dir / run_directory.ETCD)
        if self._rank in self.founders:
            own = self._own = _Own(self._rank, 0, self._host, self._run_dir)
            card |= {"client": own.client, "peer": own.peer}
        try:
            cards = founding.meet(self._run_dir, self._rank, hosts, card, timeout_s)
            first = {rank: cards[rank] for rank in self.founders}
            _check_addresses(first)
            self._tls = self._run_dir / run_directory.ETCD / first[self.founders[0]]["tls"]
            if self._own is not None:
                cluster = ",".join(f"h{rank}=https://{card['peer']}" for rank, card in first.items())
                self._own.start(cluster, joins=False, tls=self._tls)
                self._voter = True
        except BaseException:
            if self._own is not None:
                self._own.close()
            raise
        return tuple(given(net.split(card["client"])) for card in first.values())

    # --- in a thread of its own ---------------------------------------------------------------------------------------

    def _watch(self) -> None:
        pause_s = _LOOK_S
        while not self._over.wait(pause_s):
            try:
                pause_s = self._look_at_members()
            except Exception as error:  # of a bug, too: this host would replace no lost member any more
                why = str(error) if isinstance(error, StoreError | LaunchError | OSError) else f"it {described(error)}"
                self._say(f"this host cannot become a member of the control store yet: {why}")
                pause_s = _LOOK_S

    def _look_at_members(self) -> float:
        """Make at most one change. Return the seconds to wait for the next look."""
        own = self._own
        if self._voter or self._to_start is not None or time.monotonic() < self._not_before:
            return _LOOK_S
        silences = self._silences()
        well = self._addresses().keys() - silences.keys() - self._others
        patience_s = etcd_membership.patience_s(self._rank, well)
        if not self._vacant and own is None and max(silences.values(), default=0.0) < patience_s:
            return _LOOK_S
        listed = self._gateway.call("/v3/cluster/member/list", {})["members"]
        mine = next((raw for raw in listed if own is not None and f"https://{own.peer}" in raw["peerURLs"]), None)
        hosts = {raw["ID"]: self._host_of(raw) for raw in listed}
        self._others = {host for host in hosts.values() if host is not None} - {self._rank}
        if own is not None and mine is not None and not own.started:
            self._to_start = ",".join(f"{raw.get('name') or own.name}={raw['peerURLs'][0]}" for raw in listed)
            return _NEXT_S
        gone = {host for host, silent_s in silences.items() if silent_s >= etcd_membership.PATIENCE_S}
        my_id = None if mine is None else mine["ID"]
        lost = {id_ for id_, host in hosts.items() if id_ != my_id and (host in gone or host == self._rank)}
        members = [etcd_membership.Member(raw["ID"], bool(raw.get("isLearner"))) for raw in listed]
        due = etcd_membership.change(members, my_id, lost, mine is not None and self._synced(given(own)))
        if mine is not None and not mine.get("isLearner"):
            self._stands(given(own))
        elif due is None:
            self._vacant = self._vacant and bool(lost)
            if own is not None and mine is None:  # another host was faster
                self._own = None
                own.close()
            return _SETTLED_S if self._own is None else _NEXT_S
        else:
            self._do(due, {raw["ID"]: raw.get("name") or "without a name" for raw in listed})
        return _NEXT_S

    def _stands(self, own: _Own) -> None:
        """Note that this host's member has a vote."""
        self._gateway.learn()  # first: if the store is silent now, the next look does all of this
        operator_requests.write_store_address(self._run_dir, self.address, self._say)
        self._note("added", own.name)
        say(f"this host has a member of the control store now, {own.name}")
        self._voter, self._vacant = True, False

    def _do(self, due: etcd_membership.Change, names: Mapping[str, str]) -> None:
        match due:
            case etcd_membership.Add():
                if self._own is None:
                    self._numbers += 1
                    self._own = _Own(self._rank, self._numbers, self._host, self._run_dir)
                self._gateway.call(
                    "/v3/cluster/member/add", {"peerURLs": [f"https://{self._own.peer}"], "isLearner": True}
                )
            case etcd_membership.Remove(id=id_):
                self._gateway.call("/v3/cluster/member/remove", {"ID": id_})
                self._note("removed", names[id_])
            case etcd_membership.Promote(id=id_):
                self._gateway.call("/v3/cluster/member/promote", {"ID": id_})

    def _synced(self, own: _Own) -> bool:
        """Return whether this host's learner has all that a voting member had a moment ago."""
        there = int(self._gateway.call("/v3/maintenance/status", {})["raftIndex"])
        mine = self._reach((given(net.split(own.client)),), _OWN_S)
        try:
            return int(mine.call("/v3/maintenance/status", {})["raftAppliedIndex"]) >= there
        except StoreError:
            return False  # it is only just starting
        finally:
            mine.close()

    def _host_of(self, raw: Mapping[str, Any]) -> int | None:
        """Return a member's host by the member's name; a member that has not started has only an address."""
        name = raw.get("name", "").removeprefix("h").partition(".")[0]
        if name.isdigit():
            return int(name)
        where = net.split(raw["peerURLs"][0].removeprefix("https://"))
        known = [host for host, address in self._addresses().items() if where is not None and address == where[0]]
        return known[0] if len(known) == 1 else None

    def _reach(self, endpoints: Endpoints, timeout_s: float, learns: bool = False) -> Gateway:
        return Gateway(endpoints, timeout_s, learns=learns, access=Access(_address(endpoints, self._tls)))

    def _note(self, what: str, member: str) -> None:
        with contextlib.suppress(OSError):
            history.append(self._run_dir, "store", what=what, member=member, host=socket.gethostname(), detail="")

    def _say(self, line: str) -> None:
        if line != self._told:
            say(line)
        self._told = line


def _address(endpoints: Endpoints, tls: Path) -> EtcdAddress:
    return EtcdAddress(endpoints, tls=True, own=True, **etcd_tls.client(tls))


def _check_addresses(cards: Mapping[int, dict[str, Any]]) -> None:
    for rank, card in cards.items():
        loopback = net.is_loopback(card["address"])
        if loopback and len({other["name"] for other in cards.values()}) > 1:
            raise LaunchError(
                f"{host_name(card['name'], rank)} has the address {card['address']}, at which no other host reaches it; "
                f"give --address there, the one by which the other hosts reach it"
            )
