"""What a script registers with its session: equal in all groups, carried by a return and by a checkpoint."""

from __future__ import annotations

import json

import pytest

from megatron_ft.data.order import BatchSchedule
from megatron_ft.errors import ConfigError, InvariantBroken
from megatron_ft.run.registered_state import Registered
from tests import support

STEPS, LATER = 200, 210

SCRIPT = """
import argparse, json, os, signal, time
from pathlib import Path
import torch
import megatron_ft

parser = argparse.ArgumentParser()
parser.add_argument("--data"); parser.add_argument("--steps", type=int); parser.add_argument("--seed", type=int)
parser.add_argument("--out", type=Path); parser.add_argument("--differ", type=int); parser.add_argument("--new")
args = parser.parse_args()
session = megatron_ft.init(seed=args.seed)
torch.manual_seed(100 + session.group)  # the first step starts all groups from the state of group 0
model = torch.nn.Linear(8, 4)
average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
engine = session.wrap(model, torch.optim.SGD(model.parameters(), lr=1e-3), lambda m, b: m(b).square().mean())

class Best:
    loss, steps, text, history = float("inf"), 0, "none", ()
    def state_dict(self):
        return {"loss": self.loss, "steps": self.steps, "text": self.text, "history": self.history}
    def load_state_dict(self, state):
        vars(self).update(state)

best = Best()
session.register("average", average)
session.register("best", best)
if args.new:
    session.register(args.new, Best())

def samples(microbatch):
    return torch.ones(2, 8) * (1 + microbatch.index)

for step in session.steps(args.steps):
    if len(session.live) < 3:
        time.sleep(0.1)  # until the lost group is back: much shorter than all steps together
    result = session.train_step(engine, samples)
    average.update_parameters(model)
    best.loss, best.steps, best.text = min(best.loss, result.loss), best.steps + 1, f"step {step}"
    best.history = (*best.history[-2:], step)
    if step == 5 and session.group == 1:
        if args.differ:
            best.steps += args.differ
        else:
            os.kill(os.getpid(), signal.SIGKILL)
weights = [parameter.flatten().tolist() for parameter in average.parameters()]
says = {"average": weights, "updates": int(average.n_averaged), **best.state_dict()}
(args.out / f"{args.steps}.{session.group}").write_text(json.dumps(says))
"""


def start(directory, steps, *own, **changes):
    script, out = directory / "train.py", directory / "out"
    script.write_text(SCRIPT)
    out.mkdir(exist_ok=True)
    options = {"script": script, "groups": 3, "own": ("--out", out, *own), "rejoin": {"enabled": True}, **changes}
    return support.start(directory / f"run{steps}", directory, steps=steps, **options)


def said(directory, steps) -> list[dict]:
    return [json.loads((directory / "out" / f"{steps}.{group}").read_text()) for group in range(3)]


@pytest.mark.long
def test_registered_objects_come_back_with_a_group_and_from_a_checkpoint(tmp_path):
    """Group 1 dies after a step and comes back; another run goes on from the checkpoint of the first."""
    saved = {"checkpoint": {"directory": str(tmp_path / "saved")}}
    run = start(tmp_path, STEPS, **saved)
    run.finish()
    assert run.process.returncode == 0, run.logs()
    assert [line["group"] for line in run.events("rejoined")] == [1], "the group is back before the end"
    first = said(tmp_path, STEPS)
    assert first[0] == first[1] == first[2]
    expected = {"updates": STEPS, "steps": STEPS, "text": f"step {STEPS - 1}", "history": list(range(STEPS - 3, STEPS))}
    assert expected.items() <= first[0].items()

    again = start(tmp_path, LATER, "--new", "other", **saved)
    again.finish()
    assert again.process.returncode == 0, again.logs()
    assert "'other' is not in the checkpoint, and begins anew" in again.logs()
    resumed = said(tmp_path, LATER)
    assert resumed[0] == resumed[1] == resumed[2]
    assert resumed[0]["updates"] == resumed[0]["steps"] == LATER

    (tmp_path / "unbroken").mkdir()
    unbroken = start(tmp_path / "unbroken", LATER, "--differ", "0", groups=1, rejoin={"enabled": False})
    unbroken.finish()
    whole = json.loads((tmp_path / "unbroken" / "out" / f"{LATER}.0").read_text())
    for mine, other in zip(resumed[0]["average"], whole["average"], strict=True):
        assert mine == pytest.approx(other, abs=1e-6)


def test_a_registered_object_that_differs_in_one_group_is_found(tmp_path):
    run = start(tmp_path, STEPS, "--differ", "1", detector={"state_check_steps": 8})
    run.finish()
    assert run.process.returncode == 0, run.logs()
    (line,) = run.events("divergence")
    assert line["group"] == 1 and "registered.best" in json.dumps(line)
    assert len({json.dumps(each) for each in said(tmp_path, STEPS)}) == 1, "it came back with the others' object"


def test_what_cannot_be_registered_is_refused():
    class Odd:
        def state_dict(self):
            return {"a": {1, 2}}

        def load_state_dict(self, state):
            raise InvariantBroken("never called")

    registered = Registered(BatchSchedule(1))
    for name, one, why in [
        ("odd", Odd(), r"state.a is a set; a state may hold tensors, numbers"),
        ("odd", object(), r"a object has no state_dict\(\)"),
        ("", Odd(), "must be a text that is not empty"),
    ]:
        with pytest.raises(ConfigError, match=why):
            registered.add(name, one)
    assert not registered
