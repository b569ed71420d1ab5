"""The contract of communicators, kept by the staged one over a device and a network that are late, stuck or failing."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.collectives import base, device_copies, staged_communicator
from megatron_ft.collectives.base import Broken, Communicator, Left, Work
from megatron_ft.collectives.device_copies import PinnedPool
from megatron_ft.collectives.gloo_communicator import GlooCommunicator
from megatron_ft.collectives.staged_communicator import StagedCommunicator
from tests.fakes.device import FakeDevice
from tests.fakes.network import Member, Network

SIZES = st.lists(st.integers(1, 200), min_size=1, max_size=6)


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    monkeypatch.setattr(device_copies, "PIECE", 256)
    monkeypatch.setattr(base, "GRACE_S", 0.02)


def build(network: Network, devices: list[FakeDevice]) -> list[StagedCommunicator]:
    return [StagedCommunicator(Member(network, me), device.port_of) for me, device in enumerate(devices)]


def close(communicators: list[Communicator], devices: list[FakeDevice]) -> None:
    for communicator in communicators:
        communicator.abort()
    for device in devices:
        device.complete_all()
    for communicator in communicators:
        communicator.close()


def wait_all(works: list[Work]) -> None:
    for work in works:
        work.wait()


@settings(max_examples=40)
@given(SIZES, st.integers(0, 999), st.sampled_from([1.0, 0.3, 0.05]), st.lists(st.booleans(), min_size=6, max_size=6))
def test_sums_of_many_tensors_are_right_wherever_each_is_and_however_late_copies_are(sizes, seed, pace, on_device):
    devices = [FakeDevice(seed + me, pace) for me in range(3)]
    outers = build(Network(range(3), seed, pace), devices)
    tensors = []
    for me, device in enumerate(devices):
        own = [torch.arange(size, dtype=torch.float32) + me for size in sizes]
        tensors.append([device.put(one) if there else one for one, there in zip(own, on_device, strict=False)])
    works = [[outer.all_reduce(one) for one in own] for outer, own in zip(outers, tensors, strict=True)]
    for each in works:
        wait_all(each)
    for own in tensors:
        for one in own:
            assert torch.equal(one, torch.arange(len(one)) * 3.0 + 3)
    assert all(work.settled() for each in works for work in each)
    close(outers, devices)


@settings(max_examples=40)
@given(SIZES, st.integers(0, 999), st.sampled_from([1.0, 0.1]), st.booleans())
def test_broadcasts_and_messages_arrive_whole_from_a_device_to_the_host_and_back(sizes, seed, pace, first_on_device):
    devices = [FakeDevice(seed + me, pace) for me in range(2)]
    outers = build(Network(range(2), seed, pace), devices)
    sent = [torch.arange(size, dtype=torch.int32) for size in sizes]
    room = [torch.zeros_like(one) for one in sent]
    shown = [torch.zeros_like(one) for one in sent]
    for one in sent if first_on_device else [*room, *shown]:
        devices[0 if first_on_device else 1].put(one)
    works = [outers[0].send(one, 1, 7 + at % 2) for at, one in enumerate(sent)]
    works += [outers[0].broadcast(one, 0) for one in sent]
    works += [outers[1].broadcast(one, 0) for one in shown]
    works += [outers[1].receive(one, 0, 7 + at % 2) for at, one in enumerate(room)]
    wait_all(works)
    for one, other, third in zip(sent, room, shown, strict=True):
        assert torch.equal(one, other) and torch.equal(one, third)
    close(outers, devices)


def test_messages_that_no_peer_takes_keep_no_other_operation_from_running():
    """Each is larger than what may be under way of one operation at a time."""
    devices = [FakeDevice(), FakeDevice()]
    outers = build(Network(range(2)), devices)
    waits = [outers[0].receive(devices[0].put(torch.zeros(1000)), 1, tag) for tag in range(3)]
    sums = [outer.all_reduce(device.put(torch.ones(1000))) for outer, device in zip(outers, devices, strict=True)]
    wait_all(sums)
    assert not any(work.settled() for work in waits)
    close(outers, devices)


@settings(max_examples=60)
@given(
    SIZES,
    st.integers(0, 999),
    st.sampled_from([1.0, 0.2]),
    st.one_of(st.none(), st.integers(0, 12)),
    st.booleans(),
    st.integers(0, 30),
)
def test_after_an_abort_every_wait_ends_and_no_settled_tensor_changes_again(
    sizes, seed, pace, stuck_after, forgets, looks
):
    """Whatever the device and the network do: a wait returns with the right sum, or raises Broken."""
    devices = [FakeDevice(seed + me, pace, stuck_after) for me in range(2)]
    outers = build(Network(range(2), seed, pace, forgets), devices)
    tensors = [[device.put(torch.full((size,), 1.0 + me)) for size in sizes] for me, device in enumerate(devices)]
    works = [[outer.all_reduce(one) for one in own] for outer, own in zip(outers, tensors, strict=True)]
    for _ in range(looks):  # time passes
        devices[0].event_query(devices[0].now())
    for outer in outers:
        outer.abort()
        with pytest.raises(Broken):
            outer.all_reduce(torch.ones(1))
    complete = []
    for own, each in zip(tensors, works, strict=True):
        for tensor, work in zip(own, each, strict=True):
            try:
                work.wait()
            except Broken:
                continue
            complete.append(tensor)
    assert all(tensor.unique().tolist() == [3.0] for tensor in complete)
    quiet = [
        (tensor, tensor.clone())
        for own, each in zip(tensors, works, strict=True)
        for tensor, work in zip(own, each, strict=True)
        if work.settled()
    ]
    close(outers, devices)
    assert all(torch.equal(tensor, then) for tensor, then in quiet)


def until(condition) -> None:
    while not condition():
        threading.Event().wait(0.001)


def test_a_copy_back_that_ends_after_the_abort_began_does_not_count():
    devices = [FakeDevice(stuck_after=1), FakeDevice()]  # the first one copies out, and never back
    outers = build(Network(range(2)), devices)
    tensors = [device.put(torch.ones(10)) for device in devices]
    works = [outer.all_reduce(tensor) for outer, tensor in zip(outers, tensors, strict=True)]
    works[1].wait()
    assert not works[0].settled()
    outers[0].abort()
    devices[0].complete_all()
    with pytest.raises(Broken, match="aborted"):
        works[0].wait()
    until(works[0].settled)
    close(outers, devices)


def test_nothing_is_copied_back_after_an_abort():
    devices = [FakeDevice(), FakeDevice()]
    network = Network(range(2), forgets=True)
    outers = build(network, devices)
    tensor = devices[0].put(torch.ones(10))
    work = outers[0].all_reduce(tensor)
    until(lambda: network.collectives[0])
    outers[0].abort()
    with pytest.raises(Broken):
        work.wait()
    outers[1].all_reduce(devices[1].put(torch.ones(10)))  # the forgotten operation ends after all, in host memory
    until(work.settled)
    assert devices[0].copied == 1 and tensor.tolist() == [1.0] * 10
    close(outers, devices)


def test_a_member_that_leaves_waits_no_more_and_cuts_nothing():
    devices = [FakeDevice(), FakeDevice()]
    outers = build(Network(range(2)), devices)
    work = outers[0].all_reduce(devices[0].put(torch.ones(10)))
    outers[0].leave()
    with pytest.raises(Left):
        work.wait()
    with pytest.raises(Left):
        outers[0].all_reduce(torch.ones(1))
    assert not work.settled()
    other = devices[1].put(torch.ones(10))
    outers[1].all_reduce(other).wait()
    assert other.tolist() == [2.0] * 10
    close(outers, devices)


def test_a_copy_that_never_ends_is_a_timeout_and_its_memory_is_kept_until_it_ends():
    device = FakeDevice(stuck_after=0)
    network = Network(range(2))
    inner = Member(network, 0)
    inner._timeout_s = 0.05
    outer = StagedCommunicator(inner, device.port_of)
    work = outer.all_reduce(device.put(torch.ones(10)))
    behind = outer.all_reduce(torch.ones(10))
    with pytest.raises(Broken, match="timed out"):
        work.wait()
    with pytest.raises(Broken, match="timed out"):
        behind.wait()  # a peer would match it with the one before
    assert not network.collectives and not work.settled() and behind.settled()
    outer.close()
    base.sweep()
    assert any(work in works for _, works in base._closed)
    device.complete_all()
    base.sweep()
    assert not any(work in works for _, works in base._closed)


def test_an_operation_that_cannot_be_started_ends_those_behind_it_and_no_others():
    devices = [FakeDevice(), FakeDevice()]
    outers = build(Network(range(2)), devices)
    outers[0]._inner.refuses = 1
    first = outers[0].all_reduce(devices[0].put(torch.ones(10)))
    with pytest.raises(Broken, match="a connection broke"):
        first.wait()
    outers[0]._inner.refuses = 0
    with pytest.raises(Broken, match="a connection broke"):
        outers[0].all_reduce(torch.ones(10)).wait()
    room = devices[1].put(torch.zeros(4))
    wait_all([outers[0].send(torch.ones(4), 1, 3), outers[1].receive(room, 0, 3)])
    assert room.tolist() == [1.0] * 4
    close(outers, devices)


def test_a_copy_waits_for_what_was_computed_before_the_operation():
    devices = [FakeDevice(), FakeDevice()]
    outers = build(Network(range(2)), devices)
    tensor = devices[0].put(torch.zeros(10))
    computed = devices[0].compute()
    work = outers[0].all_reduce(tensor)
    other = outers[1].all_reduce(devices[1].put(torch.ones(10)))
    until(lambda: devices[1].copied)
    assert not devices[0].copied
    tensor.fill_(1.0)
    computed.done = True
    wait_all([work, other])
    assert tensor.tolist() == [2.0] * 10
    close(outers, devices)


def test_a_device_that_fails_as_a_whole_fails_the_operation(monkeypatch):
    device = FakeDevice()
    outer = StagedCommunicator(Member(Network(range(2)), 0), device.port_of)

    def fails(event):
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    monkeypatch.setattr(device, "event_query", fails)
    work = outer.all_reduce(device.put(torch.ones(10)))
    with pytest.raises(Broken, match="between the device and the host failed") as raised:
        work.wait()
    assert raised.value.detail == "CUDA error: an illegal memory access was encountered" and work.settled()
    outer.close()


def test_a_device_from_which_a_call_does_not_return_is_stuck(monkeypatch):
    monkeypatch.setattr(staged_communicator, "_STUCK_S", 0.05)
    monkeypatch.setattr(base, "_stuck", [])
    device, gate, inside = FakeDevice(), threading.Event(), threading.Event()
    outer = StagedCommunicator(Member(Network(range(2)), 0), device.port_of)

    def hangs(size):  # as cudaHostAlloc does behind a kernel that never ends
        inside.set()
        gate.wait(60)
        return torch.empty(size, dtype=torch.uint8)

    monkeypatch.setattr(device, "pinned", hangs)
    work = outer.all_reduce(device.put(torch.ones(10)))
    assert inside.wait(60)
    outer.abort()
    with pytest.raises(Broken, match="abandoned"):
        work.wait()
    outer.close()
    assert "has not returned" in base.stuck()
    gate.set()
    until(work.settled)


def test_memory_is_bounded_and_used_again():
    device, other = FakeDevice(), FakeDevice()
    outers = build(Network(range(2)), [device, other])
    tensors = [one.put(torch.ones(20_000)) for one in (device, other)]
    for _ in range(3):
        wait_all([outer.all_reduce(tensor) for outer, tensor in zip(outers, tensors, strict=True)])
    assert device.pinned_bytes <= 5 * 4096, "an operation of 80,000 bytes has a few pieces under way at a time"
    close(outers, [device, other])


@given(st.lists(st.tuples(st.integers(1, 100_000), st.booleans()), max_size=30), st.integers(0, 200_000))
def test_the_pool_gives_no_buffer_twice_and_keeps_no_more_than_its_bound(asked, bound):
    device = FakeDevice()
    pool = PinnedPool(device, bound)
    held: list[torch.Tensor] = []
    for size, give in asked:
        buffer = pool.take(size)
        assert len(buffer) >= size and all(buffer is not other for other in held)
        held.append(buffer)
        if give:
            pool.give(held.pop(0))
        assert sum(map(len, pool._free)) <= bound


def test_over_gloo():
    store = dist.HashStore()
    devices = [FakeDevice(me, 0.5) for me in range(3)]
    with ThreadPoolExecutor(3) as pool:
        make = lambda me: GlooCommunicator(store, me, range(3), 0, 60.0)  # noqa: E731
        inner = list(pool.map(make, range(3)))
    outers = [StagedCommunicator(one, device.port_of) for one, device in zip(inner, devices, strict=True)]
    tensors = [device.put(torch.full((1000,), float(me))) for me, device in enumerate(devices)]
    wait_all([outer.all_reduce(tensor) for outer, tensor in zip(outers, tensors, strict=True)])
    assert all(tensor.unique().tolist() == [3.0] for tensor in tensors)
    pending = [outers[me].all_reduce(tensors[me]) for me in range(2)]
    outers[0].abort()
    for work in pending:  # the abort of gloo reaches the peer
        with pytest.raises(Broken):
            work.wait()
    for outer in outers:
        outer.close()
    base.sweep()
    assert not [works for _, works in base._closed if any(work in works for work in pending)]
