"""Groups of several ranks: whichever of them dies, at any point, its group is out and the others keep the step.

These are the moments that are particular to such groups; the chaos campaign draws many others, and half of its runs
have such groups.
"""

from __future__ import annotations

import os
import re
import signal

import pytest

from megatron_ft.cluster.faults import kill
from megatron_ft.run.injection_points import Breakpoint
from tests import support

GROUPS, RANKS = 3, 2


def start(directory, data_dir, holds=(), **options) -> support.Run:
    return support.start(directory, data_dir, holds, groups=GROUPS, extra=["--ranks-per-group", RANKS], **options)


@pytest.fixture(scope="module")
def alone(tmp_path_factory, data_dir) -> support.Run:
    """The same job with one rank per group and without failures."""
    run = support.start(tmp_path_factory.mktemp("alone") / "run", data_dir, groups=GROUPS)
    run.check()
    return run


def follower(group: int, point: str, bucket: int | None = None, step: int = 3) -> Breakpoint:
    return Breakpoint(group, step, point, bucket, position=1)


STORIES = {
    "a follower, in the all-reduce of the first bucket it owns": [follower(2, "reduce", 1)],
    "a follower of the group that writes the history, during the update": [follower(0, "update")],
    "a leader before anything is connected, and the others compute its part": [Breakpoint(0, 0, "begin")],
    "a leader, in the all-reduce of the last bucket": [Breakpoint(2, 3, "reduce", 6)],
    "a follower while it patches for another group": [Breakpoint(2, 3, "backward"), follower(1, "patch")],
    "a follower while the new communicators are built": [follower(2, "reduce", 1), follower(1, "connect")],
    "after the last step": [follower(1, "update", step=support.STEPS - 1), Breakpoint(0, support.STEPS, "finish")],
}
IN_CI = (
    "a follower, in the all-reduce of the first bucket it owns",
    "a leader before anything is connected, and the others compute its part",
)


LISTENS = """
from megatron_ft.run import peer_lost as released

released._CULPRIT_S = 120.0
"""
"""The time for which a released rank waits for its agent to name the lost rank, before the rank reports that its group
has come apart."""


def test_ranks_that_share_a_group_train_the_same_model(tmp_path, data_dir, alone):
    run = start(tmp_path / "run", data_dir)
    run.check(alone)
    assert not run.events("fault") and not run.events("recovery")
    for group in range(GROUPS):
        lines = [(run.directory / "logs" / f"g{group}.p{position}.log").read_text() for position in range(RANKS)]
        assert lines[0] == lines[1], "every rank's script sees the same results"


@pytest.mark.parametrize("holds", support.first_of(STORIES, *IN_CI))
def test_one_dead_rank_takes_its_group_out_and_costs_no_step(tmp_path, data_dir, alone, holds):
    run = start(tmp_path / "run", data_dir, holds, script=support.changed_script(tmp_path / "train.py", LISTENS))
    run.strike_in_step(*holds)
    run.check(alone)
    lost = {hold.group for hold in holds}
    assert [line["group"] for line in run.events("survivor")] == sorted(set(range(GROUPS)) - lost)
    assert {(line["group"], line["position"]) for line in run.events("fault")} == {(h.group, h.position) for h in holds}
    dead = {(hold.group, hold.position) for hold in holds}
    for group, position in {(group, position) for group in lost for position in range(RANKS)} - dead:
        log = (run.directory / "logs" / f"g{group}.p{position}.log").read_text()
        assert f"group {group} is out: " in log and f"rank {position} waits" in log, (
            "a healthy rank waits, nothing kills it"
        )
        assert "SIGKILL" in log, "and knows what took its group out"


@pytest.mark.long
def test_a_stopped_follower_takes_its_group_out(tmp_path, data_dir, alone):
    """The leader is stuck behind the stopped follower in the group; the agent names the stopped rank, and all others
    go on."""
    hold = follower(1, "forward")
    script = support.changed_script(tmp_path / "train.py", LISTENS)
    run = start(tmp_path / "run", data_dir, [hold], detector={"stopped_timeout_s": 0.5}, script=script)
    support.wait_for(lambda: any(1 not in line["live"] for line in run.events("step")), run)
    frozen = kill.pid_of(run.directory, 1, 1)
    os.kill(frozen, signal.SIGCONT)
    run.check(alone)
    assert [(line["group"], line["position"], line["pid"]) for line in run.events("fault")] == [(1, 1, frozen)]
    for position in range(RANKS):
        assert "is stopped" in (run.directory / "logs" / f"g1.p{position}.log").read_text()


@pytest.mark.long
def test_a_follower_that_is_told_to_leave_takes_its_group_with_it(tmp_path, data_dir, alone):
    hold = follower(2, "backward")
    gate = support.Gate(tmp_path, 6)
    run = start(tmp_path / "run", data_dir, [hold], script=gate.script)
    pid = support.await_held(run, 2, 1)
    os.kill(pid, signal.SIGTERM)
    os.kill(pid, signal.SIGCONT)
    # Its leader hears of it through the store, whatever step that is in.
    leader = run.directory / "logs" / "g2.p0.log"
    support.wait_for(lambda: "group 2 is asked to leave" in leader.read_text(), run)
    gate.open()
    run.check(alone)
    ((group, after, reason),) = [(line["group"], line["after"], line["reason"]) for line in run.events("leave")]
    assert group == 2 and after >= 3 and "SIGTERM" in reason
    assert not run.events("fault")
    assert sum(line["patched"] for line in run.events("recovery")) <= support.PER_GROUP


HANGS_INSIDE = """
import threading
import torch, torch.distributed as dist
from megatron_ft.core.detection import rank_health
from megatron_ft.run.rank import Rank
from megatron_ft.run.session import Session

rank_health.LEAST_S = 2.0
plain, inside = Session.train_step, Rank.inside

def train_step(self, *args):
    if not dist.is_initialized():
        self.init_distributed("gloo")
    return plain(self, *args)

def with_collective(self, operation):
    def first_a_collective():
        if (self.group, self.position, self.env.incarnation, self.link._step) == (1, 1, 0, 5):
            threading.Event().wait()  # a bug of the user's: it never gets to the collective
        dist.all_reduce(torch.ones(10))
        return operation()
    return inside(self, first_a_collective)

Session.train_step, Rank.inside = train_step, with_collective
"""


def test_a_hang_inside_a_group_takes_it_out_and_names_the_rank(tmp_path, data_dir, alone):
    """The script does nothing for it, and no limit is set."""
    script = support.changed_script(tmp_path / "train.py", HANGS_INSIDE)
    run = start(tmp_path / "run", data_dir, script=script)
    run.check(alone)
    (view,) = [line for line in run.events("view") if line["lost"]]
    assert list(view["lost"]) == ["1"]
    assert re.match(
        r"rank 1 on \S+ \(pid \d+\) did not enter all_reduce #\d+ of the world; rank 0 waits in it", view["lost"]["1"]
    )
    for position in range(RANKS):
        assert (
            "the last collectives:\n  the world all_reduce #"
            in (run.directory / "logs" / f"g1.p{position}.log").read_text()
        )


FALLS_APART = """
from megatron_ft.run.session import Session

plain = Session.train_step
def train_step(self, *args):
    result = plain(self, *args)
    if (self.group, self.position, result.step) == (1, 1, 3):
        self._rank.inner.abort()  # as a switch does that forgets a connection
    return result
Session.train_step = train_step
"""


@pytest.mark.long
def test_a_group_whose_live_ranks_have_lost_each_other_is_out(tmp_path, data_dir, alone):
    script = support.changed_script(tmp_path / "train.py", FALLS_APART)
    run = start(tmp_path / "run", data_dir, script=script)
    run.check(alone)
    (view,) = [line for line in run.events("view") if line["lost"]]
    assert list(view["lost"]) == ["1"] and "has lost the other ranks of its group" in view["lost"]["1"]
    assert not run.events("fault")


@pytest.mark.long
def test_a_run_ends_with_the_reason_when_all_groups_are_broken(tmp_path, data_dir):
    """Healthy ranks wait for their group only as long as there is a run that it could come back to."""
    holds = [follower(group, "backward") for group in range(GROUPS)]
    run = start(tmp_path / "run", data_dir, holds)
    run.strike(*holds)
    said = run.finish()
    assert run.process.returncode != 0
    assert "SIGKILL" in said and "Traceback" not in said, said


@pytest.mark.long
def test_buckets_in_bf16_are_summed_in_fp32_inside_a_group(tmp_path, data_dir, alone):
    hold = follower(1, "bucket", 1)
    run = start(tmp_path / "run", data_dir, [hold], reduce_dtype="bf16")
    run.strike(hold)
    assert "all 8 steps are done" in run.finish(), run.logs()
    losses = {line["step"]: line["loss"] for line in run.events("step")}
    expected = {line["step"]: line["loss"] for line in alone.events("step")}
    assert all(abs(losses[step] / expected[step] - 1) < 1e-3 for step in expected)
