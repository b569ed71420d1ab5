"""Exact reduction: grid, rounding, wire and checksum. The sums must not depend on order, grouping or buckets."""

from __future__ import annotations

import copy
import math
import random
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from megatron_ft.core.exactness import grid
from megatron_ft.run.engines import rounding_loops
from megatron_ft.run.engines.buckets import Buckets
from megatron_ft.run.engines.torch_native import TorchNativeEngine
from megatron_ft.types import Microbatch

MAGNITUDES = st.floats(min_value=2.0**-60, max_value=2.0**60)


@given(MAGNITUDES, st.integers(-60, 60), st.sampled_from([(51, 8), (30, 4)]))
def test_the_next_exponent_leaves_headroom_and_wastes_little(magnitude, exponent, how):
    """After a few steps a constant magnitude has 8 to 12 bits of headroom, with few bits 4 to 8; then the exponent stays."""
    bits, least = how
    for _ in range(8):
        counts = [magnitude >= bound for bound in (5e-324, *(2.0 ** (exponent + o) for o in grid.OFFSETS))]
        before, exponent = exponent, grid.following(exponent, counts, bits)
    headroom = exponent - math.log2(magnitude)
    assert least <= headroom <= least + 4 and exponent == before


@given(st.integers(-100, 100))
def test_a_unit_without_gradients_keeps_its_grid(exponent):
    assert grid.following(exponent, [0] * grid.COUNTS) == exponent


@given(MAGNITUDES, st.integers(-60, 60), st.integers(1, 2**20), st.integers(16, grid.MOST_BITS))
def test_a_sum_that_is_not_discarded_has_the_bits_it_may_have(magnitude, exponent, microbatches, bits):
    """Every partial sum is a whole number of grid units below 2^bits: fp64 and the checksum have room for it."""
    counts = [magnitude >= bound for bound in (5e-324, *(2.0 ** (exponent + o) for o in grid.OFFSETS))]
    if grid.beyond(counts):
        assert grid.following(exponent, counts) > exponent
        return
    unit = Fraction(2) ** grid.lowest(exponent, microbatches, bits)
    assert Fraction(magnitude) < Fraction(2) ** exponent and Fraction(2) ** exponent * microbatches <= unit * 2**bits


def buckets_of(shapes, bucket_mb: float, bits: int, microbatches: int) -> Buckets:
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    buckets = Buckets(parameters, bucket_mb, slots=0, exact_bits=bits)
    assert buckets.rounding is not None
    for bucket in buckets:
        bucket.begin_step()
    buckets.rounding.begin(microbatches)
    buckets.parameters = parameters
    return buckets


def add(buckets: Buckets, gradients) -> None:
    named = {id(parameter): one for parameter, one in zip(buckets.parameters, gradients, strict=True)}
    for number, bucket in enumerate(buckets):
        buckets.rounding.buckets[number].add([named[id(parameter)] for parameter in bucket.parameters])
    buckets.rounding.add_loss(gradients[0].sum() if gradients[0] is not None else torch.tensor(0.5))


def gradients_of(seed: int, shapes, count: int):
    generator = torch.Generator().manual_seed(seed)
    draw = random.Random(seed)
    return [
        [None if draw.random() < 0.1 else torch.randn(shape, generator=generator) * 10.0 ** draw.uniform(-6, 3)
         for shape in shapes]
        for _ in range(count)
    ]  # fmt: skip


SHAPES = [(40, 30), (7,), (300,), (2, 3, 5)]


def total_of(seed: int, count: int, groups: int, bucket_mb: float, bits: int) -> list[torch.Tensor]:
    """Return the sums of all parameters, and of bucket 0's end, over microbatches that are dealt out at random."""
    draw = random.Random(f"{seed} {groups} {bucket_mb}")
    gradients = gradients_of(seed, SHAPES, count)
    mine = [buckets_of(SHAPES, bucket_mb, bits, count) for _ in range(groups)]
    order = list(range(count))
    draw.shuffle(order)
    for number in order:
        add(draw.choice(mine), gradients[number])
    draw.shuffle(mine)
    sums = []
    for number, bucket in enumerate(mine[0]):
        parts = []
        for one in mine:
            exact = one.rounding.buckets[number]
            exact.load(one[number].local, one[number].reduced)
            if exact.as_int32:
                wire = torch.empty(bucket.elements, dtype=torch.int32)
                exact.pack(one[number].reduced, wire)
                one[number].reduced[: bucket.elements] = 0
                exact.unpack(wire, one[number].reduced)
            parts.append(one[number].reduced)
        bucket.reduced = total = torch.stack(parts).sum(0)
        assert mine[0].rounding.buckets[number].intact(total)
        sums += [(id(parameter), total[a:b]) for (a, b), parameter in zip(bucket.spans, bucket.parameters, strict=True)]
        sums += [(0, total[-2:-1])] if number == 0 else []
    found = dict(sums)
    return [found[id(parameter)] for parameter in mine[0].parameters] + [found[0]]


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.integers(1, 12), st.sampled_from([51, 40, 30, 24]))
def test_a_sum_depends_on_the_microbatches_only(seed, count, bits):
    expected = total_of(seed, count, 1, 25.0, bits)
    for groups, bucket_mb in ((2, 25.0), (3, 0.001), (5, 0.003)):
        for mine, theirs in zip(total_of(seed, count, groups, bucket_mb, bits), expected, strict=True):
            assert torch.equal(mine, theirs)


@settings(max_examples=20)
@given(st.integers(0, 10**6), st.integers(1, 9))
def test_the_loops_of_numba_and_of_torch_give_the_same_bits(seed, count):
    if rounding_loops._compiled() is None:
        pytest.skip("numba is not installed")
    compiled = total_of(seed, count, 2, 0.002, 51)
    known, small = rounding_loops._compiled, rounding_loops._CPU_BLOCK
    rounding_loops._compiled = lambda: None
    rounding_loops._CPU_BLOCK = 500  # a parameter in several blocks
    try:
        interpreted = total_of(seed, count, 2, 0.002, 51)
    finally:
        rounding_loops._compiled, rounding_loops._CPU_BLOCK = known, small
    assert all(torch.equal(one, other) for one, other in zip(compiled, interpreted, strict=True))


def test_the_error_of_a_sum_is_half_a_unit_of_the_grid_for_each_microbatch():
    count = 8
    gradients = gradients_of(3, SHAPES, count)
    sums = total_of(3, count, 3, 0.001, 51)
    half = 2.0 ** (grid.lowest(grid.GUESS, count) - 1)
    for at in range(len(SHAPES)):
        known = [one[at].double().flatten() for one in gradients if one[at] is not None]
        assert (sums[at] - sum(known)).abs().max() <= half * count


@pytest.mark.parametrize("compiled", [True, False])
def test_every_single_flipped_bit_of_a_sum_is_seen(monkeypatch, compiled):
    if not compiled:
        monkeypatch.setattr(rounding_loops, "_compiled", lambda: None)
    buckets = buckets_of([(64,), (9,)], 25.0, 51, 4)
    add(buckets, [torch.randn(64), torch.randn(9)])
    exact, bucket = buckets.rounding.buckets[0], buckets[0]
    exact.load(bucket.local, bucket.reduced)
    assert exact.intact(bucket.reduced)
    words = bucket.reduced.view(torch.int64)
    for element in (0, 5, 63, 70):
        for bit in range(64):
            flip = (1 << bit) - (1 << 64 if bit == 63 else 0)
            words[element] ^= flip
            assert not exact.intact(bucket.reduced), f"bit {bit} of element {element}"
            words[element] ^= flip


@pytest.mark.parametrize("bits", [51, 30])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_stays_so_and_needs_no_coarser_grid(bits, value):
    bad = torch.ones(30)
    bad[4] = value
    buckets = buckets_of([(30,)], 25.0, bits, 2)
    add(buckets, [bad])
    exact, bucket = buckets.rounding.buckets[0], buckets[0]
    exact.load(bucket.local, bucket.reduced)
    if exact.as_int32:
        wire = torch.zeros(30, dtype=torch.int32)
        exact.pack(bucket.reduced, wire)
        exact.unpack(wire, bucket.reduced)
    assert exact.intact(bucket.reduced) and not bucket.reduced[:30].isfinite().all()
    assert not grid.beyond(exact.statistics(bucket.reduced)[0].tolist()[:-1])


def engine(bits: int = 51, **options) -> TorchNativeEngine:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return TorchNativeEngine(model, optimizer, lambda m, b: m(b).pow(2).mean(), exact_bits=bits, **options)


def make_step(one: TorchNativeEngine, step: int, scale: float = 1.0, count: int = 4) -> int:
    """Make a step of a single group; return how often it was discarded."""
    discards = 0
    while True:
        one.begin_step(count)
        for index in range(count):
            generator = torch.Generator().manual_seed(100 * step + index)
            batch = torch.randn(5, 6, generator=generator) * (scale if index == 2 else 1.0)
            one.compute(Microbatch(step, 0, index), batch, 1, lambda point: None)
            one.collect()
        for bucket in range(one.num_buckets):
            one.keep_local(bucket)
        if not one.must_discard(count):
            one.update(step, count, lambda point: None)
            return discards
        one.discard(count)
        discards += 1


def test_the_first_step_measures_and_a_jump_of_the_gradient_is_computed_again():
    one = engine()
    assert [make_step(one, step) for step in range(4)] == [1, 0, 0, 0]
    one._rounding.exponents = [exponent - 40 for exponent in one._rounding.exponents]  # as if they had been tiny
    one._rounding._set()
    assert make_step(one, 4) == 1
    assert make_step(one, 5) == 0


def test_the_grid_is_a_part_of_the_state():
    one, other = engine(), engine()
    for step in range(3):
        make_step(one, step)
    other.load_state(copy.deepcopy(one.state()))
    assert other._rounding.state() == one._rounding.state() and not other._rounding.guessed
    assert make_step(other, 3) == make_step(one, 3) == 0
    assert other.fingerprint() == one.fingerprint()


def test_a_state_of_a_run_with_fast_sums_is_measured_anew():
    fast, one = engine(0), engine()
    make_step(fast, 0)
    make_step(one, 0)
    one.load_state(fast.state())
    assert one._rounding.guessed and make_step(one, 1) == 1


def test_groups_with_different_grids_are_refused():
    from megatron_ft.errors import InvariantBroken

    one = engine()
    make_step(one, 0)
    one.begin_step(2)
    for index in range(2):
        one.compute(Microbatch(1, 0, index), torch.randn(5, 6), 1, lambda point: None)
        one.collect()
        one._rounding.exponents[0] += 1
        one._rounding._set()
    for bucket in range(one.num_buckets):
        one.keep_local(bucket)
    with pytest.raises(InvariantBroken, match="different grids"):
        one.must_discard(2)


def test_a_microbatch_that_is_computed_for_its_digest_adds_nothing():
    from megatron_ft.run.engines.port import DIGEST

    one, batch = engine(), torch.randn(5, 6)
    one.begin_step(2)
    before = [one.local(bucket).clone() for bucket in range(one.num_buckets)]
    one.add_to(DIGEST)
    one.compute(Microbatch(0, 0, 0), batch, 1, lambda point: None, keep=True)
    digest = one.collect(digest=True)
    assert all(torch.equal(one.local(bucket), before[bucket]) for bucket in range(one.num_buckets))
    one.add_to(0)
    one.compute(Microbatch(0, 0, 0), batch, 1, lambda point: None, keep=True)
    assert one.collect(digest=True) == digest != 0
    one.compute(Microbatch(0, 0, 0), batch + 1e-6, 1, lambda point: None, keep=True)
    assert one.collect(digest=True) != digest


def test_a_value_far_beyond_the_grid_is_a_reason_to_discard_and_not_a_changed_bucket():
    buckets = buckets_of([(30,)], 25.0, 51, 2)
    huge = torch.ones(30)
    huge[7] = 2.0**100
    add(buckets, [huge])
    exact, bucket = buckets.rounding.buckets[0], buckets[0]
    exact.load(bucket.local, bucket.reduced)
    assert exact.intact(bucket.reduced)
    assert grid.beyond(exact.statistics(bucket.reduced)[0].tolist()[:-1])


def test_a_gradient_that_is_not_finite_stays_in_the_local_sums_that_name_its_group():
    one = engine()
    make_step(one, 0)
    before = one.fingerprint()
    one.begin_step(1)
    one.compute(Microbatch(1, 0, 0), torch.full((5, 6), float("nan")), 1, lambda point: None)
    one.collect()
    for bucket in range(one.num_buckets):
        one.exact(bucket).load(one.local(bucket), one.reduced(bucket))
    assert not one.must_discard(1)
    result = one.update(1, 1, lambda point: None)
    assert math.isnan(result.gradient_norm) and one.fingerprint() == before and not one.local_finite()
