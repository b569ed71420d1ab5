"""Verification: who computes what for comparison, and what follows from the digests."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.core.exactness import verification
from megatron_ft.core.exactness.verification import SLACK, Check, Verdict
from megatron_ft.core.scheduling.policies import Batch, policy
from megatron_ft.types import Microbatch, PlanOrigin

SIZES = st.tuples(st.integers(2, 9), st.integers(1, 5))


def plan_of(groups: int, per_shard: int, step: int, slack: bool = False):
    batch = Batch(groups, per_shard, None)
    return policy("stacked_quota", slack=slack).plan(batch, step, PlanOrigin(tuple(range(groups))), {})


@given(SIZES, st.integers(0, 500), st.integers(0, 2), st.integers(1, 6), st.data())
def test_every_check_has_two_living_groups_or_three_and_room_for_its_digests(size, step, attempt, per_step, data):
    groups, per_shard = size
    plan, room = plan_of(groups, per_shard, step), verification.slots(per_step, groups)
    alive = data.draw(st.sets(st.integers(0, groups - 1), min_size=1))
    found = verification.checks(plan, alive, attempt, per_step, room)
    for check in found:
        assert set(check.groups) <= alive and len(set(check.groups)) == len(check.groups)
        assert check.microbatch in plan.of(check.groups[0])
        assert len(check.groups) == (3 if attempt and len(alive) > 2 else 2)
    used = Counter(group for check in found for group in check.groups)
    assert all(count <= room for count in used.values())
    assert len({check.microbatch for check in found}) == len(found) <= per_step


@given(SIZES, st.integers(0, 500), st.data())
def test_a_step_verifies_as_many_microbatches_as_it_is_asked_to(size, step, data):
    groups, per_shard = size
    per_step = data.draw(st.integers(1, groups * per_shard))
    found = verification.checks(
        plan_of(groups, per_shard, step), range(groups), 0, per_step, verification.slots(per_step, groups)
    )
    assert len(found) == per_step


@given(st.integers(2, 6), st.integers(1, 3))
def test_in_the_course_of_a_run_every_group_verifies_every_other_and_every_place_of_a_share(groups, per_shard):
    pairs, places = set(), set()
    for step in range(groups * (groups - 1) * per_shard):
        (check,) = verification.checks(plan_of(groups, per_shard, step), range(groups), 0, 1, 4)
        pairs.add(check.groups)
        places.add(check.microbatch[1:])
    assert pairs == {(one, other) for one in range(groups) for other in range(groups) if one != other}
    assert len(places) == groups * per_shard


def test_the_room_holds_a_third_opinion_on_everything_and_the_common_check_of_the_first_step():
    """Two groups are left of four that verify one microbatch each, with a third opinion on all; and the check of all."""
    assert [verification.slots(per_step, 4) for per_step in (0, 1, 4, 5)] == [0, 7, 7, 13]


def test_in_the_first_step_all_groups_compute_one_microbatch():
    first, *_ = verification.checks(plan_of(5, 2, 0), range(5), 0, 1, 4, everyone=True)
    assert set(first.groups) == set(range(5))


@given(SIZES, st.integers(0, 50))
def test_slack_verifies_what_the_plan_computes_twice(size, step):
    groups, per_shard = size
    plan = plan_of(groups, per_shard, step, slack=True)
    for check in verification.checks(plan, range(groups), 0, SLACK, verification.slots(SLACK, groups)):
        owner, other = check.groups
        assert check.microbatch in plan.of(owner) and check.microbatch in plan.standby_of(other)


def digests(found, wrong, attempt: int, lasting: bool):
    """Return the digests of all groups: those of group ``wrong`` are wrong, in every attempt if it is ``lasting``."""
    said: dict[int, list[int]] = {}
    for check in found:
        for group in check.groups:
            right = 1 + abs(hash(check.microbatch)) % 2**40
            bad = group == wrong and (lasting or not attempt)
            said.setdefault(group, []).append(right + 1 + attempt * lasting if bad else right)
    return said


@given(SIZES, st.integers(0, 99), st.integers(1, 4), st.booleans(), st.data())
def test_the_guilty_group_is_found_at_the_second_attempt_and_no_other(size, step, per_step, lasting, data):
    groups, per_shard = size
    wrong = data.draw(st.integers(0, groups - 1))
    plan, room = plan_of(groups, per_shard, step), verification.slots(per_step, groups)
    first = verification.checks(plan, range(groups), 0, per_step, room)
    now = digests(first, wrong, 0, lasting)
    verdict = verification.verdict(first, now, {})
    covered = any(wrong in check.groups for check in first)
    assert bool(verdict.doubtful) == covered and not verdict.guilty and verdict.tied is None
    if not covered:
        return
    second = verification.checks(plan, range(groups), 1, per_step, room)
    places: dict[tuple[int, Microbatch], int] = {}
    for group in range(groups):
        for microbatch, digest in zip(verification.mine(first, group), now.get(group, ()), strict=True):
            places[group, microbatch] = digest
    before = {g: [places.get((g, m), 0) for m in verification.mine(second, g)] for g in range(groups)}
    again = verification.verdict(second, digests(second, wrong, 1, lasting), before)
    assert set(again.guilty) == {wrong} and again.tied is None


@given(SIZES, st.integers(0, 99), st.integers(1, 4), st.integers(0, 2))
def test_healthy_groups_are_never_accused(size, step, per_step, attempt):
    groups, per_shard = size
    found = verification.checks(plan_of(groups, per_shard, step), range(groups), attempt, per_step, 20, step == 0)
    said = digests(found, None, attempt, False)
    assert verification.verdict(found, said, said if attempt else {}) == Verdict({})


def test_two_groups_that_differ_and_repeat_themselves_leave_it_open():
    (check,) = [Check(Microbatch(3, 0, 0), (0, 1))]
    found = verification.verdict([check], {0: [7], 1: [8]}, {0: [7], 1: [8]})
    assert found.tied == (Microbatch(3, 0, 0), ((0,), (1,))) and not found.guilty


def test_a_group_that_contradicts_itself_is_guilty_even_where_there_are_two():
    check = Check(Microbatch(3, 0, 0), (0, 1))
    assert verification.verdict([check], {0: [7], 1: [9]}, {0: [7], 1: [8]}).guilty == {1: check.microbatch}
    assert verification.verdict([check], {0: [7], 1: [7]}, {0: [7], 1: [8]}).guilty == {1: check.microbatch}


def test_a_missing_digest_accuses_nobody():
    check = Check(Microbatch(3, 0, 0), (0, 1))
    assert verification.verdict([check], {0: [7]}, {}) == Verdict({})


def test_the_room_for_digests_has_two_shares_of_three_opinions_and_the_first_steps_common_check():
    assert [verification.slots(per_step, 4) for per_step in (0, 1, 4, 5)] == [0, 7, 7, 13]
