"""A state that ranks hold parts of is the same when it was put together and divided anew."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.config import schema
from megatron_ft.core.lifecycle.checkpoint_policy import Found
from megatron_ft.errors import CheckpointError, ConfigError
from megatron_ft.run import checkpoint
from megatron_ft.run.checkpoint import reshard, restore
from megatron_ft.run.engines.port import PARTITIONS, PARTS, STAGED


def divided(whole: dict[str, torch.Tensor], ranks: int) -> list[dict]:
    """Divide a state along the first axis, as FSDP does; "scale" is the same at every rank."""
    states = []
    for rank in range(ranks):
        state: dict = {
            "model": {"scale": torch.tensor(2.0)},
            "optimizer": {"state": {}, "param_groups": [{"lr": 0.1, "params": [0]}]},
        }
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
    joined = reshard.whole([divided(whole, before)], "a checkpoint")
    for expected in divided(whole, after):
        found = reshard.cut(joined, expected, "a checkpoint")
        assert all(torch.equal(found["model"][name], one) for name, one in expected["model"].items())
        for number, values in expected["optimizer"]["state"].items():
            assert all(torch.equal(found["optimizer"]["state"][number][key], one) for key, one in values.items())


def test_a_state_that_says_nothing_of_parts_is_refused():
    with pytest.raises(CheckpointError, match="cannot be divided anew"):
        reshard.whole([[{"model": {}}]], "a checkpoint")


def test_stages_whose_names_are_not_those_of_the_whole_model_are_refused():
    """A stage that names its layers from 0 on has other tensors of the same names as the stage before it."""
    stages = [[divided({"w": torch.full((4, 3), number)}, 1)[0] | {STAGED: True}] for number in (0.0, 1.0)]
    for (state,) in stages:
        state["model"] = {f"0.{name}": tensor for name, tensor in state["model"].items()}
        state[PARTS]["model"] = {f"0.{name}": box for name, box in state[PARTS]["model"].items()}
    with pytest.raises(CheckpointError, match="a checkpoint was saved by an engine whose state cannot be divided anew"):
        reshard.whole(stages, "a checkpoint")
    for (state,) in stages:
        state[PARTS]["names"] = ["w"]
    with pytest.raises(
        CheckpointError, match="different values of w in two stages.*parameter names of the whole model"
    ):
        reshard.whole(stages, "a checkpoint")


def test_each_stage_brings_its_buffers_into_the_whole_model_and_gets_them_from_there():
    stages = []
    for number in range(2):
        (state,) = divided({f"w{number}": torch.ones(4, 3)}, 1)
        for part in (state, state[PARTS]):
            part["model"] = {f"{number}.{name}": value for name, value in part["model"].items()}
        state[PARTS]["names"] = [f"w{number}"]
        stages.append([state | {STAGED: True, "buffers": {f"{number}.table{number}": torch.tensor([1.0, number])}}])
    joined = reshard.whole(stages, "a checkpoint")
    assert list(joined["buffers"]) == ["table0", "table1"]
    for (own,) in stages:
        found = reshard.cut(joined, own, "a checkpoint")["buffers"]
        assert found.keys() == own["buffers"].keys()
        assert all(torch.equal(found[name], value) for name, value in own["buffers"].items())


def test_an_optimizer_with_other_groups_of_parameters_is_refused():
    (state,) = divided({"w": torch.ones(4, 3)}, 1)
    other = {**state, "optimizer": {**state["optimizer"], "param_groups": [{"lr": 0.1}, {"lr": 0.2}]}}
    with pytest.raises(CheckpointError, match="has 1 groups of parameters in its optimizer, and here are 2"):
        reshard.cut(reshard.whole([[state]], "a checkpoint"), other, "a checkpoint")


def saved(directory, layout: list[int], **keys: object) -> Found:
    """Write a checkpoint of ranks whose state has these keys."""
    ranks, receipts = layout[0] * layout[1] * layout[2], []
    for position in range(ranks):
        part = checkpoint.snapshot({"model": {"w": torch.ones(2)}, **keys}, 0, 1)
        receipts.append(checkpoint.write_part(directory, 4, "a", position, part))
    options = {"run_id": "run", "groups": 1, "ranks_per_group": ranks, "meta": {"layout": layout}}
    checkpoint.complete(directory, 4, "a", receipts, **options)
    return checkpoint.find(directory)[0]


BOXES, PIPELINE = {PARTS: {}}, {PARTS: {}, STAGED: True}


@pytest.mark.parametrize(
    ("layout", "keys", "now", "fits"),
    [
        ([1, 2, 1], BOXES, {"shards": 4}, True),
        ([1, 2, 1], {PARTITIONS: {}}, {"shards": 4}, True),
        ([1, 2, 1], {}, {"shards": 4}, False),  # Megatron
        ([2, 1, 1], PIPELINE, {"stages": 4}, True),
        ([2, 1, 1], PIPELINE, {"stages": 1}, False),  # another engine
        ([2, 1, 1], {}, {"stages": 4}, False),  # DeepSpeed's
        ([2, 1, 1], {}, {"shards": 2}, False),
        ([2, 1, 1], {}, {"stages": 2}, True),  # as it was
    ],
)
def test_the_launcher_knows_what_can_be_divided_anew(tmp_path, layout, keys, now, fits):
    sizes = {"pipeline": {"stages": now.get("stages", 1)}, "fault_tolerance": {"inner_shards": now.get("shards", 1)}}
    config = schema.resolve({"train_micro_batch_size_per_gpu": 4, **sizes}, groups=1)
    found = saved(tmp_path, layout, **keys)
    with contextlib.nullcontext() if fits else pytest.raises(ConfigError, match="its engine cannot divide it anew"):
        restore.check_division(config, found)


def test_the_grid_of_exact_reduction_stays_behind_when_a_state_is_divided_anew(monkeypatch):
    """Its exponents are those of the parts that a rank had."""
    whole = {"w": torch.randn(4, 3)}
    states = [{**state, "grid": [1, 2]} for state in divided(whole, 2)]
    monkeypatch.setattr(checkpoint, "load", lambda found, position, copies: states[position])
    found = Found("a checkpoint", 4, True, manifest={"meta": {"layout": [1, 2, 1]}})
    state = restore._divided_anew(found, SimpleNamespace(state=lambda: divided(whole, 1)[0]), lambda *_: None)
    assert torch.equal(state["model"]["w"], whole["w"]) and "grid" not in state
