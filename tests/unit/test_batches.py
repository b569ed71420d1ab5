"""Which microbatches groups load for comparison, and what follows from their digests."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.core.exactness.batches import Sent, chosen, compared, difference
from megatron_ft.types import Microbatch


def plan_of(groups):
    shares = {group: tuple(Microbatch(0, group, index) for index in range(2)) for group in groups}
    return SimpleNamespace(assignment=shares, of=shares.__getitem__)


def sent(pairs, bad=(), returned=()):
    """What groups send in the ring of ``pairs``: group -> the microbatches that it has chosen."""
    content = {group: 8 + bad.index(group) if group in bad else 7 for group in pairs}
    return {
        group: Sent(1 + own.shard, content[group], 1 + other.shard, content[group], int(group in returned))
        for group, (own, other) in pairs.items()
    }


@given(st.sets(st.integers(0, 9), min_size=2), st.data())
def test_each_groups_first_microbatch_is_loaded_by_another_group_and_a_difference_names_both(groups, data):
    plan = plan_of(groups)
    found = {group: chosen(plan, groups, group) for group in groups}
    assert {other for _, other in found.values()} == {own for own, _ in found.values()}
    assert all(own.shard == group != other.shard for group, (own, other) in found.items())
    bad = data.draw(st.sampled_from(sorted(groups)))
    assert compared(sent(found)) == (groups, {}, None)
    took_part, wrong, undecided = compared(sent(found, [bad]))
    assert took_part == groups and not wrong and bad in undecided
    assert chosen(plan, groups - {bad}, bad) is None


@given(st.sets(st.integers(0, 9), min_size=2), st.data())
def test_of_groups_that_came_back_those_with_other_batches_leave_and_only_those(groups, data):
    found = {group: chosen(plan_of(groups), groups, group) for group in groups}
    returned = data.draw(st.sets(st.sampled_from(sorted(groups)), max_size=len(groups) - 1))
    bad = sorted(data.draw(st.sets(st.sampled_from(sorted(returned))))) if returned else []
    _, wrong, undecided = compared(sent(found, bad, returned))
    assert wrong.keys() <= set(bad)
    ring = sorted(groups)
    for at, group in enumerate(ring):
        neighbours = {ring[at - 1], ring[(at + 1) % len(ring)]}
        if group in bad and neighbours - returned:
            assert group in wrong
    if len(bad) == 1:
        assert set(wrong) == set(bad) and undecided is None


def test_a_group_that_came_back_is_not_believed_against_one_that_stayed():
    two = {0: (Microbatch(5, 0, 0), Microbatch(5, 1, 0)), 1: (Microbatch(5, 1, 0), Microbatch(5, 0, 0))}
    _, wrong, undecided = compared(sent(two, [1], [1]))
    assert wrong.keys() == {1} and set(wrong[1]) == {0, 1} and undecided is None
    assert compared(sent(two, [0], [1])).wrong.keys() == {1}
    assert set(compared(sent(two, [1], [0, 1])).undecided) == {0, 1}  # both came back


def test_digests_of_microbatches_that_only_one_group_has_sent_decide_nothing():
    """A group was lost, and others chose in other views."""
    assert compared({0: Sent(1, 5, 3, 6), 1: Sent(2, 7, 1, 5), 2: Sent()}) == ({0, 1}, {}, None)


def test_a_group_that_is_alone_and_loads_two_batches_decides_nothing():
    assert compared({0: Sent(1, 5, 1, 6, 1)}) == ({0}, {}, (0, 0))


def test_the_first_difference_is_named():
    names = ("in group 0", "in group 1")
    one = [("", "dict", "2"), ("['x']", "tensor int64 [4]", "a"), ("['y']", "int", "b")]
    assert difference(one, one, names) == ""
    other = [one[0], ("['x']", "tensor int64 [5]", "c"), one[2]]
    assert difference(one, other, names) == "batch['x'] is tensor int64 [4] in group 0 and tensor int64 [5] in group 1"
    assert difference(one, [*one[:2], ("['y']", "int", "z")], names) == (
        "batch['y'] (int) has another content in group 0 than in group 1"
    )
    assert difference(one, one[:2], names) == "batch['y'] (int) is there in group 0 only"
    assert difference(one[:2], one, names) == "batch['y'] (int) is there in group 1 only"
