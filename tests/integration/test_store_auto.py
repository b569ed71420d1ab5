"""``"store": "auto"`` on several hosts: their agents meet in an embedded store and agree on the one for the run.

The stores are real. The hosts are threads of this process; in one test they are agents, each with its own loopback address.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from megatron_ft.agent.etcd import binary
from megatron_ft.agent.peers import Hosts, Place, boot_store
from megatron_ft.config import schema
from megatron_ft.config.store_address import EtcdAddress
from megatron_ft.core.lifecycle import etcd_membership
from megatron_ft.errors import StoreError
from tests import support
from tests.integration import test_failover
from tests.integration.test_failover import HELD, check, references  # noqa: F401 (a fixture)
from tests.stores import DEADLINE_S, await_, etcd_missing
from tests.support import SECRET

LACKS = "no etcd on PATH"
GROUPS, LACKING, SPARE = 4, 1, 4


class Fleet:
    """The agents' views of the hosts of one run. The hosts in ``lacking`` have no etcd, those in ``apart`` have
    another run directory."""

    def __init__(self, directory, count: int, lacking: set[int], apart: int | None, monkeypatch) -> None:
        monkeypatch.setattr(binary, "lacks", lambda: LACKS * (int(threading.current_thread().name) in lacking))
        run = schema.resolve({}, groups=count)
        self.hosts: list[Hosts] = []
        store = "127.0.0.1:0"
        for rank in range(count):
            where = Place(count, rank, f"127.0.0.{rank + 1}", store)
            run_dir = directory / ("apart" if rank == apart else "run")
            run_dir.mkdir(exist_ok=True)
            self.hosts.append(Hosts(where, run, 0.8, run_dir, "run" if rank == 0 else None, SECRET))
            store = self.hosts[0].store_address
        self.met_at = store
        self._agents = ThreadPoolExecutor(count)  # members of the etcd end with the thread that has started them

    def settle(self) -> set[str]:
        """Return the store that the hosts have agreed on."""
        settled = [self._agents.submit(self._settle, host) for host in self.hosts]
        return {one.result(DEADLINE_S).fault_tolerance.store for one in settled}

    @staticmethod
    def _settle(host: Hosts) -> schema.RunConfig:
        threading.current_thread().name = str(host.place.rank)
        return host.settle()

    def close(self) -> None:
        for host in self.hosts:
            host.beats.close()
            for kept in (host.keeper, host._members):
                if kept is not None:
                    kept.close()
        self._agents.shutdown()


def endpoints(host: Hosts) -> int:
    return len(EtcdAddress.parse(host.store_address).endpoints)


@pytest.fixture
def fleet(tmp_path, monkeypatch):
    """A function that makes a fleet."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    made: list[Fleet] = []

    def make(count: int, lacking: set[int] = frozenset(), apart: int | None = None) -> Fleet:
        made.append(Fleet(tmp_path, count, lacking, apart, monkeypatch))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.skipif(bool(etcd_missing()), reason=etcd_missing())
def test_the_first_three_hosts_that_have_etcd_found_the_store_and_all_hosts_go_there(fleet, tmp_path):
    there = fleet(4, lacking={1})
    assert there.settle() == {"etcd"}
    assert {path.name for path in (tmp_path / "run" / "etcd").glob("*.member")} == {
        "h0.member",
        "h2.member",
        "h3.member",
    }
    for host in there.hosts:
        await_(lambda host=host: endpoints(host) == etcd_membership.SIZE, "all members are known")
        assert EtcdAddress.parse(host.store_address).own
        boot = boot_store(host.store, host.place.job, DEADLINE_S, SECRET)
        assert boot.wait("run", DEADLINE_S)["run_id"] == host.run_id == "run"
        assert boot.get("run")["config"]["fault_tolerance"]["store"] == "etcd", "a host that comes later follows"
        boot.close()
        assert host.store_said == "control store: the run's own etcd on hosts 0 2 3; any one host may be lost at a time"
    with pytest.raises(StoreError):
        boot_store(there.met_at, "only", 1.0, SECRET).get("run")


def test_the_hosts_stay_in_the_embedded_store_where_two_of_them_have_etcd(fleet):
    there = fleet(3, lacking={2})
    assert there.settle() == {"embedded"}
    assert {host.store_address for host in there.hosts} == {there.met_at}
    assert "(2 of 3 hosts that are needed can start an etcd; host 2: no etcd on PATH)" in there.hosts[0].store_said


def test_the_hosts_stay_in_the_embedded_store_where_one_has_another_run_directory(fleet, tmp_path, monkeypatch):
    monkeypatch.setenv("MEGATRON_FT_SECRET", SECRET.text)
    there = fleet(3, apart=1)
    (tmp_path / "run" / "config.json").write_text(json.dumps({"run_id": "run"}))
    assert there.settle() == {"embedded"}
    assert "needs a run directory that all hosts see at the same path" in there.hosts[0].store_said


@pytest.fixture
def hosts(tmp_path, data_dir):
    hosts = test_failover.Hosts(tmp_path, data_dir, store="auto", rejoin={})
    yield hosts
    hosts.kill()


@pytest.mark.skipif(bool(etcd_missing()), reason=etcd_missing())
def test_a_run_chooses_etcd_a_spare_host_follows_and_host_0_is_lost(hosts, references):  # noqa: F811
    hosts.environment[LACKING] = {binary.VARIABLE: "/no/etcd"}
    for host in range(GROUPS + 1):
        hosts.start(host, groups=GROUPS, hosts=GROUPS + 1, spare_hosts=1)
    run = support.Run(hosts.directory / "run", hosts.agents[LACKING], groups=GROUPS)
    hosts.at(run, HELD, GROUPS)
    support.wait_for(lambda: run.events("host"), run)  # the spare host has followed to the store
    settled = json.loads((run.directory / "config.json").read_text())["fault_tolerance"]["store"]
    assert settled == "etcd"
    assert {path.name for path in (run.directory / "etcd").glob("*.member")} == {"h0.member", "h2.member", "h3.member"}
    hosts.lose(0)
    hosts.gate.open()
    check(hosts, run, references(GROUPS), (1, 2, 3, SPARE))
    first = next(line for line in hosts.said(0).splitlines() if "control store" in line)
    assert first.endswith("control store: the run's own etcd on hosts 0 2 3; any one host may be lost at a time")


def test_a_member_whose_etcd_may_have_lost_writes_is_not_started_again(tmp_path):
    """The agent then has another member in its place."""
    runs, own = tmp_path / "runs", tmp_path / "own"
    program = tmp_path / "etcd"
    program.write_text(f"#!/bin/sh\necho run >> {runs}\n[ $(wc -l < {runs}) -gt 3 ] && exit 0\nkill -9 $$\n")
    program.chmod(0o755)
    (own / "data" / "member").mkdir(parents=True)
    words = [
        "--agent",
        os.getpid(),
        "--run-dir",
        tmp_path,
        "--directory",
        own,
        "--entry",
        tmp_path / "h0.member",
        "--once",
    ]
    command = [sys.executable, "-m", "megatron_ft.agent.etcd.member_keeper", *words, "--", program, "--name=h0"]
    done = subprocess.run(
        [*map(str, command), "--listen-client-urls=https://127.0.0.1:1"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 1 and "is not started again: this version of etcd may have lost writes" in done.stderr
    assert runs.read_text() == "run\n"
