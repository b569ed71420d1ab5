"""Runs whose groups share hosts, so that gradients are summed inside the hosts and then between them."""

from __future__ import annotations

import pytest

from megatron_ft.run.injection_points import Breakpoint
from tests import support

GROUPS, STEPS = 5, 8
ON_THREE_HOSTS = """
from megatron_ft.run.collectives.communicator_choice import Offer
from megatron_ft.config.rank_env import RankEnvironment

host = str(RankEnvironment.from_env().group // 2)
usual = Offer.of
Offer.of = lambda setting, device, address: usual(setting, device, host)
"""
"""Groups 0 and 1 are on one host, 2 and 3 on another; group 4 is alone."""


def start(directory, data_dir, holds=(), **options) -> support.Run:
    script = support.changed_script(directory.with_suffix(".py"), ON_THREE_HOSTS)
    return support.start(directory, data_dir, holds, script=script, groups=GROUPS, steps=STEPS, **options)


@pytest.fixture(scope="module")
def flat(tmp_path_factory, data_dir) -> support.Run:
    """A run on one host without failures."""
    own = {"groups": GROUPS, "steps": STEPS, "reduction": "exact"}
    run = support.start(tmp_path_factory.mktemp("flat") / "run", data_dir, **own)
    run.check()
    return run


KILLED = {"the leader of a host": [0], "another of a host": [3], "a leader, and a whole host": [2, 4]}


@pytest.mark.parametrize("groups", support.first_of(KILLED, "the leader of a host"))
def test_groups_that_are_killed_in_a_sum_cost_no_step_and_no_bit(tmp_path, data_dir, flat, groups):
    holds = [Breakpoint(group, 2, "reduce", 1) for group in groups]
    run = start(tmp_path / "run", data_dir, holds, reduction="exact")
    run.strike_in_step(*holds)
    run.check()
    assert support.outcome(run) == support.outcome(flat)


@pytest.mark.long
def test_a_group_that_is_killed_while_bf16_is_summed_costs_no_step(tmp_path, data_dir, flat):
    hold = Breakpoint(2, 2, "bucket", 1)
    run = start(tmp_path / "run", data_dir, [hold], reduce_dtype="bf16")
    run.strike_in_step(hold)
    run.check()
    pairs = zip(support.outcome(run)[0], support.outcome(flat)[0], strict=True)
    assert max(abs(one / other - 1) for one, other in pairs) < 1e-3
