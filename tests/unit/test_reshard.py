"""A state that ranks hold parts of is the same when it was put together and divided anew."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.checkpoint import reshard
from megatron_ft.engines.port import PARTS
from megatron_ft.errors import CheckpointError


def divided(whole: dict[str, torch.Tensor], ranks: int) -> list[dict]:
    """Divide a state along the first axis, as FSDP does; "scale" is the same at every rank."""
    states = []
    for rank in range(ranks):
        state: dict = {"model": {"scale": torch.tensor(2.0)}, "optimizer": {"state": {}, "param_groups": [{"lr": 0.1}]}}
        state[PARTS] = {"model": {}, "optimizer": {}}
        for number, (name, tensor) in enumerate(whole.items()):
            chunk = -(-len(tensor) // ranks)
            begin, end = min(rank * chunk, len(tensor)), min((rank + 1) * chunk, len(tensor))
            part = tensor[begin:end].clone()
            box = [list(tensor.shape), [begin] + [0] * (tensor.dim() - 1), list(part.shape)]
            state["model"][name], state[PARTS]["model"][name] = part, box
            state["optimizer"]["state"][number] = {"exp_avg": part * 2, "step": torch.tensor(7.0)}
            state[PARTS]["optimizer"][number] = box
        states.append(state)
    return states


@given(rows=st.lists(st.integers(1, 9), min_size=1, max_size=4), before=st.integers(1, 5), after=st.integers(1, 5))
def test_parts_of_any_number_become_parts_of_any_other(rows, before, after):
    whole = {f"weight {at}": torch.randn(count, 3) for at, count in enumerate(rows)}
    joined = reshard.whole(divided(whole, before), "a checkpoint")
    for expected in divided(whole, after):
        found = reshard.cut(joined, expected[PARTS])
        assert all(torch.equal(found["model"][name], one) for name, one in expected["model"].items())
        for number, values in expected["optimizer"]["state"].items():
            assert all(torch.equal(found["optimizer"]["state"][number][key], one) for key, one in values.items())


def test_a_state_that_says_nothing_of_parts_is_refused():
    with pytest.raises(CheckpointError, match="cannot be divided anew"):
        reshard.whole([{"model": {}}], "a checkpoint")
