"""Samples that end every process which computes them: the run stops and names them, and a setting leaves them out."""

from __future__ import annotations

import pytest

from megatron_ft.proof.replay import replay
from megatron_ft.record.protocol_trace import Record
from megatron_ft.types import Microbatch
from tests import support

POISON = Microbatch(3, 1, 2)
STEPS = 6

SCRIPT = f"""
import argparse
import torch
import megatron_ft

parser = argparse.ArgumentParser()
parser.add_argument("--data"); parser.add_argument("--steps", type=int); parser.add_argument("--seed", type=int)
args = parser.parse_args()
session = megatron_ft.init(seed=args.seed)
model = torch.nn.Linear(1, 1)
engine = session.wrap(model, torch.optim.SGD(model.parameters()), lambda m, b: b.mean() + 0 * m.weight.sum())

def samples(microbatch):
    if str(microbatch) == "{POISON}":
        raise ValueError("damaged")  # in the background, where it is loaded ahead, this is only logged
    return torch.tensor([float(microbatch.shard * {support.PER_GROUP} + microbatch.index)])

for step in session.steps(args.steps):
    session.train_step(engine, samples)
"""


def start(directory, name, **changes):
    script = directory / "train.py"
    script.write_text(SCRIPT)
    return support.start(directory / name, directory, steps=STEPS, script=script, groups=3, own=(), **changes)


def test_a_microbatch_that_ends_every_process_is_named_and_can_be_left_out(tmp_path):
    run = start(tmp_path, "stops")
    output = run.finish()
    assert run.process.returncode != 0
    assert f'fault_tolerance.skip_microbatches ["{POISON}"] leaves it out' in output + run.logs()

    run = start(tmp_path, "goes-on", skip_microbatches=[str(POISON)])
    run.check()
    steps = run.events("step")
    whole = 3 * support.PER_GROUP
    left = [number for number in range(whole) if number != POISON.shard * support.PER_GROUP + POISON.index]
    for line in steps:
        if line["step"] == POISON.step:
            assert (line["skipped"], line["of_microbatches"], line["microbatches"]) == (
                [str(POISON)],
                whole - 1,
                whole - 1,
            )
            assert line["loss"] == pytest.approx(sum(left) / len(left))
        else:
            assert "skipped" not in line and line["loss"] == pytest.approx((whole - 1) / 2)
    assert not replay(Record.load(run.directory)).different
