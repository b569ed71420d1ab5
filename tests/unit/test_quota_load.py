"""The least load without a plan is the load of the plan."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.core.replication.placement import consecutive, cyclic, golomb
from megatron_ft.core.scheduling.assignment import plan_step
from megatron_ft.core.scheduling.quota_load import Memory, least_load


@given(st.integers(2, 9), st.integers(1, 6), st.data())
@settings(max_examples=150)
def test_it_is_the_largest_load_of_the_plan(groups, per_shard, data):
    offsets = data.draw(st.sets(st.integers(1, groups - 1), max_size=3))
    placement = data.draw(st.sampled_from([None, cyclic(groups, (0, *sorted(offsets)))]))
    live = sorted(data.draw(st.sets(st.integers(0, groups - 1), min_size=1)))
    plan = plan_step(0, groups, per_shard, live, placement)
    assert least_load(groups, per_shard, live, placement) == max(len(plan.of(group)) for group in live)


@pytest.mark.parametrize("make", [golomb, consecutive])
@pytest.mark.parametrize("share", [0.02, 0.3])
def test_at_the_published_sizes_too(make, share):
    placement, live = make(200, 5), [group for group in range(200) if (group * 37) % 200 >= share * 200]
    plan = plan_step(0, 200, 16, live, placement)
    assert least_load(200, 16, live, placement) == max(len(plan.of(group)) for group in live)


@given(st.integers(2, 9), st.integers(1, 6), st.data())
@settings(max_examples=150)
def test_memory_changes_no_answer(groups, per_shard, data):
    """The losses and joins between two questions are arbitrary."""
    offsets = data.draw(st.sets(st.integers(1, groups - 1), max_size=3))
    placement, memory = cyclic(groups, (0, *sorted(offsets))), Memory()
    for live in data.draw(st.lists(st.sets(st.integers(0, groups - 1), min_size=1), min_size=1, max_size=8)):
        assert least_load(groups, per_shard, live, placement, memory) == least_load(groups, per_shard, live, placement)


@pytest.mark.parametrize("make", [golomb, consecutive])
@pytest.mark.parametrize("rejoin", [False, True])
def test_memory_changes_no_answer_over_a_long_history(make, rejoin):
    placement, memory, live = make(60, 4), Memory(), set(range(60))
    for turn in range(50):
        live ^= {(turn * 37) % 60} if not rejoin or turn % 3 else {(turn * 37) % 60, (turn * 11) % 60}
        assert least_load(60, 5, live, placement, memory) == least_load(60, 5, live, placement)


def test_an_empty_set_and_unknown_groups_are_refused():
    with pytest.raises(ValueError, match="at least one live group"):
        least_load(4, 2, [])
    with pytest.raises(ValueError, match="not group 4"):
        least_load(4, 2, [1, 4], golomb(4, 2))
