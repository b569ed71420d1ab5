"""The duration of an all-reduce by formula. tests/system/test_simgrid.py has the second opinion."""

from __future__ import annotations

from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.errors import ConfigError
from megatron_ft.planning.allreduce import allreduce_s

S, B, L = 1e9, 12.5e9, 1e-5


def test_a_ring_moves_nearly_twice_the_bytes():
    assert allreduce_s(8, S, B, L) == pytest.approx(2 * 7 / 8 * S / B + 14 * L)


@given(st.integers(2, 300))
def test_a_tree_takes_two_rounds_per_doubling(N):
    assert allreduce_s(N, S, B, L, "tree") == pytest.approx(2 * ceil(log2(N)) * (S / B + L))


@given(st.integers(2, 300), st.floats(1.0, 100.0))
def test_a_slow_root_slows_every_round_of_a_tree(N, slowdown):
    found = allreduce_s(N, S, B, L, "tree", slowdown=slowdown)
    assert found == pytest.approx(allreduce_s(N, S, B / slowdown, L, "tree"))


@given(st.integers(1, 8), st.floats(1.0, 100.0), st.data())
def test_a_slow_leaf_slows_two_rounds_of_a_full_tree(doublings, slowdown, data):
    """Odd numbers are leaves. With N a power of two every way is equally long, so the choice of the leaf does not
    matter."""
    N = 2**doublings
    leaf = 2 * data.draw(st.integers(0, N // 2 - 1)) + 1
    found = allreduce_s(N, S, B, L, "tree", slowdown=slowdown, slow_group=leaf)
    assert found == pytest.approx(allreduce_s(N, S, B, L, "tree") + 2 * (slowdown - 1) * S / B)


def test_a_slow_link_off_the_longest_way_costs_nothing_until_it_makes_the_way_the_longest():
    """Of six groups 5 sends to 4 only, and 0 has no time for 4 before it has heard of 1 and 2."""
    healthy = allreduce_s(6, S, B, L, "tree")
    assert allreduce_s(6, S, B, 0.0, "tree", slowdown=2.0, slow_group=5) == allreduce_s(6, S, B, 0.0, "tree")
    assert allreduce_s(6, S, B, L, "tree", slowdown=3.0, slow_group=5) == pytest.approx(healthy + 2 * (S / B - L))


@given(st.integers(2, 300), st.floats(1.0, 100.0), st.data())
def test_a_ring_is_as_slow_as_its_slowest_link_wherever_that_is(N, slowdown, data):
    place = data.draw(st.integers(0, N - 1))
    found = allreduce_s(N, S, B, L, slowdown=slowdown, slow_group=place)
    assert found == pytest.approx(allreduce_s(N, S, B / slowdown, L))


@pytest.mark.parametrize("algorithm", ["ring", "tree"])
def test_positions_share_bandwidth_but_not_latency(algorithm):
    assert allreduce_s(8, S, B, L, algorithm, positions=4) == pytest.approx(allreduce_s(8, 4 * S, B, L, algorithm))


@pytest.mark.parametrize("algorithm", ["ring", "tree"])
def test_one_group_has_no_peer_to_send_to(algorithm):
    assert allreduce_s(1, S, B, L, algorithm) == 0.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"groups": 0},
        {"groups": 2.0},
        {"size_bytes": -1},
        {"bandwidth_bytes_s": 0},
        {"bandwidth_bytes_s": float("inf")},
        {"latency_s": float("nan")},
        {"slowdown": 0.5},
        {"positions": 0},
        {"slow_group": 8},
        {"slow_group": -1},
        {"algorithm": "star"},
    ],
    ids=str,
)
def test_impossible_arguments_are_refused_by_name(wrong):
    asked = {"groups": 8, "size_bytes": S, "bandwidth_bytes_s": B, "latency_s": L, **wrong}
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        allreduce_s(**asked)
