"""Data that people bring: a group dies in the middle of a step, and the run ends with the bits of one without failures."""

from __future__ import annotations

import numpy as np
import pytest
from datasets import Dataset

from megatron_ft.data import indexed, prepare
from megatron_ft.run.injection_points import Breakpoint
from tests import engine_kills, support

VOCAB, SEQ_LEN, STEPS = 64, 32, 6
HELD = Breakpoint(1, 3, "backward", after=1)

SCRIPT = """
import argparse
import torch
import torch.nn.functional as F
from datasets import load_from_disk
from torch.utils.data import DataLoader
import megatron_ft
from megatron_ft.data import open_corpora

parser = argparse.ArgumentParser()
parser.add_argument("--data"); parser.add_argument("--steps", type=int); parser.add_argument("--seed", type=int)
parser.add_argument("--kind"); parser.add_argument("--workers", type=int, default=0)
args = parser.parse_args()
session = megatron_ft.init(seed=args.seed)
if args.kind == "hugging face":
    dataset = load_from_disk(args.data + "/saved").with_format("torch").filter(lambda row: row["labels"][0] >= 0)
    loader = session.prepare(DataLoader(dataset, batch_size=2, shuffle=True, num_workers=args.workers))
else:
    words = ["0.7", args.data + "/one", "0.3", args.data + "/two"]
    loader = session.loader(open_corpora(words, 32), num_workers=args.workers)
torch.manual_seed(args.seed)
model = torch.nn.Sequential(torch.nn.Embedding(64, 16), torch.nn.Linear(16, 64))

def loss_fn(model, batch):
    return F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())

engine = session.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loss_fn)
for step in session.steps(args.steps):
    session.train_step(engine, loader)
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A saved dataset of Hugging Face's, two corpora of Megatron's, and a prepared directory of many short documents."""
    directory, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(1)
    tokens = rng.integers(0, VOCAB, (50, SEQ_LEN + 1))
    rows = {"input_ids": tokens[:, :-1].tolist(), "labels": tokens[:, 1:].tolist()}
    Dataset.from_dict(rows).save_to_disk(directory / "saved")
    for name in ("one", "two"):
        documents = [rng.integers(0, VOCAB, length) for length in rng.integers(1, 100, 40)]
        indexed.write(directory / name, documents, np.uint16)
    lines = (support.ROOT / "megatron_ft" / "data" / "addresses.txt").read_text().splitlines()
    prepare(directory / "lines", None, 512, lambda line: None, documents=[{"text": line} for line in lines])
    return directory


@pytest.mark.parametrize(
    ("kind", "workers"),
    [
        pytest.param("hugging face", 0, marks=pytest.mark.long),
        pytest.param("hugging face", 1, marks=pytest.mark.long),
        ("blend", 0),
    ],
)
def test_a_lost_group_changes_no_bit(tmp_path, data, kind, workers):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    own = ("--kind", kind, "--workers", workers)
    settings = {"script": script, "own": own, "groups": 2, "steps": STEPS, "reduction": "exact"}
    run = support.start(tmp_path / "run", data, [HELD], **settings)
    run.strike(HELD)
    assert run.finish() is not None and run.process.returncode == 0, run.logs()
    alone = support.start(tmp_path / "alone", data, **settings)
    alone.finish()
    assert support.outcome(run) == support.outcome(alone) and run.events("fault"), run.logs()
    assert len(run.events("step")) == STEPS
    if kind == "blend":
        assert run.events("step")[0]["tokens"] == 2 * support.PER_GROUP * 2 * SEQ_LEN


@pytest.mark.long
def test_the_example_trains_within_documents_while_a_group_dies(tmp_path, data):
    own = ("--layers", 2, "--width", 64, "--seq-len", 256)
    settings = {"groups": 2, "steps": STEPS, "reduction": "exact"}
    alone = support.start(tmp_path / "alone", data / "lines", own=(*own, "--document-mask"), **settings)
    run = support.start(tmp_path / "run", data / "lines", [HELD], own=(*own, "--document-mask"), **settings)
    run.strike(HELD)
    run.finish()
    alone.finish()
    assert run.process.returncode == alone.process.returncode == 0, run.logs()
    assert run.events("fault") and support.outcome(run) == support.outcome(alone)
    losses = [line["loss"] for line in run.events("step")]
    assert len(losses) == STEPS and losses[-1] < losses[0]


@pytest.mark.long
def test_the_megatron_example_trains_on_a_blend_while_a_rank_dies(tmp_path, data):
    support.needs_engine("megatron")
    sizes = ("--pipeline-model-parallel-size", 2, "--micro-batch-size", 2, "--global-batch-size", 4 * support.PER_GROUP)
    own = ("--seq-length", SEQ_LEN, "--vocab-size", VOCAB, *sizes)
    blend = ["0.7", data / "one", "0.3", data / "two"]
    settings = {"groups": 2, "reduction": "exact", "steps": STEPS, "engine": {}, "extra": ["--megatron"]}
    hold = Breakpoint(1, 3, "backward", after=1, position=1)
    run = engine_kills.megatron(tmp_path / "run", blend[0], [hold], own=(*own, "--data-path", *blend), **settings)
    run.strike(hold)
    run.finish()
    assert run.process.returncode == 0 and len(run.events("step")) == STEPS, run.logs()
    assert run.events("fault")
