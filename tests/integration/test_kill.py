"""Real SIGKILLs of real ranks, at every kind of moment; every run must equal the failure-free one."""

from __future__ import annotations

import re
import signal

import pytest

from megatron_ft.run.injection_points import Breakpoint
from tests import support
from tests.support import GROUPS, STEPS

LAST_BUCKET = 6

STORIES = {
    "in a forward; in a backward; in the last all-reduce": [
        Breakpoint(1, 1, "forward"),
        Breakpoint(2, 3, "backward"),
        Breakpoint(3, 5, "reduce", LAST_BUCKET),
    ],
    "before anything of the step; between two buckets; after the last bucket": [
        Breakpoint(3, 1, "begin"),
        Breakpoint(1, 3, "bucket", 0),
        Breakpoint(2, 5, "gate"),
    ],
    "in the first all-reduce; during the update": [Breakpoint(2, 1, "reduce", 0), Breakpoint(3, 3, "update")],
    "the group that writes the history: in an all-reduce; during the update": [
        Breakpoint(0, 2, "reduce", 1),
        Breakpoint(1, 5, "update"),
    ],
    "two groups at once": [Breakpoint(1, 3, "backward"), Breakpoint(3, 3, "backward")],
    "a second one after its report on the first": [Breakpoint(2, 3, "reduce", 1), Breakpoint(0, 3, "recover")],
    "a second one while it patches for the first": [Breakpoint(2, 3, "backward"), Breakpoint(1, 3, "patch")],
    "a second one while the new communicator is built": [Breakpoint(2, 3, "reduce", 0), Breakpoint(3, 3, "connect")],
    "all but one, one after the other": [
        Breakpoint(0, 1, "backward"),
        Breakpoint(1, 3, "reduce", 0),
        Breakpoint(3, 5, "gate"),
    ],
    "in the first step, before the models are equal": [Breakpoint(0, 0, "connect")],
    "after the last step": [Breakpoint(0, STEPS, "finish")],
}
IN_CI = (
    "in a forward; in a backward; in the last all-reduce",
    "a second one while the new communicator is built",
    "after the last step",
)


def test_the_last_bucket_is_the_last(reference):
    assert reference.events("begin")[0]["buckets"] == LAST_BUCKET + 1


@pytest.mark.parametrize("holds", support.first_of(STORIES, *IN_CI))
def test_a_killed_group_costs_no_step(tmp_path, data_dir, reference, holds):
    run = support.start(tmp_path / "run", data_dir, holds)
    run.strike_in_step(*holds)
    run.check(reference)
    assert {line["group"] for line in run.events("fault")} == {hold.group for hold in holds}
    assert all(line["signal"] == "SIGKILL" and line["detected_s"] >= 0 for line in run.events("fault"))
    survivors = sorted(set(range(GROUPS)) - {hold.group for hold in holds})
    assert [line["group"] for line in run.events("survivor")] == survivors


def test_lost_microbatches_are_taken_over_by_the_survivors(tmp_path, data_dir, reference):
    """The survivors notice a broken connection before they hear of the death: the agent is stopped meanwhile. The
    view's reason is the death all the same, and the message of gloo is in a rank's log only."""
    hold = Breakpoint(2, 3, "backward")
    run = support.start(tmp_path / "run", data_dir, [hold])
    support.await_held(run, hold.group)
    run.process.send_signal(signal.SIGSTOP)
    run.strike_in_step(hold)
    support.wait_for(lambda: "a connection broke" in run.logs(), run)
    run.process.send_signal(signal.SIGCONT)
    run.check(reference)
    (view,) = [line for line in run.events("view") if line["lost"]]
    assert view["reason"] == view["lost"]["2"] and "ended with SIGKILL" in view["reason"]
    assert re.fullmatch(r"group [013] reports: a connection broke", view["noticed"])
    assert "pair.cc" not in str(run.history) and "pair.cc" in run.logs()
    (recovery,) = run.events("recovery")
    assert recovery["step"] == 3
    assert recovery["patched"] == support.PER_GROUP
    assert sum(recovery["patched_by"].values()) == support.PER_GROUP
    assert "2" not in recovery["patched_by"]
    after = [line for line in run.events("step") if line["step"] > 3]
    assert all(line["live"] == [0, 1, 3] for line in after)


@pytest.mark.long
def test_the_failure_free_run_ends_alike_twice(tmp_path, data_dir, reference):
    run = support.start(tmp_path / "run", data_dir)
    run.check(reference)
    (mine,), (theirs,) = run.events("end"), reference.events("end")
    assert mine["params_sha256"] == theirs["params_sha256"]
