"""Transfers and checkpoints of tensors on a device whose copies are late: values arrive, on the receiver's own device."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.errors import EngineError
from megatron_ft.run import checkpoint
from megatron_ft.run.collectives import bucket_allreduce, device_copies, state_transfer
from megatron_ft.run.collectives.device_copies import fill, own_device, to_host
from megatron_ft.run.rejoin import state_receiver, state_sender
from tests.fakes.device import FakeDevice
from tests.unit.test_gloo_communicator import build


@pytest.fixture
def device(monkeypatch) -> FakeDevice:
    monkeypatch.setattr(device_copies, "PIECE", 64)
    return FakeDevice(seed=1, pace=0.3).install(monkeypatch)


def optimizer_state(device: FakeDevice) -> dict:
    moments = {name: device.put(torch.arange(50.0) + at) for at, name in enumerate(("exp_avg", "exp_avg_sq"))}
    return {"state": {0: {"step": torch.tensor(7.0), **moments}}, "half": device.put(torch.ones(3, 5).bfloat16())}


def same(received: dict, sent: dict) -> None:
    for name in ("step", "exp_avg", "exp_avg_sq"):
        assert torch.equal(received["state"][0][name], sent["state"][0][name])
    assert torch.equal(received["half"], sent["half"])


def test_a_state_arrives_on_the_kind_of_device_that_it_came_from(device):
    sent = {**optimizer_state(device), "empty": torch.empty(0)}
    source, target = build(2)
    sender = threading.Thread(target=state_transfer.send_state, args=(source, sent, 1))
    sender.start()
    received = state_transfer.receive_state(target, 0)
    sender.join(60)
    same(received, sent)
    assert device.holds(received["half"]) and device.holds(received["state"][0]["exp_avg"])
    assert not device.holds(received["state"][0]["step"]), "a tensor of the optimizer that was on the CPU stays there"
    for outer in (source, target):
        outer.close()


def test_the_number_of_a_device_is_no_part_of_what_is_sent(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_RANK", "6")
    assert own_device("cuda") == torch.device("cuda:2") and own_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(EngineError, match="this rank has none"):
        own_device("cuda")
    monkeypatch.setattr(device_copies, "kind_of", lambda tensor: torch.device("cuda:3").type)
    skeleton, _ = state_transfer.flatten(torch.ones(2))
    assert skeleton == {"tensor": ["float32", [2], "cuda"]}


@given(st.lists(st.tuples(st.integers(0, 90), st.booleans(), st.booleans()), max_size=8), st.integers(0, 99))
def test_copies_hold_the_values_wherever_source_and_target_are(tensors, seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_copies, "PIECE", 64)
        device = FakeDevice(seed, pace=0.3).install(patch)
        sources = [torch.arange(size, dtype=torch.int64) for size, _, _ in tensors]
        targets = [torch.zeros_like(one) for one in sources]
        for (size, first, second), source, target in zip(tensors, sources, targets, strict=True):
            if size and first:
                device.put(source)
            if size and second:
                device.put(target)
        fill(targets, sources)
        copies = to_host(sources)
        for source, target, copy in zip(sources, targets, copies, strict=True):
            assert torch.equal(source, target) and torch.equal(source, copy)
            assert not copy.numel() or not device.holds(copy)


def test_a_device_that_is_stuck_ends_a_copy_with_an_error(monkeypatch):
    monkeypatch.setattr(device_copies, "PATIENCE_S", 0.05)
    device = FakeDevice(stuck_after=0).install(monkeypatch)
    with pytest.raises(RuntimeError, match="has not ended within"):
        to_host([device.put(torch.ones(3))])


def test_a_checkpoint_takes_the_values_that_a_device_has_at_the_boundary(device, tmp_path):
    state = optimizer_state(device)
    computed = device.compute()
    threading.Timer(0.05, setattr, (computed, "done", True)).start()
    taken = checkpoint.snapshot(state, 0, 1)
    assert computed.done
    receipt = checkpoint.write_part(tmp_path, 3, "a", 0, taken)
    checkpoint.complete(tmp_path, 3, "a", [receipt], run_id="r", groups=1, ranks_per_group=1)
    state["half"].zero_()
    found = checkpoint.find(tmp_path)[0]
    state["half"].fill_(1.0)
    same(checkpoint.load(found, 0), state)


@pytest.mark.parametrize("sent_before", [0, 2])
def test_a_follower_gets_the_values_from_before_the_update(device, monkeypatch, sent_before):
    monkeypatch.setattr(state_sender, "_PIECE", 128)
    values = device.put(torch.arange(300, dtype=torch.int64))
    parcel = state_sender._Parcel({}, [device_copies.as_bytes(values)], 1.0, True)
    pieces, got = parcel.pieces(), []
    for _ in range(sent_before):
        got.append(next(pieces).clone())
    parcel.settle()
    values.zero_()  # the optimizer
    got += [piece.clone() for piece in pieces]
    assert torch.equal(torch.cat(got).view(torch.int64), torch.arange(300))


def test_what_a_follower_received_is_put_on_its_own_device(device):
    state = optimizer_state(device)
    skeleton, tensors = state_transfer.flatten(state)
    taken = state_receiver._room_for(skeleton)
    fill(taken, tensors)
    filled = state_receiver._filled(skeleton, taken)
    same(filled, state)
    assert device.holds(filled["half"]) and not device.holds(filled["state"][0]["step"])


def test_a_reduction_within_the_capture_of_a_cuda_graph_is_refused(device, monkeypatch):
    local = device.put(torch.ones(4))
    reduction = bucket_allreduce.Reduction(SimpleNamespace(local=lambda bucket: local), None)
    monkeypatch.setattr(device_copies, "_is_capturing", lambda: True)
    with pytest.raises(EngineError, match="while a CUDA graph is captured"):
        reduction.reduce(SimpleNamespace(members=(0, 1), confirms=False), 0, [0], lambda bucket: None)
