"""Runs whose groups train on a GPU; between groups gloo copies through the host's memory.

All groups share one device. ``reduction`` "exact" needs the same bits from every run; "fast" the same losses.
"""

from __future__ import annotations

import pytest
import torch

from megatron_ft.faults.injection_points import Breakpoint
from tests import support

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; tests/integration runs on the CPU"),
]

ON_DEVICE = """
import os
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
import torch
from megatron_ft.worker.session import Session
torch.use_deterministic_algorithms(True)
wrap = Session.wrap
def on_device(self, model, optimizer, loss_fn, scheduler):
    model.to("cuda")  # in place: the optimizer holds the same parameters
    moved = lambda model, batch: loss_fn(model, {name: one.to("cuda") for name, one in batch.items()})
    return wrap(self, model, optimizer, moved, scheduler)
Session.wrap = on_device
"""


def start(directory, data_dir, holds=(), **options) -> support.Run:
    script = support.changed_script(directory.with_suffix(".py"), ON_DEVICE)
    return support.start(directory, data_dir, holds, script=script, groups=3, warm_start=False, **options)


@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_groups_on_a_gpu_that_are_killed_cost_no_step(tmp_path, data_dir, reduction):
    alone = start(tmp_path / "alone", data_dir, reduction=reduction)
    alone.check()
    holds = [Breakpoint(1, 2, "backward"), Breakpoint(2, 5, "reduce", 1)]
    run = start(tmp_path / "run", data_dir, holds, reduction=reduction)
    run.strike_in_step(*holds)
    run.check(alone)
    assert len(run.events("fault")) == 2
    if reduction == "exact":
        assert support.outcome(run) == support.outcome(alone)


def test_a_group_on_a_gpu_comes_back_and_changes_no_bit(tmp_path, data_dir):
    steps = 30
    alone = start(tmp_path / "alone", data_dir, steps=steps, reduction="exact")
    alone.check()
    hold = Breakpoint(1, 2, "backward")
    run = start(tmp_path / "run", data_dir, [hold], steps=steps, reduction="exact", rejoin={"enabled": True})
    run.strike_in_step(hold)
    run.check()
    assert support.outcome(run) == support.outcome(alone)


def test_a_group_on_a_gpu_that_computes_wrongly_is_found(tmp_path, data_dir):
    verify = {"microbatches_per_step": 12}
    run = start(tmp_path / "run", data_dir, reduction="exact", verify=verify)
    run.check()
    assert [line["why"] for line in run.events("discarded")] == ["grid"], "a healthy device gives the same bits again"
