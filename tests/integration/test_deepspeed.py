"""DeepSpeed's pipelines inside groups: a rank of any stage and slice dies at any moment of a flush, and the step is kept."""

from __future__ import annotations

import json
import os
import signal
import sys

import pytest
import torch

from megatron_ft.data.dataset import PackedDataset
from megatron_ft.runtime.points import Hold
from megatron_ft.types import Microbatch
from tests import support

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")

SCRIPT = support.ROOT / "examples" / "pretrain_gpt_deepspeed" / "train.py"
STEPS = 5


def start(directory, data_dir, holds=(), *, stages=2, slices=1, own=(), **options) -> support.Run:
    return support.start(
        directory,
        data_dir,
        holds,
        extra=["--ranks-per-group", stages * slices, "--preload", "deepspeed"],
        own=["--stages", stages, "--slices", slices, *own],
        **{"steps": STEPS, "script": SCRIPT, "groups": 2, **options},
    )


def spans(run: support.Run, group: int, position: int, step: int) -> list[tuple[str, float, float]]:
    """What a rank did in one step."""
    lines = (run.directory / "timeline" / f"g{group}.p{position}.jsonl").read_text().splitlines()
    return [tuple(span) for line in map(json.loads, lines) if line["step"] == step for span in line["spans"]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory, data_dir) -> support.Run:
    """Two groups that are pipelines of two stages, without failures."""
    run = start(tmp_path_factory.mktemp("alone") / "run", data_dir)
    run.check()
    return run


STORIES = {
    "a first stage in a forward pass": [Hold(1, 2, "forward")],
    "a last stage in a backward pass": [Hold(1, 2, "backward", position=1)],
    "a last stage in the all-reduce of its first bucket": [Hold(1, 2, "reduce", position=1)],
}


@pytest.mark.parametrize("holds", STORIES.values(), ids=STORIES.keys())
def test_a_rank_that_dies_in_a_flush_costs_no_step(tmp_path, data_dir, alone, holds):
    run = start(tmp_path / "run", data_dir, holds)
    run.strike(*holds)
    run.check(alone)


def test_what_is_taken_over_joins_the_running_flush(tmp_path, data_dir, alone):
    """Group 0's last stage is frozen in the middle of a flush, the first waits for it; meanwhile group 1 is lost."""
    holds = [Hold(0, 2, "forward", position=1), Hold(1, 2, "forward", position=1)]
    run = start(tmp_path / "run", data_dir, holds)
    frozen, victim = support.await_held(run, 0, 1), support.await_held(run, 1, 1)
    os.kill(victim, signal.SIGKILL)
    support.wait_for(lambda: "group 1 is out" in (run.directory / "logs" / "g1.p0.log").read_text(), run)
    os.kill(frozen, signal.SIGCONT)
    run.check(alone)
    for position in range(2):
        kinds = [kind for kind, *_ in spans(run, 0, position, 2)]
        for kind in ("forward", "backward", "patch_forward", "patch_backward"):
            assert kinds.count(kind) == support.PER_GROUP, "exactly what was lost is computed again"
    first = [kind for kind, *_ in spans(run, 0, 0, 2)]
    assert "backward" in first[first.index("patch_forward") :], "the pipeline has not run empty in between"


UNEVEN = """
from megatron_ft.core import scheduler
from megatron_ft.types import Plan

SHARES = {shares}

def uneven(step, shards, per_shard, live, *others, **named):
    ids = scheduler.microbatches_of_step(step, shards, per_shard)
    order = ids if step % 2 else ids[::-1]
    share = SHARES[step % len(SHARES)]
    return Plan(step, {{0: order[:share], 1: order[share:]}}, "uneven")

scheduler.plan_step = uneven
"""


@pytest.mark.parametrize("slices", [1, 2])
def test_uneven_plans_equal_a_single_process(tmp_path, data_dir, slices):
    shares = [4, 6, 8, 1, 0, 3, 7]
    script = support.changed_script(tmp_path / "train.py", UNEVEN.format(shares=shares), SCRIPT)
    run = start(tmp_path / "run", data_dir, script=script, steps=len(shares), slices=slices)
    run.finish()
    assert run.process.returncode == 0, run.logs()
    losses, norm = single_process(data_dir, len(shares))
    assert [line["loss"] for line in run.events("step")] == pytest.approx(losses, rel=1e-6)
    assert [line["params_norm"] for line in run.events("end")] == pytest.approx([norm], rel=1e-6)


def single_process(data_dir, steps: int) -> tuple[list[float], float]:
    """The example's model and optimizer without DeepSpeed, pipeline or groups: losses, and the parameters' norm."""
    sys.path.insert(0, str(SCRIPT.parent))
    others = {name: sys.modules.pop(name) for name in ("model", "layers") if name in sys.modules}
    try:
        import model as example
        from layers import Slices
    finally:
        sys.path.remove(str(SCRIPT.parent))
        for name in ("model", "layers"):
            sys.modules.pop(name, None)
        sys.modules.update(others)
    dataset = PackedDataset(data_dir, seq_len=32, samples_per_microbatch=2, groups=2, microbatches_per_group=4, seed=1)
    config = example.GPTConfig(dataset.vocab_size, layers=2, width=64, seq_len=32)
    makers = [lambda: example.Embedding(config), *(lambda: example.Block(config, Slices()) for _ in range(2))]
    modules = []
    for number, make in enumerate([*makers, lambda: torch.nn.RMSNorm(64)]):
        torch.manual_seed(1000 + number)
        modules.append(make())
    embedding, *rest = modules
    parameters = [parameter for module in modules for parameter in module.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    losses = []
    for step in range(steps):
        total = 0.0
        for shard in range(2):
            for index in range(4):
                batch = dataset(Microbatch(step, shard, index))
                x = embedding(batch["input_ids"])
                for module in rest:
                    x = module(x)
                loss = example.loss_fn(example.project(embedding, x), batch["labels"])
                (loss / 8).backward()
                total += loss.item()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(total / 8)
    return losses, float(sum(parameter.detach().double().square().sum() for parameter in parameters)) ** 0.5


PLAIN = """
from megatron_ft.runtime.session import Session
import deepspeed

def wrap(self, model, optimizer, loss_fn, scheduler):
    return self.deepspeed(model, loss_fn=loss_fn, optimizer=optimizer, lr_scheduler=scheduler)

Session.wrap = wrap
"""


@pytest.fixture(scope="module")
def native(tmp_path_factory, data_dir) -> support.Run:
    """The example in plain PyTorch, two groups of one rank."""
    run = support.start(tmp_path_factory.mktemp("native") / "run", data_dir, groups=2)
    run.check()
    return run


@pytest.mark.parametrize(("stage", "ranks"), [(0, 1), (1, 2), (2, 2)])
def test_a_plain_engine_trains_what_plain_pytorch_does(tmp_path, data_dir, native, stage, ranks):
    """With its data-parallel ranks inside the group, one of which is killed."""
    script = support.changed_script(tmp_path / "train.py", PLAIN)
    holds = [Hold(1, 3, "backward", position=ranks - 1)]
    config = {"zero_optimization": {"stage": stage}}
    extra = ["--ranks-per-group", ranks, "--preload", "deepspeed"]
    run = support.start(tmp_path / "run", data_dir, holds, script=script, groups=2, extra=extra, engine=config)
    run.strike(*holds)
    run.check(native)


def test_bf16_keeps_the_step_too(tmp_path, data_dir):
    """The same run with a kill, to bf16's precision."""
    bf16 = {"engine": {"bf16": {"enabled": True}}}
    alone = start(tmp_path / "alone", data_dir, **bf16)
    alone.check()
    holds = [Hold(1, 2, "backward", position=1)]
    run = start(tmp_path / "run", data_dir, holds, **bf16)
    run.strike(*holds)
    run.check(alone)
