"""The planner's numbers about verification, against the checks that a run makes."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.core.exactness import verification
from megatron_ft.plan import verified_share
from tests import support
from tests.unit.test_verification import plan_of


@given(st.integers(2, 64), st.integers(1, 32), st.floats(0.01, 1), st.data())
def test_more_checks_find_a_bad_host_sooner_and_cost_more(groups, microbatches, share, data):
    one, other = sorted(data.draw(st.lists(st.integers(0, groups * microbatches), min_size=2, max_size=2)))
    less, more = (verified_share.effect(groups, microbatches, count, share) for count in (one, other))
    assert less.found_per_step <= more.found_per_step <= 1 and less.steps >= more.steps
    assert less.step_factor <= more.step_factor and less.covered <= more.covered <= 1


@pytest.mark.parametrize(("groups", "per_shard", "per_step", "share"), [(8, 4, 2, 0.5), (5, 3, 5, 0.2), (4, 2, 8, 1.0)])
def test_the_expected_steps_are_those_of_the_checks_of_a_run(groups, per_shard, per_step, share):
    """A bad group is drawn, and steps are played with the production checks until one of them shows it."""
    draw, taken = random.Random(1), []
    for _ in range(600):
        bad, step = draw.randrange(groups), draw.randrange(1000)
        first = step
        while True:
            room = verification.slots(per_step, groups)
            found = verification.checks(plan_of(groups, per_shard, step), range(groups), 0, per_step, room)
            step += 1
            if any(bad in check.groups and draw.random() < share for check in found):
                break
        taken.append(step - first)
    expected = verified_share.effect(groups, per_shard, per_step, share).steps
    assert sum(taken) / len(taken) == pytest.approx(expected, rel=0.12)


def test_plan_says_what_to_verify_when_it_is_asked():
    done = support.ft("plan", "--preset", "lab-64", "--steps", 1000, "--wrong-share", "0.01", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["verification"]
    assert [row["per_step"] for row in rows] == sorted({row["per_step"] for row in rows}) and rows[-1]["covered"] == 1
    wrong = support.ft("plan", "--preset", "lab-64", "--wrong-share", "2")
    assert wrong.returncode == 2 and "--wrong-share" in wrong.stderr
