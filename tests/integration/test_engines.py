"""A rank of a group whose ranks compute together dies, and the step is kept, in every engine."""

from __future__ import annotations

import pytest
import torch

from megatron_ft.run.injection_points import Breakpoint
from tests import deepspeed_kills, engine_kills, support

OFTEN = (
    "3 x FSDP2: rank 1 of group 1, rank 0 of group 2 as another group takes a microbatch over",
    "3 x torch PP2: rank 0 of group 1 in the second forward pass",
    "2 x Megatron EP2: rank 1 of group 1 in the last backward pass",
    "2 x ZeRO-3: rank 0 of group 1 in the optimizer's update",
    "2 x PP2 x TP2: rank 2 of group 1 in the last backward pass",
)
CASES = (
    *OFTEN,
    "3 x FSDP2: rank 1 of group 1 in the last backward pass",
    "3 x FSDP2, reduced with the last: rank 0 of group 1 in the second forward pass",
    "2 x PP2 x TP2: rank 0 of group 1 in the second forward pass",
    "3 x PP2: rank 0 of group 1 in the optimizer's update",
    "3 x PP2: rank 1 of group 1, rank 0 of group 2 as another group takes a microbatch over",
)


@pytest.fixture(scope="module")
def alone(tmp_path_factory, data_dir):
    """Failure-free runs by engine; each is made once."""
    found: dict[str, support.Run] = {}

    def run(kit: str) -> support.Run:
        if kit not in found:
            found[kit] = engine_kills.start(kit, tmp_path_factory.mktemp("alone") / "run", data_dir)
            found[kit].check()
        return found[kit]

    return run


@pytest.mark.parametrize("name", support.first_of({name: name for name in CASES}, *OFTEN))
def test_a_rank_that_dies_costs_no_step(tmp_path, data_dir, alone, name):
    support.needs_engine(name)
    if "x PP2" in name:
        support.needs_engine("deepspeed")
    (case,) = [case for kit in engine_kills.KITS for case in engine_kills.cases(kit) if case.name == name]
    run = engine_kills.play(case, tmp_path / "run", data_dir)
    assert not engine_kills.judge(run, case, alone(case.kit), exact=False)[0], run.logs()


@pytest.mark.long
def test_recomputed_activations_change_no_bit(tmp_path, data_dir):
    """A rank dies while Megatron computes its layers again, with their dropout. The other run keeps all activations."""
    support.needs_engine("megatron")
    settings = {"groups": 2, "stages": 2, "reduction": "exact"}
    hold = Breakpoint(1, 2, "backward", after=1, position=1)
    run = engine_kills.megatron(tmp_path / "run", data_dir, [hold], own=engine_kills.RECOMPUTATION, **settings)
    run.strike(hold)
    alone = engine_kills.megatron(tmp_path / "alone", data_dir, **settings)
    alone.check()
    run.check(alone)
    assert support.outcome(run) == support.outcome(alone) and run.events("fault")


SAMPLES = {"train_micro_batch_size_per_gpu": 4}


def _fsdp(*arguments, **options):
    return engine_kills.fsdp(*arguments, engine=SAMPLES, **options)


def _zero(*arguments, stage, **options):
    zero = {"stage": stage, "stage3_param_persistence_threshold": 100}
    options["own"] = (*options["own"], "--width", 64, "--seq-len", 32)
    return deepspeed_kills.zero(*arguments, stage=stage, **options | {"engine": {"zero_optimization": zero, **SAMPLES}})


def _native(*arguments, schedule="1f1b", own, **options):
    return engine_kills.native(*arguments, own=(*own, "--schedule", schedule), **options)


DIVIDED_ANEW = {
    "FSDP2 2 to 4 shards": (_fsdp, {"shards": 2}, {"shards": 4}),
    "FSDP2 2 shards to 1": (_fsdp, {"shards": 2}, {"shards": 1}),
    "ZeRO-2 2 to 4 shards": (_zero, {"stage": 2, "shards": 2}, {"stage": 2, "shards": 4}),
    "ZeRO-2 2 shards to 1": (_zero, {"stage": 2, "shards": 2}, {"stage": 2, "shards": 1}),
    "ZeRO-3 2 to 4 shards": (_zero, {"stage": 3, "shards": 2}, {"stage": 3, "shards": 4}),
    "ZeRO-3 2 shards to 1": (_zero, {"stage": 3, "shards": 2}, {"stage": 3, "shards": 1}),
    "torch pipeline 4 stages to 2": (_native, {"stages": 4}, {"stages": 2}),
    "torch pipeline 2 stages to 4 on 2 ranks, 2 shards": (
        _native,
        {"stages": 2},
        {"stages": 2, "shards": 2, "schedule": "interleaved"},
    ),
}
"""Starts of an engine, and its division when the checkpoint is saved and when it is loaded."""


@pytest.mark.parametrize("case", support.first_of(DIVIDED_ANEW, "FSDP2 2 to 4 shards"))
def test_a_checkpoint_goes_on_in_groups_that_are_divided_otherwise(tmp_path, data_dir, case):
    """Without dropout, which draws other numbers for a share of the samples and for a stage."""
    start, before, after = case
    support.needs_engine(start.__name__)
    saved = {"checkpoint": {"directory": str(tmp_path / "saved"), "period_s": 1e6}}
    common = {"groups": 1, "own": ("--layers", 4 if "stages" in before else 2, "--dropout", 0)}
    alone = start(tmp_path / "alone", data_dir, steps=6, **common, **before)
    alone.check()
    first = start(tmp_path / "first", data_dir, steps=3, **common, **before, **saved)
    first.finish()
    second = start(tmp_path / "second", data_dir, steps=6, **common, **after, **saved)
    said = second.finish()
    assert first.process.returncode == second.process.returncode == 0, said + second.logs()
    losses = [line["loss"] for run in (first, second) for line in run.events("step")]
    assert losses == pytest.approx([line["loss"] for line in alone.events("step")], rel=1e-5)


WHOLE = {
    "shards": (engine_kills.native, {"shards": 2}),
    "stages": (engine_kills.native, {"stages": 2}),
    "slices": (engine_kills.native, {"slices": 2}),
    "ZeRO-3": (deepspeed_kills.zero, {"shards": 2, "stage": 3}),
}


@pytest.mark.long
@pytest.mark.parametrize("case", WHOLE.values(), ids=WHOLE)
def test_a_divided_model_is_exported_whole(tmp_path, data_dir, case):
    """What is exported has the norm that the groups have recorded, and the names of the whole model."""
    start, sizes = case
    support.needs_engine(start.__name__)
    saved = {"checkpoint": {"directory": str(tmp_path / "saved"), "period_s": 1e6}, "groups": 2}
    run = start(tmp_path / "run", data_dir, **sizes, **saved)
    run.check()
    said = support.ft("export", run.directory, "--format", "torch", "--out", tmp_path / "model.pt")
    assert said.returncode == 0, said.stderr
    model = torch.load(tmp_path / "model.pt")
    once = {one.data_ptr(): one for one in model.values()}  # weights may be tied
    norm = sum(float(one.double().square().sum()) for one in once.values()) ** 0.5
    assert norm == pytest.approx(run.events("survivor")[0]["params_norm"], rel=1e-6)
    assert {"embedding.weight", "blocks.0.norm1.weight", "blocks.1.norm2.weight", "head.weight"} <= model.keys()
