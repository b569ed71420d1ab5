"""Sums on two levels over a network that is late, failing or forgetful, with groups on hosts in any way."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.run.collectives import base, two_level_communicator
from megatron_ft.run.collectives.base import Broken
from megatron_ft.run.collectives.communicator_choice import GLOO, Choice
from megatron_ft.run.collectives.two_level_communicator import TwoLevelCommunicator
from tests.fakes.network import Member, Network

HOSTS = st.lists(st.integers(0, 3), min_size=2, max_size=6)
"""The host of each member."""
SIZES = st.lists(st.integers(1, 200), min_size=1, max_size=5)
DTYPES = st.lists(st.sampled_from([torch.float32, torch.bfloat16, torch.int32]), min_size=5, max_size=5)


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    monkeypatch.setattr(two_level_communicator, "PIECE", 128)
    monkeypatch.setattr(base, "GRACE_S", 0.02)


class Lab:
    """One communicator in each member. ``networks``: of each of its parts, by name."""

    def __init__(self, host_of: Sequence[int], rounded: bool, seed: int = 0, pace: float = 1.0, forgets: bool = False):
        hosts = Choice.of(GLOO, dict(enumerate(host_of))).hosts
        self.networks: dict[str, Network] = {}
        self.outers: list[TwoLevelCommunicator] = []
        for me in range(len(host_of)):

            def part(name, members, me=me):
                made = self.networks.setdefault(name, Network(members, seed, pace, forgets))
                return Member(made, me)

            whole = part("whole", range(len(host_of)))
            self.outers.append(TwoLevelCommunicator(whole, hosts, part, rounded=rounded))
            self.outers[-1].connect()

    def sum(self, tensors: Sequence[Sequence[torch.Tensor]]) -> list[list[base.Work]]:
        return [[outer.all_reduce(one) for one in own] for outer, own in zip(self.outers, tensors, strict=True)]

    def close(self) -> None:
        for outer in self.outers:
            outer.abort()
        for outer in self.outers:
            outer.close()


def numbers(me: int, sizes: Sequence[int], dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
    """Return tensors whose sums bf16 can represent."""
    return [(torch.arange(size) % 20 + me).to(dtype) for size, dtype in zip(sizes, dtypes, strict=False)]


@settings(max_examples=60)
@given(HOSTS, SIZES, DTYPES, st.booleans(), st.integers(0, 999), st.sampled_from([1.0, 0.3, 0.05]))
def test_sums_are_right_wherever_members_are_and_however_late_the_network_is(
    host_of, sizes, dtypes, rounded, seed, pace
):
    lab = Lab(host_of, rounded, seed, pace)
    tensors = [numbers(me, sizes, dtypes) for me in range(len(host_of))]
    expected = [torch.stack(column).sum(0) for column in zip(*tensors, strict=True)]
    works = lab.sum(tensors)
    for each in works:
        for work in each:
            work.wait()
    for own in tensors:
        for one, total in zip(own, expected, strict=True):
            assert torch.equal(one, total.to(one.dtype))
    assert all(work.settled() for each in works for work in each)
    lab.close()


@settings(max_examples=60)
@given(HOSTS, SIZES, DTYPES, st.booleans(), st.integers(0, 999), st.booleans(), st.integers(0, 20), st.data())
def test_after_an_abort_every_wait_ends_and_no_settled_tensor_changes_again(
    host_of, sizes, dtypes, rounded, seed, forgets, pause, data
):
    """Wherever the sums are: a wait returns with the right sum, or raises Broken. One member may never begin."""
    lab = Lab(host_of, rounded, seed, 0.2, forgets)
    silent = data.draw(st.sampled_from([None, *range(len(host_of))]))
    tensors = [numbers(me, sizes, dtypes) for me in range(len(host_of))]
    expected = [torch.stack(column).sum(0) for column in zip(*tensors, strict=True)]
    begun = [own if me != silent else [] for me, own in enumerate(tensors)]
    works = lab.sum(begun)
    threading.Event().wait(pause / 10000)  # the sums get as far as they get
    for outer in lab.outers:
        outer.abort()
        with pytest.raises(Broken):
            outer.all_reduce(torch.ones(1))
    quiet = []
    for own, each in zip(begun, works, strict=True):
        for tensor, work, total in zip(own, each, expected, strict=False):
            try:
                work.wait()
                assert torch.equal(tensor, total.to(tensor.dtype))
            except Broken:
                pass
            if work.settled():
                quiet.append((tensor, tensor.clone()))
    lab.close()
    assert all(torch.equal(tensor, then) for tensor, then in quiet)


def test_a_sum_that_cannot_go_on_ends_those_behind_it():
    """The leaders of both hosts cannot sum any more: no later sum may take the place of the one that failed."""
    lab = Lab([0, 0, 1, 1], rounded=False)
    works = lab.sum([[torch.ones(10)] for _ in range(4)])
    for each in works:
        each[0].wait()
    for outer in (lab.outers[0], lab.outers[2]):
        outer._parts[two_level_communicator._ACROSS].refuses = 1
    works = lab.sum([[torch.ones(10) for _ in range(3)] for _ in range(4)])
    for leader in (0, 2):
        for work in works[leader]:
            with pytest.raises(Broken, match="a connection broke"):
                work.wait()
    assert not any(work.settled() for member in (1, 3) for work in works[member])
    lab.close()


@pytest.mark.parametrize("rounded", [True, False])
def test_bf16_is_added_in_fp32_inside_a_host(rounded):
    """In bf16, 256 + 1 is 256 again."""
    lab = Lab([0, 0, 0, 1], rounded)
    tensors = [torch.full((3,), value).bfloat16() for value in (256.0, 1.0, 1.0, 0.0)]
    for (work,) in lab.sum([[one] for one in tensors]):
        work.wait()
    assert all(one.tolist() == [258.0] * 3 for one in tensors)
    lab.close()


def test_a_member_alone_on_its_host_among_others_connects_with_leaders_only():
    lab = Lab([0, 0, 1], rounded=False)
    assert [sorted(outer._parts) for outer in lab.outers] == [[0, 1, 3], [0, 3], [1]]
    lab.close()


def test_an_abort_while_it_connects_ends_the_parts_that_come_later():
    made = []

    def part(name, members):
        outer.abort()
        made.append(Member(Network(members), 0))
        return made[-1]

    outer = TwoLevelCommunicator(Member(Network(range(3)), 0), [[0, 1], [2]], part, rounded=False)
    with pytest.raises(RuntimeError, match="aborted"):
        outer.connect()
    assert len(made) == 1 and made[0].aborted
    outer.close()
