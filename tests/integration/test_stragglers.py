"""A group that is slow, and a microbatch that kills every group that computes it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter

from tests import support


def computed(run: support.Run, group: int) -> Counter:
    """Return, by step, the number of microbatches that a group has computed."""
    lines = (run.directory / "timeline" / f"g{group}.p0.jsonl").read_text().splitlines()
    spans = ((line["step"], span[0]) for line in map(json.loads, lines) for span in line["spans"])
    return Counter(step for step, phase in spans if phase in ("compute", "patch"))


def test_a_slow_group_is_reported_and_gets_less_to_do(tmp_path, data_dir):
    steps = 24
    reference = support.start(tmp_path / "reference", data_dir, steps=steps)
    reference.check()
    detector = {"straggler_factor": 2.0}
    gate = support.Gate(tmp_path, 1)
    run = support.start(tmp_path / "run", data_dir, steps=steps, detector=detector, script=gate.script)
    schedule = tmp_path / "slow.json"
    schedule.write_text(json.dumps({"faults": [{"kind": "slow", "group": 1, "factor": 12.0, "steps": 16, "step": 2}]}))
    done = support.inject_when_ready(run, gate, 1, schedule, orders=(1,))
    assert done.returncode == 0, done.stdout + done.stderr
    run.check(reference)
    found = [line for line in run.events("stragglers") if "1" in line["slow"]]
    assert found and found[0]["slow"]["1"] >= 2.0, run.events("step")
    share = computed(run, 1)[found[0]["step"] + 1]
    assert 1 <= share < support.PER_GROUP
    assert sum(computed(run, group)[found[0]["step"] + 1] for group in range(support.GROUPS)) == 16
    command = [sys.executable, "tools/replay.py", run.directory]
    replay = subprocess.run(command, cwd=support.ROOT, capture_output=True, text=True)
    assert replay.returncode == 0, replay.stdout + replay.stderr


POISON = """
from megatron_ft.run.engines import torch_native

plain = torch_native.TorchNativeEngine.compute
def compute(self, microbatch, *args):
    if str(microbatch) == "3/1.2":
        raise MemoryError("too long a sample")
    plain(self, microbatch, *args)
torch_native.TorchNativeEngine.compute = compute
"""


def test_a_microbatch_that_no_group_survives_costs_two_groups_and_stops_the_run(tmp_path, data_dir):
    script = support.changed_script(tmp_path / "train.py", POISON)
    run = support.start(tmp_path / "run", data_dir, script=script)
    said = " ".join(run.finish().split())
    assert run.process.returncode == 3 and "the run stops: look at the samples of that microbatch" in said, said
    assert [line["microbatch"] for line in run.events("fault") if line["microbatch"]] == ["3/1.2", "3/1.2"]
    assert "3/1.2" in run.events("stop")[0]["reason"]
