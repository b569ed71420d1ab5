"""Engines on a GPU, with one rank in each group: all groups share one device, on which NCCL allows one rank."""

from __future__ import annotations

import pytest
import torch

from megatron_ft.run.injection_points import Breakpoint
from tests import engine_kills, support

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; tests/integration runs on the CPU"),
]

DETERMINISTIC = """
import os
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
import torch
torch.use_deterministic_algorithms(True)
"""
COMPILED = """
from megatron_ft.run.session import Session
wrap = Session.wrap
def compiled(self, model, *rest, **options):
    for block in model.blocks:
        block.compile()
    return wrap(self, model, *rest, **options)
Session.wrap = compiled
"""
ENGINES = {
    "FSDP2": (engine_kills.fsdp, "pretrain_gpt_fsdp", ("--layers", 2)),
    "FSDP2, bf16": (engine_kills.fsdp, "pretrain_gpt_fsdp", ("--layers", 2, "--bf16")),
    "FSDP2, compiled": (engine_kills.fsdp, "pretrain_gpt_fsdp", ("--layers", 2)),
    "torch-native": (engine_kills.native, "pretrain_gpt_native3d", ("--layers", 2)),
    "Megatron": (engine_kills.megatron, "pretrain_gpt_megatron", ("--bf16",)),
    "Megatron, experts": (engine_kills.megatron, "pretrain_gpt_megatron", engine_kills.EXPERTS),
}


@pytest.mark.parametrize("name", ENGINES)
def test_a_group_that_is_killed_changes_no_bit(tmp_path, data_dir, name):
    if name.startswith("Megatron"):
        pytest.importorskip("megatron.core")
    start, example, own = ENGINES[name]
    change = DETERMINISTIC + COMPILED * name.endswith("compiled")
    script = support.changed_script(tmp_path / "train.py", change, engine_kills.EXAMPLES / example / "train.py")
    options = {"script": script, "groups": 3, "own": own, "reduction": "exact", "warm_start": False, "extra": ()}
    alone = start(tmp_path / "alone", data_dir, **options)
    alone.check()
    hold = Breakpoint(1, 2, "backward")
    run = start(tmp_path / "run", data_dir, [hold], **options)
    run.strike(hold)
    run.check(alone)
    assert support.outcome(run) == support.outcome(alone)
