"""Building a communicator: who waits, for how long, and what is left of a build that nobody wants any more."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.errors import ConfigError
from megatron_ft.run.collectives import communicator_choice
from megatron_ft.run.collectives.base import Broken
from megatron_ft.run.collectives.communicator_choice import GLOO, KINDS, NCCL, Choice, Maker, Offer, agree
from megatron_ft.run.collectives.rendezvous import Build

AGREEMENT = SimpleNamespace(rendezvous=lambda name: None)


class Made:
    """A communicator whose building ends when ``may`` is set, in its constructor or in ``connect``."""

    def __init__(self, may: threading.Event, ends: bool = False) -> None:
        self.may, self.ends, self.closed, self.connecting = may, ends, 0, threading.Event()

    def connect(self) -> None:
        self.connecting.set()
        assert self.may.wait(60.0)
        if self.ends and self.closed:
            raise RuntimeError("aborted while it was connected")

    def close(self) -> None:
        self.closed += 1
        if self.ends:
            self.may.set()


def build_of(monkeypatch, made: Made, choice=lambda: Choice(GLOO, ()), in_constructor: bool = False) -> Build:
    def make(*_: object) -> Made:
        if in_constructor:
            made.connect()
        return made

    monkeypatch.setattr(Maker, "make", make)
    return Build(AGREEMENT, "outer", Maker(0, [0], 3, 60.0, "127.0.0.1"), choice)


@pytest.mark.parametrize("in_constructor", [False, True])
def test_a_build_that_was_given_up_holds_nothing_once_it_is_done(monkeypatch, in_constructor):
    made = Made(threading.Event())
    build = build_of(monkeypatch, made, in_constructor=in_constructor)
    assert made.connecting.wait(60.0)
    build.give_up()
    made.may.set()
    build._thread.join(60.0)
    assert made.closed == 1
    with pytest.raises(Broken):
        build.result()


def test_a_communicator_that_is_connected_belongs_to_who_takes_it(monkeypatch):
    made = Made(threading.Event())
    made.may.set()
    build = build_of(monkeypatch, made)
    build._thread.join(60.0)
    assert build.over() and build.result() is made and not made.closed


def test_giving_up_ends_a_connect_that_hangs(monkeypatch):
    made = Made(threading.Event(), ends=True)
    build = build_of(monkeypatch, made)
    assert made.connecting.wait(60.0)
    build.give_up()
    build._thread.join(60.0)
    assert not build._thread.is_alive() and made.closed == 1


def test_members_that_cannot_agree_on_a_kind_end_with_the_reason(monkeypatch):
    offers = {0: Offer((NCCL,), "GPU-1"), 1: Offer((GLOO,))}
    build = build_of(monkeypatch, Made(threading.Event()), choice=lambda: agree(offers))
    build._thread.join(60.0)
    with pytest.raises(ConfigError, match="group 0: nccl, group 1: gloo.*none in common"):
        build.result()


@given(st.dictionaries(st.integers(0, 5), st.tuples(st.booleans(), st.sampled_from(["a", "b", "c", ""])), min_size=1))
def test_groups_take_nccl_exactly_if_all_can_and_each_has_a_gpu_of_its_own(groups):
    offers = {group: Offer((NCCL, GLOO) if nccl else (GLOO,), place) for group, (nccl, place) in groups.items()}
    places = [place for _, place in groups.values() if place]
    can = all(nccl for nccl, _ in groups.values()) and len(set(places)) == len(places)
    kind = agree(offers).kind
    assert kind == (NCCL if can else GLOO) and kind in KINDS
    assert kind == agree(dict(reversed(offers.items()))).kind


def test_groups_that_insist_on_nccl_and_share_a_gpu_are_told_so():
    offers = {group: Offer((NCCL,), "GPU-1") for group in (0, 1)}
    with pytest.raises(ConfigError, match="one GPU, which NCCL refuses"):
        agree(offers)


@given(st.lists(st.sampled_from(["10.0.0.1", "10.0.0.2", ""]), min_size=1, max_size=5))
def test_sums_go_by_hosts_only_if_no_member_has_its_gradients_on_a_device(hosts):
    choice = agree({member: Offer((GLOO,), host=host) for member, host in enumerate(hosts)})
    assert bool(choice.hosts) == ("" not in hosts)
    assert sorted(sum(choice.hosts, ())) == (list(range(len(hosts))) if choice.hosts else [])


def test_nccl_is_refused_where_the_gradients_are_on_a_cpu():
    with pytest.raises(ConfigError, match='communicator is "nccl", and the gradients of this rank are on cpu'):
        Offer.of(NCCL, torch.device("cpu"), "10.0.0.1")
    assert Offer.of(communicator_choice.AUTO, torch.device("cpu"), "10.0.0.1") == Offer((GLOO,), host="10.0.0.1")
