"""The choice of optimizer and norm: apex's only with its CUDA extensions and a GPU, else torch's."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from megatron_ft.run.engines import fused


class FusedAdam(torch.optim.Adam):
    def __init__(self, parameters, adam_w_mode, **options) -> None:
        assert adam_w_mode
        super().__init__(parameters, **options)


@pytest.fixture
def apex(monkeypatch):
    """Install modules with the names of NVIDIA's apex, and a GPU."""
    made = {name: ModuleType(name) for name in ("amp_C", "apex", "apex.optimizers", "apex.normalization")}
    made["apex.optimizers"].FusedAdam = FusedAdam
    made["apex.normalization"].FusedLayerNorm = type("FusedLayerNorm", (torch.nn.LayerNorm,), {})
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return made


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.linspace(-1, 1, 6))]


def test_without_apex_torchs_fused_one_computes_the_same(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert fused.which() == {"AdamW": "torch's, fused", "LayerNorm": "torch's", "RMSNorm": "torch's"}
    ours, plain = parameters(), parameters()
    optimizers = fused.adamw(ours, lr=0.1, weight_decay=0.1), torch.optim.AdamW(plain, lr=0.1, weight_decay=0.1)
    assert optimizers[0].param_groups[0]["fused"]
    for weights, optimizer in zip((ours, plain), optimizers, strict=True):
        for _ in range(3):
            weights[0].grad = weights[0].detach() ** 2
            optimizer.step()
    torch.testing.assert_close(ours[0], plain[0])


def test_apex_is_used_where_it_works(apex):
    assert fused.which() == {"AdamW": "apex's FusedAdam", "LayerNorm": "apex's FusedLayerNorm", "RMSNorm": "torch's"}
    assert isinstance(fused.adamw(parameters(), lr=0.1), FusedAdam)
    assert fused.layer_norm().__name__ == "FusedLayerNorm"
    assert fused.rms_norm() is torch.nn.RMSNorm


def test_the_other_apex_of_pypi_is_not_used(apex, monkeypatch):
    monkeypatch.setitem(sys.modules, "amp_C", None)
    assert fused.which()["AdamW"] == "torch's, fused"
