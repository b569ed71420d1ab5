"""Models leave a run in the formats of other programs, and a run starts from a model that another program wrote."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from megatron_ft.data.dataset import PackedDataset
from megatron_ft.types import Microbatch
from tests import engine_kills, support

FROM_PRETRAINED = """
import argparse
import torch
import megatron_ft
from transformers import AutoModelForCausalLM

parser = argparse.ArgumentParser()
for name, kind in (("data", str), ("steps", int), ("seed", int), ("model", str), ("out", str)):
    parser.add_argument(f"--{name}", type=kind)
args = parser.parse_args()
session = megatron_ft.init(seed=args.seed)
dataset = session.dataset(args.data, seq_len=32)
model = AutoModelForCausalLM.from_pretrained(args.model)
loss_fn = lambda model, batch: torch.nn.functional.cross_entropy(
    model(batch["input_ids"]).logits.flatten(0, 1), batch["labels"].flatten())
engine = session.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loss_fn)
for step in session.steps(args.steps):
    session.train_step(engine, dataset)
session.save_final(args.out, lambda path: torch.save(model.state_dict(), path))
"""


def batch(data_dir, step: int, index: int, shard: int = 0, groups: int = 2):
    shape = {"samples_per_microbatch": 2, "groups": groups, "microbatches_per_group": support.PER_GROUP, "seed": 1}
    return PackedDataset(data_dir, seq_len=32, **shape)(Microbatch(step, shard, index))


def tiny(transformers, dropout: float = 0.0):
    """A small GPT-2 with weights that differ from those that any other process would draw."""
    torch.manual_seed(12345)
    options = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    config = transformers.GPT2Config(vocab_size=512, n_positions=32, n_embd=32, n_layer=2, n_head=2, **options)
    return transformers.GPT2LMHeadModel(config)


@pytest.fixture(scope="module")
def pretrained_run(tmp_path_factory, data_dir):
    """A run of two groups that began with a model of Hugging Face, and the directories of that model and of the result."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    place = tmp_path_factory.mktemp("pretrained")
    tiny(transformers).save_pretrained(place / "model")
    (place / "train.py").write_text(FROM_PRETRAINED)
    own = ("--model", place / "model", "--out", place / "final.pt")
    saved = {"checkpoint": {"directory": str(place / "saved"), "period_s": 1e6}}
    run = support.start(place / "run", data_dir, script=place / "train.py", steps=2, groups=2, own=own, **saved)
    run.check()
    return run, place


def exported(run: support.Run, kind: str, out, *options: object):
    said = support.ft("export", run.directory, "--format", kind, "--out", out, *options)
    assert said.returncode == 0, said.stderr
    return out


def test_a_run_starts_from_a_model_of_hugging_face_in_all_groups(pretrained_run, data_dir):
    """The loss of the first step is that of the model on disk, over the microbatches of both groups."""
    transformers = pytest.importorskip("transformers")
    run, place = pretrained_run
    model = transformers.AutoModelForCausalLM.from_pretrained(place / "model")
    losses = []
    for shard in range(2):
        for index in range(support.PER_GROUP):
            one = batch(data_dir, 0, index, shard)
            losses.append(model(one["input_ids"], labels=one["labels"], shift_labels=one["labels"]).loss.item())
    assert run.events("step")[0]["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-6)


@pytest.mark.long
def test_a_trained_model_goes_back_to_hugging_face_with_its_config(pretrained_run, data_dir, tmp_path):
    transformers = pytest.importorskip("transformers")
    run, place = pretrained_run
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported(run, "hf", tmp_path / "hf"))
    mine = tiny(transformers).eval()
    before = mine(batch(data_dir, 2, 0)["input_ids"]).logits
    mine.load_state_dict(torch.load(place / "final.pt"))
    tokens = batch(data_dir, 2, 0)["input_ids"]
    logits = mine(tokens).logits
    assert torch.equal(theirs(tokens).logits, logits) and not torch.allclose(logits, before)


DEEPSPEED = """
import os, sys
os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
import torch
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
import deepspeed
import deepspeed.ops
deepspeed.ops.__compatible_ops__ = {}
from transformers import AutoConfig, AutoModelForCausalLM

place, final, model = sys.argv[1:]
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
config = {"train_batch_size": 1, "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
path, client = engine.load_checkpoint(place, load_module_only=True)
wanted = torch.load(final)
found = engine.module.state_dict()
assert path and found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
tokens = torch.arange(8)[None]
engine.backward(engine(tokens, labels=tokens).loss)
engine.step()
assert all(torch.equal(one, wanted[name]) for name, one in engine.module.state_dict().items()), "fp32 weights, too"
"""


@pytest.mark.long
def test_deepspeed_loads_what_was_exported_for_it(pretrained_run, tmp_path):
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    run, place = pretrained_run
    out = exported(run, "deepspeed", tmp_path / "ds")
    (tmp_path / "load.py").write_text(DEEPSPEED)
    words = [sys.executable, tmp_path / "load.py", out, place / "final.pt", place / "model"]
    said = subprocess.run(words, capture_output=True, text=True, timeout=support.TIMEOUT_S, check=False)
    assert said.returncode == 0, said.stderr


PIPELINE = """
import os, sys
from pathlib import Path
os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
import torch
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
import deepspeed
import deepspeed.ops
deepspeed.ops.__compatible_ops__ = {}
from deepspeed.pipe import PipelineModule
deepspeed.init_distributed(dist_init_required=False)
from megatron_ft.run import checkpoint
from megatron_ft.run.checkpoint import export

place = Path(sys.argv[1])
layers = [torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)]
model = PipelineModule(layers, num_stages=1, loss_fn=torch.nn.functional.mse_loss)
wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
receipt = checkpoint.write_part(place, 3, "a", 0, checkpoint.snapshot({"module": wanted}, 0, 1))
meta = {"settings": {"pipeline": {"stages": 1}}}
checkpoint.complete(place, 3, "a", [receipt], run_id="run", groups=1, ranks_per_group=1, meta=meta)
export.export(checkpoint.find(place)[0], "deepspeed", place / "out", {})
for parameter in model.parameters():
    torch.nn.init.zeros_(parameter)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
config = {"train_batch_size": 1}
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
path, _ = engine.load_checkpoint(str(place / "out"), load_module_only=True)
assert path and all(torch.equal(engine.module.state_dict()[name], wanted[name]) for name in wanted)
"""


@pytest.mark.long
def test_deepspeeds_pipeline_loads_layer_by_layer(tmp_path):
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    (tmp_path / "load.py").write_text(PIPELINE)
    words = [sys.executable, tmp_path / "load.py", tmp_path]
    said = subprocess.run(words, capture_output=True, text=True, timeout=support.TIMEOUT_S, check=False)
    assert said.returncode == 0, said.stderr


LLAMA = (*("--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear", "--untie-embeddings-and-output-weights"),
         *("--position-embedding-type", "rope", "--group-query-attention", "--num-query-groups", 2),
         *("--hidden-dropout", 0, "--attention-dropout", 0))  # fmt: skip


def megatron(place, data_dir, name: str, *own: object, steps: int = 2, groups: int = 1, **sizes):
    """Run Megatron's example to its end with a checkpoint; ``sizes``: stages, shards, slices."""
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    saved = {"checkpoint": {"directory": str(place / f"{name} saved"), "period_s": 1e6}}
    more = {"steps": steps, "groups": groups, "own": own, **saved, **sizes}
    run = engine_kills.megatron(place / name, data_dir, **more)
    run.check()
    return run


@pytest.fixture(scope="module")
def llama_run(tmp_path_factory, data_dir):
    """A Llama of Megatron-core over two stages of two slices."""
    return megatron(tmp_path_factory.mktemp("llama"), data_dir, "run", *LLAMA, stages=2, slices=2)


@pytest.mark.long
def test_a_megatron_model_becomes_hugging_faces_llama(llama_run, data_dir, tmp_path):
    """The loss of the next step is that of the exported model over the same microbatches."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported(llama_run, "hf", tmp_path / "hf"))
    assert type(theirs).__name__ == "LlamaForCausalLM"
    losses = []
    for index in range(support.PER_GROUP):
        one = batch(data_dir, 2, index, groups=1)
        losses.append(theirs(one["input_ids"], labels=one["labels"], shift_labels=one["labels"]).loss.item())
    out = exported(llama_run, "megatron", tmp_path / "megatron")
    again = megatron(tmp_path, data_dir, "again", *LLAMA, "--load", out, "--lr", 0, steps=3, slices=2)
    assert again.events("step")[2]["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)


DIVISIONS = {
    "Llama": (LLAMA, {"stages": 2, "slices": 2}, {"slices": 2, "shards": 2}),
    "experts": (engine_kills.EXPERTS, {"shards": 2}, {"stages": 2}),
    "virtual stages": (("--num-layers", 4), {"stages": 2, "chunks": 2}, {"slices": 2}),
}
"""Options of the model, and its division in a first and in a second run."""


@pytest.mark.long
@pytest.mark.parametrize("case", support.first_of(DIVISIONS, "Llama", "experts"))
def test_a_megatron_model_goes_out_and_in_again_with_another_division(data_dir, tmp_path, case):
    """With a learning rate of 0 the second run saves what it has loaded, in every one of its two groups."""
    own, first, again = case
    chunks = ("--num-virtual-stages-per-pipeline-rank", first.get("chunks", 1))
    one = megatron(tmp_path, data_dir, "first", *own, *chunks, **{key: first[key] for key in first if key != "chunks"})
    out = exported(one, "megatron", tmp_path / "out")
    other = megatron(tmp_path, data_dir, "again", *own, "--load", out, "--lr", 0, groups=2, **again)
    left, entered = (
        torch.load(exported(run, "torch", tmp_path / f"{number}.pt")) for number, run in enumerate((one, other))
    )
    assert left.keys() == entered.keys()
    changed = {name for name, tensor in left.items() if not torch.equal(tensor, entered[name])}
    assert all(name.endswith("expert_bias") for name in changed), changed  # no learning rate is used for it
    assert "--num-experts" not in own or "decoder.layers.1.mlp.experts.local_experts.3.linear_fc2.weight" in left
