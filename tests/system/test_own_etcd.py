"""The etcd that a run starts by itself: its members die, its hosts lose their power, spare ones take their places."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_ft.agent.etcd import member_keeper
from megatron_ft.agent.etcd.members import EtcdCluster
from megatron_ft.config.store_address import EtcdAddress
from megatron_ft.coordination.store import ControlStore, patient
from megatron_ft.coordination.store.etcd_access import Access, Refused
from megatron_ft.coordination.store.etcd_http import Gateway, encoded
from megatron_ft.core.lifecycle import etcd_membership
from megatron_ft.errors import StoreError
from megatron_ft.runlog import run_directory
from megatron_ft.utils import net
from tests.stores import DEADLINE_S, await_, etcd_missing

pytestmark = [pytest.mark.system, pytest.mark.skipif(bool(etcd_missing()), reason=etcd_missing())]

SILENCE_S = 10.0


class Host:
    """Act as an agent does for its member, on an address of its own; ``silent`` maps the hosts that have been silent
    to the seconds."""

    def __init__(self, rank: int, run_dir: Path, silent: dict[int, float], store: str | None = None) -> None:
        self.rank, self.address = rank, f"127.0.0.{rank + 1}"
        self.members = EtcdCluster(rank, etcd_membership.SIZE, self.address, run_dir, DEADLINE_S, store)
        self.members.watch(lambda: dict(silent), lambda: {host: f"127.0.0.{host + 1}" for host in range(8)})

    @property
    def entry(self) -> dict | None:
        """Return the entry of the member's process."""
        own = self.members._own
        path = self.members._run_dir / run_directory.ETCD / f"{own.name}.member"
        return json.loads(path.read_text()) if path.exists() else None

    def answers(self) -> bool:
        """Return whether the host's member runs, and follows a leader."""
        gateway = self.members._reach((net.split(self.members._own.client),), 5.0)
        try:
            return self.entry is not None and gateway.call("/v3/maintenance/status", {}).get("leader", "0") != "0"
        except StoreError:
            return False
        finally:
            gateway.close()


class Launch:
    """Three hosts that found the store, and others that come to it."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.silent = run_dir, {}
        self.hosts: dict[int, Host] = {}
        self._over = threading.Event()
        self._founding = [threading.Thread(target=self._found, args=(rank,)) for rank in range(etcd_membership.SIZE)]
        for thread in self._founding:
            thread.start()
        await_(lambda: len(self.hosts) == etcd_membership.SIZE, "all hosts have met")
        for host in self.hosts.values():  # two of them would do for the store, and a test may strike the third
            await_(host.answers, f"the member of host {host.rank} answers")
        self.store = ControlStore(self.hosts[0].members.address, "run", SILENCE_S)
        patient(lambda: self.store.get("any"), patience_s=DEADLINE_S)
        (run_dir / "config.json").write_text(json.dumps({"store_address": self.hosts[0].members.address}))

    def _found(self, rank: int) -> None:
        self.hosts[rank] = Host(rank, self.run_dir, self.silent)
        self._over.wait()  # a keeper ends with the thread that has started it

    def come(self, rank: int) -> None:
        self.hosts[rank] = Host(rank, self.run_dir, self.silent, self.announced)

    @property
    def announced(self) -> str:
        """The address at which a process from outside looks for the store."""
        return json.loads((self.run_dir / "config.json").read_text())["store_address"]

    def lose(self, rank: int) -> None:
        """Lose a host as in a power cut, after the patience of all others."""
        lost = self.hosts.pop(rank)
        lost.members.close()
        self.silent[rank] = 1000.0

    def poll(self) -> None:
        for host in self.hosts.values():
            host.members.poll()

    def await_(self, condition, what: str) -> None:
        def looked() -> bool:
            self.poll()
            return condition()

        await_(looked, what, every_s=0.05)

    def await_votes(self, *names: str) -> None:
        """Wait until these members have a vote, and no other; the member that is asked may hear of a change later than
        others."""
        self.await_(lambda: self.votes() == set(names), f"{', '.join(names)} have a vote")

    def votes(self) -> set[str]:
        """Return the members that are there, with a vote, as one of them lists them."""
        gateway = self.hosts[max(self.hosts)].members._gateway
        listed = patient(lambda: gateway.call("/v3/cluster/member/list", {}), patience_s=DEADLINE_S)["members"]
        return {raw.get("name", "?") for raw in listed if not raw.get("isLearner")}

    def close(self) -> None:
        for host in self.hosts.values():
            host.members.close()
        self._over.set()
        for thread in self._founding:
            thread.join()


@pytest.fixture
def launch(tmp_path):
    launch = Launch(tmp_path)
    yield launch
    launch.close()
    assert not list(tmp_path.glob(f"{run_directory.ETCD}/*.member")), "what runs has said so"


def directories(launch: Launch) -> list[Path]:
    return [host.members._own.directory for host in launch.hosts.values() if host.members._own is not None]


def test_members_that_are_lost_one_after_the_other_are_replaced_and_old_clients_find_the_new_ones(launch):
    """In the end none of the members is there that the client was given at first."""
    launch.store.begin()
    launch.store.set("key", 1)
    were = directories(launch)
    for lost, comes in ((0, 3), (1, 4), (2, 5)):
        launch.lose(lost)
        launch.come(comes)
        launch.await_(lambda comes=comes: launch.hosts[comes].members._voter, f"host {comes} has a vote")
        launch.await_votes(*(f"h{rank}" if rank < etcd_membership.SIZE else f"h{rank}.1" for rank in launch.hosts))
        assert patient(lambda: launch.store.get("key"), patience_s=DEADLINE_S) == 1
        patient(launch.store._client._gateway.learn, patience_s=DEADLINE_S)  # as every client does now and then
    patient(lambda: launch.store.set("key", 2), patience_s=DEADLINE_S)
    late = patient(lambda: ControlStore(launch.announced, "run", SILENCE_S), patience_s=DEADLINE_S)
    found = patient(lambda: late.get("key"), patience_s=DEADLINE_S)
    assert found == 2, "who comes later finds the new members in the run directory"
    assert not any(directory.exists() for directory in were)


def test_one_learner_at_a_time_however_many_hosts_could_replace_the_lost_one(launch):
    for comes in (3, 4):
        launch.come(comes)
    launch.lose(2)
    launch.await_(lambda: any(launch.hosts[rank].members._voter for rank in (3, 4)), "one of them has a vote")
    launch.await_(lambda: all(host.members._to_start is None for host in launch.hosts.values()), "all is done")
    launch.await_(lambda: len(launch.votes()) == etcd_membership.SIZE, "it is one of three")


def test_a_member_that_is_killed_is_started_again_with_its_data(launch):
    launch.store.begin()
    for rank in (0, 1, 2):
        before = launch.hosts[rank].entry
        os.kill(before["pid"], signal.SIGKILL)
        launch.await_(lambda rank=rank, before=before: (launch.hosts[rank].entry or before) != before, "another runs")
        patient(lambda rank=rank: launch.store.set("key", rank), patience_s=DEADLINE_S)
    launch.store.check_begun()
    launch.await_votes("h0", "h1", "h2")


def test_a_keeper_that_is_killed_is_started_again_and_its_member_goes_on(launch):
    own = launch.hosts[1].members._own
    before = launch.hosts[1].entry
    os.kill(own.pid, signal.SIGKILL)
    launch.await_(lambda: own.poll() and (launch.hosts[1].entry or before)["pid"] != before["pid"], "another runs")
    launch.lose(0)
    patient(lambda: launch.store.set("key", 1), patience_s=DEADLINE_S)


def test_a_host_that_only_seemed_lost_finds_itself_removed_and_may_come_again(launch):
    launch.come(3)
    launch.silent[0] = 1000.0
    launch.await_(lambda: launch.hosts[3].members._voter, "host 3 has a vote")
    launch.await_(lambda: not launch.hosts[0].members.keeping, "host 0 has none")
    del launch.silent[0]
    launch.lose(1)
    launch.await_(lambda: launch.hosts[0].members._voter, "host 0 has a vote again")
    launch.await_votes("h0.1", "h2", "h3.1")


def test_a_member_whose_directory_is_gone_is_replaced_by_its_own_host(launch):
    """A member that is started on an empty directory would vote twice."""
    own = launch.hosts[2].members._own
    pid = launch.hosts[2].entry["pid"]
    os.kill(pid, signal.SIGSTOP)  # it would write files there meanwhile
    shutil.rmtree(own.directory / "data")
    os.kill(pid, signal.SIGKILL)
    launch.await_(
        lambda: launch.hosts[2].members._voter and launch.hosts[2].members._own is not own, "it has a new one"
    )
    launch.await_votes("h0", "h1", "h2.1")


def test_a_keeper_that_is_stopped_does_not_keep_its_host_and_leaves_nothing(launch):
    """The fixture checks that nothing is left."""
    os.kill(launch.hosts[2].members._own.pid, signal.SIGSTOP)


def test_the_last_output_of_etcd_is_reported(tmp_path):
    (tmp_path / "log").write_text(
        '{"level":"warn","msg":"a"}\n{"level":"fatal","msg":"discovery failed","error":"b"}\n!\n'
    )
    assert member_keeper._last_words(tmp_path / "log") == " (discovery failed: b)"
    assert member_keeper._last_words(tmp_path / "none") == ""


def test_only_a_process_that_can_read_the_runs_certificates_gets_access(launch):
    """Any other process of the network is sent away from the ports of clients and of members."""
    launch.store.set("key", 1)
    there = EtcdAddress.parse(launch.announced)
    assert there.tls and there.own
    tls = Path(there.ca).parent
    assert tls.stat().st_mode & 0o077 == 0
    for file in (tls / "ca.key", Path(there.key), *(directory / "member.key" for directory in directories(launch))):
        assert file.stat().st_mode & 0o077 == 0, file
    without = EtcdAddress(there.endpoints, tls=True, ca=there.ca)
    peers = tuple(net.split(host.members._own.peer) for host in launch.hosts.values())
    for strangers in (without, EtcdAddress(there.endpoints), replace(without, endpoints=peers), EtcdAddress(peers)):
        gateway = Gateway(strangers.endpoints, SILENCE_S, access=Access(strangers))
        with pytest.raises(Refused, match="cannot be used.*(without a certificate|speaks TLS only)"):
            gateway.call("/v3/kv/range", {"key": encoded("any")})
