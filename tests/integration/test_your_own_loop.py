"""The example that converts a script for DistributedDataParallel."""

from __future__ import annotations

import ast
import difflib
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch

from megatron_ft.run import injection_points
from megatron_ft.run.injection_points import Breakpoint
from tests import support, warm

EXAMPLE = support.ROOT / "examples" / "your_own_loop"
CONVERSIONS = {
    "ddp": "ft",
    "hf_trainer": "hf_trainer_ft",
    "hf_accelerate": "hf_accelerate_ft",
    "lightning_module": "lightning_ft",
    "titan_style": "titan_style_ft",
    "nano_style": "nano_style_ft",
}
HELD_OUT = re.compile(r"held-out loss ([\d.]+); saved in")


def code(name: str) -> list[str]:
    """Return the lines of a script that are not empty, without its docstring."""
    text = (EXAMPLE / name).read_text(encoding="utf-8")
    first = ast.parse(text).body[0]
    return [line for line in text.splitlines()[first.end_lineno :] if line.strip()]


@pytest.mark.parametrize(("plain", "converted"), CONVERSIONS.items())
def test_a_conversion_changes_few_lines_as_the_documents_say(plain, converted):
    new = [line for line in difflib.ndiff(code(f"{plain}.py"), code(f"{converted}.py")) if line.startswith("+ ")]
    assert len(new) <= 20, new
    row = rf"\b{plain}\.py.*\b{converted}\.py.*\b{len(new)} lines\b"
    for page in (support.ROOT / "docs" / "script.md", support.ROOT / "examples" / "README.md"):
        assert re.search(row, page.read_text(encoding="utf-8")), (
            f"{page.name} does not say {len(new)} lines for {plain}"
        )


@pytest.mark.long
def test_both_scripts_learn_the_task(tmp_path):
    """The losses are not equal: the two orders of the samples differ."""
    ddp = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--standalone",
        EXAMPLE / "ddp.py",
    ]
    by_ddp = subprocess.run(
        [*map(str, ddp), "--out", str(tmp_path / "ddp.pt")], capture_output=True, text=True, timeout=120, check=False
    )
    assert by_ddp.returncode == 0, by_ddp.stderr
    config = EXAMPLE / "ds_config.json"
    where = ["--groups", 2, "--config", config, "--run-dir", tmp_path / "run"]
    ours = support.ft("launch", *where, EXAMPLE / "ft.py", "--", "--out", tmp_path / "ft.pt")
    assert ours.returncode == 0, ours.stdout + ours.stderr
    logs = "".join(path.read_text() for path in sorted((tmp_path / "run" / "logs").glob("*.log")))
    losses = [float(HELD_OUT.search(text)[1]) for text in (by_ddp.stdout, logs)]
    assert all(loss < 2.6 for loss in losses), losses  # 3.4 before training
    assert (tmp_path / "ft.pt").exists()


def run_of(
    tmp_path,
    name: str,
    holds=(),
    own=("--epochs", 1),
    config="ds_config.json",
    rejoin=False,
    script=None,
    suffix="",
    **changes,
) -> support.Run:
    """Run a script of the example with 2 groups and exact reduction, short."""
    script = script or support.changed_script(tmp_path / f"{name}.py", "", EXAMPLE / f"{name}.py")
    known = json.loads((EXAMPLE / config).read_text())
    section = {**known.get("fault_tolerance", {}), "reduction": "exact", "rejoin": {"enabled": rejoin}, **changes}
    section["detector"] = {"stopped_timeout_s": support.TIMEOUT_S, "straggler_factor": 0}
    directory = tmp_path / (f"{name}.struck" if holds else f"{name}{suffix}")
    config = directory.with_suffix(".json")
    config.write_text(json.dumps({**known, "fault_tolerance": section}))
    where = ["--groups", 2, "--config", config, "--run-dir", directory]
    env = {**os.environ, **injection_points.to_env(list(holds))}
    process = warm.launch("launch", *where, script, "--", *own, "--out", directory / "model", env=env)
    support.started.append(process)
    return support.Run(directory, process, 2)


@pytest.mark.long
def test_a_loop_of_its_own_gives_the_same_bits_when_a_group_dies(tmp_path):
    with_loss_fn = run_of(tmp_path, "ft")
    with_loss_fn.finish()
    hold = Breakpoint(1, 20, "backward")
    own = run_of(tmp_path, "own_loop", [hold])
    own.strike(hold)
    own.finish()
    assert own.process.returncode == with_loss_fn.process.returncode == 0, own.logs()
    assert support.outcome(own) == support.outcome(with_loss_fn) and own.events("fault")


def losses(text: str) -> list[float]:
    """Return the losses that a script has printed, in their order."""
    return [float(number) for number in re.findall(r"loss'?:? '?(\d+\.\d+)", text)]


def steps(text: str, after: int) -> list[str]:
    """Return the lines that a script has printed for steps after that one."""
    return [found[0] for found in re.finditer(r"^step (\d+)  .*$", text, re.M) if int(found[1]) > after]


def printed(run: support.Run) -> str:
    """Return what group 0 has printed."""
    return (run.directory / "logs" / "g0.p0.log").read_text()


def logged(run: support.Run) -> list[tuple[int, dict]]:
    """Return the losses that ``session.log`` has written, with their steps."""
    return [
        (line["step"], {name: value for name, value in line["values"].items() if "loss" in name})
        for line in run.events("log")
    ]


@dataclass(frozen=True)
class Case:
    """A conversion and how it is run: ``own`` are options of both scripts, ``ranks`` processes of the plain one.

    ``rejoin``: the library counts steps by itself, so a group that comes back has to go on with the right number."""

    package: str = "torch"
    own: tuple[object, ...] = ("--epochs", 1)
    config: str = "ds_config.json"
    ranks: int = 1
    rejoin: bool = False


CASES = {
    "hf_trainer": Case("transformers", ("--steps", 40), "hf_trainer.json", rejoin=True),
    "hf_accelerate": Case("accelerate"),
    "lightning_module": Case("lightning", ("--epochs", 2), rejoin=True),
    "titan_style": Case(own=("--steps", 15), config="sharded.json", ranks=2),
}


@pytest.mark.parametrize("plain", support.first_of({name: name for name in CASES}, "hf_accelerate"))
def test_a_converted_script_keeps_its_losses_when_a_group_dies(tmp_path, plain):
    """The undisturbed run has the same microbatches as the plain script, the disturbed one also the same bits. Group 0
    dies: it is the one that prints."""
    case, name = CASES[plain], CONVERSIONS[plain]
    pytest.importorskip(case.package, reason=f"{case.package} is not installed")
    many = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", case.ranks) if case.ranks > 1 else ()
    words = [sys.executable, *many, EXAMPLE / f"{plain}.py", *case.own, "--out", tmp_path / "plain"]
    alone = subprocess.Popen(
        [*map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    undisturbed = run_of(tmp_path, name, own=case.own, config=case.config)
    undisturbed.finish()
    assert undisturbed.process.returncode == 0, undisturbed.logs()
    assert ("accelerator.is_main_process, " in undisturbed.logs()) == (plain == "hf_accelerate")
    said, errors = alone.communicate(timeout=support.TIMEOUT_S)
    assert alone.returncode == 0, errors
    wanted = losses(printed(undisturbed))
    assert wanted and losses(said) == pytest.approx(wanted, rel=1e-3), (said, printed(undisturbed))

    hold = Breakpoint(0, 6, "backward")
    gate = support.Gate(tmp_path, slowly=100, script=EXAMPLE / f"{name}.py") if case.rejoin else None
    run = run_of(tmp_path, name, [hold], case.own, case.config, case.rejoin, gate and gate.script)
    run.strike(hold)
    if gate:
        support.wait_for(lambda: run.events("rejoined"), run)
        gate.open()
    run.finish()
    assert run.process.returncode == 0, run.logs()
    assert support.outcome(run) == support.outcome(undisturbed) and run.events("fault")
    assert (run.directory / "model").exists()
    if case.rejoin:
        after = losses(printed(run).partition("incarnation 1")[2])
        assert after and after == wanted[-len(after) :], printed(run)
        entered = run.events("rejoined")[-1]["step"]
        assert steps(printed(run), entered) == steps(printed(undisturbed), entered), printed(run)
        assert logged(run) and logged(run) == logged(undisturbed)


@pytest.mark.long
def test_nanogpt_s_loop_keeps_its_bits_through_a_kill_a_return_a_stop_and_a_resumption(tmp_path, data_dir):
    """Its batches come from torch's global generator, also those of its own evaluation; the learning rate is set by hand."""
    own, script = ("--steps", 30, "--data", data_dir), EXAMPLE / "nano_style_ft.py"
    undisturbed = run_of(tmp_path, "nano_style_ft", own=own, config="nano.json")
    undisturbed.finish()
    assert undisturbed.process.returncode == 0, undisturbed.logs()
    wanted, values = support.outcome(undisturbed), dict(logged(undisturbed))
    assert len(set(wanted[0])) == 30 and len(values) == 3

    saved = {"checkpoint": {"directory": str(tmp_path / "saved")}}
    hold = Breakpoint(0, 6, "backward")
    gate = support.Gate(tmp_path, slowly=30, script=script)
    struck = run_of(tmp_path, "nano_style_ft", [hold], own, "nano.json", True, gate.script, **saved)
    struck.strike(hold)
    support.wait_for(lambda: struck.events("rejoined"), struck)
    entered = struck.events("rejoined")[-1]["step"]
    support.wait_for_step(struck, entered + 2)  # it has trained
    assert support.ft("stop", struck.directory).returncode == 0
    struck.finish()
    made = {line["step"]: line["loss"] for line in struck.events("step")}
    assert [made[step] for step in sorted(made)] == wanted[0][: len(made)], struck.logs()
    assert entered < len(made) < 30

    resumed = run_of(tmp_path, "nano_style_ft", own=own, config="nano.json", suffix=".resumed", **saved)
    resumed.finish()
    assert resumed.process.returncode == 0, resumed.logs()
    rest, digest = support.outcome(resumed)
    assert rest == wanted[0][len(made) :] and digest == wanted[1]
    assert {**dict(logged(struck)), **dict(logged(resumed))} == values
    best = torch.load(undisturbed.directory / "model")["best_val_loss"]
    assert best == min(value["val_loss"] for value in values.values())


HABITS = f"""
import argparse, hashlib, json, sys
from pathlib import Path
import torch
from torch.nn.functional import cross_entropy
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
sys.path.insert(0, {str(EXAMPLE)!r})
from sums import MixedSums, make_model
from torch.utils.data import DataLoader
import megatron_ft

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int)
parser.add_argument("--out", type=Path)
args = parser.parse_args()
session = megatron_ft.init(seed=1)
torch.manual_seed(1)
loader = session.prepare(DataLoader(MixedSums(range(800)), batch_size=8))
held_out = DataLoader(MixedSums(range(800, 1000)), batch_size=50)
model = torch.nn.Sequential(*make_model(), torch.nn.BatchNorm1d(30))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
optimizer.register_step_pre_hook(lambda *_: torch.nn.utils.clip_grad_value_(model.parameters(), 0.1))

def decay(optimizer, *_):
    optimizer.param_groups[0]["weight_decay"] = 0.01 * (1 + session.step % 7)

optimizer.register_step_pre_hook(decay)
warmup = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
scheduler = lr_scheduler.SequentialLR(optimizer, [warmup, lr_scheduler.CosineAnnealingLR(optimizer, args.steps)], [5])
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)

class Best:
    loss, step, seen = float("inf"), -1, 0
    def state_dict(self):
        return {{"loss": self.loss, "step": self.step, "seen": self.seen}}
    def load_state_dict(self, state):
        vars(self).update(state)

@torch.no_grad()
def evaluate(model):
    model.eval()
    loss = sum(cross_entropy(model(terms), total, reduction="sum").item() for terms, total in held_out)
    model.train()
    return loss / 200

best = Best()
session.register("average", average)
session.register("best", best)
session.wrap(model, optimizer, scheduler=scheduler)
for step in session.steps(args.steps):
    optimizer.param_groups[0]["eps"] *= 1.1
    for terms, total in session.microbatches(loader):
        session.backward(cross_entropy(model(terms), total))
    optimizer.param_groups[0]["betas"] = (0.8 + step / 1000, 0.99)
    session.commit()
    average.update_parameters(model)
    best.seen += 1
    if step % 5 == 4:
        loss, smooth = evaluate(model), evaluate(average)
        session.log({{"held_out": loss, "held_out_average": smooth}})
        if smooth < best.loss:
            best.loss, best.step = smooth, step

def digest(module):
    state = module.state_dict()
    return hashlib.sha256(b"".join(state[name].numpy().tobytes() for name in sorted(state))).hexdigest()

values = {{key: optimizer.param_groups[0][key] for key in ("weight_decay", "betas", "eps")}}
says = {{"model": digest(model), "average": digest(average), "lr": scheduler.get_last_lr(), **values, **best.state_dict()}}
args.out.with_suffix(f".{{session.group}}").write_text(json.dumps(says))
"""


def test_what_scripts_do_beside_the_steps_is_the_same_in_all_groups_after_a_return(tmp_path):
    """An average of the weights with BatchNorm's statistics, an evaluation loop, a best value, schedulers in sequence,
    clipping by value in a hook of the optimizer, and values of the optimizer that the loop sets before a step, relative
    to the last one, and before it commits, and a hook that asks for the step."""
    (tmp_path / "habits.py").write_text(HABITS)
    own = ("--steps", 40)
    undisturbed = run_of(tmp_path, "habits", own=own, script=tmp_path / "habits.py")
    hold = Breakpoint(1, 6, "backward")
    gate = support.Gate(tmp_path, slowly=100, script=tmp_path / "habits.py")
    run = run_of(tmp_path, "habits", [hold], own, rejoin=True, script=gate.script)
    run.strike(hold)
    support.wait_for(lambda: run.events("rejoined"), run)
    gate.open()
    says = []
    for each in (undisturbed, run):
        each.finish()
        assert each.process.returncode == 0, each.logs()
        says += [json.loads((each.directory / f"model.{group}").read_text()) for group in range(2)]
    assert says == [says[0]] * 4 and says[0]["seen"] == 40 and says[0]["step"] > 0
    logged = [[line["values"] for line in each.events("log")] for each in (undisturbed, run)]
    assert logged[0] == logged[1] and len(logged[0]) == 8


MISUSE = {
    "a turn without backward": (
        "session.backward(loss)",
        "pass",
        "call session.backward(loss) once for each microbatch",
    ),
    "backward twice": (
        "session.backward(loss)",
        "session.backward(loss); session.backward(loss)",
        "session.backward outside of a loop over session.microbatches, or twice in one turn of it",
    ),
    "commit in the loop": (
        "session.backward(loss)",
        "session.backward(loss); session.commit()",
        "session.commit before the loop over session.microbatches has ended",
    ),
    "an engine with a loss function": (
        "session.wrap(model, optimizer, scheduler=scheduler)",
        "session.wrap(model, optimizer, loss_fn)",
        "leave loss_fn out in session.wrap",
    ),
    "clipping before commit": (
        "result = session.commit()",
        "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0); result = session.commit()",
        "gradient_clipping in the config clips the norm",
    ),
    "an exception in the loop": (
        "loss = loss_fn(model, batch)",
        "raise ValueError('a mistake of the script')",
        "a mistake of the script",
    ),
}


@pytest.mark.parametrize("case", support.first_of({name: name for name in MISUSE}, "clipping before commit"))
def test_a_loop_that_is_wrong_is_told(tmp_path, case):
    before, after, words = MISUSE[case]
    text = (EXAMPLE / "own_loop.py").read_text(encoding="utf-8")
    assert before in text
    (tmp_path / "wrong.py").write_text(text.replace(before, after), encoding="utf-8")
    (tmp_path / "sums.py").write_text((EXAMPLE / "sums.py").read_text(encoding="utf-8"), encoding="utf-8")
    where = ["--groups", 1, "--config", EXAMPLE / "ds_config.json", "--run-dir", tmp_path / "run"]
    said = support.ft("launch", *where, tmp_path / "wrong.py", "--", "--out", tmp_path / "out.pt")
    assert said.returncode != 0 and words in said.stdout + said.stderr
