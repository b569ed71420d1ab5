"""Three hosts in network namespaces, one group each: links cut, cut one way, flapping. The right host leaves, named."""

from __future__ import annotations

import os
import subprocess
import time

import pytest

from megatron_ft.faults import checkers
from tests import netlab, support

STEPS, GROUPS = 40, 3


@pytest.fixture
def lab():
    netlab.require()
    lab = netlab.Lab(GROUPS)
    yield lab
    lab.close()


@pytest.fixture
def run(lab, tmp_path, data_dir):
    """A run on all of them; its parts are ended by pid, whatever the test did."""
    config = support.write_config(tmp_path / "config.json")
    own = ["--data", data_dir, "--steps", STEPS, "--seed", 1, "--layers", 2, "--width", 64, "--seq-len", 32]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}  # each agent believes that it has the machine for itself
    agents = []
    for host in lab.hosts:
        where = ["--hosts", GROUPS, "--host-rank", host, "--store", f"{lab.address(0)}:29500"]
        job = ["--groups", GROUPS, "--config", config, "--run-dir", tmp_path / "run", support.SCRIPT, "--", *own]
        command = lab.inside(host, support.command("launch", *where, *job))
        output = (tmp_path / f"agent{host}.log").open("w")
        options = {"stdout": output, "stderr": subprocess.STDOUT, "cwd": support.ROOT, "env": env}
        agents.append(subprocess.Popen(command, **options))
    run = support.Run(tmp_path / "run", agents[0])
    run.agents = agents
    yield run
    for agent in agents:
        agent.kill()
        agent.wait()


def check(run, survivors) -> list[dict]:
    """The run reached its end with these groups and kept every promise; returns its views."""
    assert run.agents[0].wait(timeout=support.TIMEOUT_S) == 0, run.logs()
    found = checkers.check_history(run.history, GROUPS * support.PER_GROUP)
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
