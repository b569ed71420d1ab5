"""ReCtlr by repair: the same decisions as with the published matchings, and valid contributions after every loss."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.core.replication.placement import consecutive, golomb, largest_redundancy
from megatron_ft.core.scheduling.policies.rectlr import Stacks, lower_bound
from tests.rectlr_reference import patch, reconfigure


@st.composite
def placements(draw):
    groups = draw(st.integers(2, 24))
    redundancy = draw(st.integers(1, min(groups, 6)))
    if draw(st.booleans()):
        return consecutive(groups, redundancy)
    return golomb(groups, min(redundancy, largest_redundancy(groups)))


@given(placements(), st.randoms(use_true_random=False))
@settings(max_examples=100)
def test_every_loss_is_decided_as_rectlr_does(placement, shuffle):
    """SPARe, ReCtlr: phase, S, number of moved entries, number of patched shards; until the wipe-out."""
    stacks, order = Stacks(placement.stacks), list(range(placement.groups))
    shuffle.shuffle(order)
    for group in order[:-1]:
        stacks.begin_step()
        before, S = tuple(map(tuple, stacks.orders)), stacks.S
        repaired = stacks.lose(group)
        reference = reconfigure(before, stacks.live, S)
        patched = patch(before, S, reference)
        assert (repaired.phase, repaired.S, len(repaired.moves)) == (reference.phase, reference.S, len(reference.moves))
        assert repaired.wiped_out == reference.wiped_out
        if repaired.phase == "wipe-out":
            return
        assert len(repaired.patch) == sum(map(len, patched.values()))
        assert repaired.depth <= len(repaired.patch)
        check(stacks, placement)


def check(stacks, placement):
    """Check that every shard is contributed by one live group, from its first S, and that stacks hold what they always
    held."""
    assert lower_bound(placement.groups, len(stacks.live)) <= stacks.S
    for shard, owner in enumerate(stacks.owner):
        assert owner in stacks.live and shard in stacks.orders[owner][: stacks.S]
    for group, order in enumerate(stacks.orders):
        assert sorted(order) == sorted(placement.stacks[group])


@given(placements(), st.randoms(use_true_random=False), st.lists(st.integers(1, 4), min_size=24, max_size=24))
@settings(max_examples=60)
def test_a_shard_is_patched_once_in_a_step_however_many_groups_are_lost_in_it(placement, shuffle, bursts):
    """A shard that was patched in this step, or stood among the first S when it began, is there already."""
    stacks, order = Stacks(placement.stacks), list(range(placement.groups))
    shuffle.shuffle(order)
    for burst in bursts:
        stacks.begin_step()
        have = {(g, s) for g in stacks.live for s in stacks.orders[g][: stacks.S]}
        for _ in range(min(burst, len(order) - 1)):
            repaired = stacks.lose(order.pop())
            if repaired.phase == "wipe-out":
                return
            assert not have & set(repaired.patch)
            have |= set(repaired.patch)
            check(stacks, placement)
            assert all((owner, shard) in have for shard, owner in enumerate(stacks.owner))


@pytest.mark.parametrize("groups, redundancy", [(200, 9), (600, 8)])
def test_at_the_published_sizes_too(groups, redundancy):
    placement = golomb(groups, redundancy)
    stacks, order = Stacks(placement.stacks), list(range(groups))
    random.Random(1).shuffle(order)
    for number, group in enumerate(order):
        stacks.begin_step()
        before, S = tuple(map(tuple, stacks.orders)), stacks.S
        repaired = stacks.lose(group)
        if repaired.phase == "wipe-out":
            return
        if number % 7 == 0:
            reference = reconfigure(before, stacks.live, S)
            assert (repaired.phase, repaired.S, len(repaired.moves)) == (
                reference.phase,
                reference.S,
                len(reference.moves),
            )
