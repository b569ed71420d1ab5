"""The duration of an all-reduce by formula. tests/system/test_simgrid.py has the second opinion."""

from __future__ import annotations

from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.allreduce import allreduce_s

S, B, L = 1e9, 12.5e9, 1e-5


def test_a_ring_moves_nearly_twice_the_bytes():
    assert allreduce_s(8, S, B, L) == pytest.approx(2 * 7 / 8 * S / B + 14 * L)


@given(st.integers(2, 300))
def test_a_tree_takes_two_rounds_per_doubling(N):
    assert allreduce_s(N, S, B, L, "tree") == pytest.approx(2 * ceil(log2(N)) * (S / B + L))


@pytest.mark.parametrize("algorithm", ["ring", "tree"])
def test_one_group_has_no_peer_to_send_to(algorithm):
    assert allreduce_s(1, S, B, L, algorithm) == 0.0
