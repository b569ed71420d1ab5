"""Three hosts in network namespaces, one group each: links cut, cut one way, flapping. The right host leaves, named."""

from __future__ import annotations

import os
import subprocess
import time

import pytest

from megatron_ft.faults import checkers
from megatron_ft.runtime import history
from tests import netlab, support

STEPS, GROUPS = 40, 3
PATIENT_S = 8.0
"""A heartbeat timeout that is longer than the kernel needs to bring an unplugged link up again."""


@pytest.fixture
def lab():
    netlab.require()
    lab = netlab.Lab(GROUPS)
    yield lab
    lab.close()


def job(run_dir, data_dir, **changes) -> list:
    """What is launched, wherever; ``changes`` are settings."""
    config = support.write_config(run_dir.with_suffix(".json"), **changes)
    own = ["--data", data_dir, "--steps", STEPS, "--seed", 1, "--layers", 2, "--width", 64, "--seq-len", 32]
    return ["--groups", GROUPS, "--config", config, "--run-dir", run_dir, support.SCRIPT, "--", *own]


@pytest.fixture(scope="module")
def failure_free(tmp_path_factory, data_dir) -> list[dict]:
    """The history of the same job on one host, to which nothing happens."""
    run_dir = tmp_path_factory.mktemp("reference") / "run"
    done = support.ft("launch", *job(run_dir, data_dir))
    assert done.returncode == 0, done.stderr
    return history.read(run_dir)


@pytest.fixture
def run(lab, request, tmp_path, data_dir):
    """A run on all of them, with the settings of ``request``; its parts are ended by pid, whatever the test did."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}  # each agent believes that it has the machine for itself
    agents = []
    for host in lab.hosts:
        where = ["--hosts", GROUPS, "--host-rank", host, "--store", f"{lab.address(0)}:29500"]
        what = job(tmp_path / "run", data_dir, detector=getattr(request, "param", {}))
        command = lab.inside(host, support.command("launch", *where, *what))
        output = (tmp_path / f"agent{host}.log").open("w")
        options = {"stdout": output, "stderr": subprocess.STDOUT, "cwd": support.ROOT, "env": env}
        agents.append(subprocess.Popen(command, **options))
    run = support.Run(tmp_path / "run", agents[0])
    run.agents = agents
    yield run
    for agent in agents:
        agent.kill()
        agent.wait()


def check(run, survivors, reference=None) -> list[dict]:
    """The run reached its end with these groups and kept every promise; returns its views."""
    assert run.agents[0].wait(timeout=support.TIMEOUT_S) == 0, run.logs()
    found = checkers.check_history(run.history, GROUPS * support.PER_GROUP, reference)
    assert not found, "\n".join([*found, *map(str, run.history)])
    assert [line["group"] for line in run.events("survivor")] == list(survivors)
    assert len(run.events("step")) == STEPS
    return run.events("view")


def test_a_host_whose_link_is_cut_leaves_and_is_named(lab, run):
    support.wait_for_step(run, 3)
    lab.cut(2)
    views = check(run, [0, 1])
    why = views[1]["lost"]["2"]
    assert f"has heard nothing of host {os.uname().nodename}({lab.address(2)})" in why, why
    # Both of the others miss it, and both were waited for.
    assert lab.address(0) in why and lab.address(1) in why
    # It is still cut off, and sees by the record that the run is over.
    assert run.agents[2].wait(timeout=support.TIMEOUT_S) == 0


def test_a_link_cut_one_way_costs_one_of_its_two_ends(lab, run):
    """Host 1 does not hear host 2; host 0 hears both, and both hear host 0: one of 1 and 2 leaves, never both."""
    support.wait_for_step(run, 3)
    lab.deafen(1, to=2)
    views = check(run, [0, 1])
    why = views[1]["lost"]["2"]
    assert why.startswith("cut off") and lab.address(1) in why and lab.address(0) not in why


def test_a_short_cut_costs_nobody(lab, run):
    """The link is back before the silence counts: the packets of the all-reduce are sent again, nothing else happens."""
    for step in (3, 8, 13):
        support.wait_for_step(run, step)
        for host in (0, 1):
            lab.deafen(host, to=2)
        time.sleep(0.3)  # this is the fault's length, not a wait for something
        for host in (0, 1):
            lab.heal(host, to=2)
    views = check(run, [0, 1, 2])
    assert len(views) == 1 and not run.events("silence")


@pytest.mark.parametrize("run", [{"heartbeat_timeout_s": PATIENT_S}], indirect=True)
def test_a_link_that_flaps_for_shorter_than_the_timeout_costs_nobody(lab, run, failure_free):
    """Unplugged and plugged in again, several times, the host of the store too."""
    for step, host in ((2, 2), (5, 1), (8, 0), (11, 2), (14, 2)):
        support.wait_for_step(run, step)
        lab.cut(host)
        lab.plug_in(host)
    views = check(run, [0, 1, 2], failure_free)
    assert len(views) == 1 and not run.events("silence")


def silences(run) -> set[tuple[str, str]]:
    """(who says so, about whom), of those that last."""
    found = set()
    for line in run.events("silence"):
        pair = line["by"], line["about"]
        found = found - {pair} if line["heard"] else found | {pair}
    return found


def test_a_link_that_flaps_for_longer_costs_the_groups_of_that_host_alone(lab, run, failure_free):
    """It goes on flapping when its host is out: a host that nobody needs any more disturbs nobody."""
    support.wait_for_step(run, 3)
    lab.cut(2)
    support.wait_for(lambda: len(run.events("view")) == 2, run)
    for step in (6, 9, 12):
        lab.plug_in(2)
        support.wait_for_step(run, step)
        lab.cut(2)
    lab.plug_in(2)
    views = check(run, [0, 1], failure_free)
    assert [sorted(view["lost"]) for view in views] == [[], ["2"]]
    why = views[1]["lost"]["2"]
    assert f"has heard nothing of host {os.uname().nodename}({lab.address(2)})" in why, why
    run.agents[2].wait(timeout=support.TIMEOUT_S)
    assert "group 2 is outside view" in (run.directory / "logs" / "g2.p0.log").read_text()


def test_a_link_that_is_back_as_soon_as_it_is_missed_never_costs_another_host(lab, run, failure_free):
    """Whether host 2 is out or stays is decided in that moment; nobody else is, and every step is whole."""
    for step in (3, 8, 13):
        support.wait_for_step(run, step)
        lab.cut(2)
        support.wait_for(lambda: silences(run) or len(run.events("view")) > 1, run)
        lab.plug_in(2)
    run.agents[0].wait(timeout=support.TIMEOUT_S)
    out = run.events("view")[-1]["live"] == [0, 1]
    check(run, [0, 1] if out else [0, 1, 2], failure_free)
    assert {group for view in run.events("view") for group in view["lost"]} <= {"2"}
