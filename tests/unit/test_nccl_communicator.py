"""The communicator of NCCL against an adversary (``tests.fakes.nccl``): its ranks are threads, its tensors the host's."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.run.collectives import base, nccl_communicator
from megatron_ft.run.collectives.base import Broken, Communicator, Done, Left, Work
from megatron_ft.run.collectives.gloo_communicator import Collective, GlooCommunicator
from megatron_ft.run.collectives.nccl_communicator import NcclCommunicator
from tests.fakes.nccl import PATIENCE_S, Fabric, Temper


class Unused(Communicator):
    """The host's part, where only tensors of the device are sent."""

    def _all_reduce(self, tensor: torch.Tensor) -> Work:
        return Done(self._over)

    _broadcast = _send = _receive = None  # type: ignore[assignment]

    def _cut(self) -> None:
        pass

    def _release(self) -> None:
        pass


def members(
    fabric: Fabric, size: int, name: str = "e0", connect: bool = True, gloo: bool = False
) -> list[NcclCommunicator]:
    """Return communicators of all members. ``gloo``: with a host's part, which others do not need."""
    store = dist.HashStore()

    def make(me: int) -> NcclCommunicator:
        same = me, range(size), 0, PATIENCE_S
        host = GlooCommunicator(dist.PrefixStore(name, store), *same) if gloo else Unused(*same)
        made = NcclCommunicator(host, fabric.rank(), lambda tensor: tensor.is_floating_point(), name)
        if connect:
            made.connect()
        return made

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(make, range(size)))


@pytest.fixture(autouse=True)
def nothing_is_stuck(monkeypatch):
    monkeypatch.setattr(base, "_stuck", [])


def outcome(work: Work) -> bool:
    try:
        work.wait()
    except Broken:
        return False
    return True


tempers = st.builds(
    Temper,
    looks=st.integers(0, 4),
    abort_needs_all=st.booleans(),
    says_error=st.none() | st.integers(0, 3),
    leaks=st.booleans(),
)


@settings(max_examples=40)
@given(
    temper=tempers,
    seed=st.integers(0, 999),
    size=st.integers(2, 4),
    buckets=st.integers(1, 5),
    end=st.sampled_from(["abort", "death"]),
    data=st.data(),
)
def test_sums_that_count_are_right_whoever_ends_and_when(temper, seed, size, buckets, end, data):
    """One member aborts or dies after some of its operations, or while it confirms them; the others abort when the news
    reaches them, at any time. A sum counts at a member that has confirmed."""
    started = data.draw(st.integers(0, buckets), label="operations that the member starts")
    confirms = started == buckets and data.draw(st.booleans(), label="it confirms them")
    fabric = Fabric(temper, seed)
    outers = members(fabric, size, gloo=True)
    news = threading.Event()
    tensors = [[torch.full((4,), float(10**bucket * (me + 1))) for bucket in range(buckets)] for me in range(size)]

    def confirmed(me: int) -> bool:
        try:
            for work in [outers[me].all_reduce(tensor) for tensor in tensors[me]]:
                work.wait()
            outers[me].confirm()
        except Broken:
            return False
        return True

    def step(me: int) -> bool:
        if me:
            return confirmed(me)
        counts = confirms and confirmed(0)
        for tensor in [] if confirms else tensors[0][:started]:
            outers[0].all_reduce(tensor)
        fabric.die(0) if end == "death" else outers[0].abort()
        news.set()
        return counts

    def watches(me: int) -> None:
        news.wait(PATIENCE_S)
        outers[me].abort()

    with ThreadPoolExecutor(2 * size) as pool:
        watching = [pool.submit(watches, me) for me in range(1, size)]
        counted = list(pool.map(step, range(size)))
        for one in watching:
            one.result()
    right = [[10.0**bucket * size * (size + 1) / 2] * 4 for bucket in range(buckets)]
    for me in (me for me in range(size) if counted[me]):
        assert [tensor.tolist() for tensor in tensors[me]] == right
    dead, alive = (outers[:1], outers[1:]) if end == "death" else ([], outers)
    with ThreadPoolExecutor(size) as pool:
        list(pool.map(NcclCommunicator.close, alive))
    assert not base.stuck() and not fabric.misuse
    fabric.release()
    for outer in dead:
        outer.close()
    base.sweep()


def test_a_sum_that_the_abort_of_another_member_has_spoilt_is_not_confirmed():
    fabric = Fabric(Temper(looks=0, leaks=True))
    outers = members(fabric, 3, gloo=True)
    tensor = torch.ones(4)
    works = [outers[me].all_reduce(tensor if me else torch.ones(4)) for me in (0, 1)]
    outers[0].abort()
    works[1].wait()
    assert tensor.isnan().all(), "nothing on the device says so"
    with pytest.raises(Broken):
        outers[1].confirm()


def test_an_event_that_comes_with_the_abort_is_not_a_completion():
    """The kernels of an aborted rank complete their events, and leave garbage."""
    fabric = Fabric(Temper(looks=0))
    outers = members(fabric, 2)
    tensor = torch.ones(4)
    work = outers[0].all_reduce(tensor)
    outers[0].abort()
    while not work.settled():
        pass
    assert tensor.isnan().all() and work._queued.ended()
    with pytest.raises(Broken, match="aborted"):
        work.wait()


def test_communicators_of_one_process_are_aborted_together():
    """Two members of two communicators abort them in different orders; an abort returns when the other has begun it, too."""
    fabric = Fabric(Temper(abort_needs_all=True))
    first, second = members(fabric, 2, "a"), members(fabric, 2, "b")
    for outer in (first[0], second[0], second[1], first[1]):
        outer.abort()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(NcclCommunicator.close, [*first, *second]))
    assert not base.stuck() and not fabric.misuse


def test_an_abort_that_hangs_makes_the_process_one_to_replace(monkeypatch):
    monkeypatch.setattr(nccl_communicator, "ABORT_TIMEOUT_S", 0.1)
    fabric = Fabric(Temper(abort_hangs=frozenset({0}), late_writes=True))
    outers = members(fabric, 2)
    tensor = torch.ones(4)
    work = outers[0].all_reduce(tensor)
    outers[0].close()
    assert "has not returned within 0.1 s" in base.stuck()
    assert not work.settled(), "its buffer is not its owner's: the kernel may still write"
    base.sweep()
    assert base._closed, "what it needs is kept"
    fabric.release()


@pytest.mark.parametrize("ignores", [False, True], ids=["an abort ends it", "nothing ends it"])
def test_a_connect_that_hangs_is_ended_by_a_close(monkeypatch, ignores):
    monkeypatch.setattr(nccl_communicator, "ABORT_TIMEOUT_S", 0.1)
    fabric = Fabric(Temper(connect_hangs=frozenset({0}), connect_ignores_abort=ignores))
    one = NcclCommunicator(Unused(0, range(2), 0, PATIENCE_S), fabric.rank(), torch.is_tensor, "x")
    failed = []

    def connect() -> None:
        try:
            one.connect()
        except RuntimeError as error:
            failed.append(str(error))

    thread = threading.Thread(target=connect)
    thread.start()
    with fabric.changed:
        fabric.wait(lambda: bool(fabric.links))
    one.close()
    if ignores:
        assert thread.is_alive()
        fabric.release()
    thread.join(PATIENCE_S)
    assert "aborted" in failed[0] and not fabric.misuse


def test_a_member_that_is_gone_while_the_others_connect_leaves_them_waiting_until_they_are_closed():
    fabric = Fabric(Temper())
    old = members(fabric, 3)
    fabric.die(2)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(NcclCommunicator.close, old[:2]))
    new = members(fabric, 2, "e1")
    tensors = [torch.ones(2), torch.ones(2)]
    for work in [outer.all_reduce(tensor) for outer, tensor in zip(new, tensors, strict=True)]:
        work.wait()
    assert tensors[0].tolist() == [2.0, 2.0] and not fabric.misuse


def test_an_error_that_nccl_reports_ends_a_wait_before_any_news():
    fabric = Fabric(Temper(says_error=0))
    outers = members(fabric, 2)
    work = outers[0].all_reduce(torch.ones(4))
    fabric.die(1)
    with pytest.raises(Broken, match="reports an error") as raised:
        work.wait()
    assert "ncclRemoteError" in raised.value.detail


def test_a_member_that_leaves_waits_no_more_and_its_kernels_go_on():
    fabric = Fabric(Temper(looks=0))
    outers = members(fabric, 2)
    mine, theirs = torch.ones(2), torch.ones(2)
    work = outers[0].all_reduce(mine)
    outers[0].leave()
    with pytest.raises(Left):
        work.wait()
    outers[1].all_reduce(theirs).wait()
    assert theirs.tolist() == [2.0, 2.0] == mine.tolist()


def test_messages_go_in_order_and_what_is_in_the_hosts_memory_goes_by_the_host():
    fabric = Fabric(Temper())
    outers = members(fabric, 2, gloo=True)
    here = [torch.zeros(2), torch.zeros(2)]
    received = [outers[1].receive(tensor, 0, tag) for tag, tensor in enumerate(here)]
    sent = [outers[0].send(torch.full((2,), float(tag + 1)), 1, tag) for tag in (0, 1)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda works: [work.wait() for work in works], (sent, received)))
    assert [tensor.tolist() for tensor in here] == [[1.0, 1.0], [2.0, 2.0]]
    assert isinstance(outers[0].all_reduce(torch.ones(2, dtype=torch.int64)), Collective)
    for outer in outers:
        outer.close()
