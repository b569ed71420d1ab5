"""The torch-native engine: sums are exact, repeatable, independent of the group that computes, and misuse is named."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from megatron_ft.data.order import microbatch_seed
from megatron_ft.errors import EngineError
from megatron_ft.run.engines.torch_native import TorchNativeEngine
from megatron_ft.types import Microbatch


def nothing(point: str) -> None:
    """A progress callback that does nothing."""


def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def build(bucket_mb: float = 0.0001, clipping: float = 0.0) -> TorchNativeEngine:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return TorchNativeEngine(model, optimizer, loss_fn, bucket_mb=bucket_mb, gradient_clipping=clipping)


def batch(microbatch: Microbatch) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(microbatch.index))


IDS = [Microbatch(0, 0, index) for index in range(4)]


def compute(engine: TorchNativeEngine, ids) -> None:
    for microbatch in ids:
        engine.compute(microbatch, batch(microbatch), microbatch_seed(1, microbatch), nothing)


def reduce_between(*engines: TorchNativeEngine) -> None:
    """Reduce as the outer communicator does: every engine ends with the sum in its reduced buffers."""
    for bucket in range(engines[0].num_buckets):
        total = sum(engine.local(bucket).clone() for engine in engines)
        for engine in engines:
            engine.reduced(bucket).copy_(total)


def test_buckets_hold_every_parameter_once_last_layer_first():
    engine = build()
    found = [parameter for bucket in engine._buckets for parameter in bucket.parameters]
    assert [id(p) for p in found] == [id(p) for p in reversed(list(engine.model.parameters()))]
    assert engine.num_buckets > 1


def test_the_sum_does_not_depend_on_which_engine_computes_what():
    """One engine with four microbatches and two engines with 1 + 3 end with the same parameters."""
    alone, one, three = build(), build(), build()
    for engine in (alone, one, three):
        engine.begin_step()
    compute(alone, IDS), compute(one, IDS[:1]), compute(three, IDS[1:])
    reduce_between(alone), reduce_between(one, three)
    results = [engine.update(0, 4, nothing) for engine in (alone, one, three)]
    assert results[1] == results[2]
    assert results[0].loss == pytest.approx(results[1].loss, rel=1e-6)
    assert one.fingerprint() == three.fingerprint()
    assert alone.fingerprint()[0] == pytest.approx(one.fingerprint()[0], rel=1e-6)


def test_a_reduction_can_be_repeated_from_the_local_gradients():
    """A broken all-reduce leaves garbage behind, and may write more of it later. The repeated one is followed by the update
    that would have come without a failure, bit for bit."""
    broken, whole = (build(), build()), (build(), build())
    for one, three in (broken, whole):
        one.begin_step(), three.begin_step()
        compute(one, IDS[:1]), compute(three, IDS[1:])
    reduce_between(*whole)
    given_up = [engine.reduced(bucket) for engine in broken for bucket in range(engine.num_buckets)]
    for buffer in given_up:
        buffer.fill_(float("nan"))
    for engine in broken:
        for bucket in range(engine.num_buckets):
            engine.replace_reduced(bucket)
    reduce_between(*broken)
    for buffer in given_up:
        buffer.fill_(float("inf"))
    results = [engine.update(0, 4, nothing) for engine in (*broken, *whole)]
    assert results[0] == results[1] == results[2] == results[3]
    assert len({engine.fingerprint() for engine in (*broken, *whole)}) == 1


def test_an_update_with_a_microbatch_missing_is_refused():
    engine = build()
    engine.begin_step()
    compute(engine, IDS[:3])
    reduce_between(engine)
    with pytest.raises(AssertionError, match="hold .*3.* microbatches, not 4"):
        engine.update(0, 4, nothing)


def test_gradients_of_the_next_step_start_from_nothing():
    engine = build()
    for step in range(2):
        engine.begin_step()
        compute(engine, IDS)
        reduce_between(engine)
        assert engine.update(step, 4, nothing).microbatches == 4


def test_clipping_uses_the_norm_of_the_mean_gradient():
    free, clipped = build(), build(clipping=1e-3)
    for engine in (free, clipped):
        engine.begin_step()
        compute(engine, IDS)
        reduce_between(engine)
    assert free.update(0, 4, nothing).gradient_norm == pytest.approx(clipped.update(0, 4, nothing).gradient_norm)
    norm = sum(bucket.reduced[: bucket.elements].square().sum() for bucket in clipped._buckets).sqrt()
    assert float(norm) == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("left", [pytest.param(1024, id="the optimizer"), pytest.param(1, id="the engine")])
def test_a_scale_that_is_taken_out_changes_neither_the_norm_nor_the_clipping(left):
    """As with fp16: gradients are those of the loss times the scale (``run.engines.deepspeed``, ``run.engines.megatron``).
    ``left``: the factor of the means, which the optimizer gets."""
    plain, scaled = build(clipping=1e-3), build(clipping=1e-3)
    scaled.loss_fn = lambda model, batch: 1024 * loss_fn(model, batch)
    scaled._loss_scale, scaled._takes_scale_out = lambda: 1024.0, left == 1
    for engine in (plain, scaled):
        engine.begin_step()
        compute(engine, IDS)
        reduce_between(engine)
    assert scaled.update(0, 4, nothing).gradient_norm == pytest.approx(plain.update(0, 4, nothing).gradient_norm)
    for mine, theirs in zip(scaled._buckets, plain._buckets, strict=True):
        mine, theirs = mine.reduced[: mine.elements], theirs.reduced[: theirs.elements]
        assert torch.allclose(mine, left * theirs, rtol=1e-6, atol=0)


@pytest.mark.parametrize("compiled", [(True, False), (False, True)])
def test_a_state_fits_with_and_without_torch_compile(compiled):
    models = [torch.compile(nn.Linear(8, 4)) if one else nn.Linear(8, 4) for one in compiled]
    first, second = (TorchNativeEngine(one, torch.optim.SGD(one.parameters()), loss_fn) for one in models)
    second.load_state(first.state())
    assert first.state()["model"].keys() == {"weight", "bias"}
    assert torch.equal(*(engine.state()["model"]["weight"] for engine in (first, second)))


def test_a_state_makes_another_engine_equal_to_this_one():
    first, second = build(), build()
    for engine in (first, first):
        engine.begin_step()
        compute(engine, IDS)
        reduce_between(engine)
        engine.update(0, 4, nothing)
    second.load_state(first.state())
    assert second.fingerprint() == first.fingerprint()


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Linear(2, 2).to(torch.bfloat16), "weight is torch.bfloat16"),
        (nn.Identity(), "no trainable parameter"),
    ],
)
def test_models_that_cannot_be_trained_are_refused(model, words):
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    with pytest.raises(EngineError, match=words):
        TorchNativeEngine(model, optimizer, loss_fn)


def test_an_optimizer_of_another_model_is_refused():
    with pytest.raises(EngineError, match="not the model's"):
        TorchNativeEngine(nn.Linear(2, 2), torch.optim.SGD(nn.Linear(3, 3).parameters(), lr=1.0), loss_fn)


def test_gradients_taken_away_are_noticed():
    engine = build()

    def zeroing(model, data):
        model.zero_grad(set_to_none=True)
        return loss_fn(model, data)

    engine.loss_fn = zeroing
    engine.begin_step()
    with pytest.raises(EngineError, match="gradient was replaced"):
        compute(engine, IDS[:1])


def test_the_seed_belongs_to_the_microbatch():
    assert microbatch_seed(1, IDS[0]) == microbatch_seed(1, Microbatch(0, 0, 0))
    seeds = {microbatch_seed(run, Microbatch(step, 0, index)) for run in (0, 1) for step in (0, 1) for index in (0, 1)}
    assert len(seeds) == 8


@pytest.mark.parametrize(("bad", "reported"), [(float("inf"), "inf"), (float("-inf"), "inf"), (float("nan"), "nan")])
@pytest.mark.parametrize("clipping", [0.0, 1.0])
def test_a_norm_that_is_not_finite_is_reported(bad, reported, clipping):
    engine = build(clipping=clipping)
    engine.begin_step()
    compute(engine, IDS)
    reduce_between(engine)
    engine.reduced(engine.num_buckets - 1)[0] = bad
    assert str(engine.update(0, 4, nothing).gradient_norm) == reported


@pytest.mark.parametrize("limit", [0.5, 0.999999, 1.0, 1.000001, 1.00001, 2.0])
def test_dividing_and_clipping_in_one_pass_is_what_torch_does_in_two(limit):
    """``limit`` is in norms of the mean gradient."""
    engine, plain = build(), build()
    for each in (engine, plain):
        each.begin_step()
        compute(each, IDS[:3])
        reduce_between(each)
    for bucket in plain._buckets:
        bucket.reduced.div_(3)
        bucket.point_gradients_at(bucket.reduced_views)
    norm = float(torch.nn.utils.clip_grad_norm_(plain._parameters, float("inf")))
    torch.nn.utils.clip_grad_norm_(plain._parameters, limit * norm)
    engine._clipping = limit * norm
    assert engine.update(0, 3, nothing).gradient_norm == pytest.approx(norm, rel=1e-6)
    for mine, theirs in zip(engine._buckets, plain._buckets, strict=True):
        mine, theirs = mine.reduced[: mine.elements], theirs.reduced[: theirs.elements]
        assert torch.equal(mine, theirs) if limit > 1.001 else torch.allclose(mine, theirs, rtol=1e-6, atol=0)


def test_any_gradient_taken_away_during_backward_is_noticed():
    """The check covers more than the first parameter of a bucket."""
    engine = build(bucket_mb=1)
    last = engine._buckets[0].parameters[-1]

    def replacing(model, data):
        last.grad = None
        return loss_fn(model, data)

    engine.loss_fn = replacing
    engine.begin_step()
    with pytest.raises(EngineError, match="gradient was replaced"):
        compute(engine, IDS[:1])


def test_fault_injection_reaches_the_reduced_tensors():
    engine = build()
    engine.begin_step()
    compute(engine, IDS[:1])
    for gradient, loss in zip(engine.local_gradients(), engine.local_losses(), strict=True):
        gradient.fill_(2.0)
        loss.fill_(3.0)
    local = engine.local(0)
    assert set(local[:-2].tolist()) == {2.0} and local[-2:].tolist() == [3.0, 1.0]


@pytest.mark.parametrize(("layers", "buckets"), [(1, 1), (8, 8), (32, 8)])
def test_without_a_size_gradients_are_cut_into_a_few_buckets(layers, buckets):
    """The layers have 1 MiB each: a bucket holds at least one."""
    layer = nn.Linear(512, 512, bias=False)
    model = nn.Sequential(*(copy.deepcopy(layer) for _ in range(layers)))
    engine = TorchNativeEngine(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn)
    assert engine.num_buckets == buckets
