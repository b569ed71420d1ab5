"""State outside the optimizer, and means over tokens: equal in all groups and exact whichever groups are lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron_ft.run.injection_points import Breakpoint
from tests import support
from tests.integration import state_job

SCRIPT = Path(state_job.__file__)
SETTINGS = {"bucket_mb": 0.0005, "loss_reduction": "token"}
CLIPPING_OFF = {"gradient_clipping": 0.0}


def start(tmp_path, kind: str, holds=(), script=SCRIPT, **options) -> support.Run:
    (tmp_path / "out").mkdir()
    own = ("--engine", kind, "--out", tmp_path / "out")
    return support.start(tmp_path / "run", tmp_path, holds, script=script, own=own, **SETTINGS, **options)


def check(run: support.Run, out: Path, steps: int, optimizer) -> None:
    """Check that every step's loss and the buffers at the end are those of one process, and that all groups have the
    same bits."""
    run.check()
    losses, expected = state_job.alone(steps, run.groups, support.PER_GROUP, optimizer, seed=1)
    assert [line["loss"] for line in run.events("step")] == pytest.approx(losses, rel=1e-5)
    found = {path.stem: json.loads(path.read_text()) for path in out.iterdir()}
    by_position: dict[str, list[dict]] = {}
    for name, buffers in found.items():
        by_position.setdefault(name.split(".")[1], []).append(buffers)
    for held in by_position.values():
        assert all(buffers == held[0] for buffers in held), found
    merged = {name: value for held in by_position.values() for name, value in held[0].items()}
    assert merged.keys() == expected.keys()
    for name, value in merged.items():
        assert torch.allclose(torch.tensor(value).double(), torch.tensor(expected[name]).double(), atol=1e-5), name


def test_a_group_that_comes_back_has_the_same_buffers_and_random_updates(tmp_path):
    """Group 1 is killed when it has computed some of its microbatches, and comes back."""
    steps = 150
    gate = support.Gate(tmp_path, slowly=steps, script=SCRIPT)
    hold = Breakpoint(1, 2, "backward", after=2)
    rejoin = {"enabled": True, "restarts_per_hour": 1}
    run = start(tmp_path, "native", [hold], gate.script, steps=steps, groups=3, engine=CLIPPING_OFF, rejoin=rejoin)
    run.strike(hold)
    support.wait_for(lambda: run.events("rejoined"), run)
    gate.open()
    check(run, tmp_path / "out", steps, state_job.Noisy)
    assert len(list((tmp_path / "out").iterdir())) == 3


@pytest.mark.long
@pytest.mark.parametrize(("kind", "moment"), [("data", "backward"), ("pipeline", "forward")])
def test_deepspeed_merges_buffers_and_counts_tokens(tmp_path, kind, moment):
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    hold = Breakpoint(1, 2, moment, position=1, after=1)
    options = {"steps": 5, "groups": 2, "extra": ["--preload", "deepspeed", "--ranks-per-group", 2]}
    engine = {**CLIPPING_OFF, **({"pipeline": {"stages": 2}} if kind == "pipeline" else {})}
    run = start(tmp_path, kind, [hold], engine=engine, **options)
    run.strike(hold)
    check(run, tmp_path / "out", 5, state_job.Noisy if kind == "data" else torch.optim.SGD)
    assert len(run.events("survivor")) == 1


REFUSED = """
import sys
sys.path.insert(0, {here!r})
import state_job, torch
class Masked(state_job.Experts):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(16, dtype=torch.bool))
    def forward(self, rows):
        self.seen |= (rows > 0).any(0)
        return super().forward(rows)
state_job.Experts = Masked
state_job.main()
"""


def test_a_buffer_that_cannot_be_merged_ends_the_run_before_its_first_step(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(REFUSED.format(here=str(SCRIPT.parent)))
    run = start(tmp_path, "native", script=script, groups=2)
    said = " ".join(run.finish().split())
    assert run.process.returncode == 2 and "Traceback" not in said, said
    assert "buffer 2.seen (bool, 16 elements) was written in forward" in said and not run.events("step"), said
