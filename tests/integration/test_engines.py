"""A rank of a group whose ranks compute together dies, and the step is kept, in every engine."""

from __future__ import annotations

import pytest
import torch

from tests import engine_kills, support

IN_CI = (
    "3 x FSDP2: rank 1 of group 1 in the last backward pass",
    "3 x FSDP2: rank 1 of group 1, rank 0 of group 2 as another group takes a microbatch over",
    "3 x FSDP2, reduced with the last: rank 0 of group 1 in the second forward pass",
    "3 x torch PP2: rank 0 of group 1 in the second forward pass",
    "2 x Megatron EP2: rank 1 of group 1 in the last backward pass",
    "2 x ZeRO-3: rank 0 of group 1 in the optimizer's update",
    "2 x PP2 x TP2: rank 0 of group 1 in the second forward pass",
    "2 x PP2 x TP2: rank 2 of group 1 in the last backward pass",
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


@pytest.mark.parametrize("name", IN_CI)
def test_a_rank_that_dies_costs_no_step(tmp_path, data_dir, alone, name):
    support.needs_engine(name)
    if "x PP2" in name:
        support.needs_engine("deepspeed")
    (case,) = [case for kit in engine_kills.KITS for case in engine_kills.cases(kit) if case.name == name]
    run = engine_kills.play(case, tmp_path / "run", data_dir)
    assert not engine_kills.judge(run, case, alone(case.kit), exact=False)[0], run.logs()


@pytest.mark.parametrize("shards", [1, 4])
def test_a_checkpoint_of_two_shards_goes_on_with_another_number(tmp_path, data_dir, shards):
    """Without dropout, which draws other numbers for a share of the samples."""
    own = ("--layers", 2, "--dropout", 0)
    saved = {"checkpoint": {"directory": str(tmp_path / "saved"), "period_s": 1e6}, "own": own, "groups": 1}
    samples = {"train_micro_batch_size_per_gpu": 4}
    alone = engine_kills.fsdp(tmp_path / "alone", data_dir, shards=2, own=own, groups=1, steps=8, engine=samples)
    alone.check()
    first = engine_kills.fsdp(tmp_path / "first", data_dir, shards=2, steps=4, engine=samples, **saved)
    first.finish()
    second = engine_kills.fsdp(tmp_path / "second", data_dir, shards=shards, steps=8, engine=samples, **saved)
    second.finish()
    assert first.process.returncode == second.process.returncode == 0, second.logs()
    losses = [line["loss"] for run in (first, second) for line in run.events("step")]
    assert losses == pytest.approx([line["loss"] for line in alone.events("step")], rel=1e-5)


@pytest.mark.parametrize("sizes", [{"shards": 2}, {"stages": 2}, {"slices": 2}], ids=str)
def test_a_divided_model_is_exported_whole(tmp_path, data_dir, sizes):
    """What is exported has the norm that the groups have recorded, and the names of the whole model."""
    saved = {"checkpoint": {"directory": str(tmp_path / "saved"), "period_s": 1e6}, "groups": 2}
    run = engine_kills.native(tmp_path / "run", data_dir, **sizes, **saved)
    run.check()
    said = support.ft("export", tmp_path / "saved", "--format", "torch", "--out", tmp_path / "model.pt")
    assert said.returncode == 0, said.stderr
    model = torch.load(tmp_path / "model.pt")
    norm = sum(float(one.double().square().sum()) for one in model.values()) ** 0.5
    assert norm == pytest.approx(run.events("survivor")[0]["params_norm"], rel=1e-6)
    assert {"embedding.weight", "blocks.0.q.weight", "blocks.1.down.weight", "head.weight"} <= model.keys()
