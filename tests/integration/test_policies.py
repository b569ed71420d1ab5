"""The policies to compare with: the batch shrinks, or the whole job restarts from its last checkpoint."""

from __future__ import annotations

import os
import signal

import pytest

from megatron_ft.faults import kill
from megatron_ft.faults.injection_points import Breakpoint
from megatron_ft.runlog import history, invariants
from tests import support

STEPS = 60
OWN = ("--layers", 2, "--width", 64, "--seq-len", 32, "--lr", 1e-4)
WHOLE = support.GROUPS * support.PER_GROUP


@pytest.mark.parametrize(
    "hold",
    [
        pytest.param(Breakpoint(2, 3, "backward"), id="compute", marks=pytest.mark.long),
        pytest.param(Breakpoint(2, 3, "bucket", bucket=0), id="reduce"),
    ],
)
def test_with_drop_the_batch_shrinks_by_what_the_lost_group_had(tmp_path, data_dir, hold):
    """The batch shrinks in the step of the loss, too, even when a bucket with the lost group's part had been reduced
    already."""
    others = [Breakpoint(group, 3, "forward") for group in range(support.GROUPS) if group != hold.group]
    run = support.start(tmp_path / "run", data_dir, [hold, *others], own=OWN, policy="drop")
    # A group in step 3 has committed step 2: otherwise that step would be made again, without the lost group.
    for frozen in [support.await_held(run, other.group) for other in others]:
        os.kill(frozen, signal.SIGCONT)
    run.strike(hold)
    output = run.finish()
    assert run.process.returncode == 0, output + run.logs()
    counted = [line["microbatches"] for line in run.events("step")]
    # The lost group never came to its last bucket, so no other group had all of step 3 with its part.
    assert counted == [WHOLE] * 3 + [WHOLE - support.PER_GROUP] * (support.STEPS - 3)
    assert len({line["params_sha256"] for line in run.events("survivor")}) == 1


@pytest.mark.long
def test_with_drop_a_group_that_comes_back_brings_its_share_along(tmp_path, data_dir):
    gate = support.Gate(tmp_path, slowly=STEPS)
    options = {"steps": STEPS, "own": OWN, "script": gate.script, "rejoin": {"enabled": True}}
    run = support.start(tmp_path / "run", data_dir, policy="drop", **options)
    support.wait_for_step(run, 2)
    kill.kill(run.directory, 1, "anywhere")
    support.wait_for(lambda: bool(run.events("rejoined")), run)
    support.wait_for_step(run, run.events("rejoined")[0]["step"] + 1)  # its share is its own again in the next step
    gate.open()
    output = run.finish()
    assert run.process.returncode == 0, output + run.logs()
    counted = [line["microbatches"] for line in run.events("step")]
    assert WHOLE - support.PER_GROUP in counted and counted[-1] == WHOLE
    assert len({line["params_sha256"] for line in run.events("survivor")}) == 1


def test_with_restart_any_loss_starts_the_job_again_from_the_last_checkpoint(tmp_path, data_dir):
    saved = {"directory": str(tmp_path / "saved"), "period_s": 0.1}
    gate = support.Gate(tmp_path, slowly=STEPS)
    options = {"steps": STEPS, "own": OWN, "script": gate.script}
    run = support.start(tmp_path / "run", data_dir, policy="restart", checkpoint=saved, **options)
    support.wait_for(lambda: bool(run.events("checkpoint")), run)
    kill.kill(run.directory, 1, "anywhere")
    gate.open()
    output = run.finish()
    assert run.process.returncode == 0, output + run.logs()
    assert "a group is lost: the whole job is started again" in " ".join(output.split())
    starts = [history.read(run.directory / "earlier" / "0001"), run.history]
    found = invariants.check_history(invariants.joined(starts), WHOLE)
    assert not found, found
