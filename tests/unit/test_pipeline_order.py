"""The order of what remains in a flush, against every other order of small cases."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.core.scheduling import pipeline_order
from megatron_ft.core.scheduling.pipeline_1f1b import Progress, next_instruction
from megatron_ft.types import Microbatch


class Waiting(NamedTuple):
    """A microbatch that has not begun. ``standby``: the group does not contribute it; ``at_hand``: its samples are in
    memory."""

    standby: bool = False
    at_hand: bool = True


def reorder(listed: Sequence[Waiting]) -> list[int]:
    """Return the places of ``listed`` in the order in which they should begin."""
    ids = [Microbatch(0, 0, place) for place in range(len(listed))]
    standby = {one for one, how in zip(ids, listed, strict=True) if how.standby}
    at_hand = {one for one, how in zip(ids, listed, strict=True) if how.at_hand}
    return [one.index for one in pipeline_order.reorder(ids, standby, at_hand)]


class Costs(NamedTuple):
    """Seconds of a forward and of a backward pass of one stage."""

    forward: float = 1.0
    backward: float = 2.0


def ends(ready: Sequence[float], costs: Sequence[Costs]) -> list[float]:
    """Return when each microbatch's backward pass is through at the first stage, in the order of the list. ``ready``: when
    the first stage has the samples of each microbatch, in the order in which they begin. ``costs``: of the stages."""
    stages = len(costs)
    todo = [instructions(stage, stages, len(ready)) for stage in range(stages)]
    free, through = [0.0] * stages, dict[tuple[str, int, int], float]()  # (kind, microbatch, stage) -> when it is done
    while any(todo):
        for stage, own in enumerate(costs):
            while todo[stage]:
                kind, index = todo[stage][0]
                before = stage - 1 if kind == "forward" else stage + 1
                comes = through.get((kind, index, before)) if 0 <= before < stages else ready[index]
                if comes is None:
                    break
                cost = own.forward if kind == "forward" else own.backward
                free[stage] = through[kind, index, stage] = max(free[stage], comes) + cost
                todo[stage].pop(0)
    return [through["backward", index, 0] for index in range(len(ready))]


def instructions(stage: int, stages: int, count: int) -> list[tuple[str, int]]:
    """Return all that a stage does, in order: kind and microbatch."""
    found, done = [], Progress()
    while (move := next_instruction(stage, stages, done, count)) is not None:
        found.append(tuple(move))
        forward = move.kind == "forward"
        done = Progress(done.forwards + forward, done.backwards + (not forward))
    return found


costs = st.builds(Costs, st.sampled_from([0.5, 1.0, 3.0]), st.sampled_from([1.0, 2.0, 5.0]))
waiting = st.lists(st.builds(Waiting, st.booleans(), st.booleans()), min_size=1, max_size=5)


def complete(order, listed: list[Waiting], stages: list[Costs], begun: int, fetch_s: float) -> tuple[float, float]:
    """Return when the last contributed microbatch and the last of all are through. ``begun`` others come before; the samples
    that are not in memory are fetched one after the other from the beginning, in the order of the list."""
    fetched, ready = 0.0, []
    for place in order:
        fetched += 0.0 if listed[place].at_hand else fetch_s
        ready.append(0.0 if listed[place].at_hand else fetched)
    found = ends([0.0] * begun + ready, stages)[begun:]
    needed = [end for end, place in zip(found, order, strict=True) if not listed[place].standby]
    return max(needed, default=0.0), max(found)


@given(waiting, st.lists(costs, min_size=1, max_size=4), st.integers(0, 3), st.sampled_from([0.0, 1.0, 4.0, 20.0]))
@settings(max_examples=100)
def test_no_other_order_completes_the_contribution_sooner(listed, stages, begun, fetch_s):
    chosen = complete(reorder(listed), listed, stages, begun, fetch_s)
    others = [complete(order, listed, stages, begun, fetch_s) for order in permutations(range(len(listed)))]
    assert chosen[0] <= min(needed for needed, _ in others) + bound(listed, stages) + 1e-9


def bound(listed: list[Waiting], stages: list[Costs]) -> float:
    """Return by how much another order may be better: one microbatch through all stages, where standby work could begin
    while the samples of a contribution are fetched."""
    fills = any(one.standby and one.at_hand for one in listed) and any(
        not (one.standby or one.at_hand) for one in listed
    )
    return sum(stage.forward + stage.backward for stage in stages) if fills else 0.0


@given(waiting, st.lists(costs, min_size=1, max_size=4), st.integers(0, 3), st.sampled_from([0.0, 1.0, 4.0, 20.0]))
@settings(max_examples=100)
def test_it_is_not_later_than_appending(listed, stages, begun, fetch_s):
    chosen = complete(reorder(listed), listed, stages, begun, fetch_s)
    appended = complete(range(len(listed)), listed, stages, begun, fetch_s)
    assert chosen[0] <= appended[0] + bound(listed, stages) + 1e-9


def test_patches_that_stand_behind_standby_work_are_done_sooner():
    """Four stages, six standby microbatches that have not begun, and two patches: 6 * 3 seconds sooner."""
    listed = [Waiting(standby=True)] * 6 + [Waiting()] * 2
    stages = [Costs(1.0, 2.0)] * 4
    appended = complete(range(8), listed, stages, 2, 0.0)
    chosen = complete(reorder(listed), listed, stages, 2, 0.0)
    assert appended[0] - chosen[0] == pytest.approx(18.0) and appended[1] == chosen[1]


def test_samples_are_fetched_while_others_are_computed():
    listed = [Waiting(at_hand=False)] * 2 + [Waiting()] * 6
    stages = [Costs(1.0, 2.0)] * 2
    appended = complete(range(8), listed, stages, 0, 6.0)
    chosen = complete(reorder(listed), listed, stages, 0, 6.0)
    assert chosen[1] < appended[1] - 5.0


@given(st.integers(1, 6), st.integers(1, 8))
def test_a_flush_takes_the_time_of_1f1b(stages, count):
    assert ends([0.0] * count, [Costs(1.0, 1.0)] * stages)[-1] == 2 * (count + stages - 1)


def test_equal_microbatches_keep_their_order():
    listed = [Waiting(), Waiting(standby=True), Waiting(), Waiting(at_hand=False), Waiting(standby=True)]
    assert reorder(listed) == [0, 2, 3, 1, 4]
