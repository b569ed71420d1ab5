"""The restarts of lost groups: never too often, never after an end, never without a member to come back to."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.core.lifecycle.restart_policy import (
    FIRST_S,
    HOUR_S,
    LONGEST_S,
    WELL_S,
    WELL_TIMES,
    Group,
    Loss,
    Seats,
    is_due,
    kind_of,
    lost,
    member,
    never,
    started,
)
from megatron_ft.errors import GroupLeft, RunStopped, StartOver, StoreError
from megatron_ft.types import Exit, View

PER_HOUR = 100
FAILED, DIED = "failed", "died"


def live_and_die(lives, per_hour, kind=DIED, begun=True):
    """Play a group with these lengths of life and delays of its starts; return (starts, pauses, the group at the
    end)."""
    group, now, starts, pauses = Group(), 0.0, [], []
    for number, (seconds, late) in enumerate(lives):
        now += seconds
        group = lost(group, Loss(number, kind, f"words {number}", begun), now, per_hour)
        if group.never:
            return starts, pauses, group
        assert group.due >= now and not is_due(group, group.due - 1e-3) and is_due(group, group.due)
        pauses.append(group.due - now)
        now = group.due + late
        starts.append(now)
        group = started(group, now)
    return starts, pauses, group


lives = st.lists(st.tuples(st.floats(0, 4000), st.floats(0, 100)), max_size=40)


@given(lives, st.integers(1, 8), st.sampled_from([FAILED, DIED]))
def test_a_group_is_never_started_more_often_in_any_hour_than_is_allowed(lives, per_hour, kind):
    starts, _, _ = live_and_die(lives, per_hour, kind)
    for last in starts:
        assert sum(last - HOUR_S < start <= last for start in starts) <= per_hour


@given(st.lists(st.floats(0, WELL_S - 1), min_size=1, max_size=20), st.lists(st.sampled_from([FAILED, DIED])))
def test_a_group_that_is_soon_lost_again_waits_longer_every_time(seconds, kinds):
    group, now, pauses = Group(), 0.0, []
    for number, lived in enumerate(seconds):
        now += lived
        kind = kinds[number % len(kinds)] if kinds else DIED
        group = lost(group, Loss(number, kind, f"words {number}"), now, PER_HOUR)
        pauses.append(group.due - now)
        assert group.quick == number + 1
        now = group.due
        group = started(group, now)
    assert pauses[0] <= FIRST_S + 1e-6 and max(pauses) <= LONGEST_S + 1e-6
    assert all(later >= before - 1e-6 for before, later in zip(pauses, pauses[1:], strict=False))


def test_the_pauses():
    died = live_and_die([(1.0, 0.0)] * 9, PER_HOUR)[1]
    failed = live_and_die([(1.0, 0.0)] * 9, PER_HOUR, FAILED)[1]
    assert died == pytest.approx([0, 1, 2, 4, 8, 16, 32, 60, 60])
    assert failed == pytest.approx([1, 2, 4, 8, 16, 32, 60, 60, 60]), "its neighbours may fail of the same in a moment"


def test_a_good_time_is_a_new_beginning():
    _, pauses, group = live_and_die([(1.0, 0.0), (1.0, 0.0), (WELL_S, 0.0), (1.0, 0.0)], PER_HOUR)
    assert pauses == pytest.approx([0, 1, 0, 1]) and group.incarnation == 4


@given(st.floats(0.01, 50), st.floats(0, 10), st.integers(1, 5))
def test_a_group_that_was_a_member_for_long_compared_with_its_return_begins_anew(took, times, before):
    """Both times may be short; a moment as a member, or none, changes nothing."""
    _, _, group = live_and_die([(1.0, 0.0)] * before, PER_HOUR)
    at = group.lost_at + took
    seen = member(member(group, at), at + 1.0)
    assert seen.back == at, "the first sight counts"
    now = at + times * took
    well = now - at >= WELL_TIMES * (at - group.lost_at) or now - group.since >= WELL_S
    assert lost(seen, Loss(before, DIED, ""), now, PER_HOUR).quick == (1 if well else before + 1)
    assert lost(group, Loss(before, DIED, ""), group.since + 1.0, PER_HOUR).quick == before + 1


def test_losses_of_an_hour_ago_do_not_count():
    starts, _, group = live_and_die([(HOUR_S, 0.0)] * 50, 1)
    assert len(starts) == 50 and not group.never
    starts, _, group = live_and_die([(1.0, 0.0), (HOUR_S - 1, 0.0)], 1)
    assert len(starts) == 1
    for words in ("started again 1 times within an hour", "restarts_per_hour is 1", "words 1", "or allow more"):
        assert words in group.never


@given(lives, st.sampled_from(["left", "ended", "over"]), st.integers(0, 100))
def test_a_group_that_is_not_wanted_back_stays_away(lives, kind, later):
    _, _, group = live_and_die(lives, PER_HOUR)
    if group.down:
        return
    group = lost(group, Loss(group.incarnation, kind, "why"), 1e6, PER_HOUR)
    assert group.never == "why" and not group.pending and not is_due(group, 1e6 + later)
    again = lost(group, Loss(group.incarnation, DIED, "after all"), 1e6 + later, PER_HOUR)
    assert again == group, "the first verdict counts"


def test_a_group_that_has_announced_its_leave_does_not_come_back_if_it_is_killed_before():
    group = lost(never(Group(), "leaves after step 3"), Loss(0, DIED, "SIGKILL"), 5.0, PER_HOUR)
    assert group.down and group.never == "leaves after step 3" and not is_due(group, 1e9)


@given(st.integers(0, 5), st.integers(0, 5))
def test_only_a_verdict_against_the_present_start_counts(present, accused):
    group = replace(Group(), incarnation=present)
    assert lost(group, Loss(accused, DIED, ""), 1.0, PER_HOUR).down == (present == accused)


def failures(*ends):
    """Return a group that fails with these (words, begun), one after the other."""
    group, now = Group(), 0.0
    for number, (words, begun) in enumerate(ends):
        now += 1.0
        group = lost(group, Loss(number, FAILED, words, begun), now, PER_HOUR)
        if group.never:
            break
        now = group.due
        group = started(group, now)
    return group


def test_a_group_that_fails_the_same_way_twice_before_its_first_step_is_given_up():
    group = failures(("no such file", False), ("no such file", False), ("not reached", False))
    assert group.incarnation == 1 and "twice, in the same words: no such file" in group.never


@pytest.mark.parametrize(
    "ends",
    [
        [("no such file", False), ("out of memory", False), ("no such file", False)],
        [("no such file", False), ("no such file", True), ("no such file", False)],
        [("no such file", True), ("no such file", True)],
    ],
    ids=["in other words", "but trained in between", "after some steps"],
)
def test_other_failures_are_no_pattern(ends):
    assert not failures(*ends).never


# --- the meaning of an exit -------------------------------------------------------------------------------------------

FOUR = View(3, (0, 1, 2), "", incarnations={1: 2})


def ended(group=1, **how):
    return Exit(group, 0, 7, "h", **{"signal": None, "code": None, **how})


@pytest.mark.parametrize(
    ("exit_", "incarnation", "kind"),
    [
        (ended(signal="SIGKILL"), 2, "died"),
        (ended(signal="SIGSEGV"), 2, "died"),
        (ended(signal="SIGTERM"), 2, "ended"),
        (ended(code=GroupLeft.exit_code), 2, "left"),
        (ended(code=0), 2, "ended"),
        (ended(code=1), 2, "failed"),
        (ended(code=StoreError.exit_code), 2, "died"),
        (ended(code=StartOver.exit_code), 2, "died"),
        (ended(code=RunStopped.exit_code), 2, "over"),
        (ended(code=RunStopped.exit_code), 3, "died"),
        (ended(code=RunStopped.exit_code), 1, "died"),
        (ended(3, code=RunStopped.exit_code), 0, "died"),
    ],
)
def test_an_exit_code_gives_the_state_of_the_group(exit_, incarnation, kind):
    """A group with a seat stops because all groups do; one without a seat was left out."""
    assert kind_of(exit_, incarnation, Seats(FOUR)) == kind


def test_left_out_by_too_few_is_no_reason_to_come_back():
    assert kind_of(ended(3, code=RunStopped.exit_code), 0, Seats(FOUR, min_groups=4)) == "over"
    assert kind_of(ended(code=RunStopped.exit_code), 2, Seats(View(4, (), "wipe-out"))) == "over"


def test_the_groups_that_are_left():
    seats = Seats(FOUR)
    assert seats.taken == {0, 1, 2} and seats.enough
    assert seats.without(1, 1).taken == {0, 1, 2}, "that was an older start"
    seats = seats.without(1, 2).without(0, 0).without(0, 0)
    assert seats.taken == {2} and seats.enough
    seats = seats.without(2, 0)
    assert not seats.taken and not seats.enough
    later = seats.after(View(4, (2,), "", incarnations={2: 1}))
    assert later.taken == {2} and later.after(FOUR) == later
    assert not Seats(FOUR, min_groups=4).enough
