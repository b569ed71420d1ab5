"""The draws of the chaos campaign (``tests/chaos/plan.py``), which start no process."""

from __future__ import annotations

import pytest

from megatron_ft.cluster.faults.schedule import KINDS, RAISING
from megatron_ft.run.injection_points import POINTS
from tests.chaos.plan import SHORT, Plan, draw, is_long, takes


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    return [draw(seed) for seed in range(300)]


def test_a_seed_determines_the_run_and_its_keeper_is_never_taken(plans):
    for seed, plan in enumerate(plans):
        assert plan == draw(seed)
        plan.schedule.check(plan.job.groups, plan.job.ranks)
        taken = [takes(fault, plan.job) for fault in plan.schedule.faults]
        assert plan.keeper not in frozenset().union(*taken)
        assert plan.job.kind != "plain" or frozenset().union(*taken), "no group is taken"


def test_the_short_campaign_has_runs_of_all_kinds():
    """A change of the draws may need other seeds in ``SHORT``."""
    plans = [draw(seed) for seed in SHORT]
    assert {plan.job.kind for plan in plans} == {"plain", "numbers", "hosts"}
    assert any(plan.job.ranks > 1 for plan in plans) and any(plan.fills_disk for plan in plans)
    faults = [fault for plan in plans for fault in plan.schedule.faults]
    assert {"nan", "bitflip", "cut", "exception"} <= {fault.kind for fault in faults}
    assert any(fault.kind == "store" and fault.how is None for fault in faults)


def test_no_two_groups_raise_while_they_compute_the_same_step(plans):
    """Such groups may die of the same microbatch, which stops the run on purpose."""
    for plan in plans:
        faults = [fault for fault in plan.schedule.faults if fault.kind in RAISING]
        steps = [fault.step for fault in faults if fault.point in ("forward", "backward", None)]
        assert len(steps) == len(set(steps))


def test_all_kinds_and_points_are_drawn(plans):
    faults = [fault for plan in plans for fault in plan.schedule.faults]
    assert {fault.kind for fault in faults} == set(KINDS), "each kind has a weight in `_SINGLES` or `_HARMLESS`"
    assert {is_long(fault) for fault in faults if fault.kind == "stop"} == {True, False}
    points = {fault.point for fault in faults}
    assert points == {None, *POINTS} - {"warm", "follow"}, "no lost group comes back in these runs"
    assert {fault.position for fault in faults} == {None, 1, "all"}
    assert {fault.share is None for fault in faults if fault.kind == "cut"} == {True, False}
    assert len(faults) > 5 * len(plans)
