"""The plan: every microbatch exactly once, the least possible largest load, and no group loses the microbatches that
it has."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.core.scheduling.assignment import (
    admit,
    microbatches_of_step,
    patch_plan,
    plan_step,
)
from tests.support import check_exactly_once

shapes = st.tuples(st.integers(1, 12), st.integers(1, 8))


@given(shapes, st.data())
def test_a_plan_is_exact_and_level(shape, data):
    shards, per_shard = shape
    live = data.draw(st.sets(st.integers(0, shards - 1), min_size=1))
    plan = plan_step(5, shards, per_shard, sorted(live))
    check_exactly_once(plan.assignment, microbatches_of_step(5, shards, per_shard))
    loads = [len(plan.of(group)) for group in live]
    assert set(plan.assignment) == live
    assert max(loads) == -(-shards * per_shard // len(live))
    assert max(loads) - min(loads) <= 1
    assert plan.patched == frozenset()


@given(shapes)
def test_without_losses_every_group_does_its_own_shard(shape):
    shards, per_shard = shape
    plan = plan_step(0, shards, per_shard, range(shards))
    assert all(m.shard == group for group in range(shards) for m in plan.of(group))


@given(st.integers(2, 12), st.integers(1, 8), st.data())
def test_a_patch_moves_only_what_was_lost(shards, per_shard, data):
    plan = plan_step(1, shards, per_shard, range(shards))
    lost = data.draw(st.sets(st.integers(0, shards - 1), min_size=1, max_size=shards - 1))
    patched = patch_plan(plan, lost)
    check_exactly_once(patched.assignment, microbatches_of_step(1, shards, per_shard))
    assert patched.patched == {m for group in lost for m in plan.of(group)}
    added = []
    for group in set(range(shards)) - lost:
        assert patched.of(group)[: len(plan.of(group))] == plan.of(group)
        added.append(len(patched.of(group)) - len(plan.of(group)))
    # Beyond both papers: the patch takes ceil(lost / survivors) microbatches.
    assert max(added) == -(-len(lost) * per_shard // (shards - len(lost)))


@given(st.integers(3, 10), st.integers(1, 6), st.data())
def test_patching_twice_stays_exact(shards, per_shard, data):
    plan = plan_step(1, shards, per_shard, range(shards))
    order = data.draw(st.permutations(range(shards)))
    for group in order[:-1]:
        plan = patch_plan(plan, [group])
        check_exactly_once(plan.assignment, microbatches_of_step(1, shards, per_shard))
    assert len(plan.of(order[-1])) == shards * per_shard


@given(st.integers(1, 5), st.integers(6, 12))
def test_fewer_microbatches_than_groups_leaves_some_with_none(shards, groups):
    plan = plan_step(0, shards, 1, range(groups))
    check_exactly_once(plan.assignment, microbatches_of_step(0, shards, 1))
    assert len(plan.assignment) == groups


@given(st.integers(0, 9), shapes)
def test_a_step_has_every_id_once_in_order(step, shape):
    shards, per_shard = shape
    ids = microbatches_of_step(step, shards, per_shard)
    assert list(ids) == sorted(set(ids)) and len(ids) == shards * per_shard
    assert {m.step for m in ids} == {step}
    assert all(m.shard < shards and m.index < per_shard for m in ids)


@given(shapes, st.data())
def test_an_admitted_group_has_no_share_until_a_group_is_lost(shape, data):
    """Architecture, rejoin: the step goes on as it was planned; the next loss is spread over the entrant, too."""
    shards, per_shard = shape
    plan = plan_step(2, shards, per_shard, range(shards))
    joined = data.draw(st.sets(st.integers(0, shards + 3), min_size=1))
    grown = admit(plan, joined)
    assert set(grown.assignment) == set(range(shards)) | joined and list(grown.assignment) == sorted(grown.assignment)
    assert all(grown.of(group) == plan.of(group) for group in grown.assignment)
    assert grown.reason == plan.reason and grown.patched == plan.patched
    lost = data.draw(st.sampled_from(range(shards)))
    if joined - set(range(shards)):
        patched = patch_plan(grown, [lost])
        check_exactly_once(patched.assignment, microbatches_of_step(2, shards, per_shard))
        added = {group: len(own) - len(grown.of(group)) for group, own in patched.assignment.items()}
        assert max(added.values()) - min(added.values()) <= 1
        newcomer = min(joined - set(range(shards)))
        assert added[newcomer] == max(added.values()), "of equally much added, who has least comes first"


def test_a_patch_without_a_survivor_is_refused():
    with pytest.raises(ValueError, match=r"no survivor of step 3 among \[0, 1\]"):
        patch_plan(plan_step(3, 2, 1, [0, 1]), [0, 1])
