"""The samples of a microbatch: the permutation is a bijection, and no sample is lost or doubled by anything."""

import json

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_ft.data.order import BatchSchedule, Permutation, permutation, sample_indices
from megatron_ft.types import Microbatch

SEEDS = st.integers(-(2**70), 2**70)


def samples_of(step, shard, index, **shape):
    return sample_indices(Microbatch(step, shard, index), **shape).tolist()


@given(n=st.integers(1, 3000), seed=SEEDS, epoch=st.integers(0, 10**6))
@settings(max_examples=100)
@example(n=1, seed=0, epoch=0)
@example(n=2, seed=0, epoch=0)
def test_it_is_a_bijection(n, seed, epoch):
    values = Permutation(n, seed, epoch).many(np.arange(n))
    assert values.dtype == np.int64
    assert sorted(values.tolist()) == list(range(n))


@given(n=st.integers(1, 2**62), seed=SEEDS, data=st.data())
@settings(max_examples=100)
def test_a_position_has_the_same_value_alone_and_among_others(n, seed, data):
    positions = data.draw(st.lists(st.integers(0, n - 1), max_size=20))
    order = Permutation(n, seed)
    values = order.many(np.array(positions, dtype=np.int64)).tolist()
    assert values == [int(order.many(np.array([position]))[0]) for position in positions]
    assert all(0 <= value < n for value in values)


def test_the_order_never_changes():
    """A run may be resumed with a newer version, or on another machine: these values are for ever."""
    assert Permutation(1000, 42, 0).many(np.arange(6)).tolist() == [257, 386, 319, 94, 894, 289]
    assert Permutation(2**62, 5).many(np.array([2**62 - 1])).tolist() == [4270525836796963831]


def test_epochs_and_seeds_give_other_orders():
    positions = np.arange(1000)
    orders = [Permutation(1000, seed, epoch).many(positions).tolist() for seed in (0, 1, -1) for epoch in (0, 1, 2)]
    for i, order in enumerate(orders):
        for other in orders[:i]:
            assert sum(a == b for a, b in zip(order, other, strict=True)) < 12  # one in a thousand is chance


def test_the_order_looks_random():
    """Every value is about as likely at every place, and neighbours have nothing to do with each other."""
    counts = np.zeros((10, 10))
    for seed in range(5000):
        counts[np.arange(10), Permutation(10, seed).many(np.arange(10))] += 1
    assert ((counts - 500) ** 2 / 500).sum() < 150  # chi-square, 81 degrees of freedom: 150 is beyond 1 in 100 000
    values = Permutation(200_000, 1).many(np.arange(200_000)).astype(float)
    assert abs(np.corrcoef(values[1:], values[:-1])[0, 1]) < 0.01
    assert abs(np.corrcoef(values, np.arange(200_000))[0, 1]) < 0.01


@given(
    groups=st.integers(1, 4),
    microbatches_per_group=st.integers(1, 4),
    samples_per_microbatch=st.integers(1, 9),
    num_samples=st.integers(1, 120),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=60)
@example(groups=2, microbatches_per_group=2, samples_per_microbatch=9, num_samples=4, seed=0)  # three epochs in one
def test_every_sample_comes_once_per_data_epoch(seed, **shape):
    """All microbatches of the steps that cover three data epochs, in the order of their ids."""
    per_step = shape["groups"] * shape["microbatches_per_group"] * shape["samples_per_microbatch"]
    steps = -(-3 * shape["num_samples"] // per_step)
    stream = [
        sample
        for step in range(steps)
        for shard in range(shape["groups"])
        for index in range(shape["microbatches_per_group"])
        for sample in samples_of(step, shard, index, seed=seed, **shape)
    ]
    size = shape["num_samples"]
    for epoch in range(3):
        assert sorted(stream[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_a_microbatch_may_straddle_two_data_epochs():
    shape = {"groups": 1, "microbatches_per_group": 1, "samples_per_microbatch": 4, "num_samples": 6, "seed": 3}
    first, second = (permutation(6, 3, epoch).many(np.arange(6)).tolist() for epoch in (0, 1))
    assert samples_of(1, 0, 0, **shape) == [*first[4:], *second[:2]]


def test_it_is_a_pure_function_of_the_id():
    """The caller, the order and the number of the calls change nothing: that is what lets any group compute any
    microbatch."""
    shape = {"groups": 3, "microbatches_per_group": 2, "samples_per_microbatch": 5, "num_samples": 37, "seed": 11}
    ids = [(step, shard, index) for step in range(12) for shard in range(3) for index in range(2)]
    forward = {key: samples_of(*key, **shape) for key in ids}
    permutation.cache_clear()
    assert {key: samples_of(*key, **shape) for key in reversed(ids)} == forward
    assert samples_of(0, 0, 0, **{**shape, "seed": 12}) != forward[0, 0, 0]


def test_late_steps_need_no_more_than_early_ones():
    shape = {
        "groups": 4000,
        "microbatches_per_group": 64,
        "samples_per_microbatch": 8,
        "num_samples": 10**12,
        "seed": 0,
    }
    late = samples_of(10**9, 3999, 63, **shape)
    assert len(set(late)) == 8 and all(0 <= sample < 10**12 for sample in late)


@pytest.mark.parametrize("key", [(0, 2, 0), (0, -1, 0), (0, 0, 3), (0, 0, -1), (-1, 0, 0)])
def test_a_microbatch_no_step_has_is_refused(key):
    shape = {"groups": 2, "microbatches_per_group": 3, "samples_per_microbatch": 1, "num_samples": 5, "seed": 0}
    with pytest.raises(ValueError, match="no microbatch"):
        samples_of(*key, **shape)


def test_misuse_is_refused_with_the_value():
    with pytest.raises(ValueError, match="n=0"):
        Permutation(0, 1)
    order = Permutation(5, 1)
    for positions in ([5], [0, -1]):
        with pytest.raises(ValueError, match="not all inside"):
            order.many(np.array(positions))
    with pytest.raises(ValueError, match="samples_per_microbatch=0"):
        samples_of(0, 0, 0, groups=1, microbatches_per_group=1, samples_per_microbatch=0, num_samples=1, seed=0)


@given(
    first=st.integers(1, 4),
    changes=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 4)), max_size=4).map(sorted),
    groups=st.integers(1, 3),
)
def test_the_microbatches_of_batches_that_change_are_numbered_without_a_gap(first, changes, groups):
    sizes = BatchSchedule(first)
    for step, size in changes:
        sizes.change(step, size)
    expected = [dict(((0, first), *(change for change in changes if change[0] <= step))) for step in range(15)]
    expected = [size[max(size)] for size in expected]
    assert [sizes.at(step) for step in range(15)] == expected
    numbers = [
        sizes.number(Microbatch(step, shard, index), groups)
        for step in range(15)
        for shard in range(groups)
        for index in range(sizes.at(step))
    ]
    assert numbers == list(range(len(numbers)))
    assert sizes.before(15) * groups == len(numbers)
    assert sizes.is_fixed == (set(expected) == {first})
    taken = BatchSchedule(first)
    taken.load_state_dict(json.loads(json.dumps(sizes.state_dict())))
    assert [taken.at(step) for step in range(15)] == expected
    with pytest.raises(ValueError, match="no microbatch"):
        sizes.number(Microbatch(3, 0, sizes.at(3)), groups)


def test_the_size_of_a_past_step_does_not_change():
    sizes = BatchSchedule(2)
    sizes.change(5, 3)
    with pytest.raises(ValueError, match="followed by a change at step 5"):
        sizes.change(4, 1)
