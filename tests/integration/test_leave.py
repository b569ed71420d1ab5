"""A maintenance notice: SIGTERM to one group. The group finishes its step and leaves; the others go on, and it is no
fault."""

from __future__ import annotations

import os
import signal

import pytest

from megatron_ft.cluster.faults import kill
from megatron_ft.run.injection_points import Breakpoint
from tests import support


def test_sigterm_to_one_group_costs_nothing_of_the_step(tmp_path, data_dir, reference):
    """The signal comes in the middle of a backward pass; the group's microbatches of that step all count, none is
    patched in it."""
    hold = Breakpoint(2, 3, "backward")
    run = support.start(tmp_path / "run", data_dir, [hold])
    pid = support.await_held(run, 2)
    os.kill(pid, signal.SIGTERM)
    os.kill(pid, signal.SIGCONT)
    run.check(reference)
    assert [(line["group"], line["after"], line["reason"]) for line in run.events("leave")] == [(2, 3, "SIGTERM")]
    assert not run.events("fault")
    views = run.events("view")
    assert len(views) == 2 and views[1]["lost"] == {"2": "leaves after step 3: SIGTERM"} and views[1]["step"] == 4
    assert [line["step"] for line in run.events("recovery")] == [4], "step 3 was whole"
    assert "group 2 has left: SIGTERM" in (run.directory / "logs" / "g2.p0.log").read_text()


@pytest.mark.long
def test_the_last_group_is_told_to_leave(tmp_path, data_dir):
    """No group is left to go on; the run reports this, and how far it came."""
    run = support.start(tmp_path / "run", data_dir, steps=100_000)
    support.wait_for_step(run, 2)
    for group in range(support.GROUPS):
        os.kill(kill.pid_of(run.directory, group), signal.SIGTERM)
    said = run.finish()
    assert run.process.returncode != 0 and "Traceback" not in said, said
    assert len(run.events("leave")) == support.GROUPS
    assert run.events("stop")[0]["reason"] in " ".join(said.split())


def test_an_operator_asks_a_group_to_leave(tmp_path, data_dir):
    """The request goes through the control store, from any host that reaches it; both ranks of the group leave, and it
    does not come back."""
    options = {"steps": 20, "groups": 3, "extra": ["--ranks-per-group", 2], "rejoin": {"enabled": True}}
    run = support.start(tmp_path / "run", data_dir, [Breakpoint(0, 3, "forward")], **options)
    frozen = support.await_held(run, 0)
    asked = support.Command("leave", run.directory, 1, "--why", "its fan is to be changed")
    support.wait_for(lambda: "asked to leave: its fan" in (run.directory / "logs" / "g1.p0.log").read_text(), run)
    again = support.ft("leave", run.directory, 7)
    assert again.returncode == 2 and "group 7 is not in the run; its groups are: 0 1 2" in again.stderr
    os.kill(frozen, signal.SIGCONT)
    done = asked.finish()
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in run.events("leave") if line["group"] == 1]
    assert done.stdout + done.stderr == f"group 1 leaves after step {line['after']}\n" and "fan" in line["reason"]
    run.check()
    assert run.events("view")[-1]["live"] == [0, 2]
    assert not run.events("restart") and not run.events("fault")
    over = support.ft("leave", run.directory, 0)
    assert over.returncode == 2 and "is over" in over.stderr


@pytest.mark.long
@pytest.mark.parametrize("rejoin", [pytest.param(False, marks=pytest.mark.long), True])
def test_an_operator_stops_a_run_that_saves_nothing(tmp_path, data_dir, rejoin):
    run = support.start(tmp_path / "run", data_dir, steps=100_000, groups=2, rejoin={"enabled": rejoin})
    support.wait_for_step(run, 2)
    asked = support.ft("stop", run.directory)
    assert asked.returncode == 0, asked.stderr
    said = run.finish()
    (stop,) = run.events("stop")
    assert run.process.returncode == stop["exit_code"] == 128 + signal.SIGTERM, said
    assert "stopped by SIGTERM after step" in stop["reason"] and not run.events("restart")
