"""An evaluation that all groups share: each sample counts once, whichever group dies or sleeps meanwhile."""

from __future__ import annotations

import json

import pytest

from tests import support

SAMPLES, BATCH, STEPS = 103, 4, 60
DIES, SLEEPS = 5, 8

SCRIPT = """
import argparse, json, os, signal, time
from pathlib import Path
import torch
import megatron_ft

parser = argparse.ArgumentParser()
parser.add_argument("--data"); parser.add_argument("--steps", type=int); parser.add_argument("--seed", type=int)
parser.add_argument("--out", type=Path); parser.add_argument("--dies", type=int); parser.add_argument("--sleeps", type=int)
args = parser.parse_args()
session = megatron_ft.init(seed=args.seed)
torch.manual_seed(1)
model = torch.nn.Linear(8, 4)
engine = session.wrap(model, torch.optim.SGD(model.parameters(), lr=1e-3), lambda m, b: m(b).square().mean())

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 103
    def __getitem__(self, index):
        return torch.tensor(float(index))

def refused(call):
    try:
        call()
    except megatron_ft.errors.FTError as error:
        return str(error)

def numbers(batch):
    global batches
    batches += 1
    assert not torch.is_grad_enabled()
    if session.step == args.dies + 1 and session.group == 1 and batches == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if session.step == args.sleeps + 1 and session.group == 2 and batches == 2:
        while not (args.out / f"{args.sleeps}.0").exists():  # the others do not wait for this group
            time.sleep(0.01)
    return {"sum": batch.sum(), "bias": model.bias.sum() * len(batch)}

assert "in the loop over session.steps" in refused(lambda: session.evaluate(numbers, Numbers()))
model.bias.data += session.group  # the first step gives all groups the model of the first one
for step in session.steps(args.steps):
    if step == 0:
        batches = 0
        sums = session.evaluate(numbers, Numbers(), batch_size=4)
        assert 0 < batches < 20, "each group has its share"
        assert sums == {"sum": 5253.0, "bias": sums["bias"], "samples": 103.0}
        assert abs(sums["bias"] - 103 * float(model.bias.sum())) < 1e-2, "all groups have one model"
    session.train_step(engine, lambda microbatch: torch.ones(2, 8))
    if len(session.live) < 3 and step > args.sleeps:
        time.sleep(0.1)
    if step in (2, args.dies, args.sleeps, args.steps - 1):
        batches = 0
        sums = session.evaluate(numbers, Numbers(), batch_size=4)
        said = {"sums": sums, "batches": batches, "live": list(session.live), "bias": float(model.bias.double().sum())}
        if session.position == 0:
            path = args.out / f"{step}.{session.group}"
            part = path.with_name(f"{path.name}.part")  # of this group alone
            part.write_text(json.dumps(said))
            part.rename(path)
        assert "batch_size is 0" in refused(lambda: session.evaluate(numbers, Numbers(), batch_size=0))
"""


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_each_sample_counts_once_whichever_group_dies_or_sleeps(tmp_path, ranks):
    script, out = tmp_path / "train.py", tmp_path / "out"
    script.write_text(SCRIPT)
    out.mkdir()
    own = ("--out", out, "--dies", DIES, "--sleeps", SLEEPS)
    options = {"extra": ("--ranks-per-group", ranks), "rejoin": {"enabled": True}}
    run = support.start(tmp_path / "run", tmp_path, steps=STEPS, script=script, groups=3, own=own, **options)
    run.finish()
    assert run.process.returncode == 0, run.logs()
    said: dict[int, dict[int, dict]] = {}
    for path in out.iterdir():
        step, group = map(int, path.name.split("."))
        said.setdefault(step, {})[group] = json.loads(path.read_text())
    for groups in said.values():
        sums = {json.dumps(one["sums"]) for one in groups.values()}
        assert len(sums) == 1, "all groups get the same sums"
        total = json.loads(sums.pop())
        assert total["samples"] == SAMPLES and total["sum"] == SAMPLES * (SAMPLES - 1) / 2
        assert total["bias"] == pytest.approx(SAMPLES * groups[0]["bias"], rel=1e-5)
    needed = -(-SAMPLES // BATCH)
    for step in (2, STEPS - 1):  # nothing was lost, and nothing was computed twice
        assert set(said[step]) == {0, 1, 2}
        assert sum(one["batches"] for one in said[step].values()) == needed
        assert all(one["batches"] for one in said[step].values()), "every group has a share"
    assert set(said[DIES]) == {0, 2} and set(said[SLEEPS]) >= {0, 2}
