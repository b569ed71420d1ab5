"""Whole runs with SimGrid's engine and network, and our policies as controllers, beside our own simulator."""

from __future__ import annotations

import pytest

from tools import simgrid_allreduce, simgrid_run

pytestmark = pytest.mark.system


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("policy", simgrid_run.REDUNDANCY)
def test_a_run_takes_as_long_in_simgrid_as_in_our_simulator(policy):
    """200 groups, 500 steps, a loss every 300 s on average: within 3%, with the same losses, wipe-outs and checkpoints."""
    python = simgrid_allreduce.python_with_simgrid()
    if python is None:
        pytest.skip("no Python here can import SimGrid; as root: apt-get install python3-simgrid")
    found = simgrid_run.compare(python, policy, groups=200, steps=500, seed=0)
    assert found["simgrid_over_ours"] == pytest.approx(1.0, abs=0.03), found
    for name in ("masked", "wipe_outs", "checkpoints"):
        assert found[name]["simgrid"] == pytest.approx(found[name]["ours"], rel=0.05), found
    assert found["masked"]["simgrid"] > 50
