"""Replication, drop and restart against their definitions, spelled out a second time without any shortcut."""

from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.core.scheduling.policies.baselines import divisible_world, drop, replica_set, replication, restart
from megatron_ft.types import Microbatch

shapes = st.tuples(st.integers(0, 9), st.integers(1, 12), st.integers(1, 5))


def lives(data, shards):
    return data.draw(st.sets(st.integers(0, shards - 1)))


def contributed(decision):
    return sorted(m for own in decision.plan.assignment.values() for m in own)


@given(shapes, st.data())
def test_replication_lives_as_long_as_every_set_has_a_copy(shape, data):
    step, shards, per_shard = shape
    copies, live = data.draw(st.integers(1, shards)), lives(data, shards)
    decision = replication(step, shards, per_shard, live, copies)
    sets = [[g for g in range(shards) if g // copies == s] for s in range(ceil(shards / copies))]
    if any(not live & set(members) for members in sets):
        assert decision.kind == "wipe-out" and decision.plan is None and "restart" in decision.reason
        return
    assert decision.kind == "go" and decision.divisor == shards * per_shard
    assert contributed(decision) == [Microbatch(step, s, i) for s in range(shards) for i in range(per_shard)]
    for members in sets:
        assert all(list(decision.computes[g]) == members for g in live & set(members)), "copies compute the same"
        assert sum(bool(decision.plan.of(g)) for g in members) == 1, "one copy contributes"
    assert set(decision.computes) == set(decision.plan.assignment) == live


@pytest.mark.parametrize("shards", [200, 600, 1000])
def test_replication_takes_r_stacks_from_the_start(shards):
    """SPARe, published simulation: r-fold replication takes r times the failure-free step."""
    for copies in (1, 2, 3, 5):
        decision = replication(0, shards, 1, range(shards), copies)
        assert decision.stacks == copies
        assert decision.reason == decision.plan.reason


def test_a_masked_loss_hands_the_shards_of_the_set_to_the_next_copy():
    before = replication(3, 6, 2, {0, 1, 2, 3, 4, 5}, 3)
    after = replication(3, 6, 2, {1, 2, 3, 4, 5}, 3)
    assert before.plan.of(0) == after.plan.of(1) and after.plan.of(2) == ()
    assert after.reason == "5 of 6 groups live, every set of 3 copies has at least 2"
    assert replication(3, 6, 2, {3, 4, 5}, 3).reason.startswith("all copies of a set are lost (groups 0 1 2)")


@given(st.integers(1, 40), st.integers(1, 12), st.data())
def test_sets_partition_the_groups(groups, copies, data):
    group = data.draw(st.integers(0, groups - 1))
    members = replica_set(group, groups, copies)
    assert group in members and len(members) <= copies
    assert all(replica_set(other, groups, copies) == members for other in members)


@given(shapes, st.data())
def test_drop_shrinks_the_batch_and_returns_the_divisor(shape, data):
    """ReCoVer, ablation: the batch that shrinks."""
    step, shards, per_shard = shape
    live = lives(data, shards)
    decision = drop(step, shards, per_shard, live)
    if not live:
        assert decision.kind == "wipe-out" and decision.plan is None
        return
    assert contributed(decision) == [Microbatch(step, s, i) for s in sorted(live) for i in range(per_shard)]
    assert all(m.shard == group for group in live for m in decision.plan.of(group))
    assert decision.divisor == len(live) * per_shard and decision.stacks == 1
    assert decision.plan.reason.endswith(f"the gradient is divided by {decision.divisor}")


@given(shapes, st.data())
def test_restart_stops_at_the_first_loss(shape, data):
    step, shards, per_shard = shape
    live = lives(data, shards)
    decision = restart(step, shards, per_shard, live)
    if len(live) < shards:
        assert decision.kind == "restart" and decision.plan is None and decision.stacks == 0
        assert str(min(set(range(shards)) - live)) in decision.reason
    decision = restart(step, shards, per_shard, range(shards))
    assert decision.kind == "go" and decision.divisor == shards * per_shard
    assert all(m.shard == group for group in range(shards) for m in decision.plan.of(group))


@given(st.integers(1, 70), st.integers(1, 9000))
def test_an_even_world_leaves_no_group_with_more(live, total):
    world = divisible_world(live, total)
    assert total % world == 0 and not any(total % more == 0 for more in range(world + 1, live + 1))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: replication(0, 4, 1, {0}, 5), "copies must lie between 1 and the number of groups, 4, got 5"),
        (lambda: replication(0, 4, 1, {0}, 0), "got 0"),
        (lambda: drop(0, 4, 1, {4}), r"live groups must be of 0 to 3, got \[4\]"),
        (lambda: divisible_world(0, 4), "must both be at least 1, got 0 and 4"),
        (lambda: restart(0, 4, 0, {1}), "must both be at least 1, got 4 and 0"),
    ],
)
def test_misuse_is_told(call, message):
    with pytest.raises(ValueError, match=message):
        call()
