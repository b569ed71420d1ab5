"""Collectives that do not end: when a wait is too long, and which rank the others wait for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.core.detection import collective_stalls
from megatron_ft.core.detection.collective_stalls import CEILING_S, Call, Pace, Report, Training, find, unended
from megatron_ft.core.detection.rank_health import FACTOR, LEARNED, LEAST_S, LOOK_S

LABELS = {"1": "tp", "2": "dp"}


def report(position: int, *calls: Call, members=None, **more) -> Report:
    entered: dict[str, int] = {}
    for call in calls:
        if not call.p2p:
            entered[call.group] = max(call.number, entered.get(call.group, 0))
    return Report(position, 100 + position, calls=calls, entered=entered, members=members or {}, labels=LABELS, **more)


def reports(*several: Report) -> dict[int, Report]:
    return {one.position: one for one in several}


def reduces(number: int, ended: bool = False, group: str = "1", name: str = "all_reduce", sizes: str = "[[4]]") -> Call:
    return Call(group, number, name, sizes, ended)


# --- which rank -------------------------------------------------------------------------------------------------------


def test_the_rank_that_did_not_enter_is_named():
    waiting = [report(position, reduces(811, ended=True), reduces(812)) for position in (0, 1, 2)]
    found = find(reports(*waiting, report(3, reduces(811, ended=True))), 4)
    assert found.why == "rank 3 did not enter all_reduce #812 of tp; ranks 0, 1, 2 wait in it"
    assert found.guilty == (3,) and not found.excuse


def test_a_rank_that_does_not_answer_is_named_as_such():
    found = find(reports(report(0, reduces(5))), 2)
    assert found.why == "rank 1 did not enter all_reduce #5 of tp; rank 0 waits in it (rank 1 did not answer)"


def test_a_rank_with_an_excuse_is_left_to_its_agent():
    found = find(reports(report(0, reduces(5)), report(1, excuse="inside the dataset")), 2)
    assert (found.guilty, found.excuse) == ((1,), "rank 1 is inside the dataset")


def test_an_excuse_covers_no_other_rank():
    found = find(reports(report(0, reduces(5)), report(1, excuse="inside the dataset"), report(2)), 3)
    assert (found.guilty, found.excuse) == ((2,), "")


def test_the_culprit_is_found_behind_ranks_that_wait_for_it():
    """0 and 1 wait in tp; 1 waits for 0 there, 0 waits for 2 in dp: only 2 is at fault."""
    members = {"1": (0, 1), "2": (0, 2)}
    found = find(
        reports(
            report(0, reduces(9, group="2"), members=members),
            report(1, reduces(4), members=members),
            report(2, members=members),
        ),
        3,
    )
    assert found.why == "rank 2 did not enter all_reduce #9 of dp; rank 0 waits in it"


def test_another_operation_at_the_same_place_is_a_mismatch():
    found = find(reports(*(report(at, reduces(7)) for at in (0, 1)), report(2, reduces(7, name="all_gather"))), 3)
    assert found.guilty == (2,) and found.why == (
        "rank 2 called another operation as collective #7 of tp: rank 2 called all_gather, ranks 0, 1 called all_reduce"
    )
    found = find(reports(report(0, reduces(7)), report(1, reduces(7, name="all_gather"))), 2)
    assert found.guilty == () and "rank 0 called all_reduce" in found.why


def test_ranks_that_wait_for_each_other_accuse_none():
    found = find(reports(report(0, reduces(5)), report(1, reduces(3, group="2"))), 2)
    assert found.guilty == ()
    assert found.why == "ranks wait for each other: rank 0 in all_reduce #5 of tp, rank 1 in all_reduce #3 of dp"


def test_a_collective_that_all_have_entered_blames_the_network():
    found = find(reports(report(0, reduces(5)), report(1, reduces(5, sizes="[[8]]"))), 2)
    assert found.guilty == () and "no rank is missing in it: the network or a device" in found.why
    assert "the sizes differ: [[4]] at rank 0, [[8]] at rank 1" in found.why


def test_the_other_end_of_a_message():
    receive = Call("1", 3, "recv", p2p=True, peer=0)
    found = find(reports(report(0), report(1, receive)), 2)
    assert found.why == "rank 0 did not enter the other end of recv #3 of tp; rank 1 waits in it"
    send = Call("1", 8, "send", p2p=True, peer=1)
    assert find(reports(report(0, send), report(1, receive)), 2).guilty == ()


def test_a_group_in_which_no_rank_waits():
    assert find(reports(report(0, reduces(5, ended=True)), report(1)), 2) is None


def test_operations_of_a_batch_end_with_the_batch():
    batch = [Call("1", number, "send", p2p=True, peer=1) for number in (1, 2)]
    coalesced = Call("1", 2, "coalesced", p2p=True)
    assert unended([*batch, replace(coalesced, ended=True)]) == []
    assert unended([*batch, coalesced]) == [*batch, coalesced]


@st.composite
def histories(draw):
    """Ranks of a group that run the same collectives of some process groups; one of them stops before one of its own."""
    size = draw(st.integers(2, 6))
    everyone = tuple(range(size))
    sub = draw(st.lists(st.sampled_from(everyone), min_size=2, unique=True).map(lambda ranks: tuple(sorted(ranks))))
    members = {"1": everyone, "2": sub}
    program = draw(st.lists(st.sampled_from("12"), min_size=1, max_size=12))
    late = draw(st.sampled_from(everyone))
    mine = [number for number, group in enumerate(program) if late in members[group]]
    stops_at = draw(st.sampled_from(mine)) if mine else len(program)
    return size, members, program, late, stops_at


@given(histories())
def test_the_late_rank_of_any_history_is_named_and_no_other(history):
    size, members, program, late, stops_at = history
    at = dict.fromkeys(range(size), 0)  # rank -> place in the program that it has not passed
    moved = True
    while moved:
        moved = False
        for rank in range(size):
            while at[rank] < len(program) and not (rank == late and at[rank] == stops_at):
                ranks = members[program[at[rank]]]
                if rank in ranks and any(
                    at[other] < at[rank] or (other == late and at[other] == stops_at == at[rank]) for other in ranks
                ):
                    break  # it has entered, and waits
                at[rank] += 1
                moved = True
    said = {}
    for rank in range(size):
        calls, counts = [], {"1": 0, "2": 0}
        for number, group in enumerate(program):
            if rank in members[group] and number <= at[rank] and not (rank == late and number >= stops_at):
                counts[group] += 1
                calls.append(reduces(counts[group], ended=number < at[rank], group=group))
        said[rank] = report(rank, *calls, members=members)
    found = find(said, size)
    if stops_at < len(program) and len(members[program[stops_at]]) > 1:
        assert found is not None and found.guilty == (late,)
    else:
        assert found is None


@given(
    st.dictionaries(
        st.integers(0, 3),
        st.lists(
            st.builds(
                Call,
                st.sampled_from("12"),
                st.integers(1, 5),
                st.sampled_from(["all_reduce", "send"]),
                st.just(""),
                st.booleans(),
                st.booleans(),
                st.none() | st.integers(0, 3),
            )
        ),
        max_size=4,
    )
)
def test_any_reports_are_judged(said):
    given_ = {at: report(at, *calls) for at, calls in said.items()}
    found = find(given_, 4)
    assert (found is None) == all(one.waits_in is None for one in given_.values())
    assert found is None or (found.why and set(found.guilty) <= set(range(4)))


# --- when -------------------------------------------------------------------------------------------------------------


def after(*signs: tuple[object, float], finished: int = LEARNED, given_s: float | None = None) -> Pace:
    """Return the pace after staying inside with each sign for so many seconds."""
    pace, now = Pace(), 0.0
    for sign, seconds in signs:
        for _ in range(int(seconds / LOOK_S) + 1):
            pace = collective_stalls.look(pace, Training(sign, True, finished), now, given_s)
            now += LOOK_S
    return pace


def test_the_limit_is_learned():
    assert after((1, 2.0), (2, 0.0), finished=LEARNED - 1).limit_s(None) == (CEILING_S, "it has just started")
    assert after((1, 2.0), (2, 0.0)).limit_s(None) == (LEAST_S, "the least")
    limit_s, why = after((1, 20.0), (2, 1.0)).limit_s(None)
    assert limit_s == pytest.approx(200.0, rel=0.05) and why.startswith("10 times the longest so far, 20")


def test_a_number_is_the_limit():
    assert after((1, 5.0), finished=0, given_s=7.0).limit_s(7.0) == (7.0, "collective_timeout_s")


def test_a_hang_that_ends_is_not_learned():
    assert after((1, 1.0), (2, 90.0), (3, 1.0)).longest_s == after((1, 1.0), (2, 0.0)).longest_s


def test_time_outside_of_the_engine_does_not_count():
    pace = after((1, 50.0))
    pace = collective_stalls.look(pace, Training(1, False, LEARNED), 51.0, None)
    pace = collective_stalls.look(pace, Training(1, False, LEARNED), 900.0, None)
    assert collective_stalls.look(pace, Training(1, True, LEARNED), 901.0, None).still_s == 0.0


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.integers(0, 5), st.floats(-5, 3600)), max_size=60))
def test_the_limit_stays_between_floor_and_ceiling(looks):
    pace, now = Pace(), 0.0
    for sign, inside, finished, passed in looks:
        now += passed
        before = pace
        pace = collective_stalls.look(pace, Training(sign, inside, finished), now, None)
        learned = min(max(LEAST_S, FACTOR * pace.longest_s), CEILING_S)
        assert pace.limit_s(None)[0] == (CEILING_S if finished < LEARNED else learned)
        assert pace.longest_s >= before.longest_s
        assert 0 <= pace.still_s <= before.still_s + LOOK_S
        assert before.last.inside or pace.still_s == 0
