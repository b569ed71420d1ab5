"""Hosts that join a run: with groups of their own, or as spares that take over the groups of a lost host."""

from __future__ import annotations

import json
import os
import signal
import socket

import pytest

from tests import support
from tests.integration.test_hosts import BEATS, Agents

GROUPS, STEPS = 2, 100_000
"""The steps of a run that goes on until the test has seen all, however long a busy machine takes for it."""


class Hosts(Agents):
    """Launchers and joiners, each with a loopback address of its own."""

    def __init__(self, directory, data) -> None:
        super().__init__(directory, data)
        self.config = support.write_config(directory / "config.json", rejoin={"enabled": True}, detector=BEATS)
        # A learning rate at which a rounding difference from another order of sums does not grow.
        self.own[self.own.index("--steps") + 1] = STEPS
        self.own += ["--lr", 1e-4]

    def run(self) -> support.Run:
        return support.Run(self.directory / "run", self.agents[0])

    def stop(self, *numbers: int) -> None:
        """Tell these launchers to stop, and check that every step until then was made once, with all of its
        microbatches."""
        for number in reversed(numbers):  # host 0 last: with its groups gone, others might end before they are told
            self.agents[number].send_signal(signal.SIGTERM)
        codes = {number: self.agents[number].wait(timeout=support.TIMEOUT_S) for number in numbers}
        assert set(codes.values()) == {128 + signal.SIGTERM}, f"{codes}\n" + "\n".join(map(self.said, numbers))
        steps = self.run().events("step")
        assert [line["step"] for line in steps] == list(range(len(steps)))
        assert {line["microbatches"] for line in steps} == {GROUPS * support.PER_GROUP}


@pytest.fixture
def hosts(tmp_path, data_dir):
    hosts = Hosts(tmp_path, data_dir)
    yield hosts
    hosts.kill()


def wait_for_live(run: support.Run, *groups: int) -> None:
    support.wait_for(lambda: run.events("step") and run.events("step")[-1]["live"] == list(groups), run)


def wait_for_return(run: support.Run, group: int) -> None:
    """Wait until the group is back, and has stayed for some steps."""
    support.wait_for(lambda: any(group in view["joined"] for view in run.events("view")), run)
    back = next(view for view in run.events("view") if group in view["joined"])
    support.wait_for_step(run, back["step"] + 5)
    later = [line for line in run.events("step") if line["step"] > back["step"]]
    assert all(group in line["live"] for line in later), (run.events("view"), run.events("silence"))


def test_a_run_grows_while_it_trains_and_an_added_group_may_be_lost_and_comes_back(hosts):
    hosts.start(0, groups=GROUPS, hosts=1, host_rank=0)
    run = hosts.run()
    support.wait_for_step(run, 1)
    hosts.join(1, "--groups", 1)
    wait_for_live(run, 0, 1, 2)
    added = next(rank for rank in json.loads((run.directory / "ranks.json").read_text()) if rank["group"] == 2)
    os.kill(added["pid"], signal.SIGKILL)
    support.wait_for(lambda: any(view["incarnations"].get("2", 0) > 1 for view in run.events("view")), run)
    hosts.stop(0, 1)
    assert [line["what"] for line in run.events("host")] == ["added"]


@pytest.mark.long
def test_a_run_of_one_host_that_has_grown_goes_on_when_that_host_is_lost(hosts):
    hosts.start(0, groups=GROUPS, hosts=1, host_rank=0)
    support.wait_for_step(hosts.run(), 1)
    hosts.join(1, "--groups", 1)
    run = support.Run(hosts.directory / "run", hosts.agents[1])
    wait_for_live(run, 0, 1, 2)
    assert json.loads((run.directory / "run.lock").read_text())["others"], (
        "the end of host 0 does not free the directory"
    )
    hosts.agents[0].kill()
    wait_for_live(run, 2)
    hosts.stop(1)
    assert [(line["what"], line["host_rank"]) for line in run.events("store")] == [("moved", 1)]


@pytest.mark.long
def test_a_spare_host_takes_over_the_groups_of_a_lost_host(hosts):
    for host in range(3):
        hosts.start(host, groups=GROUPS, hosts=3, spare_hosts=1)
    run = hosts.run()
    support.wait_for(lambda: bool(run.events("host")), run)
    support.wait_for_step(run, 1)
    hosts.agents[1].kill()
    wait_for_return(run, 1)
    _, lost, back = run.events("view")
    hosts.stop(0, 2)
    assert [line["what"] for line in run.events("host")] == ["spare", "took over"]
    assert list(lost["lost"]) == ["1"] and back["joined"] == [1], "what was said of the lost host ends no later epoch"
    assert run.events("host")[-1]["host_rank"] == 2 and f"of host 1 ({socket.gethostname()}) for" in lost["lost"]["1"]


@pytest.mark.long
def test_a_host_comes_late_as_a_spare_and_a_frozen_one_finds_itself_replaced(hosts):
    for host in range(2):
        hosts.start(host, groups=GROUPS, hosts=2)
    run = hosts.run()
    support.wait_for_step(run, 1)
    hosts.join(2, "--spare")
    support.wait_for(lambda: bool(run.events("host")), run)
    ranks = [r["pid"] for r in json.loads((run.directory / "ranks.json").read_text()) if r["group"] == 1]
    frozen = [hosts.agents[1].pid, *ranks]
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    wait_for_return(run, 1)
    for pid in frozen:
        os.kill(pid, signal.SIGCONT)
    support.wait_for(lambda: json.loads((run.directory / "ranks" / "1.json").read_text()) == [], run)
    hosts.stop(0, 1, 2)
    assert f"groups 1 are on host 2 ({socket.gethostname()}) now" in hosts.said(1)


@pytest.mark.parametrize(
    "options, words",
    [
        (["--groups", 3], "no number is left for 1 of 3 more"),
        ([], "one of the arguments --groups --spare is required"),
    ],
)
def test_mistakes_are_reported(hosts, options, words):
    hosts.start(0, groups=GROUPS, hosts=1, host_rank=0)
    support.wait_for_step(hosts.run(), 0)
    hosts.join(1, *options)
    said = " ".join(hosts.said(1).split())
    assert words in said and "Traceback" not in said and hosts.agents[1].returncode == 2, said


def test_there_must_be_a_run_to_join(tmp_path):
    nothing = support.ft("join", tmp_path, "--spare")
    assert nothing.returncode == 2 and "holds no run that could be joined" in nothing.stderr
