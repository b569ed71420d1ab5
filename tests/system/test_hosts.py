"""Three hosts in network namespaces, one group each: links cut, cut one way, flapping. The right host leaves, named; a
spare host, where there is one, takes its place."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_ft.cluster.faults import kill
from megatron_ft.record import history, invariants
from megatron_ft.types import host_name
from megatron_ft.utils import net
from tests import netlab, support, warm

STEPS, GROUPS = 40, 3
LONG = 60
"""Steps of a run in which a host is lost and another takes its place."""
BEATS = {"heartbeat_timeout_s": support.HEARTBEAT_TIMEOUT_S}
PATIENT = {"heartbeat_timeout_s": 60.0}
"""Settings for links that are cut for a moment: the timeout is longer than the kernel needs to bring a link up again,
and this machine to request it."""
HELD = 20
"""The number of steps that a run makes before its test opens the gate."""


@pytest.fixture
def lab():
    netlab.require()
    lab = netlab.Lab(GROUPS)
    yield lab
    lab.close()


def job(run_dir, data_dir, steps=STEPS, script=support.SCRIPT, **changes) -> list:
    """Return the arguments of the launched job, wherever it runs; ``changes`` are settings."""
    config = support.write_config(run_dir.with_suffix(".json"), store="embedded", **changes)
    own = ["--data", data_dir, "--steps", steps, "--seed", 1, *support.SMALL]
    return ["--groups", GROUPS, "--config", config, "--run-dir", run_dir, script, "--", *own]


@pytest.fixture(scope="module")
def failure_free(tmp_path_factory, data_dir) -> list[dict]:
    """The history of the same job on one host, without failures."""
    run_dir = tmp_path_factory.mktemp("reference") / "run"
    done = support.ft("launch", *job(run_dir, data_dir))
    assert done.returncode == 0, done.stderr
    return history.read(run_dir)


@pytest.fixture
def run(lab, request, tmp_path, data_dir):
    """A run on all hosts, with the detector's settings of ``request``; its parts are ended by pid, whatever the test
    did. It makes its last steps when its gate is opened."""
    gate = support.Gate(tmp_path, HELD)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}  # each agent believes that it has the machine for itself
    agents = []
    for host in lab.hosts:
        where = ["--hosts", GROUPS, "--host-rank", host, "--store", f"{lab.address(0)}:29500"]
        what = job(tmp_path / "run", data_dir, script=gate.script, detector=getattr(request, "param", BEATS))
        with (tmp_path / f"agent{host}.log").open("w") as output:
            agents.append(warm.launch_on_host(lab, host, "launch", *where, *what, env=env, stdout=output))
    run = support.Run(tmp_path / "run", agents[0])
    run.agents, run.gate = agents, gate
    yield run
    for agent in agents:
        agent.kill()
        agent.wait()


def check(run, survivors, reference=None) -> list[dict]:
    """Check that the run reached its end with these groups and kept every promise; return its views."""
    run.gate.open()
    assert run.agents[0].wait(timeout=support.TIMEOUT_S) == 0, run.logs()
    found = invariants.check_history(run.history, GROUPS * support.PER_GROUP, reference)
    assert not found, "\n".join([*found, *map(str, run.history)])
    assert [line["group"] for line in run.events("survivor")] == list(survivors)
    assert len(run.events("step")) == STEPS
    return run.events("view")


def name(address: str) -> str:
    return f"{os.uname().nodename}({address})"


def silences(run) -> set[tuple[str, str]]:
    """Return (reporting host, silent host) of all silences that last."""
    found = set()
    for line in run.events("silence"):
        pair = line["by"], line["about"]
        found = found - {pair} if line["heard"] else found | {pair}
    return found


def test_a_host_whose_link_is_cut_leaves_and_is_named(lab, run):
    # All are between two steps: no view is made before both of the others have said what they miss.
    support.wait_for(lambda: run.gate.waiting(HELD) == GROUPS, run)
    lab.cut(2)
    support.wait_for(lambda: {(name(lab.address(host)), name(lab.address(2))) for host in (0, 1)} <= silences(run), run)
    views = check(run, [0, 1])
    why = views[1]["lost"]["2"]
    assert f"has heard nothing of {host_name(os.uname().nodename, 2)}" in why, why
    # Both of the others miss it, and both are named.
    assert "host 0 (" in why and "host 1 (" in why
    # It is still cut off, and sees by the record that the run is over.
    assert run.agents[2].wait(timeout=support.TIMEOUT_S) == 0


@pytest.mark.long
def test_a_link_cut_one_way_costs_one_of_its_two_ends(lab, run):
    """Host 1 does not hear host 2; host 0 hears both, and both hear host 0: one of 1 and 2 leaves, never both."""
    support.wait_for(lambda: run.gate.waiting(HELD) == GROUPS, run)
    lab.deafen(1, to=2)
    support.wait_for(lambda: silences(run), run)
    views = check(run, [0, 1])
    why = views[1]["lost"]["2"]
    assert why.startswith("cut off") and "host 1 (" in why and "host 0 (" not in why


@pytest.mark.long
@pytest.mark.parametrize("run", [PATIENT], indirect=True)
def test_a_short_cut_costs_no_group(lab, run):
    """The link is back before the silence counts: the packets of the all-reduce are sent again, nothing else happens."""
    for step in (3, 8, 13):
        support.wait_for_step(run, step)
        for host in (0, 1):
            lab.deafen(host, to=2)
        time.sleep(0.3)  # this is the fault's length, not a wait
        for host in (0, 1):
            lab.heal(host, to=2)
    views = check(run, [0, 1, 2])
    assert len(views) == 1 and not run.events("silence")


@pytest.mark.parametrize("run", [PATIENT], indirect=True)
def test_a_link_that_flaps_for_shorter_than_the_timeout_costs_no_group(lab, run, failure_free):
    """Every link is unplugged and plugged in again, several times, that of the store's host, too."""
    for step, host in ((2, 2), (5, 1), (8, 0), (11, 2), (14, 2)):
        support.wait_for_step(run, step)
        lab.cut(host)
        lab.plug_in(host)
    views = check(run, [0, 1, 2], failure_free)
    assert len(views) == 1 and not run.events("silence")


@pytest.mark.long
def test_a_link_that_flaps_for_longer_costs_the_groups_of_that_host_alone(lab, run, failure_free):
    """The link goes on flapping when its host is out: a host that is not needed any more disturbs no other."""
    support.wait_for_step(run, 3)
    lab.cut(2)
    support.wait_for(lambda: len(run.events("view")) == 2, run)
    for step in (6, 9, 12):
        lab.plug_in(2)
        support.wait_for_step(run, step)
        lab.cut(2)
    lab.plug_in(2)
    # While the others still run: otherwise its host finds the run over, and does not tell the rank anything.
    log = run.directory / "logs" / "g2.p0.log"
    support.wait_for(lambda: "group 2 is outside view" in log.read_text(), run)
    views = check(run, [0, 1], failure_free)
    assert [sorted(view["lost"]) for view in views] == [[], ["2"]]
    why = views[1]["lost"]["2"]
    assert f"has heard nothing of {host_name(os.uname().nodename, 2)}" in why, why
    run.agents[2].wait(timeout=support.TIMEOUT_S)


def test_a_link_that_is_back_as_soon_as_it_is_missed_never_costs_another_host(lab, run, failure_free):
    """That moment decides whether host 2 is out or stays; no other host is out, and every step is whole."""
    for step in (3, 8, 13):
        support.wait_for_step(run, step)
        lab.cut(2)
        support.wait_for(lambda: silences(run) or len(run.events("view")) > 1, run)
        lab.plug_in(2)
    run.gate.open()
    run.agents[0].wait(timeout=support.TIMEOUT_S)
    out = run.events("view")[-1]["live"] == [0, 1]
    check(run, [0, 1] if out else [0, 1, 2], failure_free)
    assert {group for view in run.events("view") for group in view["lost"]} <= {"2"}


# --- with a spare host ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def long_failure_free(tmp_path_factory, data_dir) -> list[dict]:
    """The history of the long job on one host, without failures."""
    run_dir = tmp_path_factory.mktemp("reference") / "run"
    done = support.ft("launch", *job(run_dir, data_dir, LONG, detector={"straggler_factor": 0}))
    assert done.returncode == 0, done.stderr
    return history.read(run_dir)


class Spared:
    """Three hosts and, as host 3, a spare one. ``address``: the address by which a host is reached in this run."""

    def __init__(self, lab, directory, data_dir) -> None:
        self.lab, self.directory, self.data_dir = lab, directory, data_dir
        self.agents: list[warm.Launched] = []
        self.gate = support.Gate(directory, slowly=LONG)

    def start(self, address, said: bool = False) -> None:
        """Start the run. ``said``: the hosts are told which address is theirs."""
        detector = {"straggler_factor": 0, **BEATS}
        what = job(self.directory / "run", self.data_dir, LONG, self.gate.script, rejoin={}, detector=detector)
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        for host in self.lab.hosts:
            where = ["--hosts", GROUPS + 1, "--spare-hosts", 1, "--host-rank", host]
            where += ["--store", net.joined(address(0), 29500)]
            where += ["--address", address(host)] if said else []
            with (self.directory / f"agent{host}.log").open("w") as output:
                agent = warm.launch_on_host(self.lab, host, "launch", *where, *what, env=env, stdout=output)
            self.agents.append(agent)

    @property
    def run(self) -> support.Run:
        return support.Run(self.directory / "run", self.agents[0])

    def said(self, host: int) -> str:
        return (self.directory / f"agent{host}.log").read_text()

    def await_back(self, group: int, times: int = 1) -> None:
        support.wait_for(lambda: self.joined(group) >= times, self.run)

    def joined(self, group: int) -> int:
        return sum(group in view["joined"] for view in self.run.events("view"))

    def check(self, reference) -> None:
        """Check that all its groups have got to the end, and that each step was made once, with all microbatches and
        the right loss."""
        self.gate.open()
        said = "\n".join(f"== host {host}\n{self.said(host)}" for host in self.lab.hosts)
        assert self.agents[0].wait(timeout=support.TIMEOUT_S) == 0, said + self.run.logs()
        found = invariants.check_history(self.run.history, GROUPS * support.PER_GROUP, reference)
        assert not found, "\n".join([*found, said, *map(str, self.run.history)])
        assert [line["step"] for line in self.run.events("step")] == list(range(LONG))
        assert [line["group"] for line in self.run.events("survivor")] == list(range(GROUPS)), said

    def taken_over(self) -> list[tuple[str, list[int]]]:
        return [(line["host"], line["groups"]) for line in self.run.events("host") if line["what"] == "took over"]


@pytest.fixture
def spared(tmp_path, data_dir):
    netlab.require()
    lab = netlab.Lab(GROUPS + 1)
    job = Spared(lab, tmp_path, data_dir)
    yield job
    for host in lab.hosts:
        lab.kill_all(host)
    for agent in job.agents:
        agent.wait()
    lab.close()


def test_a_rank_that_is_killed_comes_back_on_its_host_although_there_is_a_spare_one(spared, long_failure_free):
    spared.start(spared.lab.address)
    support.wait_for_step(spared.run, 3)
    support.wait_for(lambda: kill.pid_of(spared.run.directory, 2), spared.run)  # its agent may not have said so yet
    os.kill(kill.pid_of(spared.run.directory, 2), signal.SIGKILL)
    spared.await_back(2)
    spared.check(long_failure_free)
    assert not spared.taken_over() and spared.run.events("restart")[-1]["host"] == name(spared.lab.address(2))


def test_a_link_that_is_cut_for_good_gives_its_group_to_the_spare_host(spared, long_failure_free):
    lab = spared.lab
    spared.start(lab.address)
    support.wait_for_step(spared.run, 3)
    lab.cut(2)
    spared.await_back(2)
    spared.check(long_failure_free)
    assert spared.taken_over() == [(name(lab.address(3)), [2])]
    why = next(view["lost"]["2"] for view in spared.run.events("view") if view["lost"])
    assert f"has heard nothing of {host_name(os.uname().nodename, 2)}" in why, why
    assert spared.agents[2].wait(timeout=support.TIMEOUT_S) == 0, spared.said(2)


def test_a_host_whose_link_is_healed_is_a_spare_for_the_one_that_replaced_it(spared, long_failure_free):
    lab = spared.lab
    spared.start(lab.address)
    support.wait_for_step(spared.run, 3)
    lab.cut(2)
    spared.await_back(2)
    lab.plug_in(2)
    support.wait_for(lambda: f"groups 2 are on {host_name(os.uname().nodename, 3)} now" in spared.said(2), spared.run)
    # It is heard again by all: a silent host is no spare.
    support.wait_for(lambda: not any(about == name(lab.address(2)) for _, about in silences(spared.run)), spared.run)
    lab.cut(3)
    spared.await_back(2, times=2)
    spared.check(long_failure_free)
    assert spared.taken_over() == [(name(lab.address(3)), [2]), (name(lab.address(2)), [2])]


@pytest.mark.long
def test_a_frozen_host_is_replaced_and_is_a_spare_when_it_wakes(spared, long_failure_free):
    """The kernel of the frozen host still answers for it: no connection ends."""
    lab = spared.lab
    spared.start(lab.address)
    support.wait_for_step(spared.run, 3)
    lab.freeze(1)
    spared.await_back(1)
    lab.thaw(1)
    support.wait_for(lambda: f"groups 1 are on {host_name(os.uname().nodename, 3)} now" in spared.said(1), spared.run)
    spared.check(long_failure_free)
    assert spared.taken_over() == [(name(lab.address(3)), [1])]


@pytest.mark.long
def test_over_ipv6_a_link_is_cut_and_the_spare_host_takes_over(spared, long_failure_free):
    lab = spared.lab
    lab.add_ipv6()
    spared.start(lab.address6)
    support.wait_for_step(spared.run, 3)
    lab.cut(2)
    spared.await_back(2)
    spared.check(long_failure_free)
    assert spared.taken_over() == [(name(lab.address6(3)), [2])]
    assert spared.run.directory.joinpath("config.json").read_text().count(f'"[{lab.address6(0)}]:29500"') == 1


def test_of_two_interfaces_the_run_uses_the_one_it_is_told(spared, long_failure_free):
    """The other interface may be lost on all hosts. The link that carries the run is then cut on one."""
    lab = spared.lab
    lab.add_network()
    spared.start(lab.second_address, said=True)
    support.wait_for_step(spared.run, 3)
    for host in lab.hosts:
        lab.cut(host)
    support.wait_for_step(spared.run, spared.run.events("step")[-1]["step"] + 8)  # longer than a silence has to last
    assert len(spared.run.events("view")) == 1 and not spared.run.events("silence")
    lab.cut_second(1)
    spared.await_back(1)
    spared.check(long_failure_free)
    assert spared.taken_over() == [(name(lab.second_address(3)), [1])]


def test_hosts_whose_own_names_are_loopback_addresses_meet_by_name(tmp_path, data_dir):
    """Debian writes ``127.0.1.1 NAME`` into the file of the host with that name."""
    netlab.require()
    lab = netlab.Lab(2)
    names = ["node0.rack", "node1.rack"]
    files = [Path("/etc/netns") / lab.namespace(host) / "hosts" for host in lab.hosts]
    agents = []
    try:
        for host, file in enumerate(files):
            file.parent.mkdir(parents=True)
            own = [f"127.0.1.1 {names[host]}", *(f"{lab.address(to)} {names[to]}" for to in lab.hosts if to != host)]
            file.write_text("\n".join(["127.0.0.1 localhost", *own, ""]))
            where = ["--hosts", 2, "--host-rank", host, "--store", f"{names[0]}:29500"]
            what = ["--groups", 2, *job(tmp_path / "run", data_dir, steps=3, detector=PATIENT)[2:]]
            # `ip netns exec` puts that file in place of /etc/hosts.
            command = lab.inside(host, [Path(sys.executable).with_name("megatron-ft"), "launch", *where, *what])
            agents.append(
                subprocess.Popen(
                    [str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
                )
            )
        said = [agent.communicate(timeout=support.TIMEOUT_S)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
        lab.close()
        for file in files:
            shutil.rmtree(file.parent, ignore_errors=True)
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert f"at {lab.address(0)}:29500" in said[0]
    assert len([line for line in history.read(tmp_path / "run") if line["event"] == "step"]) == 3


def test_a_machine_with_only_the_loopback_of_ipv6_trains(tmp_path, data_dir):
    netlab.require()
    what = [str(word) for word in job(tmp_path / "run", data_dir, steps=3)]
    inside = 'ip link set lo up && ip addr del 127.0.0.1/8 dev lo && exec "$@"'
    command = [
        "unshare",
        "-n",
        "sh",
        "-c",
        inside,
        "sh",
        str(Path(sys.executable).with_name("megatron-ft")),
        "launch",
        *what,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=support.TIMEOUT_S)
    assert done.returncode == 0, done.stderr
