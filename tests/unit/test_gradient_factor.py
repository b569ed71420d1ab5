"""The factor between a gradient and that of the loss, from losses alone."""

from __future__ import annotations

from math import inf, nan

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.core.detection import gradient_factor
from megatron_ft.errors import EngineError
from megatron_ft.run.engines.torch_native import TorchNativeEngine
from megatron_ft.types import Microbatch


@given(st.floats(0.1, 1e3), st.floats(1e-2, 1e4), st.floats(-0.3, 0.3))
def test_a_smooth_loss_tells_the_factor(loss, factor, curvature):
    change = 0.01 * loss
    moved = change / factor
    if moved > 2e-5 * loss:
        bend = curvature * moved
        found = gradient_factor.factor(loss, loss + moved + bend, loss - moved + bend, change)
        assert (
            found is None if abs(curvature) > 0.2001 else found == pytest.approx(factor, rel=1e-3) or curvature > 0.1999
        )


@pytest.mark.parametrize(
    ("ahead", "back"), [(1.0, 1.0), (0.99, 1.01), (1.01, 0.97), (inf, 0.99), (nan, 0.99), (1.01, 1.02)]
)
def test_what_is_not_smooth_tells_nothing(ahead, back):
    """A piecewise constant loss, one that falls along its gradient, an overflow, noise."""
    assert gradient_factor.factor(1.0, ahead, back, 0.01) is None


@pytest.mark.parametrize(
    ("factor", "cause"),
    [
        (2.05, "inner_shards = 2"),
        (0.49, "1 / inner_shards = 0.5"),
        (5.9, "microbatches = 6"),
        (1020.0, "a loss scale of 1024"),
        (66000.0, "a loss scale of 65536"),
        *((nothing, "") for nothing in (1.0, 1.4, 0.7, 3.1, 0.4, 16.0, 5000.0)),
    ],
)
def test_only_a_factor_that_is_the_size_of_something_has_a_cause(factor, cause):
    assert gradient_factor.cause(factor, {"inner_shards": 2, "microbatches": 6, "groups": 1}) == cause


def test_a_loss_function_may_take_entries_out_of_its_batch():
    model = torch.nn.Linear(4, 1)

    def loss(model, batch):
        return (model(batch.pop("inputs")) - batch.pop("labels")).square().mean()

    engine = TorchNativeEngine(model, torch.optim.SGD(model.parameters(), lr=0.1), loss)
    engine.begin_step()
    batch = {"inputs": torch.ones(3, 4), "labels": torch.full((3, 1), 5.0)}
    engine.compute(Microbatch(0, 0, 0), batch, 0, lambda point: None)
    engine.collect()
    engine.check_gradient({"groups": 2})
    engine.local(0)[: -engine.tail(0)].mul_(2)
    with pytest.raises(EngineError, match="2 times as large"):
        engine.check_gradient({"groups": 2})
