"""The elements of an array job agree on one correct end, whichever of them are lost and return."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.cluster.launchers.slurm.array_board import SILENT_S, ArrayState
from megatron_ft.core.lifecycle import restart_policy
from megatron_ft.core.lifecycle.array_policy import (
    Begin,
    GiveBack,
    Heartbeat,
    Join,
    Launch,
    Limits,
    Own,
    Requeue,
    Seen,
    act,
    decide,
    ended,
    overtaken,
)
from megatron_ft.core.lifecycle.supervisor_policy import Finish
from megatron_ft.errors import WIPED_OUT, GroupLeft, LaunchError

LIMITS = Limits(hosts=3, whole=2)
BEGUN = Begin((0, 1, 2), 0.0)


def heartbeats(*said: Heartbeat) -> dict[int, Heartbeat]:
    return {heartbeat.element: heartbeat for heartbeat in said}


def at_work(*elements: int, run: int = 0) -> dict[int, Heartbeat]:
    return heartbeats(*(Heartbeat(k, run=run, runs=True) for k in elements))


def finished(*elements: int, code: int, run: int = 0) -> dict[int, Heartbeat]:
    return heartbeats(*(Heartbeat(k, run=run, code=code) for k in elements))


def test_a_run_begins_with_enough_elements_and_later_ones_join():
    assert decide([], Seen(0.0, at_work(0, 1, run=-1)), LIMITS) is None
    there = heartbeats(*map(Heartbeat, range(4)))
    assert decide([], Seen(0.0, there), LIMITS) == BEGUN
    assert act(Own(there[2]), [BEGUN], there, 0.0, LIMITS) == Launch(0, 2)
    assert act(Own(there[3]), [BEGUN], there, 0.0, LIMITS) is None, "nobody has begun yet"
    assert act(Own(there[3]), [BEGUN], {**there, **at_work(0)}, 0.0, LIMITS) == Join(0)


def test_no_decision_is_made_while_an_element_may_work():
    lost = finished(1, 2, code=WIPED_OUT)
    assert decide([BEGUN], Seen(9.0, {**lost, **at_work(0)}), LIMITS) is None
    assert decide([BEGUN], Seen(9.0, lost, at_work(0)), LIMITS) is None
    assert decide([BEGUN], Seen(9.0, {**lost, 0: Heartbeat(0)}), LIMITS) is None, "it has not begun yet"


def test_a_returning_element_joins_and_one_on_a_bad_node_is_requeued():
    own = Own(Heartbeat(1, restarts=1, run=0))
    assert act(own, [BEGUN], at_work(0, 2), 0.0, LIMITS) == Join(0)
    for number in range(1, LIMITS.per_node + 1):
        own = ended(own, replace(own.heartbeat, code=-9), 100.0 * number, number)
        assert act(own, [BEGUN], at_work(0, 2), 100.0 * number, LIMITS) != Join(0), "a moment later only"
    assert act(own, [BEGUN], at_work(0, 2), 1e6, LIMITS) == GiveBack(
        "3 agents have ended there within one job", bad=True
    )


def test_a_refused_element_tries_again_and_one_that_left_in_order_does_not():
    own = ended(Own(Heartbeat(1, run=0)), Heartbeat(1, run=0, code=LaunchError.exit_code), 0.0, 1)
    assert own.failures == 0 and act(own, [BEGUN], at_work(0), 1e6, LIMITS) == Join(0)
    left = Own(Heartbeat(1, run=0, code=GroupLeft.exit_code))
    assert act(left, [BEGUN], at_work(0), 1e6, LIMITS) is None


def test_after_the_loss_of_all_elements_one_begins_again():
    back = heartbeats(*(Heartbeat(k, restarts=1, run=0) for k in range(4)))
    again = decide([BEGUN], Seen(9.0, back), LIMITS)
    assert again == Begin((0, 1, 2), 9.0)
    assert decide([BEGUN], Seen(9.0, back), replace(LIMITS, whole=None)).code == WIPED_OUT
    third = Begin((0, 1, 2), 20.0)
    over = decide([BEGUN, again, third], Seen(99.0, heartbeats(*(Heartbeat(k, 3, run=2) for k in range(4)))), LIMITS)
    assert isinstance(over, Finish) and "restarts_per_hour is 2" in over.why


def test_the_outcome_in_the_record_decides():
    there = finished(0, 1, 2, code=WIPED_OUT)
    assert decide([BEGUN], Seen(9.0, at_work(0, 1, 2), outcome=0), LIMITS) == Finish(0, "the run has got to its end")
    assert decide([BEGUN], Seen(9.0, there, outcome=3), LIMITS).code == 3
    assert decide([BEGUN], Seen(9.0, there, outcome=WIPED_OUT), LIMITS) == Begin((0, 1, 2), 9.0)
    refused = finished(0, 1, 2, code=LaunchError.exit_code)
    assert decide([BEGUN], Seen(9.0, refused), LIMITS).code == LaunchError.exit_code
    assert decide([], Seen(9.0, {}, outcome=0), LIMITS).code == 0, "it had got to its end before"


def test_at_the_time_limit_all_are_requeued_once_and_begin_again():
    there = {**finished(0, 1, 2, code=0), 1: Heartbeat(1, run=0, code=0, told="time")}
    requeue = decide([BEGUN], Seen(9.0, there, outcome=3), LIMITS)
    assert requeue == Requeue({0: 0, 1: 0, 2: 0}, "time")
    assert act(Own(there[0]), [BEGUN, requeue], there, 9.0, LIMITS) == GiveBack("time")
    assert decide([BEGUN, requeue], Seen(9.0, there), LIMITS) is None, "they have not come back"
    back = heartbeats(*(Heartbeat(k, restarts=1, run=0) for k in range(3)))
    again = decide([BEGUN, requeue], Seen(99.0, back), LIMITS)
    assert again == Begin((0, 1, 2), 99.0)
    assert act(Own(back[0]), [BEGUN, requeue, again], back, 99.0, LIMITS) == Launch(2, 0)


def test_a_run_that_could_not_save_its_end_is_over_even_if_an_element_has_to_give_its_node_back():
    there = {k: Heartbeat(k, run=0, code=8, told="time" if k == 1 else "") for k in range(3)}
    assert decide([BEGUN], Seen(9.0, there, outcome=8), LIMITS) == Finish(
        8, "all steps are done, but not all of the end is saved; the run's record says what"
    )


def test_a_waiting_element_at_its_time_limit_is_requeued_alone():
    assert act(Own(Heartbeat(3, told="time")), [], {}, 0.0, LIMITS) == GiveBack("time")


@given(st.integers(0, 10**9))
def test_elements_that_only_ask_to_be_let_in_never_hold_back_a_new_start(seed):
    """All elements are requeued at different times while the run works; its control store is gone with them.

    Heartbeats of their earlier starts are there for ``SILENT_S``, so some ask to be let in; each attempt takes its time and
    fails. The run begins again as soon as enough elements are back and those heartbeats are old.
    """
    rng, count = random.Random(seed), 6
    limits = Limits(hosts=rng.randint(1, count), whole=10**6)
    back = {k: rng.randint(1, 60) for k in range(count)}
    old = {k: Heartbeat(k, run=0, runs=True) for k in range(count)}
    own = {k: Own(Heartbeat(k, restarts=1, run=0)) for k in range(count)}
    until: dict[int, int] = {}
    latest = sorted(back.values())[limits.hosts - 1] + SILENT_S + restart_policy.FIRST_S + 2.0
    for now in range(200):
        there = {k: own[k].heartbeat for k in range(count) if back[k] <= now}
        stale = {k: old[k] for k in range(count) if k not in there and now < SILENT_S}
        if (decision := decide([BEGUN], Seen(now, there, stale), limits)) is not None:
            assert isinstance(decision, Begin) and set(decision.hosts) <= set(there)
            assert all(overtaken(heartbeat, [BEGUN, decision]) == heartbeat.asks for heartbeat in there.values())
            return
        assert now <= latest, f"seed {seed}: {own}"
        for k in there:
            if until.get(k) == now:
                own[k] = ended(own[k], Heartbeat(k, 1, 0, code=7), now, 1)
            elif not own[k].heartbeat.runs and act(own[k], [BEGUN], {**stale, **there}, now, limits) == Join(0):
                own[k] = replace(own[k], heartbeat=Heartbeat(k, 1, 0, runs=True, asks=True))
                until[k] = now + rng.randint(2, 40)
    raise AssertionError(f"seed {seed}: {own}")


@given(st.integers(0, 10**9))
def test_every_random_history_reaches_one_end(seed):
    """Agents and nodes of five elements die at random; once the failures stop, all elements end with 0."""
    rng, now, made, moving = random.Random(seed), 0.0, [], set(range(5))
    limits = Limits(hosts=rng.randint(1, 4), whole=10**6)
    own = {k: Own(Heartbeat(k)) for k in range(5)}
    away: dict[int, float] = {}
    for turn in range(4000):
        now += 1.0
        trouble = turn < 200
        for k in [k for k, until in away.items() if until <= now]:
            own[k] = Own(Heartbeat(k, own[k].heartbeat.restarts + 1, own[k].heartbeat.run))
            del away[k]
        there = {k: its.heartbeat for k, its in own.items() if k not in away and k in moving}
        newest = made[-1] if made else None
        enough = isinstance(newest, Begin) and sum(b.runs and b.run == len(made) - 1 for b in there.values()) >= 1
        outcome = 0 if not trouble and enough else None
        decision = decide(made, Seen(now, there, outcome=outcome), limits)
        if decision is not None and rng.random() < 0.7:
            made.append(decision)
        for k in sorted(there):
            its = own[k]
            if its.heartbeat.runs:
                if isinstance(newest, Finish):
                    own[k] = replace(its, heartbeat=replace(its.heartbeat, runs=False, code=0))
                elif trouble and rng.random() < 0.05:
                    own[k] = ended(its, replace(its.heartbeat, runs=False, code=rng.choice([-9, 7])), now, 1)
            else:
                match act(its, made, there, now, limits):
                    case Launch(run=run) | Join(run=run):
                        own[k] = replace(its, heartbeat=replace(its.heartbeat, run=run, runs=True, code=None))
                    case GiveBack():
                        away[k] = now + 5.0
                    case Finish(code=code):
                        assert code == 0
                        moving.discard(k)
            if trouble and rng.random() < 0.02:
                away[k] = now + rng.randint(1, 40)
            if trouble and rng.random() < 0.005:
                own[k] = replace(own[k], heartbeat=replace(own[k].heartbeat, told="time"))
        if not trouble and isinstance(newest, Begin):  # an element that was told ends, and so does the run
            told = any(b.told for b in there.values())
            for k in there:
                if told and own[k].heartbeat.runs:
                    own[k] = replace(own[k], heartbeat=replace(own[k].heartbeat, runs=False, code=3))
        if not moving:
            return
    raise AssertionError(f"seed {seed}: {made[-3:]}, {own}, {away}")


# --- the board --------------------------------------------------------------------------------------------------------


def test_the_first_decision_with_a_number_counts(tmp_path):
    mine, theirs = ArrayState(tmp_path), ArrayState(tmp_path)
    requeue = Requeue({0: 2, 3: 0}, "time")
    mine.write(BEGUN)
    theirs.write(replace(BEGUN, hosts=(4,)))
    assert theirs.read() == [BEGUN]
    theirs.write(requeue)
    assert mine.read() == theirs.read() == [BEGUN, requeue]


def test_an_unchanged_beat_is_silent_and_the_first_other_element_decides(tmp_path):
    now = [0.0]
    board, zero, two = (ArrayState(tmp_path, lambda: now[0]) for _ in range(3))
    zero.heartbeat(Heartbeat(0))
    two.heartbeat(Heartbeat(2, restarts=4))
    assert board.read_heartbeats(range(4)) == ({}, {0: Heartbeat(0), 2: Heartbeat(2, restarts=4)})
    two.heartbeat(Heartbeat(2, restarts=4))
    assert (
        board.read_heartbeats(range(4)) == ({2: Heartbeat(2, restarts=4)}, {0: Heartbeat(0)})
        and board.first(range(4)) == 0
    )
    now[0] = SILENT_S + 1.0
    two.heartbeat(Heartbeat(2, restarts=4))
    assert board.first(range(4)) == 2 and board.last(0) == Heartbeat(0)
