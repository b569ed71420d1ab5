"""Reductions between engines in threads: the sums are right with overlap or without, in bf16 or not, after failures or
not."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_ft.errors import EngineError
from megatron_ft.run.collectives.base import Broken, Communicator
from megatron_ft.run.collectives.bucket_allreduce import Reduction
from megatron_ft.run.collectives.gloo_communicator import GlooCommunicator
from megatron_ft.run.engines.port import TAIL
from megatron_ft.run.engines.torch_native import TorchNativeEngine
from megatron_ft.run.injection_points import InjectionPoints
from megatron_ft.types import Microbatch

BUCKETS = range(4)


class Net(nn.Module):
    """Four layers of equal size, one a bucket, the last in the first; ``skip`` leaves one out of the graph."""

    def __init__(self, skip: int | None = None, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in BUCKETS)
        self.skip = skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if number != self.skip:
                x = torch.tanh(layer(x))
        return x


def mean_square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


class Group:
    """An engine, its reduction, and the events of it: points, and buckets as ``done``."""

    def __init__(self, me: int, outer: Communicator, model=Net, loss_fn=mean_square, **options) -> None:
        torch.manual_seed(0)
        self.me, self.outer, self.heard = me, outer, []
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        self.engine = TorchNativeEngine(net, optimizer, loss_fn, bucket_mb=8 * 8 * 4 / 2**20)
        assert self.engine.num_buckets == len(BUCKETS)
        points = InjectionPoints(me, [])
        points.reach = lambda point, step, bucket=None: self.heard.append(
            point if bucket is None else f"{point} {bucket}"
        )
        self.reduction = Reduction(self.engine, points, **options)

    def compute(self, step: int, microbatches: int) -> None:
        """Compute the microbatches of this group in one step; in the last one complete buckets are sent."""
        for index in range(microbatches):
            last = index == microbatches - 1
            ready = self.reduction.ahead(self.outer, step, BUCKETS) if last else None
            batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + 10 * self.me + index))
            self.engine.compute(Microbatch(step, self.me, index), batch, 0, self.heard.append, ready)
        self.heard.append("computed")

    def reduce(self, step: int) -> None:
        self.reduction.reduce(self.outer, step, BUCKETS, lambda bucket: self.heard.append(f"done {bucket}"))

    def step(self, number: int, microbatches: int) -> None:
        self.engine.begin_step()
        self.compute(number, microbatches)

    @property
    def sums(self) -> list[torch.Tensor]:
        return [self.engine.reduced(bucket) for bucket in BUCKETS]


def connect(members: int, prefix: str = "p") -> list[Communicator]:
    store = dist.PrefixStore(prefix, dist.HashStore())
    with ThreadPoolExecutor(members) as pool:
        outers = list(pool.map(lambda me: GlooCommunicator(store, me, range(members), 0, 60.0), range(members)))
    _open.extend(outers)
    return outers


_open: list[Communicator] = []


@pytest.fixture(autouse=True)
def _close_all():
    """Close all process groups. One with an operation that never ends would otherwise be waited for by whichever
    thread collects garbage."""
    yield
    while _open:
        _open.pop().close()


def groups(members: int, **options) -> list[Group]:
    return [Group(me, outer, **options) for me, outer in enumerate(connect(members))]


def at_once(all_groups: list[Group], what) -> None:
    """Run each call in a thread of its own; an exception in one of them is raised here."""
    with ThreadPoolExecutor(len(all_groups)) as pool:
        list(pool.map(what, all_groups))


def train(all_groups: list[Group], steps: int, microbatches: int = 2) -> None:
    for number in range(steps):
        for group in all_groups:
            group.step(number, microbatches)
        at_once(all_groups, lambda group, number=number: group.reduce(number))
        for group in all_groups:
            result = group.engine.update(number, microbatches * len(all_groups), group.heard.append)
            assert result.microbatches == microbatches * len(all_groups)


def expected(all_groups: list[Group]) -> list[torch.Tensor]:
    return [sum(group.engine.local(bucket) for group in all_groups) for bucket in BUCKETS]


# --- overlap ----------------------------------------------------------------------------------------------------------


def test_complete_buckets_are_sent_during_the_last_backward_in_order():
    pair = groups(2)
    train(pair, 1)
    pair[0].heard.clear()
    train(pair, 1)
    assert pair[0].heard == [
        *("forward", "backward", "forward", "backward", "reduce 0", "reduce 1", "reduce 2", "reduce 3", "computed"),
        *(word for bucket in BUCKETS for word in (f"done {bucket}", f"bucket {bucket}")),
        *("gate", "update"),
    ]


@pytest.mark.parametrize("options", [{"overlap": False}, {}], ids=["overlap off", "in the very first microbatch"])
def test_otherwise_they_are_sent_after_it(options):
    pair = groups(2, **options)
    train(pair, 1, microbatches=1)
    assert pair[0].heard[:4] == ["forward", "backward", "computed", "reduce 0"]


@pytest.mark.parametrize("skip", [None, 1], ids=["", "with a layer that gets no gradient"])
def test_overlap_changes_no_bit(skip):
    runs = [groups(3, overlap=overlap, model=lambda: Net(skip)) for overlap in (True, False)]
    for run in runs:
        train(run, 3)
    assert len({group.engine.fingerprint() for run in runs for group in run}) == 1
    for one, other in zip(runs[0][0].sums, runs[1][0].sums, strict=True):
        assert torch.equal(one, other)


def test_an_incomplete_bucket_is_sent_after_backward_with_all_that_follow():
    pair = groups(2, model=lambda: Net(skip=1))  # the layers' buckets are in reverse order: bucket 2
    train(pair, 1)
    pair[0].heard.clear()
    train(pair, 1)
    heard = pair[0].heard
    assert heard[heard.index("computed") - 2 : heard.index("computed") + 3] == [
        *("reduce 0", "reduce 1", "computed", "reduce 2", "reduce 3")
    ]


def test_groups_that_send_at_different_times_agree():
    """One group computes and sends early, one has nothing to compute, one was told not to overlap."""
    three = groups(3)
    for group in three:
        group.step(0, 1)  # a whole backward pass has been seen
        group.engine.begin_step()
    three[2].reduction = Reduction(three[2].engine, InjectionPoints(2, []), overlap=False)
    three[0].compute(1, 2)
    three[2].compute(1, 1)
    at_once(three, lambda group: group.reduce(1))
    for bucket, total in zip(BUCKETS, expected(three), strict=True):
        assert all(torch.allclose(group.sums[bucket], total) for group in three)
        assert all(float(group.sums[bucket][-1]) == 3 for group in three)


def through_one_layer_twice(model: Net, batch: torch.Tensor) -> torch.Tensor:
    """A model with reentrant checkpoints that share a layer: autograd adds its gradient in two parts."""
    x = checkpoint(model.layers[3], batch.requires_grad_(), use_reentrant=True)
    x = checkpoint(model, x, use_reentrant=True)
    return x.square().mean()


def test_gradients_that_come_in_parts_are_not_sent_before_the_last():
    runs = [groups(2, overlap=overlap, loss_fn=through_one_layer_twice) for overlap in (True, False)]
    for run in runs:
        train(run, 2)
    assert "reduce 0" not in runs[0][0].heard[: runs[0][0].heard.index("computed")]
    assert len({group.engine.fingerprint() for run in runs for group in run}) == 1


def test_gradients_that_suddenly_come_in_parts_are_an_error():
    pair = groups(2)
    train(pair, 1)
    pair[0].engine.loss_fn = through_one_layer_twice
    with pytest.raises(EngineError, match="several parts.*overlap to false"):
        pair[0].step(1, 1)


# --- what breaks ------------------------------------------------------------------------------------------------------


def test_an_epoch_that_ends_during_backward_costs_only_what_was_sent():
    """One of three dies before it has sent anything; the others go on without it in a new epoch, from local gradients."""
    three = groups(3)
    train(three, 1)
    survivors = three[:2]
    for group in survivors:
        group.step(1, 2)
        assert "reduce 3" in group.heard
    local = [group.engine.local(0).clone() for group in survivors]
    for group in survivors:
        group.outer.abort()
    for group in survivors:
        with pytest.raises(Broken):
            group.reduce(1)
    for group, outer in zip(survivors, connect(2, "new"), strict=True):
        group.outer.close()
        group.reduction.drop()
        group.outer, group.heard = outer, []
    at_once(survivors, lambda group: group.reduce(1))
    assert [group.heard[-2] for group in survivors] == ["bucket 3"] * 2
    for bucket, total in zip(BUCKETS, expected(survivors), strict=True):
        assert all(torch.equal(group.sums[bucket], total) for group in survivors)
    assert all(torch.equal(group.engine.local(0), kept) for group, kept in zip(survivors, local, strict=True))


def test_a_communicator_that_fails_during_backward_is_reported_after_it():
    pair = groups(2)
    train(pair, 1)
    pair[0].outer.abort()
    pair[0].heard.clear()
    pair[0].step(1, 1)
    assert pair[0].heard == ["forward", "backward", "computed"]
    with pytest.raises(Broken):
        pair[0].reduce(1)
    assert not [word for word in pair[0].heard if word.startswith("done")]


def test_a_start_that_failed_is_not_repeated_in_its_epoch():
    """gloo matches operations by their order: a group that leaves one out would add up different buckets."""
    pair = groups(2)
    train(pair, 1)
    real, calls = pair[0].outer.all_reduce, []

    def fails_once(tensor):
        calls.append(tensor)
        if len(calls) == 2:
            raise Broken("Connection reset by peer")
        return real(tensor)

    pair[0].outer.all_reduce = fails_once
    pair[0].step(1, 1)
    with pytest.raises(Broken, match="^Connection reset by peer$"):
        pair[0].reduce(1)
    assert len(calls) == 2


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_buffer_in_which_an_operation_may_still_write_is_given_up(dtype):
    class Forgotten:
        """An operation on a half received payload, as gloo may leave it: it can end at any later time."""

        def settled(self):
            return False

    class Outer:
        members = (0, 1)
        tensors: list[torch.Tensor] = []

        def all_reduce(self, tensor):
            self.tensors.append(tensor)
            return Forgotten()

    group = Group(0, Outer(), dtype=dtype)
    group.step(0, 1)
    group.step(1, 1)
    assert "reduce 3" in group.heard
    group.reduction.drop()
    for tensor in Outer.tensors:
        tensor.fill_(float("nan"))
    for tensor in [t for bucket in BUCKETS for t in group.reduction._load(bucket)]:
        assert not tensor.isnan().any()


# --- bf16 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("members", [2, 3, 8])
def test_bf16_is_equal_in_all_groups_and_as_exact_as_documented(members):
    """|error| <= 2^-8 * sum of |g| + 2^-8 * |sum|, for any number of groups: parts and total are rounded once."""
    everybody = groups(members, dtype="bf16")
    generator = torch.Generator().manual_seed(members)
    for group in everybody:
        group.engine.begin_step()
        for bucket in BUCKETS:
            scale = 10.0 ** torch.randint(-6, 6, (64,), generator=generator)
            group.engine.local(bucket)[:-TAIL].copy_(torch.randn(64, generator=generator) * scale)
    kept = [[group.engine.local(bucket).clone() for bucket in BUCKETS] for group in everybody]
    at_once(everybody, lambda group: group.reduce(0))
    for bucket in BUCKETS:
        exact = sum(local[bucket].double() for local in kept)
        bound = 1.01 * 2.0**-8 * (sum(local[bucket].double().abs() for local in kept) + exact.abs())
        assert ((everybody[0].sums[bucket] - exact).abs() <= bound).all()
        assert all(torch.equal(group.sums[bucket], everybody[0].sums[bucket]) for group in everybody)
        assert all(group.sums[bucket].dtype == torch.float32 for group in everybody)
        for group, local in zip(everybody, kept, strict=True):
            assert torch.equal(group.engine.local(bucket), local[bucket])


def test_bf16_leaves_loss_and_count_exact():
    """The counts and losses are numbers that bf16 cannot represent."""
    pair = groups(2, dtype="bf16")
    for group in pair:
        group.engine.begin_step()
        for bucket in BUCKETS:
            group.engine.local(bucket)[-TAIL:] = torch.tensor([1.2345678, 100_001.0])
    at_once(pair, lambda group: group.reduce(0))
    for group in pair:
        assert all(total[-TAIL:].tolist() == [2 * float(torch.tensor(1.2345678)), 200_002.0] for total in group.sums)


def test_bf16_with_and_without_overlap_is_the_same():
    runs = [groups(3, dtype="bf16", overlap=overlap) for overlap in (True, False)]
    for run in runs:
        train(run, 3)
    assert len({group.engine.fingerprint() for run in runs for group in run}) == 1


# --- alone ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_alone_nothing_is_copied_and_nothing_is_rounded(dtype):
    (alone,) = groups(1, dtype=dtype)
    alone.step(0, 2)
    buffers = [alone.engine.reduced(bucket).clone() for bucket in BUCKETS]
    alone.reduce(0)
    for bucket, before in zip(BUCKETS, buffers, strict=True):
        assert alone.engine.reduced(bucket) is alone.engine.local(bucket)
        assert not before.any()
    alone.engine.update(0, 2, alone.heard.append)
    alone.engine.begin_step()
    assert all(alone.engine.reduced(bucket) is not alone.engine.local(bucket) for bucket in BUCKETS)


def test_alone_a_group_learns_the_same_as_with_a_copy():
    (alone,), (copying,) = groups(1), groups(1)
    for number in range(3):
        for group in (alone, copying):
            group.step(number, 2)
        alone.reduce(number)
        for bucket in BUCKETS:
            copying.engine.reduced(bucket).copy_(copying.engine.local(bucket))
        assert alone.engine.update(number, 2, print) == copying.engine.update(number, 2, print)
    assert alone.engine.fingerprint() == copying.engine.fingerprint()


def test_alone_the_events_are_the_same():
    (alone,) = groups(1)
    train([alone], 1, microbatches=1)
    assert alone.heard == [
        *("forward", "backward", "computed", *(f"reduce {bucket}" for bucket in BUCKETS)),
        *(word for bucket in BUCKETS for word in (f"done {bucket}", f"bucket {bucket}")),
        *("gate", "update"),
    ]
