"""What a training script asks its session: who writes, what is logged, and one final model whatever dies."""

from __future__ import annotations

import json

from tests import support

STEPS = 12

SCRIPT = """
import argparse, json, os, signal
from pathlib import Path
import torch
import megatron_ft
from megatron_ft.run import final_save

lease_s, final_save._LEASE_S = final_save._LEASE_S, 60.0  # a writer that waits for a processor is not taken for lost
parser = argparse.ArgumentParser()
parser.add_argument("--data"); parser.add_argument("--steps", type=int); parser.add_argument("--seed", type=int)
parser.add_argument("--out", type=Path)
args = parser.parse_args()
session = megatron_ft.init(seed=args.seed)
torch.manual_seed(1)
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
engine = session.wrap(model, optimizer, lambda model, batch: model(batch).square().mean(), schedule)

def samples(microbatch):
    return torch.ones(2, 8) * (1 + microbatch.index)

samples.tokens_per_microbatch = 16

def refused(call):
    try:
        call()
    except megatron_ft.errors.ConfigError as error:
        return str(error)

assert "call it after train_step" in refused(lambda: session.log({"a": 1}))
assert "call it after train_step" in refused(lambda: session.save("x", print))
assert "after step 0 of 0" in refused(lambda: session.save_final("x", print))

def save(path, step, turn):
    with (args.out / f"saves.{session.group}").open("a") as file:
        print(json.dumps([step, turn]), file=file)
    path.write_text(json.dumps([step, turn]))

def die():
    os.kill(os.getpid(), signal.SIGKILL)

for step in session.steps(args.steps):
    result = session.train_step(engine, samples)
    assert session.step == step + 1 and session.rank == session.group
    with (args.out / f"boundaries.{session.group}").open("a") as file:
        print(json.dumps([step, session.is_writer, list(session.live)]), file=file)
    session.log({"squared": torch.tensor(float(step**2))})
    session.log({"note": f"step {step}"})
    assert "'odd' is of type list" in refused(lambda: session.log({"odd": [1]}))
    for turn in range(2):
        session.save(args.out / "best", lambda path: save(path, step, turn))
    assert json.loads((args.out / "best").read_text()) == [step, 1]
    if step == 5 and session.is_writer:
        die()

def write(path):
    path.mkdir()
    (path / "half").write_text("")
    try:
        (args.out / "attempt").open("x")
    except FileExistsError:
        torch.save(model.state_dict(), path / "model.pt")
        (path / "half").unlink()
        (path / "group").write_text(str(session.group))
        return
    print("attempt of group", session.group, flush=True)
    die()

final_save._LEASE_S = lease_s
assert session.save_final(args.out / "final", write) == args.out / "final"
assert (args.out / "final" / "model.pt").exists()
"""


def test_one_living_group_writes_at_every_boundary_each_log_is_recorded_once_and_one_model_is_saved(tmp_path):
    """The writer dies after it has logged, before the next step; then the first that writes the final model dies."""
    script, out = tmp_path / "train.py", tmp_path / "out"
    script.write_text(SCRIPT)
    out.mkdir()
    run = support.start(tmp_path / "run", tmp_path, steps=STEPS, script=script, groups=4, own=("--out", out))
    run.process.wait(timeout=support.TIMEOUT_S)
    said = {int(path.suffix[1:]): list(map(json.loads, path.read_text().splitlines())) for path in out.glob("bound*")}
    saves = [json.loads(line) for path in out.glob("saves.*") for line in path.read_text().splitlines()]
    assert sorted(saves) == sorted([[step, turn] for step in range(STEPS) for turn in range(2)])
    writers = [[group for group, lines in said.items() for at, writes, _ in lines if at == step and writes]
               for step in range(STEPS)]  # fmt: skip
    assert writers == [[0]] * 6 + [[1]] * (STEPS - 6), run.logs()
    assert {tuple(line[2]) for line in said[3]} == {(0, 1, 2, 3), (1, 2, 3)}
    logged = [(line["step"], line["values"]) for line in run.events("log")]
    assert logged == [(step, {"squared": float(step**2), "note": f"step {step}"}) for step in range(STEPS)]
    steps = run.events("step")
    assert [line["learning_rate"] for line in steps] == [0.1] * 4 + [0.05] * 4 + [0.025] * 4
    assert all(line["gradient_norm"] > 0 and line["tokens"] == 16 * line["microbatches"] for line in steps)
    final = out / "final"
    assert sorted(path.name for path in final.iterdir()) == ["group", "model.pt"], run.logs()
    assert sorted(path.name for path in out.iterdir() if path.name.startswith(".")) == [], "partial data are left"
