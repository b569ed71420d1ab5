"""Runs whose datasets are impure: ``python -m tests.chaos.impurities --runs 100 --seed 0 --out FILE.json``.

A seed draws the kind of impurity, the number of groups and of microbatches, and a group that kills itself in some step. A
dataset that draws from a global generator must be right: the losses are those of the run without a loss. One that is no
function of the microbatch must be refused: exit code 10, and not a step. A run that ends with exit code 0 and other
losses has broken the promise.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks import common
from megatron_ft.record import history
from tests import support

STEPS = 5
RIGHT = {
    "torch": "torch.randint(1000, (4,)).float()",
    "numpy": "torch.from_numpy(np.random.randint(1000, size=4)).float()",
    "random": "torch.tensor([random.random() for _ in range(4)])",
    "normal": "torch.tensor([np.random.standard_normal(), random.gauss(0, 1), 0.0, torch.randn(()).item()])",
    "sometimes": "torch.rand(4) if microbatch.index else torch.full((4,), float(microbatch.shard))",
    "augmentation": "torch.arange(4.0) + float(microbatch.step) + np.random.rand()",
}
REFUSED = {
    "iterator": "next(iterator) + torch.zeros(4)",
    "clock": "torch.full((4,), float(time.time_ns() % 10**6))",
    "urandom": "torch.tensor(list(os.urandom(4))).float()",
    "generator": "torch.from_numpy(moving.random(4)).float()",
    "unseeded": "torch.from_numpy(unseeded.random(4)).float()",
    "process": "torch.full((4,), float(os.getpid()))",
    "group": "torch.full((4,), float(session.group))",
}
SCRIPT = """
import itertools, os, random, signal, time
import numpy as np, torch
import megatron_ft
session = megatron_ft.init(seed=1)
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
iterator, moving, unseeded = itertools.count(), np.random.default_rng(0), np.random.default_rng()
def batch(microbatch):
    if session.group == {group} and microbatch.step == {step}:
        os.kill(os.getpid(), signal.SIGKILL)
    return {{"x": {draw}, "microbatch": str(microbatch)}}
def loss(model, batch):
    return (model(batch["x"][:, None] / 1000) - 1).pow(2).mean()
engine = session.wrap(model, torch.optim.SGD(model.parameters(), lr=0.05), loss)
for step in session.steps({steps}):
    session.train_step(engine, batch)
"""


def play(directory: Path, draw: str, groups: int, per_group: int, group: int, step: int) -> tuple[int, list[float]]:
    """Play a run; return the exit code of the launcher and the losses of its steps."""
    directory.mkdir()
    script, config = directory / "train.py", directory / "config.json"
    script.write_text(SCRIPT.format(draw=draw, group=group, step=step, steps=STEPS))
    section = {"reduction": "exact", "rejoin": {"enabled": False}}
    config.write_text(json.dumps({
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": per_group, "fault_tolerance": section,
    }))  # fmt: skip
    where = ["--groups", groups, "--config", config, "--run-dir", directory / "run"]
    done = subprocess.run(support.command("launch", *where, script), capture_output=True, text=True, timeout=300)
    lines = history.read(directory / "run")
    losses = {line["step"]: line["loss"] for line in lines if line["event"] == "step"}
    return done.returncode, [losses[number] for number in sorted(losses)]


def run(seed: int, directory: Path) -> dict[str, Any]:
    """Play the run of a seed, and judge it."""
    dice = random.Random(f"impurities {seed}")
    kind = dice.choice(sorted({**RIGHT, **REFUSED}))
    # What is the same in all calls of a process needs a second one to differ from.
    groups, per_group = dice.randint(2 if kind in ("process", "group") else 1, 3), dice.randint(1, 3)
    group, step = (dice.randrange(groups), dice.randint(1, STEPS - 1)) if groups > 1 else (-1, 0)
    draw, began = {**RIGHT, **REFUSED}[kind], time.monotonic()
    code, losses = play(directory / f"{seed}", draw, groups, per_group, group, step)
    wanted = play(directory / f"{seed}-undisturbed", draw, groups, per_group, -1, 0)[1] if kind in RIGHT else []
    refused = code == 10 and not losses
    kept = code == 0 and losses == wanted and len(losses) == STEPS if kind in RIGHT else refused
    outcome = ("right" if kind in RIGHT else "refused") if kept else "VIOLATED"
    shape = {"seed": seed, "kind": kind, "groups": groups, "per_group": per_group, "killed": group, "step": step}
    seconds = round(time.monotonic() - began, 1)
    return {**shape, "code": code, "steps": len(losses), "outcome": outcome, "seconds": seconds}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.impurities")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    directory, results = Path(tempfile.mkdtemp(prefix="impurities-")), list[dict[str, Any]]()
    for seed in range(options.seed, options.seed + options.runs):
        results.append(run(seed, directory))
        print(results[-1], flush=True)
        if options.out:
            summary = {
                **common.about("chaos_impurities", "python -m tests.chaos.impurities " + " ".join(sys.argv[1:])),
                "runs": len(results),
                "outcomes": dict(Counter(result["outcome"] for result in results)),
                "kinds": dict(Counter(f"{result['kind']}: {result['outcome']}" for result in results)),
                "violated": [result["seed"] for result in results if result["outcome"] == "VIOLATED"],
                "results": results,
            }
            options.out.write_text(json.dumps(summary, indent=1) + "\n")
    return any(result["outcome"] == "VIOLATED" for result in results)


if __name__ == "__main__":
    sys.exit(main())
