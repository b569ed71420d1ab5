"""A gradient that is not a number: the step's update is left out in all groups, and the group that produced it is
named."""

from __future__ import annotations

import json
import math

import pytest

from tests import support


def start_with_nan(directory, data_dir, group: int, step: int, script=support.SCRIPT, **options) -> support.Run:
    """Start a run in which a gradient of that group becomes NaN."""
    path = directory.with_suffix(".faults.json")
    path.write_text(json.dumps({"faults": [{"kind": "nan", "group": group, "step": step}]}))
    gate = support.Gate(directory.parent, step - 2, script=script)
    run = support.start(directory, data_dir, script=gate.script, **options)
    done = support.inject_when_ready(run, gate, step - 2, path, orders=(group,))
    assert done.returncode == 0, done.stdout + done.stderr
    return run


def test_the_update_is_skipped_and_the_group_is_named(tmp_path, data_dir):
    run = start_with_nan(tmp_path / "run", data_dir, 2, 3)
    run.finish()
    assert run.process.returncode == 0, run.logs()
    named = run.events("nonfinite")
    assert [line["group"] for line in named] == [2]
    losses = {line["step"]: line["loss"] for line in run.events("step")}
    bad = [step for step, loss in losses.items() if not math.isfinite(loss)]
    assert len(losses) == support.STEPS and bad in ([], [named[0]["step"]])
    assert not run.events("fault") and len({line["params_sha256"] for line in run.events("survivor")}) == 1


@pytest.mark.long
def test_the_run_stops_where_the_setting_says_stop(tmp_path, data_dir):
    run = start_with_nan(tmp_path / "run", data_dir, 1, 3, steps=60, nonfinite="stop")
    said = " ".join(run.finish().split())
    assert run.process.returncode == 3 and "nonfinite is 'stop'" in said and "Traceback" not in said, said
    assert [line["group"] for line in run.events("nonfinite")] == [1]


LOSES_THE_SUM = """
import os, time
from pathlib import Path
from megatron_ft.run.collectives.base import Broken
from megatron_ft.run.collectives.bucket_allreduce import Reduction
from megatron_ft.run.nonfinite import NonFinite
start, reduce, all_started = Reduction._start, Reduction._finish, []
def starts(self, outer, step, bucket):
    start(self, outer, step, bucket)
    self.now = step
def loses(self, step, bucket):
    reduce(self, step, bucket)
    if self.now == 3 and not all_started:
        all_started.append(bucket)
        while not Path({ended!r}).exists():
            time.sleep(0.01)
        raise Broken("the others are gone")
check, mine = NonFinite.check, os.environ["MEGATRON_FT_GROUP"]
def together(self, result, engine):
    if result.step == 3:
        Path({ended!r} + mine).touch()
        while not all(Path({ended!r} + group).exists() for group in {others!r}):
            time.sleep(0.01)
    check(self, result, engine)
if mine == "{late}":
    Reduction._start, Reduction._finish = starts, loses
else:
    NonFinite.check = together
"""
"""The others end when all of them have made the step: the end of the first would take the sums from the rest, too."""


@pytest.mark.long
@pytest.mark.parametrize(
    "late",
    [pytest.param(1, id="it came from this group"), pytest.param(3, id="it came from another")],
)
def test_a_group_still_in_the_step_in_which_the_others_stop_does_not_make_it_again_alone(tmp_path, data_dir, late):
    """The sums are lost to the late group when the others, which had them, end. Without their gradient its own step
    may be finite; and no other group can say whether the late group's own gradient was not."""
    ended = tmp_path / "ended"
    others = set(range(support.GROUPS)) - {late}
    names = sorted(map(str, others))
    text = LOSES_THE_SUM.format(ended=str(ended), late=late, others=names)
    script = support.changed_script(tmp_path / "train.py", text)
    run = start_with_nan(tmp_path / "run", data_dir, 1, 3, steps=60, nonfinite="stop", script=script)
    support.wait_for(lambda: others <= {line["group"] for line in run.events("fault")}, run)
    ended.touch()
    said = " ".join(run.finish().split())
    assert run.process.returncode == 3 and "nonfinite is 'stop'" in said and "Traceback" not in said, said
    assert [line["step"] for line in run.events("step")] == [0, 1, 2, 3]
    assert [(line["group"], line["step"]) for line in run.events("nonfinite")] == [(1, 3)]


def test_a_group_whose_gradient_is_not_finite_leaves_and_its_part_is_computed_elsewhere(tmp_path, data_dir, reference):
    run = start_with_nan(tmp_path / "run", data_dir, 2, 3, nonfinite="recompute")
    run.check(reference)
    ((group, step),) = [(line["group"], line["step"]) for line in run.events("nonfinite")]
    (view,) = [line for line in run.events("view") if line["lost"]]
    assert group == 2 and list(view["lost"]) == ["2"]
    assert view["step"] in (step - 1, step), (
        "it was the first in its step: others may still have been in the one before"
    )
    assert f"microbatch {step}/" in view["lost"]["2"] and "not finite" in view["lost"]["2"]


POISON = """
from megatron_ft.run.engines import torch_native

plain = torch_native.TorchNativeEngine.compute
def compute(self, microbatch, *args):
    plain(self, microbatch, *args)
    if microbatch.step in (3, 4) and microbatch.shard == 1:
        self.local_gradients()[0][0] = float("nan")
torch_native.TorchNativeEngine.compute = compute
"""


@pytest.mark.long
def test_data_that_gives_no_finite_gradient_anywhere_costs_one_group_and_the_updates(tmp_path, data_dir):
    script = support.changed_script(tmp_path / "train.py", POISON)
    run = support.start(tmp_path / "run", data_dir, script=script, nonfinite="recompute")
    run.finish()
    assert run.process.returncode == 0, run.logs()
    assert len(run.events("survivor")) == support.GROUPS - 1
    assert len({line["step"] for line in run.events("step")}) == support.STEPS
    skipped = {line["step"] for line in run.events("nonfinite")}
    assert skipped == {3, 4}
