"""Slow groups: named after a number of slow steps in a row, until as many fast ones, and the same in all groups with
the same numbers."""

import json
import math
from statistics import median

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_ft import codec
from megatron_ft.core.detection.stragglers import MOST_NAMED, Speeds, brief, observe, weights, whole
from megatron_ft.core.protocol import machine
from megatron_ft.core.protocol.machine import Job, Transferred, Updated
from megatron_ft.core.protocol.membership import first_view
from megatron_ft.core.protocol.messages import (
    AwaitView,
    CaughtUp,
    Computed,
    Connected,
    EpochAborted,
    GroupFailed,
    JoinRequested,
    Reduced,
    Stop,
    Tick,
)
from megatron_ft.types import Microbatch, PlanOrigin, Report, View

FACTOR, STEPS = 1.5, 3

seconds = st.one_of(st.just(0.0), st.floats(1e-3, 1e3))
vectors = st.dictionaries(st.integers(0, 7), seconds, max_size=8)


def after(*steps: dict[int, float], speeds: Speeds = Speeds()) -> Speeds:  # noqa: B008 (it is immutable)
    for measured in steps:
        speeds = observe(speeds, measured, FACTOR, STEPS)
    return speeds


def one_slow(ratio: float) -> dict[int, float]:
    return {0: 0.2, 1: 0.2 * ratio, 2: 0.2, 3: 0.2}


def test_three_slow_steps_make_a_straggler_and_three_fast_ones_end_it():
    slow, fast = one_slow(3.0), one_slow(1.2)
    assert after(slow, slow).slow == {}
    assert after(slow, slow, slow).slow == pytest.approx({1: 3.0})
    assert weights(after(slow, slow, slow)) == pytest.approx({1: 1 / 3})
    assert 1 in after(slow, slow, slow, fast, fast).slow
    assert after(slow, slow, slow, fast, fast, fast) == Speeds(0.24)


def test_a_pause_starts_the_count_anew():
    slow, fast = one_slow(3.0), one_slow(1.0)
    assert after(slow, slow, fast, slow, slow).slow == {}
    straggler = after(slow, slow, slow, fast, fast, slow, fast, fast)
    assert list(straggler.slow) == [1], "nor has it recovered"


def test_a_quota_stays_until_the_speed_has_changed_by_a_quarter():
    held = after(*[one_slow(3.0)] * 3)
    assert after(*[one_slow(3.5)] * 5, speeds=held).slow == held.slow
    assert after(*[one_slow(4.0)] * 3, speeds=held).slow == pytest.approx({1: 4.0})


def test_a_group_that_computes_nothing_shows_nothing_and_one_that_is_gone_is_forgotten():
    slow = one_slow(3.0)
    without = {group: s for group, s in slow.items() if group != 1}
    assert after(slow, slow, without, slow).slow == pytest.approx({1: 3.0})
    assert list(after(slow, slow, slow, without, {**slow, 1: 0.0}).slow) == [1]
    assert after(slow, slow, slow, *[without] * STEPS) == Speeds(0.2)


def test_of_two_groups_the_slower_one_is_slow_and_one_alone_never_is():
    assert after(*[{0: 1.0, 1: 2.0}] * 3).slow == {1: 2.0}
    assert after(*[{1: 2.0}] * 3).slow == {}
    assert after(*[{0: 1.0, 1: 2.0}] * 3, {1: 2.0}).slow == {1: 2.0}, "alone it shows nothing new"


def test_a_factor_of_0_names_no_straggler_but_long_microbatches_are_known():
    speeds = Speeds()
    for _ in range(5):
        speeds = observe(speeds, one_slow(9.0), 0.0, STEPS)
    assert speeds == Speeds(1.8) and weights(speeds) == {}


@given(st.lists(vectors, max_size=12), st.floats(1.1, 4), st.integers(1, 4))
def test_invariants_hold_for_any_measurements(history, factor, steps):
    """A group that is named slow has been so; the state survives the wire; a record may hold rounded numbers."""
    speeds = rounded = Speeds()
    ratios: dict[int, list[float]] = {}
    for measured in history:
        before = speeds
        speeds = observe(speeds, measured, factor, steps)
        rounded = observe(rounded, {g: float(f"{s:.3g}") for g, s in reversed(measured.items())}, factor, steps)
        assert speeds == rounded
        assert codec.decode(Speeds, json.loads(json.dumps(codec.encode(speeds)))) == speeds
        there = {g: float(f"{s:.3g}") for g, s in measured.items() if s > 0}
        for group, own in there.items():
            others = [s for other, s in there.items() if other != group]
            if others:
                ratios.setdefault(group, []).append(own / median(others))
        for group in speeds.slow.keys() - before.slow.keys():
            assert len(ratios[group]) >= steps and all(ratio > factor for ratio in ratios[group][-steps:])
        for group in before.slow.keys() - speeds.slow.keys():
            assert group not in there or all(ratio <= factor for ratio in ratios[group][-steps:])
        assert all(0 < weight < 1 for weight in weights(speeds).values())
    assert speeds.longest_s == 0 or speeds.longest_s in {float(f"{s:.3g}") for m in history for s in m.values()}


@given(st.dictionaries(st.integers(0, 3), st.sampled_from([math.nan, math.inf, -1.0, 0.0])))
def test_a_value_that_is_no_time_is_ignored(measured):
    assert after(measured, measured, measured) == Speeds()


# --- the effects on the protocol --------------------------------------------------------------------------------------

JOB = Job(shards=3, per_shard=4, buckets=1, steps=9, straggler_steps=1, report_timeout_s=10.0)


def train(state, measured, steps=1):
    """Commit steps as core asks for them; all groups measure the same each time."""
    for _ in range(steps):
        while isinstance(action := machine.next_action(state), machine.Compute):
            state, _ = machine.step(state, Computed(action.microbatch), 0.0)
        if isinstance(action, machine.Connect):
            state, _ = machine.step(state, Connected(state.view.epoch), 0.0)
        if state.needs_transfer:
            state, _ = machine.step(state, Transferred(state.view.epoch), 0.0)
            state = train(state, measured, 0)
        state, _ = machine.step(state, Reduced(0), 0.0)
        state, _ = machine.step(state, Updated(state.step, measured), 0.0)
    return state


def begun(me=0, job=JOB):
    state = machine.start(me, job, first_view(job.shards))
    state, _ = machine.step(state, Connected(0), 0.0)
    return machine.step(state, Transferred(0), 0.0)[0]


def loads(state):
    return {group: len(state.plan.of(group)) for group in state.plan.assignment}


def test_the_next_plan_spares_a_straggler_and_can_be_foreseen():
    state = begun()
    assert loads(state) == {0: 4, 1: 4, 2: 4}
    state = train(state, {0: 1.0, 1: 1.0, 2: 2.0})
    assert loads(state) == {0: 5, 1: 5, 2: 2}
    foreseen = machine.plan_ahead(state)
    assert loads(train(state, {0: 1.0, 1: 1.0, 2: 2.0})) == {g: len(foreseen.of(g)) for g in range(3)} == loads(state)
    assert loads(train(state, {0: 1.0, 1: 1.0, 2: 1.0})) == {0: 4, 1: 4, 2: 4}


def test_without_measurements_nothing_changes():
    assert train(begun(), {}, 4).speeds == Speeds() and loads(train(begun(), {}, 4)) == {0: 4, 1: 4, 2: 4}


def test_a_group_that_enters_learns_the_slow_groups_with_the_state():
    begun_with = PlanOrigin((0, 1, 2))
    view = View(5, (0, 1, 2), "2 joins", step=3, joined=(2,), plan_origin=begun_with, incarnations={2: 1})
    state = machine.start(2, JOB, view)
    state, _ = machine.step(state, Connected(5), 0.0)
    known = observe(Speeds(), {0: 1.0, 1: 2.0, 2: 1.0}, 1.5, 1)
    state, _ = machine.step(state, CaughtUp(known), 0.0)
    assert state.speeds == known and loads(state) == {0: 5, 1: 2, 2: 5}


def test_a_group_that_hands_the_state_over_keeps_its_own_measurements():
    state = train(begun(), {0: 1.0, 1: 1.0, 2: 2.0})
    view = View(1, (0, 1, 2), "3 joins", step=1, source=0, behind=(1,), plan_origin=state.plan_origin)
    state, _ = machine.step(state, EpochAborted(0, "3 joins"), 0.0)
    state, _ = machine.step(state, machine.ViewSeen(view), 0.0)
    state, _ = machine.step(state, Connected(1), 0.0)
    after_it, _ = machine.step(state, Transferred(1, Speeds()), 0.0)
    assert after_it.speeds == state.speeds != Speeds()


@pytest.mark.parametrize(("longest", "waits_s"), [(0.5, 10), (20.0, 80)])
def test_a_long_microbatch_is_waited_for(longest, waits_s):
    """Group 2 is in its microbatch and cannot report; it is left out after 4 of those, not after report_timeout_s."""
    state = train(begun(), {0: 0.5, 1: 0.5, 2: longest})
    state, _ = machine.step(state, EpochAborted(0, "a reset"), 0.0)
    state, _ = machine.step(state, machine.ReportsSeen((Report(0, 1, 1),)), 0.0)
    while isinstance(action := machine.next_action(state), machine.Compute):
        state, _ = machine.step(state, Computed(action.microbatch), 0.0)
    assert action == AwaitView(0, (2,))
    now, proposed = 0.0, []
    while not proposed:
        now += 0.5
        state, actions = machine.step(state, Tick(), now)
        proposed = [action.view for action in actions if isinstance(action, machine.Propose)]
    assert now == pytest.approx(waits_s, abs=1.0)
    assert proposed[0].live == (0, 1) and "no report within 10 s" in proposed[0].lost[2]


# --- a microbatch that kills ------------------------------------------------------------------------------------------

X = Microbatch(2, 1, 0)


def at_step_2():
    return train(begun(0, Job(shards=4, per_shard=1, buckets=1, steps=9)), {}, 2)


def told(state, *events):
    for event in events:
        state, (*_, action) = machine.step(state, event, 0.0)
    return action


def test_two_groups_that_die_of_the_same_microbatch_stop_the_run():
    action = told(at_step_2(), GroupFailed(1, "IndexError", 0, X), GroupFailed(2, "CUDA out of memory", 0, X))
    assert isinstance(action, Stop)
    for word in ("groups 1 and 2", "2/1.0", "CUDA out of memory", "look at the samples", "memory"):
        assert word in action.reason


@pytest.mark.parametrize(
    "second",
    [
        GroupFailed(1, "again", 0, X),  # another rank of the same group
        GroupFailed(1, "again", 1, X),  # the same group, started again
        GroupFailed(2, "another one", 0, Microbatch(2, 2, 0)),
        GroupFailed(2, "killed"),
    ],
)
def test_one_group_or_two_microbatches_do_not(second):
    assert not isinstance(told(at_step_2(), GroupFailed(1, "IndexError", 0, X), second), Stop)


def test_a_microbatch_that_is_committed_harms_no_group_any_more():
    past = Microbatch(1, 1, 0)
    assert not isinstance(told(at_step_2(), GroupFailed(1, "late", 0, past), GroupFailed(2, "late", 0, past)), Stop)
    ahead = Microbatch(3, 1, 0)  # others are a step further
    assert isinstance(told(at_step_2(), GroupFailed(1, "early", 0, ahead), GroupFailed(2, "early", 0, ahead)), Stop)


def test_the_stop_is_final():
    action = told(
        at_step_2(),
        GroupFailed(1, "a", 0, X),
        GroupFailed(2, "b", 0, X),
        JoinRequested(5, 1, ((0, 0),), 1),
        GroupFailed(3, "c"),
    )
    assert isinstance(action, Stop) and "groups 1 and 2" in action.reason


@given(
    steps=st.lists(
        st.lists(
            st.sampled_from([0.0, 0.02, 0.021, 0.03, 0.1, 0.1001, 0.13, 0.16, 0.5]) | st.floats(0.02, 1.0),
            min_size=20,
            max_size=40,
        ),
        min_size=1,
        max_size=8,
    ),
    factor=st.sampled_from([0.0, 1.1, 1.5, 3.0]),
)
@example(
    steps=[[0.02] * 7 + [0.125, 0.16, 0.2, 0.5, 0.5, 0.54] + [1.0] * 6], factor=3.0
)  # 0.54 / 0.18 > 3, 3 * 0.18 = 0.54
@settings(max_examples=100)
def test_the_compact_record_of_many_groups_leads_to_the_same(steps, factor):
    """This holds for any measurements, as long as few groups are slow at once; and the record is short."""
    exact = rebuilt = Speeds()
    for seconds in steps:
        measured = dict(enumerate(seconds))
        told = brief(measured, exact, factor)
        named = {int(group): s for group, s in told["measured"].items()}
        again = whole(named, told.get("measured_rest", ()))
        assert len(again) == sum(s > 0 for s in seconds) and len(told.get("measured_rest", ())) <= 4
        rebuilt = observe(rebuilt, again, factor, STEPS)
        exact = observe(exact, measured, factor, STEPS)
        if len(named) == MOST_NAMED:
            return
        assert rebuilt == exact


@pytest.mark.parametrize("groups", [512, 4096])
@pytest.mark.parametrize("slow", [0, 3, 0.5])
def test_the_compact_record_does_not_grow_with_the_groups(groups, slow):
    many = slow if slow >= 1 else int(slow * groups)
    measured = {group: 0.1 + 0.0001 * (group % 50) + (group < many) for group in range(groups)}
    assert len(json.dumps(brief(measured, Speeds(), 1.5))) < 1000
