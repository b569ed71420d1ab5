"""What a signal means: a death names its group, a broken connection names nobody; and both survive the notice log."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.core.detector import Asking, Ended, GivenUp, Leaving, Reset, Silent, ends, from_json, judge, to_json
from megatron_ft.core.protocol import Asked, Broke, Died, Leaves, Missed
from megatron_ft.types import Exit, Microbatch, View

numbers = st.integers(0, 10**6)
exits = st.builds(
    Exit,
    group=numbers,
    position=numbers,
    pid=numbers,
    host=st.text(min_size=1),
    signal=st.none() | st.sampled_from(["SIGKILL", "SIGSEGV"]),
    code=st.none() | st.integers(0, 255),
    detail=st.text(),
    microbatch=st.none() | st.sampled_from(["3/1.0", "torn/", ""]),
)
deaths = st.builds(Ended, exits, numbers)
resets = st.builds(Reset, epoch=numbers, by=numbers, detail=st.text(), after=st.just(-1) | numbers)

accusations = st.builds(
    GivenUp, group=numbers, position=numbers, pid=numbers, host=st.text(min_size=1), why=st.text(), incarnation=numbers
)


units = st.lists(numbers, min_size=1).map(tuple)
silences = st.builds(
    Silent,
    by=st.text(),
    about=st.text(),
    groups_by=units,
    groups_about=units,
    silent_s=st.floats(0, 9),
    heard=st.booleans(),
    incarnation=numbers,
)
leavings = st.builds(Leaving, group=numbers, after=numbers, why=st.text(), incarnation=numbers)
donors = st.lists(st.tuples(numbers, numbers), min_size=1).map(tuple)
askings = st.builds(Asking, group=numbers, incarnation=numbers, donors=donors, after=numbers)


@given(silences)
def test_silence_accuses_a_pair_of_hosts_and_nobody_alone(signal):
    """But a group that has ranks on both has come apart, whichever of them is cut off."""
    verdict = judge(signal)
    shared = set(signal.groups_by) & set(signal.groups_about)
    if shared and not signal.heard:
        assert verdict == Died(min(shared), verdict.reason, signal.incarnation)
    else:
        assert verdict == Missed(signal.groups_by, signal.groups_about, verdict.reason, signal.heard)
    assert signal.by in verdict.reason and signal.about in verdict.reason


@given(leavings)
def test_who_leaves_is_not_dead_yet(signal):
    verdict = judge(signal)
    assert verdict == Leaves(signal.group, signal.after, verdict.reason, signal.incarnation)
    assert signal.why in verdict.reason


@given(askings)
def test_who_asks_says_whom_it_follows(signal):
    assert judge(signal) == Asked(signal.group, signal.incarnation, signal.donors, signal.after)


@given(accusations)
def test_who_is_given_up_is_out_with_the_reason(signal):
    verdict = judge(signal)
    assert verdict == Died(signal.group, verdict.reason, signal.incarnation)
    for word in (f"rank {signal.position}", signal.host, f"pid {signal.pid}", signal.why):
        assert word in verdict.reason


@given(deaths)
def test_a_death_is_a_verdict_against_one_incarnation_of_one_group(signal):
    """One dead rank takes its whole group out; no epoch is named, it concerns whichever the group is in."""
    verdict = judge(signal)
    assert verdict == Died(signal.exit.group, verdict.reason, signal.incarnation, verdict.microbatch)
    how = signal.exit.signal or f"exit code {signal.exit.code}"
    for word in (f"rank {signal.exit.position}", signal.exit.host, f"pid {signal.exit.pid}", how, signal.exit.detail):
        assert word in verdict.reason


@given(st.builds(Microbatch, numbers, numbers, numbers))
def test_a_microbatch_reads_back(microbatch):
    assert Microbatch.parse(str(microbatch)) == microbatch


@given(deaths)
def test_a_microbatch_is_blamed_for_an_exception_only(signal):
    """A signal comes from outside; a torn name accuses nothing."""
    blamed = signal.exit.signal is None and signal.exit.microbatch == "3/1.0"
    assert judge(signal).microbatch == (Microbatch(3, 1, 0) if blamed else None)


def test_a_notice_of_an_agent_that_names_no_microbatch_is_understood():
    wire = {"kind": "ended", "incarnation": 0, "group": 1, "position": 0, "pid": 7, "host": "h", "signal": None, "code": 1}
    assert judge(from_json(wire)).microbatch is None
    assert "in microbatch 3/1.0 (" in str(Exit(1, 0, 7, "h", None, 1, "IndexError", "3/1.0"))


@given(resets)
def test_a_reset_ends_its_epoch_and_accuses_nobody(signal):
    """gloo never says who is lost, so whoever reports the reset, or its neighbour, must not be taken for dead."""
    assert judge(signal) == Broke(signal.epoch, f"group {signal.by}: {signal.detail}", signal.after)


def test_a_reset_of_who_says_no_step_ends_the_epoch_at_once():
    assert judge(from_json({"kind": "reset", "epoch": 3, "by": 1, "detail": "x"})) == Broke(3, "group 1: x", after=-1)


@given(deaths | resets | accusations | silences | leavings | askings)
def test_the_wire_form_keeps_everything(signal):
    assert from_json(json.loads(json.dumps(to_json(signal)))) == signal


def test_what_is_no_signal_is_refused():
    with pytest.raises(ValueError, match="kind 'omen' is not known; do all nodes run the same megatron_ft"):
        from_json({"kind": "omen"})
    with pytest.raises(TypeError, match="'omen' is not a signal"):
        judge("omen")


def test_a_late_silence_does_not_accuse_the_next_start_of_a_group():
    view = View(5, (0, 1), "", incarnations={1: 2})
    silent = [Silent("a", "b", (1,), (1,), 0.9, incarnation=number) for number in (1, 2)]
    assert [ends(judge(signal), view, 0) for signal in silent] == [False, True]


VIEW = View(4, (0, 1, 3), "", incarnations={3: 2})


@pytest.mark.parametrize(
    ("verdict", "over"),
    [
        (Died(1, ""), True),
        (Died(2, ""), False),
        (Died(3, "", incarnation=2), True),
        (Died(3, "", incarnation=1), False),
        (Broke(4, ""), True),
        (Broke(3, ""), False),
        (Broke(4, "", after=6), True),
        (Broke(4, "", after=7), False),  # who works on step 7 finishes it
        (Asked(2, 1, ((0, 0), (3, 2)), after=0), False),  # core ends the epoch at a boundary, and says so
        (Missed((0, 1), (2, 3), ""), True),
        (Missed((0, 1), (2,), ""), False),
        (Missed((0, 1), (2, 3), "", heard=True), False),
        (Leaves(1, 7, ""), False),
    ],
)
def test_what_ends_an_epoch(verdict, over):
    assert ends(verdict, VIEW, step=7) == over
