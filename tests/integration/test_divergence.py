"""The state of one group differs from the others': the group leaves and comes back with their state, and no checkpoint
mixes the two."""

from __future__ import annotations

import json
import re

import pytest

from megatron_ft.cluster.faults import kill as inject
from megatron_ft.errors import InvariantBroken
from megatron_ft.run.injection_points import Breakpoint
from tests import support

RECORDS_LATE = """
import time
from megatron_ft.run.state_guard import StateGuard
record = StateGuard._record
StateGuard._record = lambda *args, **fields: (time.sleep(0.5), record(*args, **fields))
"""
"""The rank whose state differs is slow to record it: the other rank of its group must not leave before."""


def start_with_flip(
    directory, data_dir, what: str, steps: int, check_steps: int, groups: int = 3, step: int = 3, **options
):
    """A run in which one bit of group 1's state is flipped in that step."""
    path = directory.with_suffix(".faults.json")
    fault = {"kind": "bitflip", "group": 1, "step": step, "what": what, "bit": 29}
    path.write_text(json.dumps({"faults": [fault]}))
    script = support.changed_script(directory.with_suffix(".py"), RECORDS_LATE)
    gate = support.Gate(directory.parent, step - 2, script=script)
    options["detector"] = {"state_check_steps": check_steps}
    run = support.start(directory, data_dir, script=gate.script, steps=steps, groups=groups, **options)
    done = support.inject_when_ready(run, gate, step - 2, path, orders=(1,))
    assert done.returncode == 0, done.stdout + done.stderr
    return run


@pytest.mark.parametrize("what, ranks", [("parameter", 1), pytest.param("moment", 2, marks=pytest.mark.long)])
def test_a_group_whose_state_changed_leaves_and_returns_with_the_state_of_the_others(tmp_path, data_dir, what, ranks):
    extra = ("--ranks-per-group", ranks)
    run = start_with_flip(tmp_path / "run", data_dir, what, 40, check_steps=4, extra=extra, rejoin={"enabled": True})
    run.finish()
    assert run.process.returncode == 0, run.logs()
    line = run.events("divergence")[0]
    assert (line["group"], line["incarnation"]) == (1, 0) and 3 < line["step"] <= 3 + 4
    assert line["what"] and {name.split()[0] for name in line["what"]} <= {"parameter", "optimizer"}, line
    lost = [view["lost"] for view in run.events("view") if view["lost"]]
    assert list(lost[0]) == ["1"] and "its state" in lost[0]["1"]
    assert len({end["state"] for end in run.events("survivor")}) == 1


BUFFER = """
import os, torch
from megatron_ft.run.engines import torch_native

init, update = torch_native.TorchNativeEngine.__init__, torch_native.TorchNativeEngine.update
def with_buffer(self, model, *args, **settings):
    model.register_buffer("kept", torch.ones(4), persistent=False)
    init(self, model, *args, **settings)
def flipped(self, step, *args):
    result = update(self, step, *args)
    if step == 3 and os.environ["MEGATRON_FT_GROUP"] == "1" and os.environ["MEGATRON_FT_INCARNATION"] == "0":
        self.model.kept.data.numpy().view("int32")[2] ^= 1
    return result
torch_native.TorchNativeEngine.__init__, torch_native.TorchNativeEngine.update = with_buffer, flipped
"""


@pytest.mark.long
def test_a_buffer_outside_the_state_dict_is_compared_too(tmp_path, data_dir):
    """A bit flips between two steps; during a step the next microbatch would have put it right."""
    script = support.changed_script(tmp_path / "train.py", BUFFER)
    options = {"detector": {"state_check_steps": 4}, "rejoin": {"enabled": True}, "steps": 40, "groups": 3}
    run = support.start(tmp_path / "run", data_dir, script=script, **options)
    run.finish()
    assert run.process.returncode == 0, run.logs()
    (line,) = run.events("divergence")
    assert (line["group"], line["incarnation"], line["what"]) == (1, 0, ["buffer kept"])
    assert len({end["state"] for end in run.events("survivor")}) == 1


def test_a_tie_stops_the_run_with_an_exit_code_of_its_own_and_names_both_groups(tmp_path, data_dir):
    run = start_with_flip(tmp_path / "run", data_dir, "parameter", 200, check_steps=2, groups=2)
    said = " ".join(run.finish().split())
    assert run.process.returncode == InvariantBroken.exit_code, said
    assert "the states of group 0 and group 1 differ" in said and "Traceback" not in said + run.logs()
    assert re.search(r"differ \(parameter \S+, float32 on cpu, checksums \w+ and \w+; from step \d+ on", said)
    (line,) = run.events("divergence")
    assert line["tied"] == [[0], [1]] and line["what"]
    assert not any(view["lost"] for view in run.events("view")) and not run.events("end")


@pytest.mark.long
@pytest.mark.parametrize("most", [1, 2, 4])
def test_a_state_that_differs_makes_no_checkpoint_not_even_at_the_end(tmp_path, data_dir, most):
    """The save after the last step comes before any comparison of the states. Groups that write nothing are asked,
    too: one writer could not be compared, and of two neither is known to be right."""
    limit = f"from megatron_ft.core.lifecycle import checkpoint_protocol; checkpoint_protocol.MOST_PARTS = {most}\n"
    group = 0 if most == 1 else 1
    script = flipping(tmp_path / "train.py", group, limit)
    checkpoint = {"directory": str(tmp_path / "saved"), "period_s": 3600}
    options = {"steps": 8, "groups": 3, "detector": {"state_check_steps": 0}, "checkpoint": checkpoint}
    run = support.start(tmp_path / "run", data_dir, script=script, **options)
    said = run.finish()
    assert run.process.returncode == 0, said + run.logs()
    (failed,) = run.events("checkpoint_failed")
    assert "states of groups 0 1 2 differ" in failed["reason"]
    (line,) = run.events("divergence")
    assert line["group"] == group and line["what"] and line["position"] == 0
    (saved,) = run.events("checkpoint")
    others = [other for other in range(3) if other != group]
    assert saved["step"] == 8 and saved["writers"] == others[:most]
    assert [line["group"] for line in run.events("survivor")] == others


def flipping(path, group: int, change: str = ""):
    """Return a training script that flips a bit of a parameter of that group after step 3."""
    flip = f"""
import os
from megatron_ft.run.engines import torch_native

update = torch_native.TorchNativeEngine.update
def flipped(self, step, *args):
    result = update(self, step, *args)
    if step == 3 and os.environ["MEGATRON_FT_GROUP"] == "{group}" and os.environ["MEGATRON_FT_INCARNATION"] == "0":
        next(self.model.parameters()).data.view(-1).numpy().view("int32")[5] ^= 1 << 22
    return result
torch_native.TorchNativeEngine.update = flipped
"""
    return support.changed_script(path, flip + change)


@pytest.mark.long
def test_a_group_that_comes_back_takes_nothing_of_a_state_that_differs(tmp_path, data_dir):
    """One of its three donors has diverged, and no step has compared the states yet. If it finds only two of them at
    first, a tie may be recorded before the third one decides."""
    steps = 100
    gate = support.Gate(tmp_path, slowly=steps, script=flipping(tmp_path / "flip.py", 1))
    options = {"detector": {"state_check_steps": 8000}, "rejoin": {"enabled": True}, "steps": steps, "groups": 4}
    # While the others reduce, a loss can leave group 1 behind: it would take the state of another group, and be healed.
    computes = Breakpoint(2, 6, "forward")
    run = support.start(tmp_path / "run", data_dir, [computes], script=gate.script, **options)
    run.strike_in_step(computes)
    for group in (1, 2):
        support.wait_for(lambda group=group: group in [line["group"] for line in run.events("rejoined")], run)
    gate.open()
    run.finish()
    assert run.process.returncode == 0, run.logs()
    (line,) = (line for line in run.events("divergence") if "tied" not in line)
    assert (line["group"], line["incarnation"], line["tensors"]) == (1, 0, 1) and line["what"][0].startswith(
        "parameter"
    )
    lost = [view["lost"] for view in run.events("view") if view["lost"]]
    assert [list(groups) for groups in lost] == [["2"], ["1"]] and "was not that of groups 0 3" in lost[1]["1"]
    assert len({end["state"] for end in run.events("survivor")}) == 1


LEFT_BEHIND = """
import time
from megatron_ft.run.collectives.base import Broken
from megatron_ft.run.injection_points import InjectionPoints

reach, broken = InjectionPoints.reach, []
def reaches(self, point, step, bucket=None):
    reach(self, point, step, bucket)
    if (self._group, point, step, bucket) == (1, "bucket", 5, 0) and not broken:
        broken.append(step)
        while '"event": "step", "step": 5,' not in open("{history}").read():
            time.sleep(0.01)
        raise Broken("played")
InjectionPoints.reach = reaches
"""
"""Group 1 sees bucket 0 of step 5, and no other, until the other groups have committed the step."""


def test_a_state_that_differs_is_found_when_it_is_handed_to_a_group_that_is_behind(tmp_path, data_dir):
    """The lowest group hands over the wrong state. Two groups that have made the step themselves know better."""
    left_behind = LEFT_BEHIND.format(history=tmp_path / "run" / "history.jsonl")
    script = flipping(tmp_path / "flip.py", 0, left_behind)
    options = {"detector": {"state_check_steps": 8000}, "rejoin": {"enabled": True}, "steps": 40, "groups": 4}
    run = support.start(tmp_path / "run", data_dir, script=script, **options)
    run.finish()
    assert run.process.returncode == 0, run.logs()
    behind, *after = run.events("view")[1:]
    assert (behind["step"], behind["source"], behind["behind"]) == (6, 0, [1])
    lost = {group: why for view in reversed(after) for group, why in view["lost"].items()}  # when it was lost first
    assert lost.keys() == {"0", "1"} and "was not that of groups 2 3" in lost["0"], lost
    assert len({end["state"] for end in run.events("survivor")}) == 1


@pytest.mark.long
def test_a_tie_after_the_last_step_is_no_success(tmp_path, data_dir):
    options = {"steps": 5, "groups": 2, "detector": {"state_check_steps": 0}}
    run = support.start(tmp_path / "run", data_dir, script=flipping(tmp_path / "train.py", 1), **options)
    said = " ".join(run.finish().split())
    assert run.process.returncode == InvariantBroken.exit_code, said
    assert "after the last step the states of group 0 and group 1 differ" in said
    (line,) = run.events("divergence")
    assert line["tied"] == [[0], [1]] and line["what"] and not run.events("end")


POISON = """
import os, torch
from megatron_ft.run.engines import torch_native

update = torch_native.TorchNativeEngine.update
def poisoned(self, step, *args):
    result = update(self, step, *args)
    if step == 3 and os.environ["MEGATRON_FT_GROUP"] == "1" and os.environ["MEGATRON_FT_INCARNATION"] == "0":
        with torch.no_grad():
            next(self.model.parameters()).fill_(float("nan"))
    return result
torch_native.TorchNativeEngine.update = poisoned
"""


@pytest.mark.long
def test_one_group_with_parameters_that_are_not_finite_does_not_end_the_run(tmp_path, data_dir):
    script = support.changed_script(tmp_path / "train.py", POISON)
    detector = {"state_check_steps": 0}
    run = support.start(
        tmp_path / "run", data_dir, script=script, steps=30, groups=3, detector=detector, rejoin={"enabled": True}
    )
    said = run.finish()
    assert run.process.returncode == 0, said + run.logs()
    assert [(line["group"], line["step"]) for line in run.events("nonfinite")] == [(1, 4), (1, 5), (1, 6)]
    (lost,) = [view["lost"] for view in run.events("view") if view["lost"]]
    assert list(lost) == ["1"] and "not finite in 3 steps in a row" in lost["1"]
    assert len({end["state"] for end in run.events("survivor")}) == 1


MISCOUNTS = """
import os
from megatron_ft.run.engines import torch_native

compute = torch_native.TorchNativeEngine.compute
def twice(self, microbatch, *args):
    compute(self, microbatch, *args)
    if microbatch.step == 3 and microbatch.shard == 1 and microbatch.index == 0:
        self._buckets.count(None)
torch_native.TorchNativeEngine.compute = twice
"""


def test_sums_over_wrong_microbatches_end_the_run_and_not_one_group_after_the_other(tmp_path, data_dir):
    script = support.changed_script(tmp_path / "train.py", MISCOUNTS)
    run = support.start(tmp_path / "run", data_dir, script=script, steps=30, groups=3)
    said = run.finish()
    assert run.process.returncode == InvariantBroken.exit_code, said + run.logs()
    assert "step 3: buckets hold" in said and not run.events("end")
    assert not any(view["lost"] for view in run.events("view"))


HIDDEN = """
import os
from megatron_ft.run.engines import torch_native

optimize = torch_native.TorchNativeEngine._optimize
def hidden(self, *args):
    optimize(self, *args)
    if os.environ["MEGATRON_FT_INCARNATION"] != "0":
        next(self.model.parameters()).data.mul_(0.999)
torch_native.TorchNativeEngine._optimize = hidden
"""
"""What a script does with a value of its own, which no return restores: the same wrong state in all that have come back."""


@pytest.mark.long
def test_two_wrong_groups_that_come_back_do_not_enter_and_the_right_one_stays(tmp_path, data_dir):
    steps = 60
    gate = support.Gate(tmp_path, slowly=steps, script=support.changed_script(tmp_path / "hidden.py", HIDDEN))
    rejoin = {"enabled": True, "restarts_per_hour": 1}
    options = {"detector": {"state_check_steps": 8}, "rejoin": rejoin, "steps": steps, "groups": 3}
    run = support.start(tmp_path / "run", data_dir, script=gate.script, **options)
    support.wait_for_step(run, 5)
    for group in (1, 2):
        inject.kill(run.directory, group, "anywhere")
    support.wait_for(
        lambda: {(1, 1), (2, 1)} <= {(one["group"], one["incarnation"]) for one in run.events("divergence")}, run
    )
    gate.open()
    said = " ".join(run.finish().split())
    assert run.process.returncode == 0, said + run.logs()
    assert [line["group"] for line in run.events("survivor")] == [0]
    for group in (1, 2):
        assert re.search(
            rf"group {group} (does not enter|leaves): its state .* was not that of group 0 \(parameter", said
        )
