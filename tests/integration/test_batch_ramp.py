"""A script that changes the size of the batch while it trains: every sample counts once, in order, whatever dies."""

from __future__ import annotations

import pytest

from megatron_ft.proof.replay import replay
from megatron_ft.record.protocol_trace import Record
from tests import support

STEPS, LATER = 200, 210
SIZES = {0: support.PER_GROUP, 60: 6, 120: 1}
"""First step -> microbatches in a shard."""

SCRIPT = (
    f"SIZES = {SIZES}"
    + """
import argparse, os, signal, time
import torch
import megatron_ft

parser = argparse.ArgumentParser()
parser.add_argument("--data"); parser.add_argument("--steps", type=int); parser.add_argument("--seed", type=int)
args = parser.parse_args()
session = megatron_ft.init(seed=args.seed)

class Numbers:
    def __len__(self):
        return 10_000
    def __getitem__(self, index):
        return float(index)

loader = session.loader(Numbers(), shuffle=False)
model = torch.nn.Linear(1, 1)
engine = session.wrap(model, torch.optim.SGD(model.parameters()), lambda m, b: b.mean() + 0 * m.weight.sum())
dies = session.env.incarnation == 0

for step in session.steps(args.steps):
    if len(session.live) < 3:
        time.sleep(0.1)  # until the lost group is back: much shorter than all steps together
    if step in SIZES:
        session.microbatches_per_group = SIZES[step]
    if dies and (step, session.group) in [(60, 2), (120, 0)]:  # after it has set the size, before any other group knows
        os.kill(os.getpid(), signal.SIGKILL)
    session.train_step(engine, loader)
    if dies and (step, session.group) == (59, 1):  # it comes back to steps of another size
        os.kill(os.getpid(), signal.SIGKILL)
"""
)


def size(step: int) -> int:
    return max((first, number) for first, number in SIZES.items() if first <= step)[1]


def check(run, shards: int) -> None:
    assert run.process.returncode == 0, run.logs()
    samples = 2 * shards
    steps = run.events("step")
    first = sum(map(size, range(steps[0]["step"]))) * samples
    for line in steps:
        count = size(line["step"]) * samples
        assert line["microbatches"] == size(line["step"]) * shards
        assert line["loss"] == pytest.approx(first + (count - 1) / 2), f"other samples in step {line['step']}"
        first += count


def start(directory, steps):
    script = directory / "train.py"
    script.write_text(SCRIPT)
    options = {
        "groups": 3,
        "own": (),
        "rejoin": {"enabled": True},
        "checkpoint": {"directory": str(directory / "saved")},
    }
    run = support.start(directory / f"run{steps}", directory, steps=steps, script=script, **options)
    run.finish()
    return run


def test_the_size_of_a_batch_changes_while_groups_die_come_back_and_continue_from_a_checkpoint(tmp_path):
    run = start(tmp_path, STEPS)
    check(run, 3)
    assert {line["group"] for line in run.events("rejoined")} == {0, 1, 2}
    record = Record.load(run.directory)
    assert record.sizes[:2] == ((60, 6), (61, 6)) and not replay(record).different
    again = start(tmp_path, LATER)
    check(again, 3)
    assert [line["step"] for line in again.events("step")] == list(range(STEPS, LATER))
