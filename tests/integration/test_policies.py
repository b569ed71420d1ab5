"""The policies to compare with: the batch shrinks, or the whole job restarts from its last checkpoint."""

from __future__ import annotations

import json
import os
import signal

import pytest

from megatron_ft.cluster.faults import kill
from megatron_ft.errors import WIPED_OUT
from megatron_ft.plan import like_run
from megatron_ft.proof import replay
from megatron_ft.record import history, invariants
from megatron_ft.record.protocol_trace import Record
from megatron_ft.run.injection_points import Breakpoint
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
def test_with_drop_a_group_that_had_given_all_counts_in_its_last_step(tmp_path, data_dir):
    """The others hold all buckets of the step in which it is lost, and a replay comes to the same."""
    hold, *others = (Breakpoint(group, 3, "gate") for group in (2, 0, 1, 3))
    run = support.start(tmp_path / "run", data_dir, [hold, *others], own=OWN, policy="drop")
    frozen = [support.await_held(run, other.group) for other in others]
    run.strike(hold)
    for pid in frozen:
        os.kill(pid, signal.SIGCONT)
    output = run.finish()
    assert run.process.returncode == 0, output + run.logs()
    counted = [line["microbatches"] for line in run.events("step")]
    assert counted == [WHOLE] * 4 + [WHOLE - support.PER_GROUP] * (support.STEPS - 4)
    assert not replay.replay(Record.load(run.directory)).different


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
    options = {"steps": 20, "own": OWN, "script": gate.script}
    run = support.start(tmp_path / "run", data_dir, policy="restart", checkpoint=saved, **options)
    support.wait_for(lambda: bool(run.events("checkpoint")), run)
    kill.kill(run.directory, 1, "anywhere")
    gate.open()
    output = run.finish()
    assert run.process.returncode == 0, output + run.logs()
    assert "the run is wiped out: the whole job is started again" in " ".join(output.split())
    starts = [history.read(run.directory / "earlier" / "0001"), run.history]
    found = invariants.check_history(invariants.joined(starts), WHOLE)
    assert not found, found


RULES = {
    "spare": {"policy": "spare", "redundancy": 3, "placement": "consecutive"},
    "replication": {"policy": "replication"},
    "recover": {"policy": "recover"},
    "slack": {"standby": "slack"},
}
"""Four groups with 4 microbatches each."""


@pytest.mark.parametrize("rules", support.first_of({name: name for name in RULES}, "spare", "recover"))
@pytest.mark.parametrize(
    "ranks", [pytest.param(1, id="one rank", marks=pytest.mark.long), pytest.param(2, id="two ranks")]
)
def test_a_step_is_the_same_whichever_groups_stand_in_for_lost_ones(tmp_path, data_dir, reference, rules, ranks):
    """Two groups are lost in different steps, each while it reduces: the others contribute what they have computed as
    standby, and compute the rest. Losses and parameters are those of the run without a failure."""
    victim = 0 if rules == "slack" else 1
    holds = [Breakpoint(2, 2, "bucket", bucket=0), Breakpoint(victim, 5, "bucket", bucket=0)]
    extra = ["--ranks-per-group", ranks]
    run = support.start(tmp_path / "run", data_dir, holds, extra=extra, **RULES[rules])
    for hold in holds:
        run.strike_in_step(hold)
    run.check(reference)
    first, second = run.events("recovery")
    if (
        rules == "spare"
    ):  # S is 1 before the first loss, so nothing stands by for it; then every group computes 2 shards
        assert (first["promoted"], first["patched"]) == (0, 4) and first["plan"]["S"] == 2
        assert (second["promoted"], second["patched"]) == (4, 4), "it contributed two shards, one had a standby"
    elif rules == "replication":
        assert (first["promoted"], first["patched"]) == (8, 0)
        assert (second["promoted"], second["patched"]) == (0, 0), "group 1 was the standby of group 0"
    elif rules == "recover":
        assert first["plan"]["recovery"] == "boundary" and first["plan"]["b"] == 2
        assert second["promoted"] + second["patched"] == 6
    else:
        assert first["promoted"] == 0, "equal shares leave no slack"
        assert (second["promoted"], second["patched"]) == (2, 4), "a group with two fewer had copied two of its six"
    assert not replayed(run)


def replayed(run) -> list:
    """Return what core decides otherwise than the run did."""
    found = replay.replay(Record.load(run.directory))
    return found.different + ([found.stopped] if found.stopped else [])


@pytest.mark.long
def test_after_a_wipe_out_of_spare_the_job_goes_on_from_its_checkpoint_with_every_group(tmp_path, data_dir):
    """Each shard has two hosts, and both of one are lost at once: no step can be made, and S begins at 1 again."""
    saved = {"directory": str(tmp_path / "saved"), "period_s": 0.1}
    gate = support.Gate(tmp_path, slowly=STEPS)
    rules = {"policy": "spare", "redundancy": 2, "placement": "consecutive"}
    options = {"steps": STEPS, "own": OWN, "script": gate.script, "checkpoint": saved}
    run = support.start(tmp_path / "run", data_dir, **rules, **options)
    support.wait_for(lambda: bool(run.events("checkpoint")), run)
    kill.kill(run.directory, 1, "anywhere")
    support.wait_for(lambda: bool(run.events("recovery")), run)
    assert run.events("recovery")[0]["plan"]["S"] == 2
    kill.kill(run.directory, 2, "anywhere")
    support.wait_for(lambda: (run.directory / "earlier" / "0001").exists(), run)
    gate.open()
    output = run.finish()
    assert run.process.returncode == 0, output + run.logs()
    assert "the run is wiped out: the whole job is started again" in " ".join(output.split())
    before = history.read(run.directory / "earlier" / "0001")
    (end,) = [line for line in before if line["event"] == "stop"]
    assert end["exit_code"] == WIPED_OUT and "no live group hosts shard" in end["reason"]
    assert not invariants.check_history(invariants.joined([before, run.history]), WHOLE)
    assert [view["live"] for view in run.events("view")] == [[0, 1, 2, 3]] and not run.events("recovery")
    like = like_run.compare(run.directory)
    assert (like.restarts, len(like.measured.losses)) == (1, 2) and like.measured.restart_s > 0
    assert (like.predicted.wipe_outs, like.predicted.failures, like.predicted.steps) == (1, 2, STEPS - 1)
    json.dumps(like.to_json(), allow_nan=False)
