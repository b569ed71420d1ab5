"""1F1B that can grow: never a deadlock, never a microbatch twice, one drain and refill per recovery."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.core.scheduling.pipeline_1f1b import Instruction, Progress, next_instruction


def clocked(stages: int, counts: list[int]) -> list[list[Instruction | None]]:
    """A pipeline in lock step, one instruction per stage and tick; ``counts[t]`` is the list's length from tick t on.

    A forward needs the stage before, a backward the stage behind to have done it in an earlier tick.
    """
    done = [Progress() for _ in range(stages)]
    ticks: list[list[Instruction | None]] = []
    while True:
        count = counts[min(len(ticks), len(counts) - 1)]
        moves: list[Instruction | None] = []
        for stage in range(stages):
            move = next_instruction(stage, stages, done[stage], count)
            if move and not ready(move, stage, stages, done):
                move = None
            moves.append(move)
        if not any(moves):
            assert all(p == Progress(count, count) for p in done), f"deadlock at {done} of {count}"
            if len(ticks) >= len(counts) - 1:
                return ticks
        done = [p if m is None else advance(p, m) for p, m in zip(done, moves, strict=True)]
        ticks.append(moves)


def ready(move: Instruction, stage: int, stages: int, done: list[Progress]) -> bool:
    if move.kind == "forward":
        return stage == 0 or done[stage - 1].forwards > move.index
    return stage == stages - 1 or done[stage + 1].backwards > move.index


def advance(done: Progress, move: Instruction) -> Progress:
    forward = move.kind == "forward"
    return Progress(done.forwards + forward, done.backwards + (not forward))


def whole(stage: int, stages: int, count: int) -> list[Instruction]:
    """Return all instructions of a stage, in order."""
    found, done = [], Progress()
    while (move := next_instruction(stage, stages, done, count)) is not None:
        found.append(move)
        done = advance(done, move)
    return found


def test_the_schedule_is_1f1b():
    names = ["".join((i.kind[0], str(i.index))) for i in whole(0, 3, 5)]
    assert names == "f0 f1 f2 b0 f3 b1 f4 b2 b3 b4".split()
    assert [i.kind[0] for i in whole(2, 3, 3)] == list("fbfbfb")


@given(stages=st.integers(1, 6), count=st.integers(0, 12))
def test_every_microbatch_once_each_way(stages, count):
    for stage in range(stages):
        schedule = whole(stage, stages, count)
        for kind in ("forward", "backward"):
            assert [i.index for i in schedule if i.kind == kind] == list(range(count))
        assert max_in_flight(schedule) <= stages - stage


def max_in_flight(schedule) -> int:
    level = highest = 0
    for instruction in schedule:
        level += 1 if instruction.kind == "forward" else -1
        highest = max(highest, level)
    return highest


@given(stages=st.integers(1, 6), count=st.integers(1, 10))
def test_without_growth_it_takes_the_time_of_1f1b(stages, count):
    """Unit times: count forwards and backwards plus stages - 1 of each to fill and drain."""
    assert len(clocked(stages, [count])) == 2 * (count + stages - 1)


@given(stages=st.integers(1, 5), counts=st.lists(st.integers(0, 4), min_size=1, max_size=30))
def test_growing_at_any_moment_never_deadlocks(stages, counts):
    total, lengths = 0, []
    for added in counts:
        total += added
        lengths.append(total)
    ticks = clocked(stages, lengths)
    for stage in range(stages):
        done = [tick[stage] for tick in ticks if tick[stage]]
        assert len(done) == len(set(done)) == 2 * total


@given(stages=st.integers(2, 6), count=st.integers(2, 8), patch=st.integers(1, 4), data=st.data())
def test_a_patch_that_fits_costs_no_second_fill_and_drain(stages, count, patch, data):
    """Appended before the drain begins, k microbatches cost what k more from the start would have."""
    steady = 2 * (count - 1)  # the first stage's last forward is later than this
    at = data.draw(st.integers(0, max(0, steady - stages)))
    grown = len(clocked(stages, [count] * at + [count + patch]))
    assert grown == 2 * (count + patch + stages - 1)
    assert grown < len(clocked(stages, [count])) + len(clocked(stages, [patch]))


@given(stages=st.integers(1, 6), count=st.integers(1, 8), patch=st.integers(1, 4), data=st.data())
def test_a_patch_in_the_running_flush_never_costs_more_than_a_flush_of_its_own(stages, count, patch, data):
    alone = len(clocked(stages, [count]))
    at = data.draw(st.integers(0, alone - 1))
    assert len(clocked(stages, [count] * at + [count + patch])) <= alone + len(clocked(stages, [patch]))


@given(stages=st.integers(1, 5), count=st.integers(1, 6), patch=st.integers(1, 3), data=st.data())
def test_a_patch_joins_the_flush_exactly_while_the_first_stage_still_works(stages, count, patch, data):
    """What comes before the first stage's last backward is done never costs a whole flush more, what comes after does."""
    alone, own = len(clocked(stages, [count])), len(clocked(stages, [patch]))
    at = data.draw(st.integers(0, alone + 2))
    ticks = clocked(stages, [count] * at + [count + patch])
    if at >= alone:
        assert len(ticks) == at + own
    else:
        assert len(ticks) <= alone + own


@pytest.mark.parametrize(
    ("stage", "done", "count"),
    [(3, Progress(), 1), (-1, Progress(), 1), (0, Progress(1, 2), 4), (0, Progress(5, 0), 4)],
)
def test_impossible_states_are_refused(stage, done, count):
    with pytest.raises(ValueError):
        next_instruction(stage, 3, done, count)
