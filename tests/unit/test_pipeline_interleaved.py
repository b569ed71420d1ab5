"""The interleaved order: complete, without deadlock, as fast as published, and free to grow and to be put in order."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.core.scheduling.pipeline_1f1b import Progress
from megatron_ft.core.scheduling.pipeline_interleaved import begun_rounds, next_chunk_instruction, rounds_of
from megatron_ft.core.scheduling.pipeline_order import Costs, Waiting, ends, reorder

pipelines = st.tuples(st.integers(1, 4), st.integers(2, 3))


def whole(rank: int, ranks: int, chunks: int, rounds: list[int]) -> list[tuple[str, int, int]]:
    found, done = [], Progress()
    while (move := next_chunk_instruction(rank, ranks, chunks, done, rounds)) is not None:
        found.append(move[:3])
        done = move.after
    return found


def test_the_schedule_is_the_published_one():
    """Figure 4 of arXiv 2104.04473: 4 ranks of 2 chunks, 8 microbatches; the first rank fills with 11 passes."""
    names = [f"{kind[0]}{index + 1}{'ab'[chunk]}" for kind, index, chunk in whole(0, 4, 2, [4, 4])]
    assert names[:11] == "f1a f2a f3a f4a f1b f2b f3b f4b f5a f6a f7a".split()
    assert names[11:19] == "b1b f8a b2b f5b b3b f6b b4b f7b".split()
    assert names[-4:] == "b5a b6a b7a b8a".split()


@given(pipelines, st.integers(0, 9))
def test_every_microbatch_passes_every_chunk_once_each_way(pipeline, count):
    ranks, chunks = pipeline
    for rank in range(ranks):
        schedule = whole(rank, ranks, chunks, rounds_of(count, ranks))
        for kind in ("forward", "backward"):
            passes = [(index, chunk) for one, index, chunk in schedule if one == kind]
            assert sorted(passes) == [(index, chunk) for index in range(count) for chunk in range(chunks)]


@given(st.integers(1, 4), st.integers(2, 3), st.integers(1, 3))
def test_the_pipeline_fills_in_the_share_of_a_chunk(ranks, chunks, rounds):
    """The bubble is (P - 1) (f + b) / chunks (arXiv 2104.04473, section 2.2)."""
    count, costs = ranks * rounds, [Costs(1.0, 2.0)] * ranks
    assert ends([0.0] * count, costs, chunks)[-1] == pytest.approx(3.0 * (count + (ranks - 1) / chunks))


@given(pipelines, st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
@settings(max_examples=200)
def test_a_list_that_grows_at_any_moment_never_deadlocks(pipeline, grows, data):
    """Ranks move in any order; before each move the list may grow, into rounds behind those that have begun."""
    ranks, chunks = pipeline
    done, through, rounds, count = [Progress()] * ranks, set(), list[int](), 0
    while True:
        if grows and (count == 0 or data.draw(st.booleans())):
            count += grows.pop(0)
            rounds = rounds_of(count, ranks, begun_rounds(ranks, chunks, done[0], rounds))
        able = []
        for rank in range(ranks):
            move = next_chunk_instruction(rank, ranks, chunks, done[rank], rounds)
            if move is None:
                continue
            stage = move.chunk * ranks + rank
            if move.kind == "forward":
                ready = stage == 0 or ("forward", move.index, stage - 1) in through
            else:
                last = stage == ranks * chunks - 1
                ready = last or ("backward", move.index, stage + 1) in through
            if ready:
                able.append((rank, move, stage))
        if not able:
            break
        rank, move, stage = data.draw(st.sampled_from(able))
        assert (move.kind, move.index, stage) not in through
        through.add((move.kind, move.index, stage))
        done[rank] = move.after
    assert len(through) == 2 * count * ranks * chunks, f"deadlock: {done} of {rounds}"


waiting = st.lists(st.builds(Waiting, st.booleans()), min_size=1, max_size=5)
costs = st.builds(Costs, st.sampled_from([0.5, 1.0, 3.0]), st.sampled_from([1.0, 2.0, 5.0]))


@given(waiting, st.lists(costs, min_size=1, max_size=3), st.integers(2, 3), st.integers(0, 4))
@settings(max_examples=150)
def test_no_other_order_completes_the_contribution_sooner(listed, stages, chunks, begun):
    """All samples are in memory; ``begun`` microbatches come before."""
    found = ends([0.0] * (begun + len(listed)), stages, chunks)[begun:]

    def complete(order) -> float:
        return max((end for end, place in zip(found, order, strict=True) if not listed[place].standby), default=0.0)

    assert complete(reorder(listed)) <= min(map(complete, permutations(range(len(listed))))) + 1e-9


def test_a_rank_that_does_not_exist_and_impossible_progress_are_refused():
    for refused in ((4, 4, 2, Progress(), [4]), (0, 4, 2, Progress(9, 0), [4]), (0, 2, 2, Progress(), [3])):
        with pytest.raises(ValueError):
            next_chunk_instruction(*refused)
    with pytest.raises(ValueError, match="have begun"):
        rounds_of(3, 2, [2, 2])
