"""The least load without a plan is the load of the plan."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.core.replication.placement import consecutive, cyclic, golomb
from megatron_ft.core.scheduling.assignment import least_load, plan_step


@given(st.integers(2, 9), st.integers(1, 6), st.data())
@settings(max_examples=100)
def test_it_is_the_largest_load_of_the_plan(groups, per_shard, data):
    offsets = data.draw(st.sets(st.integers(1, groups - 1), max_size=3))
    placement = data.draw(st.sampled_from([None, cyclic(groups, (0, *sorted(offsets)))]))
    live = sorted(data.draw(st.sets(st.integers(0, groups + 1), min_size=1)))
    plan = plan_step(0, groups, per_shard, live, placement)
    assert least_load(groups, per_shard, live, placement) == max(len(plan.of(group)) for group in live)


@pytest.mark.parametrize("make", [golomb, consecutive])
@pytest.mark.parametrize("share", [0.02, 0.3])
def test_at_the_published_sizes_too(make, share):
    placement, live = make(200, 5), [group for group in range(200) if (group * 37) % 200 >= share * 200]
    plan = plan_step(0, 200, 16, live, placement)
    assert least_load(200, 16, live, placement) == max(len(plan.of(group)) for group in live)


def test_an_empty_set_is_refused():
    with pytest.raises(ValueError, match="at least one live group"):
        least_load(4, 2, [])


def test_the_load_falls_when_the_shards_of_a_crowded_group_lose_their_last_host():
    """Shards 1 and 2 have group 1 only, which computes both; without it any group may compute them."""
    placement = cyclic(8, (0, 1))
    assert least_load(8, 4, [1, 3, 4, 5, 6, 7], placement) == 8
    assert least_load(8, 4, [3, 4, 5, 6, 7], placement) == 7
