"""DeepSpeed inside groups: flushes that grow, uneven plans, plain engines, models and settings."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from contextlib import contextmanager

import pytest
import torch

from megatron_ft.data.dataset import PackedDataset
from megatron_ft.run.injection_points import Breakpoint
from megatron_ft.types import Microbatch
from tests import deepspeed_kills, support
from tests.deepspeed_kills import MODEL, PLAIN, SCRIPT, flushes, kinds, start

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")


@pytest.fixture(scope="module")
def alone(tmp_path_factory, data_dir):
    """Failure-free runs by (groups, stages, slices); each is made once."""
    found: dict[tuple[int, int, int], support.Run] = {}

    def run(groups: int = 2, stages: int = 2, slices: int = 1) -> support.Run:
        whole = groups, stages, slices
        if whole not in found:
            directory = tmp_path_factory.mktemp("alone") / "run"
            found[whole] = start(directory, data_dir, groups=groups, stages=stages, slices=slices)
            found[whole].check()
        return found[whole]

    return run


FLIP = """
from megatron_ft.run.finishing import Finishing

update = Finishing.update
def flipped(self, order):
    result = update(self, order)
    rank = self._rank
    if (rank.group, rank.position, rank.env.incarnation, order.step) == (1, 1, 0, 3):
        name, moment = next((name, of) for name, of in self._engine.state_tensors() if " exp_avg " in name)
        moment.data.view(-1).numpy().view("int32")[0] ^= 1 << 22
    return result
Finishing.update = flipped
"""


@pytest.mark.long
def test_a_group_whose_last_stage_holds_another_state_leaves_and_comes_back(tmp_path, data_dir):
    """Only the ranks at position 1 can see the difference."""
    steps = 60
    script = support.changed_script(tmp_path / "flip.py", FLIP, SCRIPT)
    gate = support.Gate(tmp_path, slowly=steps, script=script)
    options = {"detector": {"state_check_steps": 4}, "rejoin": {"enabled": True}, "steps": steps, "groups": 3}
    run = start(tmp_path / "run", data_dir, script=gate.script, **options)
    support.wait_for(lambda: run.events("rejoined"), run)
    gate.open()
    run.finish()
    assert run.process.returncode == 0, run.logs()
    (line,) = run.events("divergence")
    assert (line["group"], line["position"], line["tensors"]) == (1, 1, 1) and " exp_avg " in line["what"][0]
    assert [list(view["lost"]) for view in run.events("view") if view["lost"]] == [["1"]]
    assert len({end["state"] for end in run.events("survivor")}) == 1 and len(run.events("survivor")) == 3


SAYS_WHAT_IT_HEARS = """
from megatron_ft.core.protocol.messages import GroupFailed
from megatron_ft.run.group_leader import GroupLeader

hear = GroupLeader.on_signal

def says(self, verdict):
    hear(self, verdict)
    if isinstance(verdict, GroupFailed):
        print(f"group {self.group} has heard of the death of group {verdict.group}", flush=True)

GroupLeader.on_signal = says
"""


def test_microbatches_that_are_taken_over_join_the_running_flush(tmp_path, data_dir, alone):
    """Group 0's last stage is frozen in the middle of a flush, and the first stage waits for it; meanwhile group 1 is
    lost."""
    holds = [Breakpoint(0, 2, "forward", position=1), Breakpoint(1, 2, "forward", position=1)]
    script = support.changed_script(tmp_path / "train.py", SAYS_WHAT_IT_HEARS, SCRIPT)
    run = start(tmp_path / "run", data_dir, holds, script=script)
    frozen, victim = support.await_held(run, 0, 1), support.await_held(run, 1, 1)
    os.kill(victim, signal.SIGKILL)
    heard = "group 0 has heard of the death of group 1"
    support.wait_for(lambda: heard in (run.directory / "logs" / "g0.p0.log").read_text(), run)
    os.kill(frozen, signal.SIGCONT)
    run.check(alone())
    for position in range(2):
        found = kinds(run, 0, position)
        for kind in ("forward", "backward", "patch_forward", "patch_backward"):
            assert found.count(kind) == support.PER_GROUP, "exactly what was lost is computed again"
    assert flushes(kinds(run, 0, 0)) == 1, "the pipeline has not run empty in between"


UNEVEN = """
from megatron_ft.core.scheduling import assignment as scheduler
from megatron_ft.types import Plan

PLANS = {plans}

def uneven(step, shards, per_shard, live, *others, **named):
    ids = scheduler.microbatches_of_step(step, shards, per_shard)
    order, share = PLANS[step % len(PLANS)]
    shares = order[:share], order[share:]
    return Plan(step, {{group: tuple(ids[n] for n in own) for group, own in enumerate(shares)}}, "uneven")

scheduler.plan_step = uneven
"""


@pytest.mark.parametrize("slices", [1, pytest.param(2, marks=pytest.mark.long)])
def test_uneven_plans_equal_a_single_process(tmp_path, data_dir, slices):
    """The plans are 4/4, 6/2, 8/0, 1/7, 0/8, 3/5 and some random ones, in any order."""
    rng = random.Random(slices)
    orders = [rng.sample(range(8), 8) for _ in range(9)]
    shares = [4, 6, 8, 1, 0, 3, *(rng.randrange(9) for _ in range(3))]
    plans = list(zip(orders, shares, strict=True))
    script = support.changed_script(tmp_path / "train.py", UNEVEN.format(plans=plans), SCRIPT)
    run = start(tmp_path / "run", data_dir, script=script, steps=len(shares), slices=slices)
    run.finish()
    assert run.process.returncode == 0, run.logs()
    losses, norm = single_process(data_dir, len(shares))
    assert [line["loss"] for line in run.events("step")] == pytest.approx(losses, rel=1e-6)
    assert [line["params_norm"] for line in run.events("end")] == pytest.approx([norm], rel=1e-6)


@contextmanager
def modules_of_the_example():
    """Make the example's modules importable, in place of other modules with these names."""
    names = ("model", "layers", "llama")
    others = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        yield
    finally:
        sys.path.remove(str(SCRIPT.parent))
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(others)


def single_process(data_dir, steps: int) -> tuple[list[float], float]:
    """Run the example's model and optimizer without DeepSpeed, pipeline or groups; return the losses, and the norm of
    the parameters."""
    with modules_of_the_example():
        import model as example
        from layers import Slices
    dataset = PackedDataset(data_dir, seq_len=32, samples_per_microbatch=2, groups=2, microbatches_per_group=4, seed=1)
    config = example.GPTConfig(vocab_size=dataset.vocab_size, **MODEL)
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


@pytest.fixture(scope="module")
def native(tmp_path_factory, data_dir) -> support.Run:
    """The example in plain PyTorch: two groups of one rank."""
    run = support.start(tmp_path_factory.mktemp("native") / "run", data_dir, groups=2)
    run.check()
    return run


def plain(tmp_path, data_dir, ranks: int, engine: dict) -> support.Run:
    """The same job with a ``DeepSpeedEngine``; a rank of group 1 is killed."""
    script = support.changed_script(tmp_path / "train.py", PLAIN)
    holds = [Breakpoint(1, 3, "backward", position=ranks - 1)]
    extra = ["--ranks-per-group", ranks, "--preload", "deepspeed"]
    run = support.start(tmp_path / "run", data_dir, holds, script=script, groups=2, extra=extra, engine=engine)
    run.strike(*holds)
    return run


@pytest.mark.long
@pytest.mark.parametrize(("stage", "ranks"), [pytest.param(0, 1, marks=pytest.mark.long), (1, 2)])
def test_a_plain_engine_trains_what_plain_pytorch_trains(tmp_path, data_dir, native, stage, ranks):
    """The data-parallel ranks of the engine are inside the group."""
    plain(tmp_path, data_dir, ranks, {"zero_optimization": {"stage": stage}}).check(native)


@pytest.mark.long
@pytest.mark.parametrize("stage", [2, 3])
def test_zero_2_and_3_train_what_plain_pytorch_trains(tmp_path, data_dir, stage):
    """Without dropout, which draws other numbers for a share of the samples."""
    own = ("--layers", 2, "--width", 64, "--seq-len", 32, "--dropout", 0)
    native = support.start(tmp_path / "native", data_dir, groups=2, own=own)
    native.check()
    holds = [Breakpoint(1, 3, "backward", position=1)]
    run = deepspeed_kills.zero(tmp_path / "run", data_dir, holds, stage=stage, groups=2, own=own, steps=support.STEPS)
    run.strike(*holds)
    run.check(native)


@pytest.mark.long
def test_a_plain_engine_in_bf16_trains_the_same_within_its_rounding(tmp_path, data_dir, native):
    run = plain(tmp_path, data_dir, 1, {"bf16": {"enabled": True}})
    run.check()
    losses = [[line["loss"] for line in lines.events("step")] for lines in (run, native)]
    assert losses[0] == pytest.approx(losses[1], rel=0.02) and losses[0] != losses[1]


VARIANTS = {
    "bf16": {"engine": {"bf16": {"enabled": True}}},
    "ZeRO-1, learned positions, LayerNorm, untied": {
        "engine": {"zero_optimization": {"stage": 1}},
        "model": {**MODEL, "positions": "learned", "norm": "layer", "tie_word_embeddings": False, "dropout": 0.1},
    },
    "optimizer and scheduler of the config": {
        "engine": {
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": 1e-3}},
        }
    },
    "Hugging Face's Llama, two slices": {
        "model": {**MODEL, "model_type": "llama", "intermediate_size": 96, "num_key_value_heads": 2},
        "slices": 2,
        "extra": ["--preload", "deepspeed,transformers.models.llama.modeling_llama"],
    },
}


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    support.first_of(VARIANTS, "ZeRO-1, learned positions, LayerNorm, untied", "Hugging Face's Llama, two slices"),
)
def test_other_models_and_numbers_keep_the_step_too(tmp_path, data_dir, options):
    """The run is the same, with a kill; nothing is compiled for it."""
    if "llama" in options.get("model", {}).get("model_type", ""):
        pytest.importorskip("transformers", reason="transformers is not installed")
    alone = start(tmp_path / "alone", data_dir, **options)
    alone.check()
    holds = [Breakpoint(1, 2, "backward", position=1)]
    run = start(tmp_path / "run", data_dir, holds, **options)
    run.strike(*holds)
    run.check(alone)


STANDING_IN = {
    "replication, two slices": {"policy": "replication", "slices": 2},
    "replication, bf16": {"policy": "replication", "engine": {"bf16": {"enabled": True}}},
    "spare, three groups": {"policy": "spare", "redundancy": 3, "placement": "full", "groups": 3},
}


@pytest.mark.long
@pytest.mark.parametrize("options", support.first_of(STANDING_IN, *STANDING_IN))
def test_a_pipeline_contributes_what_it_has_computed_as_standby(tmp_path, data_dir, options):
    """The last stage of a group is lost. Stages keep each part apart though its passes overlap with those of other
    microbatches; the run without a loss has another policy."""
    whole = {name: options[name] for name in ("slices", "engine", "groups") if name in options}
    alone = start(tmp_path / "alone", data_dir, **whole)
    alone.check()
    spare = options["policy"] == "spare"
    first = [Breakpoint(2, 1, "backward", position=1, after=2)] if spare else []  # from then on S is 2
    last = Breakpoint(1 if spare else 0, 3, "backward", position=1, after=2)
    run = start(tmp_path / "run", data_dir, [*first, last], rejoin={"enabled": False}, **options)
    for hold in (*first, last):
        run.strike_in_step(hold)
    run.check(alone)
    recovery = run.events("recovery")[-1]
    assert recovery["promoted"] > 0 and (spare or recovery["patched"] == 0), recovery


@pytest.mark.long
def test_the_llama_computes_the_same_as_hugging_faces_llama():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    with modules_of_the_example():
        import llama
        from layers import Slices
    shape = {**MODEL, "intermediate_size": 96, "num_key_value_heads": 2, "tie_word_embeddings": False}
    config = transformers.LlamaConfig(vocab_size=50, attn_implementation="sdpa", **shape)
    theirs = transformers.LlamaForCausalLM(config)
    ours = [
        llama.Embedding(config),
        *(llama.Layer(config, number, Slices()) for number in range(config.num_hidden_layers)),
        llama.LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps),
        llama.Head(config),
    ]
    whole = [theirs.model.embed_tokens, *theirs.model.layers, theirs.model.norm, theirs.lm_head]
    x = tokens = torch.randint(0, 50, (2, 16))
    for mine, other in zip(ours, whole, strict=True):
        mine.load_state_dict(other.state_dict())
        x = mine(x)
    torch.testing.assert_close(x, theirs(tokens).logits)


@pytest.mark.long
def test_a_first_start_compiles_nothing(tmp_path, data_dir, monkeypatch):
    """DeepSpeed would build its all-reduce through shared memory, and its optimizers, on a machine without a cache of
    them."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "built"))
    monkeypatch.setenv("CXX", str(tmp_path / "no compiler"))
    run = start(tmp_path / "run", data_dir, engine={"bf16": {"enabled": True}})
    run.check()
    assert not (tmp_path / "built").exists()


@pytest.mark.long
def test_two_jobs_on_one_machine_do_not_interfere(tmp_path, data_dir, alone):
    runs = [start(tmp_path / name, data_dir) for name in ("one", "other")]
    for run in runs:
        run.check(alone())


@pytest.mark.long
def test_a_pipeline_goes_on_from_its_checkpoint(tmp_path, data_dir, alone):
    """Each stage has saved, and reads, its own part of the model and of the optimizer's state."""
    settings = {"checkpoint": {"directory": str(tmp_path / "saved"), "period_s": 1e6}}
    start(tmp_path / "first", data_dir, steps=2, **settings).check()
    again = start(tmp_path / "again", data_dir, **settings)
    again.check(alone())
    assert [line["step"] for line in again.events("step")] == [2, 3]
    (end,), (theirs,) = again.events("end"), alone().events("end")
    assert end["params_sha256"] == theirs["params_sha256"]


@pytest.mark.long
def test_an_exported_pipeline_is_hugging_faces_llama(tmp_path, data_dir):
    """Two stages of two slices each are put together; from_pretrained gives the model whose loss the next step has."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    saved, out = tmp_path / "saved", tmp_path / "llama"
    model = {
        **MODEL,
        "model_type": "llama",
        "intermediate_size": 96,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
    }
    settings = {"checkpoint": {"directory": str(saved), "period_s": 1e6}, "groups": 1}
    options = {**VARIANTS["Hugging Face's Llama, two slices"], "model": model, **settings}
    start(tmp_path / "first", data_dir, steps=2, **options).check()
    names = {"0": "model.embed_tokens", "1-2": "model.layers.*", "3": "model.norm", "4": "lm_head"}
    (tmp_path / "names.json").write_text(json.dumps(names))
    where = ["--format", "hf", "--out", out, "--names", tmp_path / "names.json"]
    made = support.ft("export", saved, *where)
    assert made.returncode == 0, made.stderr
    theirs = transformers.LlamaForCausalLM.from_pretrained(out)
    again = start(tmp_path / "again", data_dir, steps=3, **options)
    again.check()
    (step,) = again.events("step")
    shape = {"samples_per_microbatch": 2, "groups": 1, "microbatches_per_group": support.PER_GROUP, "seed": 1}
    dataset = PackedDataset(data_dir, seq_len=MODEL["max_position_embeddings"], **shape)
    losses = []
    for index in range(support.PER_GROUP):
        batch = dataset(Microbatch(2, 0, index))
        logits = theirs(batch["input_ids"]).logits
        losses.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()).item())
    assert step["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
