"""Models that ranks hold parts of, and that cannot be trained: real ranks, which print the error."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from megatron_ft.errors import EngineError
from megatron_ft.run.engines import dtensors
from megatron_ft.run.engines.fsdp import FsdpEngine
from megatron_ft.run.engines.layout import Layout
from tests import support

pytestmark = pytest.mark.slow  # two processes import FSDP, whichever case is asked for
CASES = {
    "slices differ": (
        {"slices": 2},
        "0.weight has other values at rank 1 of the group than at rank 0",
        "call torch.manual_seed with the same number at all slices of a stage",
    ),
    "meta": (
        {"shards": 2},
        "parameter 0.weight is on meta, and its mesh is of cpu",
        "give a model that was built on the meta device its values",
    ),
    "sums over the shards": (
        {"shards": 2},
        "by 1, and not by inner_shards 2: its gradients are 2 times as large",
        "Leave set_gradient_divide_factor out",
    ),
    "a part not sharded": ({"shards": 2}, "parameter 0.weight is not sharded", "fully_shard(model"),
}


def build(case: str, rank: int) -> str:
    layout = Layout.of(rank, **CASES[case][0])
    mesh = init_device_mesh("cpu", (layout.shards, layout.slices), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(rank)
    with torch.device("meta" if case == "meta" else "cpu"):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(16, 8))
    if case == "slices differ":
        parallelize_module(model, mesh["tp"], {"1": ColwiseParallel(), "2": RowwiseParallel()})
    else:
        fully_shard(model[1] if case == "a part not sharded" else model, mesh=mesh["dp"])
    engine = FsdpEngine(model, torch.optim.SGD(model.parameters()), None, layout=layout, mesh=mesh["dp"])
    model.set_gradient_divide_factor(1.0)  # as torchtitan does after the model is made
    engine.begin_step()
    return ""


@pytest.fixture(scope="module")
def told() -> dict[str, str]:
    """What rank 1 is told of each case, and says of :func:`taken`."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    words = [sys.executable, "-m", "tests.unit.test_dtensors", str(store.port)]
    ranks = [
        subprocess.Popen([*words, str(rank)], cwd=support.ROOT, stdout=subprocess.PIPE, text=True) for rank in range(2)
    ]
    said = [rank.communicate(timeout=support.TIMEOUT_S)[0] for rank in ranks]
    return dict(json.loads(line) for line in said[1].splitlines() if line.startswith('["'))  # gloo prints, too


@pytest.mark.parametrize("case", CASES)
def test_a_model_that_cannot_be_kept_equal_is_refused(told, case):
    _, *expected = CASES[case]
    assert all(part in told[case] for part in expected), told


class Fused(nn.Linear):
    """Its state dict has the two halves of the weight, as copies. It counts, too, beside its tensors."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.count = 0
        self.register_state_dict_post_hook(self._divide)

    @staticmethod
    def _divide(module, state, prefix, _) -> None:
        state[f"{prefix}one"], state[f"{prefix}two"] = (part.clone() for part in state.pop(f"{prefix}weight").chunk(2))

    def get_extra_state(self):
        return self.count

    def set_extra_state(self, state):
        self.count = state


def taken(rank: int) -> str:
    """Return which tensors differ after a model with hooks and a wrapper has taken the state of one without the latter."""
    layout = Layout.of(rank, shards=2)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))

    def made(seed: int, wrapped: bool) -> FsdpEngine:
        torch.manual_seed(seed)
        model = nn.Sequential(checkpoint_wrapper(Fused()) if wrapped else Fused(), nn.Linear(8, 2))
        fully_shard(model, mesh=mesh["dp"])
        return FsdpEngine(model, torch.optim.SGD(model.parameters()), None, layout=layout, mesh=mesh["dp"])

    one, other = made(1, wrapped=False), made(2, wrapped=True)
    one.model[0].count = 5
    other.load_state(one.state())
    pairs = zip(one.state_tensors(), other.state_tensors(), strict=True)
    differ = [name for (name, mine), (_, theirs) in pairs if not torch.equal(mine, theirs)]
    try:
        made(1, wrapped=False).load_state({**one.state(), "model": {"2.weight": torch.zeros(1)}})
    except EngineError as error:
        return f"{differ} {other.model[0].count} {error}"
    return "anything is taken"


def test_what_is_saved_is_copied_without_gradients():
    """A copy of a parameter would need one, and has no bytes to be sent (``Tensor.numpy``)."""
    assert not any(one.requires_grad for one in dtensors._saved(nn.Linear(2, 2)).values())


def test_a_state_is_taken_as_it_is_whatever_hooks_and_wrappers_do(told):
    assert told["taken"].startswith("[] 5 ") and "the model has 0.bias, and the state has not" in told["taken"], told


def refused(case: str, port: int, rank: int) -> str:
    """Return the error of the case, or what it says, after all ranks have met. Each case has a process group of its own."""
    store = dist.PrefixStore(case, dist.TCPStore("127.0.0.1", port, is_master=False))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    try:
        return taken(rank) if case == "taken" else build(case, rank)
    except EngineError as error:
        return str(error)
    finally:
        dist.barrier()


if __name__ == "__main__":
    own_port, number = map(int, sys.argv[1:])
    torch.set_num_threads(1)
    for name in (*CASES, "taken"):
        if (child := os.fork()) == 0:
            print(json.dumps([name, refused(name, own_port, number)]), flush=True)
            os._exit(0)
        os.waitpid(child, 0)
