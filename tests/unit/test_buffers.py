"""The parts of a step beside gradients: buffers written in forward, the optimizer's random numbers, tokens."""

from __future__ import annotations

import copy
import math
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn

from megatron_ft.config.schema import resolve
from megatron_ft.errors import CheckpointError, EngineError
from megatron_ft.run.checkpoint import restore
from megatron_ft.run.collectives.bucket_allreduce import Reduction
from megatron_ft.run.engines import buffers
from megatron_ft.run.engines.port import TAIL
from megatron_ft.run.engines.torch_native import TorchNativeEngine
from megatron_ft.types import Microbatch

IDS = [Microbatch(0, 0, index) for index in range(4)]


def nothing(point: str) -> None:
    """A progress callback that does nothing."""


def batch(microbatch: Microbatch, rows: int = 6) -> torch.Tensor:
    seed = 100 * microbatch.step + microbatch.index
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed))


def square(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return model(rows).square().mean()


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))


def engines(model: nn.Module, number: int, optimizer=torch.optim.SGD, loss_fn=square, **settings):
    found, settings = [], {"bucket_mb": 0.0001, **settings}
    for copied in (copy.deepcopy(model) for _ in range(number)):
        found.append(TorchNativeEngine(copied, optimizer(copied.parameters(), lr=0.1), loss_fn, **settings))
    return found


def train_step(parts: list[tuple[TorchNativeEngine, list[Microbatch]]], data=batch) -> list:
    """One step of the groups; each engine computes its own microbatches, with random numbers of its own before."""
    microbatches = sum(len(ids) for _, ids in parts)
    for number, (engine, ids) in enumerate(parts):
        engine.begin_step()
        for microbatch in ids:
            engine.compute(microbatch, data(microbatch), 17 * number + microbatch.index, nothing)
    for bucket in range(parts[0][0].num_buckets):
        total = sum(engine.local(bucket).clone() for engine, _ in parts)
        for engine, _ in parts:
            engine.reduced(bucket).copy_(total)
    return [engine.update(parts[0][1][0].step, microbatches, nothing) for engine, _ in parts]


def held(engine: TorchNativeEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}


def assert_same_bits(one: TorchNativeEngine, other: TorchNativeEngine) -> None:
    mine, theirs = held(one), held(other)
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


def test_batch_norm_is_the_same_in_all_groups_whichever_computed_which_microbatch():
    one, three, other = engines(normed(), 3)
    two, more = engines(normed(), 2)
    for step in range(3):
        ids = [Microbatch(step, 0, index) for index in range(4)]
        train_step([(one, ids[:1]), (three, ids[1:]), (other, [])])
        train_step([(two, [ids[2], ids[0]]), (more, [ids[3], ids[1]])])
    assert_same_bits(one, three), assert_same_bits(one, other), assert_same_bits(two, more)
    for name, tensor in held(one).items():
        assert torch.allclose(tensor, held(two)[name], atol=1e-6), name
    assert int(one.model[1].num_batches_tracked) == 3


def test_batch_norm_moves_once_per_step_by_the_mean_of_the_microbatches_statistics():
    (engine,) = engines(normed(), 1)
    layer, norm = copy.deepcopy(engine.model[0]), copy.deepcopy(engine.model[1])
    train_step([(engine, IDS)])
    activations = [layer(batch(microbatch)) for microbatch in IDS]
    mean = torch.stack([found.mean(0) for found in activations]).mean(0)
    variance = torch.stack([found.var(0) for found in activations]).mean(0)
    expected = torch.lerp(norm.running_mean, mean, 0.1), torch.lerp(norm.running_var, variance, 0.1)
    assert torch.allclose(engine.model[1].running_mean, expected[0], atol=1e-6)
    assert torch.allclose(engine.model[1].running_var, expected[1], atol=1e-6)


def test_a_group_that_follows_gets_the_buffers_with_the_gradients():
    """A group that comes back makes the steps of its donor from the donor's reduced buckets."""
    donor, other, guest = engines(normed(), 3)
    results = train_step([(donor, IDS[:3]), (other, IDS[3:])])
    for bucket in range(donor.num_buckets):
        guest.reduced(bucket).copy_(donor.reduced(bucket))
    guest.repeat(results[0])
    assert_same_bits(guest, donor)


class Odd(nn.Module):
    """A module that writes into a buffer in forward, as ``write`` says."""

    def __init__(self, buffer: torch.Tensor, write, persistent: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.register_buffer("kept", buffer, persistent)
        self.register_buffer("mask", torch.full((4, 4), -math.inf).triu(1))
        self.write = write

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.write(self, rows)
        return self.layer(rows) @ torch.softmax(self.mask, -1)


def count_up(model: Odd, rows: torch.Tensor) -> None:
    model.kept += 1


def count_positive(model: Odd, rows: torch.Tensor) -> None:
    model.kept += (rows > 0).sum()


def put_another(model: Odd, rows: torch.Tensor) -> None:
    model.kept = model.kept + rows.mean()


def flip(model: Odd, rows: torch.Tensor) -> None:
    model.kept.logical_not_()


@pytest.mark.parametrize(("buffer", "write"), [(torch.zeros(3), count_positive), (torch.zeros(()), put_another)])
def test_a_buffer_that_does_not_outlive_the_run_is_merged_and_belongs_to_the_state(buffer, write):
    one, three, fresh = engines(Odd(buffer, write, persistent=False), 3)
    train_step([(one, IDS[:1]), (three, IDS[1:])])
    assert torch.equal(one.model.kept, three.model.kept) and one.model.kept.any()
    assert torch.equal(dict(one.state_tensors())["buffer kept"], one.model.kept), "what is compared between groups"
    fresh.load_state(one.state())
    assert torch.equal(fresh.model.kept, one.model.kept)


def test_a_checkpoint_without_the_buffers_outside_state_dicts_is_refused(monkeypatch):
    """Checkpoints of earlier versions are like that."""
    trained, fresh = engines(Odd(torch.zeros(3), count_up, persistent=False), 2)
    train_step([(trained, IDS)])
    state = {key: value for key, value in trained.state().items() if key != "buffers"}
    monkeypatch.setattr(restore, "check", lambda *_: None)
    monkeypatch.setattr(restore.checkpoint, "inspect", lambda path: None)
    monkeypatch.setattr(restore.checkpoint, "load", lambda *_: state)
    config = resolve({}, groups=2)
    origin = restore.Origin("there", 1, "a run", {"layout": [1, 1, 1], "result": [0, 0.5, 4, 1.0]})
    with pytest.raises(CheckpointError, match=r"buffers\.kept .* has no such tensor; .* another checkpoint\.directory"):
        restore.load(origin, config, 0, fresh)


def test_a_buffer_that_is_only_read_keeps_its_bits():
    (engine,) = engines(Odd(torch.rand(3) / 3, lambda model, rows: None), 1)
    before = held(engine)
    train_step([(engine, IDS[:3])])
    assert torch.equal(engine.model.kept, before["kept"]) and torch.equal(engine.model.mask, before["mask"])


def flip_in_memory(tensor: torch.Tensor, bit: int = 22, elements: int = 1) -> None:
    """Flip a bit as a memory error does, or one in each of the first elements: torch counts no write."""
    tensor.data.numpy().reshape(-1).view("int32")[:elements] ^= 1 << bit


@pytest.mark.parametrize("buffer", [torch.rand(3) / 3, torch.arange(3, dtype=torch.int32)])
@pytest.mark.parametrize(("before", "elements"), [(0, 1), (2, 1), (2, 2)])
def test_a_bit_that_flips_in_a_buffer_that_forward_only_reads_is_not_taken_over_by_the_others(buffer, before, elements):
    """The bit flips before one microbatch; the next one starts from the right value."""
    one, three = engines(Odd(buffer, lambda model, rows: None), 2)
    kept, mask = one.model.kept.clone(), one.model.mask.clone()

    def data(microbatch: Microbatch) -> torch.Tensor:
        if microbatch.index == before + 1:
            flip_in_memory((one if microbatch.index < 2 else three).model.kept, elements=elements)
        return batch(microbatch)

    train_step([(one, IDS[:2]), (three, IDS[2:])], data)
    for engine in one, three:
        assert torch.equal(engine.model.kept, kept) and torch.equal(engine.model.mask, mask)


def write_uncounted(model: Odd, rows: torch.Tensor) -> None:
    model.kept.data += 1


def write_in_one(model: Odd, rows: torch.Tensor) -> None:
    model.kept += float(torch.equal(rows, batch(IDS[2])))


@pytest.mark.parametrize(("write", "changes"), [(write_uncounted, 1), (write_in_one, 0.25)])
def test_a_write_that_torch_does_not_count_or_that_one_microbatch_makes_is_no_flip(write, changes):
    one, three = engines(Odd(torch.zeros(3), write), 2)
    train_step([(one, IDS[:2]), (three, IDS[2:])])
    assert one.model.kept.tolist() == three.model.kept.tolist() == [changes] * 3


def test_a_single_microbatch_of_a_step_has_nothing_to_be_compared_with():
    (engine,) = engines(Odd(torch.zeros(3), write_uncounted), 1)
    train_step([(engine, IDS[:1])])
    assert engine.model.kept.tolist() == [1, 1, 1]


def test_statistics_of_batch_norm_count_where_only_one_microbatch_has_them():
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(8, 4), nn.BatchNorm1d(4)
            self.norm.num_batches_tracked = torch.tensor(0.0)  # the mean of this counter is not whole

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            passed = self.layer(rows)
            return self.norm(passed) if torch.equal(rows, batch(IDS[2])) else passed

    (engine,) = engines(Sometimes(), 1)
    train_step([(engine, IDS[2:] + [Microbatch(0, 1, 0)])])
    assert engine.model.norm.running_mean.any()


@pytest.mark.parametrize(
    ("buffer", "write", "words"),
    [
        (torch.zeros(buffers.LARGEST + 1), count_up, ("buffer kept (float32, 65537 elements)", "written in forward")),
        (torch.zeros(2, dtype=torch.bool), flip, ("buffer kept (bool, 2 elements)", "written in forward")),
        (torch.zeros(1, dtype=torch.int64), count_positive, ("buffer kept (int64, 1 elements)", "different number")),
    ],
    ids=["too large", "neither real nor integer", "an integer that has no mean"],
)
def test_a_buffer_that_cannot_be_merged_is_refused_when_it_is_written(buffer, write, words):
    (engine,) = engines(Odd(buffer, write), 1)
    with pytest.raises(EngineError) as caught:
        train_step([(engine, IDS)])
    assert all(word in str(caught.value) for word in words), caught.value


def test_an_update_that_is_skipped_leaves_buffers_as_they_are():
    (engine,) = engines(normed(), 1)
    before = held(engine)
    (result,) = train_step([(engine, IDS)], data=lambda microbatch: batch(microbatch) * math.nan)
    assert not math.isfinite(result.gradient_norm)
    assert [name for name, tensor in held(engine).items() if not torch.equal(tensor, before[name])] == []


class Noisy(torch.optim.SGD):
    """Adds random numbers to the parameters."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(torch.randn_like(parameter), alpha=1e-3)


def test_an_optimizer_that_draws_random_numbers_draws_the_same_in_all_groups():
    one, three = engines(normed(), 2, optimizer=Noisy)
    (another_seed,) = engines(normed(), 1, optimizer=Noisy, seed=1)
    noise = []
    for step in range(2):
        ids = [Microbatch(step, 0, index) for index in range(4)]
        train_step([(one, ids[:1]), (three, ids[1:])])
        train_step([(another_seed, ids)])
        noise.append(torch.randn(3))
    assert_same_bits(one, three)
    assert not torch.equal(noise[0], noise[1]), "each step has its own random numbers"
    assert not torch.allclose(one.model[2].weight, another_seed.model[2].weight, atol=1e-5)


# --- a mean over tokens -----------------------------------------------------------------------------------------------


def ragged(microbatch: Microbatch) -> torch.Tensor:
    return batch(microbatch, rows=(1, 7, 0, 300)[microbatch.index])


def summed(model: nn.Module, rows: torch.Tensor) -> tuple[torch.Tensor, int]:
    return model(rows).square().mean(1).sum(), len(rows)


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))


@pytest.mark.parametrize("clipping", [0.0, 0.1])
def test_ragged_microbatches_give_the_result_of_one_process_with_the_whole_batch(clipping):
    settings = {"loss_fn": summed, "loss_reduction": "token", "gradient_clipping": clipping}
    one, three = engines(plain(), 2, **settings)
    results = train_step([(one, IDS[:1]), (three, IDS[1:])], data=ragged)
    whole = plain()
    loss = whole(torch.cat([ragged(microbatch) for microbatch in IDS])).square().mean(1).mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), clipping or math.inf)
    torch.optim.SGD(whole.parameters(), lr=0.1).step()
    assert results[0] == results[1]
    assert (results[0].tokens, results[0].microbatches) == (308, 4)
    assert results[0].loss == pytest.approx(loss.item(), rel=1e-6)
    assert results[0].gradient_norm == pytest.approx(float(norm), rel=1e-5)
    assert_same_bits(one, three)
    for mine, theirs in zip(one.model.parameters(), whole.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)


def test_the_number_of_tokens_is_exact_where_one_fp32_number_is_not():
    def counted(model, tokens):
        return model(torch.ones(1, 8)).sum(), tokens

    (engine,) = engines(plain(), 1, loss_fn=counted, loss_reduction="token")
    numbers = [2**24 + 1, 3, 2**24 + 255, 2**25 + 1]
    (result,) = train_step([(engine, IDS)], data=lambda microbatch: torch.tensor(numbers[microbatch.index]))
    assert result.tokens == sum(numbers)


def test_bf16_on_the_wire_rounds_gradients_and_neither_tokens_nor_buffers():
    """The other group contributes nothing."""
    outer = MagicMock(members=(0, 1))
    (engine,) = engines(normed(), 1, loss_fn=summed, loss_reduction="token", slots=3)
    engine.begin_step()
    for microbatch in IDS:
        engine.compute(microbatch, batch(microbatch) / 3, 0, nothing)
    Reduction(engine, MagicMock(), dtype="bf16").reduce(outer, 0, range(engine.num_buckets), lambda bucket: None)
    exact = 2 + sum(tensor.numel() + 1 for tensor in engine.model.buffers()) + 3 + TAIL
    local, reduced = engine.local(0), engine.reduced(0)
    assert torch.equal(reduced[-exact:], local[-exact:]) and local[-exact:].any()
    assert torch.equal(reduced[:-exact], local[:-exact].bfloat16().float())
    assert not torch.equal(reduced[:-exact], local[:-exact])


def test_a_step_without_a_token_is_skipped():
    (engine,) = engines(plain(), 1, loss_fn=summed, loss_reduction="token")
    before = held(engine)
    (result,) = train_step([(engine, IDS)], data=lambda microbatch: batch(microbatch, rows=0))
    assert result.tokens == 0 and math.isnan(result.loss) and math.isnan(result.gradient_norm)
    assert [name for name, tensor in held(engine).items() if not torch.equal(tensor, before[name])] == []


@pytest.mark.parametrize(
    ("reduction", "returned", "words"),
    [
        ("token", lambda loss: loss, ('"token"', "a tensor of shape []", "sum of the tokens' losses")),
        ("token", lambda loss: (loss, 1.5), ('"token"', "a tuple of 2")),
        ("token", lambda loss: (loss, -1), ("counted -1", "whole number")),
        ("microbatch", lambda loss: (loss, 4), ('"microbatch"', "a tuple of 2", "must be one number")),
        ("microbatch", lambda loss: loss.expand(3), ('"microbatch"', "a tensor of shape [3]")),
    ],
)
def test_a_loss_function_with_another_return_value_than_configured_is_refused(reduction, returned, words):
    loss_fn = lambda model, rows: returned(model(rows).sum())  # noqa: E731
    (engine,) = engines(plain(), 1, loss_fn=loss_fn, loss_reduction=reduction)
    with pytest.raises(EngineError) as caught:
        train_step([(engine, IDS)])
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("reduction", ["microbatch", "token"])
def test_a_standby_part_is_kept_apart_until_it_is_contributed(reduction):
    """Group 0 stands by for what group 1 contributes, which is lost: its sum, losses, tokens, statistics and counts then are
    those of the group that has computed everything itself."""

    def loss_fn(model, rows):
        loss = model(rows).square()
        return loss.mean() if reduction == "microbatch" else (loss.sum(), rows.shape[0])

    alone, group = engines(normed(), 2, loss_fn=loss_fn, loss_reduction=reduction)
    for step in range(2):  # the memory of the parts is used again
        ids = [Microbatch(step, 0, index) for index in range(4)]
        for engine in (alone, group):
            engine.begin_step()
        for microbatch in ids:
            alone.compute(microbatch, batch(microbatch), microbatch.index, nothing)
        for microbatch, part in zip(ids, (1, 0, 2, 1), strict=True):
            group.add_to(part)
            group.compute(microbatch, batch(microbatch), microbatch.index, nothing)
        counts = [group.local(bucket)[-1].item() for bucket in range(group.num_buckets)]
        assert set(counts) == {1}, "only its own"
        group.contribute(1)
        assert {group.local(bucket)[-1].item() for bucket in range(group.num_buckets)} == {3}
        group.contribute(2)
        group.contribute(3)  # nothing was added to it
        for engine in (alone, group):
            for bucket in range(engine.num_buckets):
                engine.reduced(bucket).copy_(engine.local(bucket))
            engine.update(step, 4, nothing)
    mine, theirs = held(group), held(alone)
    assert [name for name in mine if not torch.allclose(mine[name], theirs[name], atol=1e-5)] == []
