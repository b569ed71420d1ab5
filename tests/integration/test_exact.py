"""Exact reduction: whatever happens to a run, its losses and its parameters have the same bits."""

from __future__ import annotations

import json

import pytest

from megatron_ft.run.injection_points import Breakpoint
from tests import deepspeed_kills, support

EXACT = {"reduction": "exact"}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, data_dir):
    run = support.start(tmp_path_factory.mktemp("exact") / "run", data_dir, **EXACT)
    run.check()
    return support.outcome(run)


def test_killed_groups_change_no_bit(tmp_path, data_dir, undisturbed):
    """In a backward pass of the step that measures the grid, in an all-reduce, during an update."""
    holds = [Breakpoint(1, 0, "backward"), Breakpoint(2, 3, "reduce", 2), Breakpoint(3, 5, "update")]
    run = support.start(tmp_path / "run", data_dir, holds, **EXACT)
    run.strike_in_step(*holds)
    run.check()
    assert len(run.events("fault")) == 3
    assert support.outcome(run) == undisturbed


SAME = {
    "buckets of another size": {"bucket_mb": 0.02},
    "without overlap": {"overlap": False},
    "recover": {"policy": "recover"},
    "spare": {"policy": "spare", "redundancy": 3, "placement": "consecutive"},
    "replication": {"policy": "replication"},
    "verified copies in the slack": {"standby": "slack", "verify": {"microbatches_per_step": "slack"}},
}


@pytest.mark.long
@pytest.mark.parametrize(
    "options", support.first_of(SAME, "buckets of another size", "spare", "verified copies in the slack")
)
def test_no_setting_that_only_moves_work_changes_a_bit(tmp_path, data_dir, undisturbed, options):
    holds = [Breakpoint(2, 1, "backward"), Breakpoint(1, 4, "reduce", 0)]
    run = support.start(tmp_path / "run", data_dir, holds, **EXACT, **options)
    run.strike_in_step(*holds)
    run.check()
    assert support.outcome(run) == undisturbed


@pytest.mark.long
def test_ranks_that_share_microbatches_change_no_bit(tmp_path, data_dir, undisturbed):
    holds = [Breakpoint(1, 3, "backward", position=1)]
    run = support.start(tmp_path / "run", data_dir, holds, extra=("--ranks-per-group", 2), **EXACT)
    run.strike_in_step(*holds)
    run.check()
    assert support.outcome(run) == undisturbed


@pytest.mark.long
def test_a_group_that_comes_back_and_a_job_that_goes_on_with_fewer_groups_change_no_bit(tmp_path, data_dir):
    steps = 60
    alone = support.start(tmp_path / "alone", data_dir, steps=steps, **EXACT)
    alone.check()
    hold = Breakpoint(2, 2, "backward")
    gate = support.Gate(tmp_path, 40, 58)
    saved = {"directory": str(tmp_path / "saved"), "period_s": 0.01}
    options = {"steps": steps, "rejoin": {"enabled": True}, "checkpoint": saved, "script": gate.script, **EXACT}
    run = support.start(tmp_path / "run", data_dir, [hold], **options)
    run.strike_in_step(hold)
    support.wait_for(lambda: gate.waiting(40) >= 3 and run.events("checkpoint"), run)
    run.process.terminate()
    gate.open(40)  # it ends when it has made a step
    run.finish()
    gate.open()
    more = support.start(tmp_path / "run", data_dir, groups=2, **options)
    more.finish()
    assert more.process.returncode == 0, more.logs()
    losses, digest = support.outcome(alone)
    (end,) = more.events("end")
    assert end["params_sha256"] == digest
    first = min(line["step"] for line in more.events("step"))
    assert [line["loss"] for line in more.events("step")] == losses[first:]


ENGINES = {
    "pipeline": {},
    "pipeline, two slices, ZeRO-1": {"slices": 2, "engine": {"zero_optimization": {"stage": 1}}},
    "pipeline, bf16": {"engine": {"bf16": {"enabled": True}}},
    "pipeline, replication": {"policy": "replication"},
}


@pytest.mark.long
@pytest.mark.parametrize("options", support.first_of(ENGINES, "pipeline", "pipeline, two slices, ZeRO-1"))
def test_a_pipeline_that_loses_a_rank_changes_no_bit(tmp_path, data_dir, options):
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    whole = {name: value for name, value in options.items() if name != "policy"}
    alone = deepspeed_kills.start(tmp_path / "alone", data_dir, **EXACT, **whole)
    alone.check()
    holds = [Breakpoint(1, 2, "backward", position=1)]
    run = deepspeed_kills.start(tmp_path / "run", data_dir, holds, **EXACT, **options)
    run.strike(*holds)
    run.check()
    assert support.outcome(run) == support.outcome(alone)


PLAIN_ENGINES = {
    "ZeRO-0": (1, {}),
    "ZeRO-1, two ranks": (2, {"zero_optimization": {"stage": 1}}),
    "bf16": (1, {"bf16": {"enabled": True}}),
}


@pytest.mark.long
@pytest.mark.parametrize("built", support.first_of(PLAIN_ENGINES, "ZeRO-1, two ranks", "bf16"))
def test_a_plain_deepspeed_engine_changes_no_bit(tmp_path, data_dir, built):
    ranks, engine = built
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    from tests.deepspeed_kills import PLAIN

    script = support.changed_script(tmp_path / "train.py", PLAIN)
    extra = ["--ranks-per-group", ranks, "--preload", "deepspeed"]
    options = {"script": script, "groups": 2, "extra": extra, "engine": engine, **EXACT}
    alone = support.start(tmp_path / "alone", data_dir, **options)
    alone.check()
    holds = [Breakpoint(1, 3, "backward", position=ranks - 1)]
    run = support.start(tmp_path / "run", data_dir, holds, **options)
    run.strike(*holds)
    run.check()
    assert support.outcome(run) == support.outcome(alone)


def struck(directory, data_dir, fault: dict, **options) -> support.Run:
    """Return a run, at its end, in which group 1 computed wrongly in step 3."""
    path = directory.with_suffix(".faults.json")
    path.write_text(json.dumps({"faults": [{"group": 1, "step": 3, **fault}]}))
    gate = support.Gate(directory.parent, 1)
    run = support.start(directory, data_dir, script=gate.script, **EXACT, **options)
    done = support.inject_when_ready(run, gate, 1, path, orders=(1,))
    assert done.returncode == 0, done.stdout + done.stderr
    run.finish()
    assert run.process.returncode == 0, run.logs()
    return run


ALL = {"microbatches_per_step": support.GROUPS * support.PER_GROUP}


@pytest.mark.parametrize("what", ["gradient", pytest.param("activation", marks=pytest.mark.long)])
def test_a_group_that_computes_wrongly_leaves_in_the_same_step_and_changes_no_bit(
    tmp_path, data_dir, undisturbed, what
):
    run = struck(tmp_path / "run", data_dir, {"kind": "bitflip", "what": what, "bit": 30}, verify=ALL)
    found = [line for line in run.events("discarded") if line["why"] != "grid"]
    assert [(line["step"], line["why"]) for line in found] == [(3, "digests"), (3, "corruption")]
    assert list(found[1]["guilty"]) == ["1"] and found[1]["guilty"]["1"] in found[0]["doubtful"]
    (lost,) = [view["lost"] for view in run.events("view") if view["lost"]]
    assert list(lost) == ["1"] and "its gradient of microbatch" in lost["1"]
    assert support.outcome(run) == undisturbed


def test_a_bucket_that_changes_on_its_way_is_reduced_again(tmp_path, data_dir, undisturbed):
    run = struck(tmp_path / "run", data_dir, {"kind": "bitflip", "what": "sum", "bit": 40})
    assert [(line["group"], line["step"]) for line in run.events("bucket_changed")] == [(1, 3)]
    assert len(run.events("view")) == 2 and not any(view["lost"] for view in run.events("view"))
    assert support.outcome(run) == undisturbed


@pytest.mark.long
def test_verification_without_a_fault_accuses_nobody(tmp_path, data_dir, undisturbed):
    run = support.start(tmp_path / "run", data_dir, verify={"microbatches_per_step": 3}, **EXACT)
    run.check()
    assert [line["why"] for line in run.events("discarded")] == ["grid"]
    assert support.outcome(run) == undisturbed


OTHER_HARDWARE = """
import os
from megatron_ft.run.engines import torch_native

compute = torch_native.TorchNativeEngine.compute
def other(self, *args, **options):
    compute(self, *args, **options)
    if os.environ["MEGATRON_FT_GROUP"] == "2":
        kept = [p.grad for p in self.model.parameters() if p.grad is not None]
        if kept:  # else the gradient is taken already: its digest is not asked for
            kept[0].view(-1)[0] *= 1 + 2**-20
torch_native.TorchNativeEngine.compute = other
"""


@pytest.mark.long
def test_a_group_on_other_hardware_is_named_in_the_first_step(tmp_path, data_dir):
    script = support.changed_script(tmp_path / "train.py", OTHER_HARDWARE)
    run = support.start(tmp_path / "run", data_dir, script=script, verify={"microbatches_per_step": 1}, **EXACT)
    run.finish()
    assert run.process.returncode == 0, run.logs()
    first = run.events("discarded")[0]
    assert (first["step"], first["why"], list(first["guilty"])) == (0, "corruption", ["2"])
    assert run.events("step")[0]["live"] == [0, 1, 3]


@pytest.mark.long
def test_a_run_that_grows_from_two_groups_to_four_changes_no_bit(tmp_path, data_dir):
    from tests.integration.test_hosts import BEATS
    from tests.integration.test_join import GROUPS, Hosts, wait_for_live

    hosts = Hosts(tmp_path, data_dir)
    try:
        support.write_config(hosts.config, rejoin={"enabled": True}, detector=BEATS, **EXACT)
        hosts.start(0, groups=GROUPS, hosts=1, host_rank=0)
        run = hosts.run()
        support.wait_for_step(run, 1)
        hosts.join(1, "--groups", 2)
        wait_for_live(run, 0, 1, 2, 3)
        support.wait_for_step(run, run.events("step")[-1]["step"] + 5)
        hosts.stop(0, 1)
    finally:
        hosts.kill()
    grown = [line["loss"] for line in run.events("step")]
    own = ("--layers", 2, "--width", 64, "--seq-len", 32, "--lr", 1e-4)
    alone = support.start(tmp_path / "alone", data_dir, steps=len(grown), groups=GROUPS, own=own, **EXACT)
    alone.finish()
    assert len({len(str(line["live"])) for line in run.events("step")}) > 1
    assert grown == support.outcome(alone)[0]
