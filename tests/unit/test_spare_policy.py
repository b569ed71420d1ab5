"""The ranks that an idle host takes over."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.core.lifecycle.spare_policy import Part, fitting, parts_of, vacant

PARTS = [Part(0, (0, 1), 0), Part(1, (0,), 1), Part(1, (1,), 2), Part(2, (0, 1), 3)]


def test_the_part_of_a_silent_host_is_vacant_once_the_others_go_on_without_its_group():
    assert vacant(PARTS, away={0}, refused=(), unwanted=(), members={0, 1, 2}) == ()
    assert vacant(PARTS, away={0}, refused=(), unwanted=(), members={1, 2}) == (PARTS[0],)


def test_of_a_group_on_two_hosts_only_the_lost_part_is_vacant():
    assert vacant(PARTS, away={2}, refused=(), unwanted=(), members={0, 2}) == (PARTS[2],)


def test_a_group_that_failed_too_often_at_home_is_vacant_and_one_that_left_is_not():
    assert vacant(PARTS, away=(), refused={(3, 2)}, unwanted=(), members={0, 1}) == (PARTS[3],)
    assert vacant(PARTS, away={3}, refused=(), unwanted={2}, members={0, 1}) == ()


def test_a_refusal_is_that_of_one_host():
    assert vacant(PARTS, away=(), refused={(0, 2)}, unwanted=(), members={0, 1}) == ()


sets = st.sets(st.integers(0, 5))


@given(
    ranks=st.dictionaries(st.integers(0, 5), st.sets(st.tuples(st.integers(0, 5), st.integers(0, 3))), max_size=6),
    away=sets,
    unwanted=sets,
    members=sets,
    room=st.integers(0, 6),
)
def test_no_living_or_unwanted_group_is_taken_and_no_more_than_fits(ranks, away, unwanted, members, room):
    parts = [part for host, own in ranks.items() for part in parts_of(host, own)]
    assert sum(len(part.positions) for part in parts) == sum(map(len, ranks.values()))
    found = vacant(parts, away, (), unwanted, members)
    assert all(part.host in away and part.group not in members | unwanted for part in found)
    taken = fitting(found, room)
    assert sum(len(part.positions) for part in taken) <= room and set(taken) <= set(found)
    if any(len(part.positions) <= room for part in found):
        assert taken, "there was room"
