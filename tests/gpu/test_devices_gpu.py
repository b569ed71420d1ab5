"""Copies and transfers on a real device, in one process with threads as members."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from megatron_ft.errors import EngineError
from megatron_ft.run import checkpoint
from megatron_ft.run.collectives import base, device_copies, state_transfer
from megatron_ft.run.collectives.device_copies import fill, own_device, to_host
from megatron_ft.run.collectives.gloo_communicator import GlooCommunicator
from megatron_ft.run.rejoin import state_sender

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="needs a CUDA device; tests/unit has the same with a device that is played",
    ),
]

SPIN = 2_000_000_000
"""Cycles of a kernel that runs for about a second."""


def build(members: int) -> list[GlooCommunicator]:
    store = dist.HashStore()
    with ThreadPoolExecutor(members) as pool:
        return list(pool.map(lambda me: GlooCommunicator(store, me, range(members), 0, 60.0), range(members)))


def close(outers: list[GlooCommunicator]) -> None:
    torch.cuda.synchronize()
    for outer in outers:
        outer.close()
    base.sweep()
    assert not base.stuck()


def test_the_own_device_is_that_of_the_local_rank(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", str(torch.cuda.device_count()))
    assert own_device() == torch.device("cuda:0")


def test_large_tensors_are_copied_behind_what_computes_them():
    values = torch.zeros(100_000_000, device="cuda")  # 400 MB
    torch.cuda._sleep(SPIN)
    values += 1
    (copy,) = to_host([values])
    assert copy.min() == copy.max() == 1 and not copy.is_pinned()
    back = torch.empty_like(values)
    fill([back], [copy])
    assert torch.equal(back, values)


def test_a_state_arrives_on_the_device_and_the_optimizers_step_on_the_cpu():
    model = torch.nn.Linear(3000, 3000, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3000, device="cuda")).sum().backward()
    optimizer.step()
    outers = build(2)
    sent = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    sender = threading.Thread(target=state_transfer.send_state, args=(outers[0], sent, 1))
    sender.start()
    received = state_transfer.receive_state(outers[1], 0)
    sender.join(60)
    assert received["model"]["weight"].device == own_device() and torch.equal(received["model"]["weight"], model.weight)
    moments = received["optimizer"]["state"][0]
    assert moments["exp_avg"].is_cuda and not moments["step"].is_cuda
    assert torch.equal(moments["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])
    close(outers)


def test_a_checkpoint_and_a_follower_get_what_the_device_has_at_the_boundary(tmp_path):
    values = torch.zeros(5_000_000, device="cuda")
    torch.cuda._sleep(SPIN)
    values += 1
    parcel = state_sender._Parcel({}, [device_copies.as_bytes(values)], 1.0, True)
    taken = checkpoint.snapshot({"values": values}, 0, 1)
    pieces = parcel.pieces()
    got = [next(pieces).clone()]
    parcel.settle()
    values.zero_()
    got += [piece.clone() for piece in pieces]
    assert torch.cat(got).view(torch.float32).unique().tolist() == [1.0]
    assert taken.tensors["values"].unique().tolist() == [1.0]


def test_a_reduction_within_a_capture_is_refused():
    tensor = torch.ones(4, device="cuda")
    device_copies.refuse_capture(tensor)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        tensor.add_(1)
        with pytest.raises(EngineError, match="while a CUDA graph is captured"):
            device_copies.refuse_capture(tensor)


def test_a_thread_of_its_own_makes_no_context_on_device_0(monkeypatch):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices: a context that should not be there is on another one")
    monkeypatch.setenv("LOCAL_RANK", "1")
    code = (
        "import torch\n"
        "from megatron_ft.run.collectives import device_copies\n"
        "import threading\n"
        "values = torch.ones(1000, device=device_copies.own_device())\n"
        "thread = threading.Thread(target=device_copies.to_host, args=([values],))\n"
        "thread.start(); thread.join()\n"
        "assert not torch._C._cuda_hasPrimaryContext(0)\n"
    )
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, "-c", code], env=dict(os.environ), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
