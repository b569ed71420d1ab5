"""SimGrid exchanges the messages of an all-reduce one by one and arrives at the times of our formula."""

from __future__ import annotations

import pytest

from tools import simgrid_allreduce as tool
from tools.allreduce import allreduce_s

pytestmark = pytest.mark.system

SIZES = {"1 MB": 1_000_000, "1 GB": 1_000_000_000}
HOSTS = [2, 4, 8, 13, 16, 64]


@pytest.fixture(scope="module")
def simgrid() -> str:
    python = tool.python_with_simgrid()
    if python is None:
        pytest.skip("no Python here can import SimGrid; as root: apt-get install python3-simgrid")
    return python


@pytest.fixture(scope="module")
def cases(simgrid: str) -> list[dict]:
    """A healthy network, and one link ten times slower: at the tree's root, through which all rounds go."""
    return tool.simulate(simgrid, hosts=HOSTS, bytes=SIZES.values(), slowdown=[1, 10])


def ratio(case: dict, bandwidth_share: float = 1.0, latency_factor: float = 1.0) -> float:
    """Return the ratio of SimGrid over formula. All rounds are as slow as the slow link, which positions share."""
    bandwidth, latency_s = bandwidth_share * case["bandwidth"] / case["slowdown"], latency_factor * case["latency"]
    size = case["bytes"] * case["positions"]
    return case["time_s"] / allreduce_s(case["hosts"], size, bandwidth, latency_s, case["algorithm"])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("algorithm", ["ring", "tree"])
@pytest.mark.parametrize("hosts", HOSTS)
def test_simgrid_agrees_with_the_formula(cases, hosts, algorithm, size):
    own = [c for c in cases if (c["hosts"], c["algorithm"], c["bytes"]) == (hosts, algorithm, SIZES[size])]
    assert [case["slowdown"] for case in own] == [1, 10]
    assert [ratio(case) for case in own] == pytest.approx([1.0] * 2, rel=1e-3)


@pytest.mark.parametrize("algorithm", ["ring", "tree"])
def test_positions_share_the_link_of_their_host(simgrid, algorithm):
    shared = tool.simulate(simgrid, algorithm=[algorithm], hosts=[4], slowdown=[1, 10], positions=[1, 4])
    assert [ratio(case) for case in shared] == pytest.approx([1.0] * 4, rel=1e-3)


def test_tcp_as_simgrid_knows_it_costs_a_large_ring_a_tenth_and_its_factors_explain_that(simgrid):
    for case in tool.simulate(simgrid, algorithm=["ring"], model=["lv08"], hosts=[2, 8], slowdown=[1, 10]):
        assert 1.05 < ratio(case) < 1.12
        assert ratio(case, tool.LV08_BOTH_WAYS, tool.LV08_LATENCY) == pytest.approx(1.0, rel=1e-3)
