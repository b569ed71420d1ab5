"""The prefetcher: the order of loading, the samples that are kept, the waits; a dataset that misbehaves."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.data.prefetch import Prefetcher
from megatron_ft.errors import DataError
from megatron_ft.types import Microbatch

PATIENCE_S = 60.0
"""The limit of a wait, which only a failing test reaches."""


def shard(step: int, number: int, count: int = 2) -> list[Microbatch]:
    return [Microbatch(step, number, index) for index in range(count)]


OWN, REST, NEXT = shard(0, 0), shard(0, 1), shard(1, 0)


class Dataset:
    """A dataset that notes its calls; a microbatch in ``gates`` is loaded when its gate opens, one in ``bad``
    raises."""

    read_ahead = True

    def __init__(self, *gated: Microbatch, bad: dict[Microbatch, BaseException] | None = None) -> None:
        self.gates = {microbatch: threading.Event() for microbatch in gated}
        self.entered = {microbatch: threading.Event() for microbatch in gated}
        self.bad = bad or {}
        self.calls: list[Microbatch] = []
        self.background: list[Microbatch] = []
        self.inside = threading.Lock()

    def __call__(self, microbatch: Microbatch) -> str:
        assert self.inside.acquire(blocking=False), "two calls overlap"
        try:
            self.calls.append(microbatch)
            if threading.current_thread().name == "megatron_ft-prefetch":
                self.background.append(microbatch)
            if microbatch in self.gates:
                self.entered[microbatch].set()
                assert self.gates[microbatch].wait(PATIENCE_S)
            if microbatch in self.bad:
                raise self.bad[microbatch]
            return f"samples of {microbatch}"
        finally:
            self.inside.release()

    read = __call__


@pytest.fixture
def prefetcher():
    made = Prefetcher()
    yield made
    made.close()


def until(prefetcher: Prefetcher, condition: Callable[[], bool]) -> None:
    with prefetcher._changed:
        assert prefetcher._changed.wait_for(condition, PATIENCE_S)


def until_held(prefetcher: Prefetcher, *microbatches: Microbatch) -> None:
    until(prefetcher, lambda: set(microbatches) <= set(prefetcher._held))


def test_own_share_then_stack_then_the_next_steps_share(prefetcher):
    dataset = Dataset()
    prefetcher.begin(dataset, OWN, [*OWN, *REST], NEXT)
    assert prefetcher.get(OWN[0]) == (f"samples of {OWN[0]}", False)
    until_held(prefetcher, *OWN[1:], *REST, *NEXT)
    assert dataset.calls == [*OWN, *REST, *NEXT]
    assert dataset.background == [*OWN[1:], *REST, *NEXT], "the first call is the training thread's"
    assert prefetcher.get(REST[1]) == (f"samples of {REST[1]}", True)
    elsewhere = Microbatch(0, 7, 0)
    assert prefetcher.get(elsewhere) == (f"samples of {elsewhere}", False)


def test_a_requested_microbatch_goes_before_the_queue(prefetcher):
    """The training thread waits for the call that is going on, and for nothing else."""
    dataset = Dataset(OWN[1])
    prefetcher.begin(dataset, OWN, [*OWN, *REST], NEXT)
    prefetcher.get(OWN[0])
    assert dataset.entered[OWN[1]].wait(PATIENCE_S)
    got = []
    asking = threading.Thread(target=lambda: got.append(prefetcher.get(REST[1])))
    asking.start()
    until(prefetcher, lambda: prefetcher._asked)
    dataset.gates[OWN[1]].set()
    asking.join(PATIENCE_S)
    assert got == [(f"samples of {REST[1]}", False)]
    until_held(prefetcher, *NEXT)
    assert dataset.calls == [*OWN, REST[1], REST[0], *NEXT]


def test_what_is_taken_over_is_loaded_before_the_queue(prefetcher):
    """Patches come in the middle of a step, and the rest of the stack may still be in the queue."""
    patches = shard(0, 7)
    dataset = Dataset(REST[0])
    prefetcher.begin(dataset, OWN, REST, NEXT)
    assert prefetcher.get(OWN[0]) == (f"samples of {OWN[0]}", False)
    assert dataset.entered[REST[0]].wait(PATIENCE_S)
    prefetcher.want([*patches, OWN[1]])  # the latter is held or queued already
    dataset.gates[REST[0]].set()
    until_held(prefetcher, *patches, REST[1])
    assert dataset.calls.index(patches[0]) < dataset.calls.index(patches[1]) < dataset.calls.index(REST[1])
    assert prefetcher.held([*patches, Microbatch(0, 9, 9)]) == set(patches)
    assert len(dataset.calls) == len(set(dataset.calls))


def test_a_microbatch_that_is_being_loaded_is_waited_for_and_was_not_prefetched(prefetcher):
    dataset = Dataset(OWN[1])
    prefetcher.begin(dataset, OWN, OWN, [])
    prefetcher.get(OWN[0])
    assert dataset.entered[OWN[1]].wait(PATIENCE_S)
    got = []
    asking = threading.Thread(target=lambda: got.append(prefetcher.get(OWN[1])))
    asking.start()
    until(prefetcher, lambda: prefetcher._asked)
    dataset.gates[OWN[1]].set()
    asking.join(PATIENCE_S)
    assert got == [(f"samples of {OWN[1]}", False)]
    assert dataset.calls == OWN


def test_the_next_steps_share_is_kept_and_older_steps_are_dropped(prefetcher):
    dataset = Dataset()
    prefetcher.begin(dataset, OWN, [*OWN, *REST], NEXT)
    for microbatch in OWN:
        prefetcher.get(microbatch)
    until_held(prefetcher, *REST, *NEXT)
    later = shard(2, 0)
    prefetcher.begin(dataset, NEXT, NEXT, later)
    assert not set(REST) & set(prefetcher._held)
    assert [prefetcher.get(microbatch)[1] for microbatch in NEXT] == [True, True]
    until_held(prefetcher, *later)
    assert dataset.calls.count(NEXT[0]) == 1


def test_a_group_that_hosts_everything_holds_its_own_share_only(prefetcher):
    """No stack is told then, and the next step's samples come when there is room."""
    dataset = Dataset()
    prefetcher.begin(dataset, OWN, [], NEXT)
    prefetcher.get(OWN[0])
    until_held(prefetcher, OWN[1], NEXT[0])
    assert len(prefetcher._held) == len(OWN)
    prefetcher.get(OWN[1])
    until_held(prefetcher, *NEXT)


@pytest.mark.parametrize("error", [ValueError("bad sample"), SystemExit(3)], ids=["an error", "an exit"])
def test_an_error_in_the_background_leaves_a_gap(prefetcher, error, capfd):
    dataset = Dataset(bad={OWN[1]: error, REST[0]: error})
    prefetcher.begin(dataset, OWN, [*OWN, *REST], NEXT)
    prefetcher.get(OWN[0])
    until_held(prefetcher, REST[1], *NEXT)
    with pytest.raises(type(error)):
        prefetcher.get(OWN[1])
    assert prefetcher.get(REST[1])[1], "the others are not touched by it"
    assert dataset.calls.count(OWN[1]) == 2
    assert capfd.readouterr().err.count("failed in the background") == 1


def test_an_error_of_the_first_call_is_the_training_threads(prefetcher):
    dataset = Dataset(bad={OWN[0]: OSError("disk")})
    prefetcher.begin(dataset, OWN, OWN, [])
    with pytest.raises(OSError, match="disk"):
        prefetcher.get(OWN[0])
    assert prefetcher.get(OWN[1]) == (f"samples of {OWN[1]}", False)


class Drawing:
    """A dataset that draws from all global generators."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []

    def __call__(self, microbatch: Microbatch) -> tuple[float, float, float]:
        self.threads.append(threading.current_thread())
        return random.random(), float(np.random.rand()), float(torch.rand(1))


def test_draws_from_global_generators_follow_from_the_microbatch_and_stay_in_the_training_thread(prefetcher):
    """Whatever was drawn before: the model draws between two calls, and another group makes them in another order."""
    dataset, found = Drawing(), dict[Microbatch, list[tuple[float, float, float]]]()
    for order in ([*OWN, *REST], [REST[1], OWN[0]]):
        prefetcher.begin(dataset, OWN, [*OWN, *REST], NEXT)
        for microbatch in order:
            sample, prefetched = prefetcher.get(microbatch)
            assert not prefetched
            found.setdefault(microbatch, []).append(sample)
            random.random(), np.random.rand(), torch.rand(1)
    assert found[OWN[0]][0] == found[OWN[0]][1] and found[REST[1]][0] == found[REST[1]][1]
    for numbers in zip(*(samples[0] for samples in found.values()), strict=True):
        assert len(set(numbers)) == len(found), "each microbatch has random numbers of its own"
    assert set(dataset.threads) == {threading.current_thread()}


def test_a_dataset_that_draws_is_not_read_ahead_whatever_it_says(prefetcher):
    dataset = Drawing()
    dataset.read_ahead = True
    prefetcher.begin(dataset, OWN, [*OWN, *REST], NEXT)
    with pytest.raises(DataError, match=r"random and numpy.random and torch for microbatch 0/0.0.*Remove read_ahead"):
        prefetcher.get(OWN[0])


def test_another_dataset_gets_nothing_of_the_one_before(prefetcher):
    first, second = Dataset(), Dataset()
    prefetcher.begin(first, OWN, [*OWN, *REST], [])
    prefetcher.get(OWN[0])
    until_held(prefetcher, *REST)
    prefetcher.begin(second, OWN, [*OWN, *REST], [])
    assert not prefetcher.get(REST[0])[1]
    assert second.calls[0] == REST[0]


def test_a_method_is_the_same_dataset_each_time_it_is_looked_up(prefetcher):
    dataset = Dataset()
    prefetcher.begin(dataset.read, OWN, OWN, NEXT)
    prefetcher.get(OWN[0])
    until_held(prefetcher, *NEXT)
    prefetcher.begin(dataset.read, NEXT, NEXT, [])
    assert prefetcher.get(NEXT[0])[1]


def test_the_thread_ends_with_the_prefetcher_and_samples_are_loaded_all_the_same():
    prefetcher, dataset = Prefetcher(), Dataset(OWN[1])
    prefetcher.begin(dataset, OWN, [*OWN, *REST], NEXT)
    prefetcher.get(OWN[0])
    assert dataset.entered[OWN[1]].wait(PATIENCE_S)
    prefetcher.close()
    dataset.gates[OWN[1]].set()
    prefetcher._thread.join(PATIENCE_S)
    assert not prefetcher._thread.is_alive()
    assert dataset.calls == OWN
    assert prefetcher.get(REST[0]) == (f"samples of {REST[0]}", False)
    assert prefetcher._thread.daemon, "a dataset that hangs does not keep the process"


@given(st.data())
@settings(max_examples=60)
def test_any_history_of_requests_gets_the_right_samples_within_the_bound(data):
    """Groups of 2 shards; a step is taken or left at any moment, with microbatches of other shards asked for too."""
    prefetcher, dataset = Prefetcher(), Dataset()
    per_shard = data.draw(st.integers(1, 3))
    try:
        for step in range(data.draw(st.integers(1, 5))):
            stack = [*shard(step, 0, per_shard), *shard(step, 1, per_shard)]
            own = data.draw(st.permutations(stack + shard(step, 2, per_shard)))[: data.draw(st.integers(1, len(stack)))]
            following = shard(step + 1, 0, per_shard)
            prefetcher.begin(dataset, own, stack, following)
            dataset.calls.clear()
            asked = data.draw(st.lists(st.sampled_from(sorted({*own, *stack, *shard(step, 3, 1)})), unique=True))
            for microbatch in asked:
                assert prefetcher.get(microbatch)[0] == f"samples of {microbatch}"
                with prefetcher._changed:
                    held = set(prefetcher._held)
                assert len(held) <= len(own) + len(stack)
                assert held <= {*own, *stack, *following}
            assert len(dataset.calls) == len(set(dataset.calls)), "nothing is loaded twice in a step"
    finally:
        prefetcher.close()
        prefetcher._thread.join(PATIENCE_S)
    assert not prefetcher._thread.is_alive()


def test_a_step_too_short_for_prefetching_loads_nothing_and_keeps_its_own_share(prefetcher):
    dataset = Dataset()
    prefetcher.begin(dataset, OWN, [*OWN, *REST], NEXT)
    prefetcher.get(OWN[0])
    until_held(prefetcher, *OWN[1:], *REST, *NEXT)
    calls = len(dataset.calls)
    prefetcher.rest(dataset, 1)
    assert set(prefetcher._held) == set(NEXT), "what was left of step 0 is dropped"
    assert prefetcher.get(NEXT[0]) == (f"samples of {NEXT[0]}", True)
    assert prefetcher.get(shard(1, 3)[0]) == (f"samples of {shard(1, 3)[0]}", False)
    assert len(dataset.calls) == calls + 1
