"""A flush whose list grows while it runs: each stage and slice in a thread, tensors as messages that are waited for."""

from __future__ import annotations

import queue
import random
import threading
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.run.engines.layout import Layout
from megatron_ft.run.engines.pipeline_flush import Flow, Pass
from megatron_ft.run.engines.port import Listed
from megatron_ft.types import Microbatch

PATIENCE_S = 60.0
"""The limit of a wait, which only a deadlock reaches."""


class Wire:
    """Words and tensors from one position to another, in order; sending never waits."""

    def __init__(self) -> None:
        self.queues: dict[tuple, queue.SimpleQueue] = defaultdict(queue.SimpleQueue)
        self.lock = threading.Lock()

    def of(self, *key) -> queue.SimpleQueue:
        with self.lock:
            return self.queues[key]


class Ends:
    """One position's ``Control``."""

    def __init__(self, wire: Wire, position: int) -> None:
        self.wire, self.position = wire, position

    def send_words(self, position, words):
        self.wire.of("words", self.position, position).put((*words, *(0,) * (8 - len(words))))

    def heard(self, position):
        try:
            return self.wire.of("words", position, self.position).get_nowait()
        except queue.Empty:
            return None

    def receive_words(self, position):
        return self.wire.of("words", position, self.position).get(timeout=PATIENCE_S)


class Growing:
    """The first stage's ``Work``: ``growth[i]`` more microbatches from the i-th question on; ``shuffled``: in another order
    at each question; ``closes_at``: the list may be closed from this question on."""

    def __init__(self, count: int, growth: dict[int, int], shuffled: bool = False, closes_at: int = 1000) -> None:
        self.count, self.growth, self.asked = count, growth, 0
        self.shuffled, self.closes_at, self.closed = shuffled, closes_at, False

    def listed(self):
        self.count += self.growth.pop(self.asked, 0)
        self.asked += 1
        found = [Listed(Microbatch(3, i % 4, i), patch=i % 2 == 1, part=i % 3) for i in range(self.count)]
        if self.shuffled:
            random.Random(self.asked).shuffle(found)
        return found

    def closes(self, listed):
        assert not self.closed, "a list is closed once"
        assert listed and listed[-1].microbatch.index < self.count
        self.closed = self.asked > self.closes_at
        if self.closed:
            self.growth.clear()
        return self.closed


def run_stage(layout: Layout, position: int, wire: Wire, work: Growing | None, done: list[Pass], failed: list) -> None:
    flow = Flow(layout, Ends(wire, position), work)
    try:
        while (turn := flow.next()) is not None:
            before, after = position - layout.slices, position + layout.slices
            first, last = layout.stage == 0, layout.stage + 1 == layout.stages
            if turn.kind == "forward":
                if not first:
                    assert wire.of("activation", before, position).get(timeout=PATIENCE_S) == turn.listed
                done.append(turn)
                if not last:
                    wire.of("activation", position, after).put(turn.listed)
            else:
                if not last:
                    assert wire.of("gradient", after, position).get(timeout=PATIENCE_S) == turn.listed
                done.append(turn)
                if not first:
                    wire.of("gradient", position, before).put(turn.listed)
    except BaseException as error:
        failed.append((layout, error))


def play(stages: int, slices: int, work: Growing) -> list[list[Pass]]:
    wire, failed = Wire(), []
    done: list[list[Pass]] = [[] for _ in range(stages * slices)]
    threads = []
    for position in range(stages * slices):
        layout = Layout.of(position, stages=stages, slices=slices)
        own = work if position == 0 else None
        arguments = (layout, position, wire, own, done[position], failed)
        threads.append(threading.Thread(target=run_stage, args=arguments, daemon=True))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not failed, failed
    assert not any(thread.is_alive() for thread in threads), "stages wait for each other"
    return done


@settings(max_examples=60)
@given(
    stages=st.integers(1, 4),
    slices=st.integers(1, 2),
    count=st.integers(0, 6),
    growth=st.dictionaries(st.integers(0, 14), st.integers(1, 3), max_size=3),
    shuffled=st.booleans(),
    closes_at=st.sampled_from([0, 4, 1000]),
)
def test_every_stage_does_all_of_a_list_that_grows_without_a_deadlock(
    stages, slices, count, growth, shuffled, closes_at
):
    work = Growing(count, dict(growth), shuffled, closes_at)
    done = play(stages, slices, work)
    expected = [Listed(Microbatch(3, i % 4, i), patch=i % 2 == 1, part=i % 3) for i in range(work.count)]
    if shuffled:  # all stages have the order in which the first one began them
        begun = [turn.listed for turn in done[0] if turn.kind == "forward"]
        assert sorted(begun) == sorted(expected)
        expected = begun
    for position, passes in enumerate(done):
        for kind in ("forward", "backward"):
            assert [turn.listed for turn in passes if turn.kind == kind] == expected, f"position {position}"
            closed = [turn.index for turn in passes if turn.kind == kind and turn.last]
            assert closed == ([work.count - 1] if work.closed else []), f"position {position}"
        in_flight = most = 0
        for turn in passes:
            in_flight += 1 if turn.kind == "forward" else -1
            most = max(most, in_flight)
        assert most <= stages - position // slices, "more activations are held than 1F1B needs"
    for stage in range(stages):
        assert len({tuple(done[stage * slices + slice]) for slice in range(slices)}) == 1, "slices of a stage disagree"


@pytest.mark.parametrize("count", [0, 1, 8])
def test_a_list_that_does_not_grow_is_plain_1f1b(count):
    done = play(3, 1, Growing(count, {}))
    kinds = ["".join(turn.kind[0] for turn in passes) for passes in done]
    if count == 8:
        assert kinds == ["fff" + "bf" * 5 + "bbb", "ff" + "bf" * 6 + "bb", "fb" * 8]
    else:
        assert [len(passes) for passes in done] == [2 * count] * 3


def test_what_joins_a_running_flush_does_not_drain_it():
    """Eight microbatches and four more, known before the fifth pass: the first stage never runs out of forward passes."""
    done = play(2, 1, Growing(4, {5: 4}))
    kinds = "".join(turn.kind[0] for turn in done[0])
    assert kinds == "ff" + "bf" * 6 + "bb"
