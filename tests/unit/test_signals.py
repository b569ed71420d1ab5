"""The meaning of a signal: a death names its group, a broken connection names none; and both survive the notice log."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.core.protocol import signals
from megatron_ft.core.protocol.messages import EpochAborted, GroupFailed, JoinRequested, LeaveAnnounced
from megatron_ft.core.protocol.signals import (
    HostSilent,
    RankExited,
    RankUnresponsive,
    classify,
    ends,
    from_json,
    to_json,
)
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
deaths = st.builds(RankExited, exits, numbers)
resets = st.builds(EpochAborted, epoch=numbers, by=numbers, why=st.text(), after=st.just(-1) | numbers)

accusations = st.builds(
    RankUnresponsive,
    group=numbers,
    position=numbers,
    pid=numbers,
    host=st.text(min_size=1),
    why=st.text(),
    incarnation=numbers,
)


units = st.lists(numbers, min_size=1).map(tuple)
silences = st.builds(
    HostSilent,
    by=st.text(),
    about=st.text(),
    groups_by=units,
    groups_about=units,
    silent_s=st.floats(0, 9),
    heard=st.booleans(),
    incarnation=numbers,
)


def test_hosts_of_one_name_are_told_apart_by_their_numbers():
    """Notices of runs on one host, and of earlier versions, have no numbers."""
    silent = HostSilent("vm(10.0.0.2)", "vm(10.0.0.3)", (1,), (2,), 0.9, hosts=(1, 2))
    assert classify(silent).reason == "host 1 (vm) has heard nothing of host 2 (vm) for 0.9 s"
    assert classify(replace(silent, heard=True)).reason == "host 1 (vm) hears host 2 (vm) again"
    assert classify(replace(silent, hosts=())).reason.startswith(
        "host vm(10.0.0.2) has heard nothing of host vm(10.0.0.3)"
    )
    ended = Exit(0, 1, 7, "n3", "SIGKILL", None, host_rank=1)
    assert str(ended) == "rank 1 on host 1 (n3), pid 7, ended with SIGKILL"
    assert str(replace(ended, host_rank=None)) == "rank 1 on n3 (pid 7) ended with SIGKILL"
    given_up = RankUnresponsive(0, 1, 7, "n3", "is stopped", host_rank=0)
    assert classify(given_up).reason == "rank 1 on host 0 (n3), pid 7, is stopped"
    assert from_json(to_json(silent)) == silent and from_json(to_json(given_up)) == given_up


leavings = st.builds(LeaveAnnounced, group=numbers, after=numbers, why=st.text(), incarnation=numbers)
donors = st.lists(st.tuples(numbers, numbers), min_size=1).map(tuple)
askings = st.builds(JoinRequested, group=numbers, incarnation=numbers, donors=donors, after=numbers)


@given(silences)
def test_silence_accuses_a_pair_of_hosts_and_no_host_alone(signal):
    """A group that has ranks on both hosts has come apart, whichever of them is cut off."""
    verdict = classify(signal)
    shared = set(signal.groups_by) & set(signal.groups_about)
    if shared and not signal.heard:
        assert verdict == GroupFailed(min(shared), verdict.reason, signal.incarnation)
    else:
        assert verdict == signal
    assert signal.by in verdict.reason and signal.about in verdict.reason


@given(leavings)
def test_a_group_that_leaves_is_not_dead_yet(signal):
    assert classify(signal) == signal
    assert signal.why in signal.reason and str(signal.after) in signal.reason


@given(askings)
def test_a_group_that_asks_for_a_seat_is_passed_on_with_its_donors(signal):
    assert classify(signal) == signal


@given(accusations)
def test_a_group_that_is_given_up_is_out_with_the_reason(signal):
    verdict = classify(signal)
    assert verdict == GroupFailed(signal.group, verdict.reason, signal.incarnation)
    for word in (f"rank {signal.position}", signal.host, f"pid {signal.pid}", signal.why):
        assert word in verdict.reason


@given(deaths)
def test_a_death_is_a_verdict_against_one_incarnation_of_one_group(signal):
    """One dead rank takes its whole group out; the notice names no epoch, as it concerns whichever the group is in."""
    verdict = classify(signal)
    assert verdict == GroupFailed(signal.exit.group, verdict.reason, signal.incarnation, verdict.microbatch, ended=True)
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
    assert classify(signal).microbatch == (Microbatch(3, 1, 0) if blamed else None)


def test_a_notice_of_an_agent_that_names_no_microbatch_is_understood():
    ended = {"group": 1, "position": 0, "pid": 7, "host": "h", "signal": None, "code": 1}
    assert classify(from_json({"kind": "RankExited", "incarnation": 0, "exit": ended})).microbatch is None
    assert "in microbatch 3/1.0 (" in str(Exit(1, 0, 7, "h", None, 1, "IndexError", "3/1.0"))


@given(resets)
def test_a_reset_ends_its_epoch_and_accuses_no_group(signal):
    """gloo never says which rank is lost, so the rank that reports the reset, or its neighbour, must not be taken for
    dead."""
    assert classify(signal) == signal
    assert signal.reason == f"group {signal.by} reports: {signal.why}"


def test_a_reset_without_a_step_ends_the_epoch_at_once():
    said = from_json({"kind": "EpochAborted", "epoch": 3, "by": 1, "why": "x"})
    assert classify(said) == EpochAborted(3, "x", after=-1, by=1)


def test_an_invalid_signal_is_refused():
    with pytest.raises(ValueError, match="kind 'omen' is not known; do all nodes run the same megatron_ft"):
        from_json({"kind": "omen"})


def test_a_late_silence_does_not_accuse_the_next_start_of_a_group():
    view = View(5, (0, 1), "", incarnations={1: 2})
    silent = [HostSilent("a", "b", (1,), (1,), 0.9, incarnation=number) for number in (1, 2)]
    assert [ends(classify(signal), view, 0) for signal in silent] == [False, True]


VIEW = View(4, (0, 1, 3), "", incarnations={3: 2})


@pytest.mark.parametrize(
    ("verdict", "over"),
    [
        (GroupFailed(1, ""), True),
        (GroupFailed(2, ""), False),
        (GroupFailed(3, "", incarnation=2), True),
        (GroupFailed(3, "", incarnation=1), False),
        (EpochAborted(4, ""), True),
        (EpochAborted(3, ""), False),
        (EpochAborted(4, "", after=6), True),
        (EpochAborted(4, "", after=7), False),  # a group in step 7 finishes it
        (JoinRequested(2, 1, ((0, 0), (3, 2)), after=0), False),  # core ends the epoch at a boundary, and announces it
        (HostSilent("a", "b", (0, 1), (2, 3), 1.0), True),
        (HostSilent("a", "b", (0, 1), (2,), 1.0), False),
        (HostSilent("a", "b", (0, 1), (2, 3), 1.0, heard=True), False),
        (LeaveAnnounced(1, 7, ""), False),
    ],
)
def test_verdicts_that_end_an_epoch(verdict, over):
    assert ends(verdict, VIEW, step=7) == over


pairs = st.sampled_from([(0,), (1,), (1, 2)])
heard = st.one_of(
    st.builds(GroupFailed, st.integers(0, 2), st.just("died"), st.integers(0, 3)),
    st.builds(EpochAborted, st.integers(0, 3), st.just("broke"), st.integers(-1, 3)),
    st.builds(HostSilent, st.just("a"), st.just("b"), pairs, pairs, st.just(1.0), st.booleans()),
    st.builds(signals.ViewAgreed, st.integers(0, 3)),
)


@given(verdicts=st.lists(heard, max_size=12))
@settings(max_examples=100)
def test_a_verdict_that_a_rank_forgets_would_never_have_ended_an_epoch(verdicts):
    """Compared with a rank that keeps everything, for every view and step; in order, or not."""
    remembered: tuple = ()
    everything: list = []
    for verdict in verdicts:
        remembered = signals.remember(remembered, verdict)
        withdrawn = verdict.units if isinstance(verdict, HostSilent) and verdict.heard else None
        everything = [old for old in everything if not (isinstance(old, HostSilent) and old.units == withdrawn)]
        everything.append(verdict)
    for epoch, live, step in product(range(4), [(0,), (0, 1), (0, 1, 2)], range(4)):
        for start in range(4):
            view = View(epoch, live, "", incarnations={1: start})
            ended = [
                {signals.in_order(verdict) for verdict in some if signals.ends(verdict, view, step)}
                for some in (everything, remembered)
            ]
            assert ended[0] == ended[1]


def test_the_memory_of_a_rank_does_not_grow_with_the_losses():
    remembered: tuple = ()
    for loss in range(1000):
        for verdict in (
            GroupFailed(loss % 3, "killed", loss),
            HostSilent("a", "b", (0,), (1,), 1.0),
            HostSilent("a", "b", (0,), (1,), 1.0, heard=True),
        ):
            remembered = signals.remember(remembered, verdict)
    assert len(remembered) == 3
