"""Several agents on one machine, each with its own loopback address: a host that is lost, and mistakes before the start."""

from __future__ import annotations

import json
import os
import signal
import socket

import pytest

from megatron_ft.cluster.faults import kill
from megatron_ft.record import invariants
from tests import support, warm
from tests.stores import held_port

HOSTS, GROUPS, STEPS = 3, 6, 10
BEATS = {"heartbeat_timeout_s": support.HEARTBEAT_TIMEOUT_S}


class Agents:
    """The launchers of all hosts, one for each host."""

    def __init__(self, directory, data) -> None:
        self.directory, self._held = directory, held_port()
        self.port = self._held.getsockname()[1]
        self.config = support.write_config(directory / "config.json", detector=BEATS, store="embedded")
        self.script = support.SCRIPT
        self.own = ["--data", data, "--steps", STEPS, "--seed", 1, "--layers", 2, "--width", 64, "--seq-len", 32]
        self.agents: dict[int, warm.Launched] = {}
        self.environment: dict[int, dict[str, str]] = {}

    def start(self, host: int, **changed) -> warm.Launched:
        options = {"groups": GROUPS, "hosts": HOSTS, "host-rank": host, "store": f"127.0.0.1:{self.port}"}
        options |= {"address": f"127.0.0.{host + 1}", "config": self.config, "run-dir": self.directory / "run"}
        options |= {name.replace("_", "-"): value for name, value in changed.items()}
        flags = [text for name, value in options.items() for text in (f"--{name}", value) if text is not True]
        env = {**os.environ, "OMP_NUM_THREADS": "1", **self.environment.get(host, {})}
        self.agents[host] = warm.launch("launch", *flags, self.script, "--", *self.own, env=env)
        return self.agents[host]

    def join(self, number: int, *options) -> warm.Launched:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(support.ROOT)}
        own = [self.directory / "run", "--address", f"127.0.0.{number + 1}", *options]
        # The script's path is relative to the directory in which the run was started.
        self.agents[number] = warm.launch("join", *own, env=env, cwd="/")
        return self.agents[number]

    def said(self, host: int) -> str:
        return self.agents[host].communicate(timeout=support.TIMEOUT_S)[0]

    def kill(self) -> None:
        """Kill every launcher that still runs."""
        for agent in self.agents.values():
            agent.kill()
            agent.wait()
        self._held.close()


@pytest.fixture
def agents(tmp_path, data_dir):
    agents = Agents(tmp_path, data_dir)
    yield agents
    agents.kill()


@pytest.mark.long
def test_a_lost_host_is_named_and_its_groups_work_is_taken_over(agents):
    """kill -9 of an agent takes its ranks along; the other agents hear nothing of it any more."""
    gate = support.Gate(agents.directory, 5)
    agents.script = gate.script
    for host in range(HOSTS):
        agents.start(host)
    run = support.Run(agents.directory / "run", agents.agents[0])
    support.wait_for_step(run, 2)
    ranks = json.loads((run.directory / "ranks.json").read_text())
    assert sorted(rank["group"] for rank in ranks) == list(range(GROUPS))
    agents.agents[1].send_signal(signal.SIGKILL)
    gate.open()
    assert [agents.agents[host].wait(timeout=support.TIMEOUT_S) for host in (0, 2)] == [0, 0], agents.said(0)
    found = invariants.check_history(run.history, GROUPS * support.PER_GROUP)
    assert not found, found
    lost = {group: why for view in run.events("view") for group, why in view["lost"].items()}
    assert sorted(lost) == ["2", "3"] and all(f"of host 1 ({socket.gethostname()}) for" in why for why in lost.values())
    about = {(line["about"], line["hosts"][1]) for line in run.events("silence")}
    assert about == {(f"{socket.gethostname()}(127.0.0.2)", 1)}


@pytest.mark.long
def test_an_agent_whose_ranks_are_lost_for_good_stays_and_ends_as_the_run_does(agents):
    """The scheduler would take an exit code other than 0 for a failure of the job, which goes on elsewhere."""
    gate = support.Gate(agents.directory, 5)
    agents.script = gate.script
    for host in range(HOSTS):
        agents.start(host)
    run = support.Run(agents.directory / "run", agents.agents[0])
    support.wait_for(lambda: gate.waiting(5) == GROUPS, run)
    for group in (4, 5):
        os.kill(kill.pid_of(run.directory, group), signal.SIGKILL)
    support.wait_for(lambda: len(run.events("fault")) == 2, run)
    gate.open()
    said = {host: agents.said(host) for host in range(HOSTS)}
    assert [agents.agents[host].returncode for host in range(HOSTS)] == [0, 0, 0], said
    assert "no group is left" not in said[2]


@pytest.mark.long
@pytest.mark.parametrize(
    "changed, words",
    [
        ({"groups": 5}, "host 0 has"),
        ({"hosts": 2}, "host 1 has hosts 2, host 0 has 3"),
    ],
)
def test_hosts_that_do_not_agree_report_it(agents, changed, words):
    agents.start(0)
    other = agents.start(1, **changed)
    assert words in " ".join(agents.said(1).split()) and other.returncode == 2
    assert not list((agents.directory / "run").glob("logs/*")), "no rank was started"


@pytest.mark.parametrize(
    "changed, words",
    [
        ({"host_rank": 3}, "--host-rank is 3 and --hosts is 3; hosts are numbered from 0"),
        ({"groups": 2}, "a host has whole groups, or an equal part of one"),
        ({"store": "somewhere"}, "--store is 'somewhere'; with several hosts all of them need HOST:PORT"),
        ({"store": "no.such.host.invalid:1", "address": "127.0.0.1", "host_rank": 1}, "no.such.host.invalid"),
    ],
)
def test_mistakes_are_reported_before_anything_starts(agents, changed, words):
    agent = agents.start(**{"host": 0, **changed})
    said = " ".join(agents.said(0).split())
    assert words in said and agent.returncode == 2 and "Traceback" not in said, said
