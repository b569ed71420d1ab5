"""Runs whose groups train on GPUs, with every communicator that can join them there.

Groups share devices where there are fewer than three. ``reduction`` "exact" needs the same bits from every run; "fast" the
same losses.
"""

from __future__ import annotations

import pytest
import torch

from megatron_ft.cluster.qualify import device_seats
from megatron_ft.run.collectives.communicator_choice import GLOO, NCCL
from megatron_ft.run.collectives.nccl_communicator import MULTI_RANK_NCCL
from megatron_ft.run.injection_points import Breakpoint
from tests import support

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; tests/integration runs on the CPU"),
]

GROUPS = 3
ON_DEVICE = """
import os
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
import torch
from megatron_ft.run.session import Session
torch.use_deterministic_algorithms(True)
wrap = Session.wrap
def on_device(self, model, optimizer, loss_fn, scheduler):
    device = f"cuda:{int(os.environ['LOCAL_RANK']) % torch.cuda.device_count()}"
    model.to(device)  # in place: the optimizer holds the same parameters
    moved = lambda model, batch: loss_fn(model, {name: one.to(device) for name, one in batch.items()})
    return wrap(self, model, optimizer, moved, scheduler)
Session.wrap = on_device
"""


@pytest.fixture(params=[GLOO, NCCL])
def communicator(request, monkeypatch) -> str:
    if request.param == NCCL and torch.cuda.device_count() < GROUPS:
        if torch.cuda.nccl.version() < MULTI_RANK_NCCL:
            pytest.skip(f"{GROUPS} groups of NCCL need as many GPUs, or NCCL {'.'.join(map(str, MULTI_RANK_NCCL))}")
        for name, value in device_seats.MULTI_RANK.items():
            monkeypatch.setenv(name, value)
    return request.param


def start(directory, data_dir, holds=(), **options) -> support.Run:
    script = support.changed_script(directory.with_suffix(".py"), ON_DEVICE)
    return support.start(directory, data_dir, holds, script=script, groups=GROUPS, warm_start=False, **options)


@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_groups_on_a_gpu_that_are_killed_cost_no_step(tmp_path, data_dir, reduction, communicator):
    alone = start(tmp_path / "alone", data_dir, reduction=reduction)
    alone.check()
    holds = [Breakpoint(1, 2, "backward"), Breakpoint(2, 5, "reduce", 1)]
    run = start(tmp_path / "run", data_dir, holds, reduction=reduction, communicator=communicator)
    run.strike_in_step(*holds)
    run.check(alone)
    assert len(run.events("fault")) == 2
    if reduction == "exact":
        assert support.outcome(run) == support.outcome(alone)


def test_a_group_on_a_gpu_comes_back_and_changes_no_bit(tmp_path, data_dir, communicator):
    steps = 30
    alone = start(tmp_path / "alone", data_dir, steps=steps, reduction="exact")
    alone.check()
    hold = Breakpoint(1, 2, "backward")
    own = {"steps": steps, "reduction": "exact", "rejoin": {"enabled": True}, "communicator": communicator}
    run = start(tmp_path / "run", data_dir, [hold], **own)
    run.strike_in_step(hold)
    run.check()
    assert support.outcome(run) == support.outcome(alone)


def test_a_group_on_a_gpu_that_computes_wrongly_is_found(tmp_path, data_dir):
    verify = {"microbatches_per_step": 12}
    run = start(tmp_path / "run", data_dir, reduction="exact", verify=verify)
    run.check()
    assert [line["why"] for line in run.events("discarded")] == ["grid"], "a healthy device gives the same bits again"
