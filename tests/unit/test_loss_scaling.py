"""Torch's ``GradScaler`` is refused where it would scale a loss, whoever calls it."""

from __future__ import annotations

import pytest
import torch
from torch.amp import GradScaler

from megatron_ft.errors import EngineError
from megatron_ft.run.engines import loss_scaling


def test_a_scaler_that_is_enabled_is_refused_with_the_remedy(monkeypatch):
    present = type("Present", (GradScaler,), {"scale": lambda self, outputs: outputs})  # as FSDP1's ShardedGradScaler
    monkeypatch.setattr(GradScaler, "scale", GradScaler.scale)
    monkeypatch.setattr(GradScaler, "__init_subclass__", GradScaler.__init_subclass__)
    for _ in range(2):  # every engine asks for it
        loss_scaling.refuse()
    loss = torch.ones((), requires_grad=True) * 2
    later = type("Later", (GradScaler,), {"scale": lambda self, outputs: outputs})
    for kind in (GradScaler, type("OfALibrary", (GradScaler,), {}), present, later):
        with pytest.raises(EngineError, match="GradScaler scales a loss.*Leave it out.*bf16"):
            kind("cpu").scale(loss)
        assert kind("cpu", enabled=False).scale(loss) is loss
