"""A rank's handling of news, in cases that no whole run reaches reliably: news that are heard before what they end
exists, and operations that are repeated after an epoch has ended."""

from __future__ import annotations

import socket
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn

from megatron_ft.config.schema import FaultToleranceConfig, RejoinConfig, RunConfig
from megatron_ft.core.protocol import signals
from megatron_ft.core.protocol.messages import EpochAborted, GroupFailed
from megatron_ft.record import history
from megatron_ft.run.collectives.base import Broken, Left
from megatron_ft.run.collectives.gloo_communicator import GlooCommunicator
from megatron_ft.run.collectives.intra_group import IntraGroup, Lost
from megatron_ft.run.collectives.p2p_channel import P2PChannels
from megatron_ft.run.computing import Computing
from megatron_ft.run.engines.port import OWN, Engine, StepResult
from megatron_ft.run.engines.torch_native import TorchNativeEngine
from megatron_ft.run.finishing import Finishing
from megatron_ft.run.nonfinite import NonFinite
from megatron_ft.run.orders import Needs, Reduce
from megatron_ft.run.progress_counters import ProgressCounters
from megatron_ft.run.rank_executor import RankExecutor
from megatron_ft.run.rank_state import RankState
from megatron_ft.run.reducing import Reducing
from megatron_ft.types import Microbatch, PlanOrigin, View
from tests.fakes.network import Member, Network

VIEW = View(epoch=0, live=(0, 1), reason="the run starts", step=0, plan_origin=PlanOrigin((0, 1)))
CONFIG = RunConfig(groups=2, fault_tolerance=FaultToleranceConfig(rejoin=RejoinConfig(enabled=False)))


@pytest.fixture
def executor(tmp_path, monkeypatch):
    """A rank in step 3 whose communicator stands; it has one member."""
    monkeypatch.setattr(ProgressCounters, "from_env", MagicMock)
    env = MagicMock(group=0, position=0, incarnation=0, run_dir=tmp_path, config=CONFIG)
    executor = RankExecutor(env, MagicMock())
    executor.rank.link.outer, executor.rank.link.view = GlooCommunicator(None, 0, [0], 0, 60.0), VIEW
    engine = MagicMock()
    del engine.flush
    use(executor, engine)
    yield executor
    executor.prefetcher.close()


def use(executor: RankExecutor, engine: Engine) -> None:
    """Begin step 3 with that engine; nothing is compared with other groups."""
    rank = executor.rank
    guard = MagicMock(nonfinite=NonFinite("skip", rank.group, rank.history, rank.agreement))
    computing = Computing(rank, engine, executor.prefetcher, executor.registered, guard)
    state = RankState(computing, executor.registered, guard)
    computing.batches, computing.unchecked = MagicMock(), False
    computing.batches.due.return_value = False
    executor.engine, executor.guard, executor.computing, executor.state = engine, guard, computing, state
    executor.reducing = Reducing(computing, state, guard)
    executor.finishing = Finishing(computing, state, guard, None)
    begin(executor, 3)


def begin(executor: RankExecutor, step: int) -> None:
    executor.computing.begin(step, MagicMock(), lambda: Needs((), (), ()))


def test_an_epoch_that_ends_in_order_ends_for_a_rank_that_comes_to_its_step_later(executor):
    """A follower has heard of it in the step before; its leader, which has not, lets the follower reduce the next
    one."""
    executor.on_signal(EpochAborted(0, "group 1 leaves", after=3))
    executor.rank.link.outer.all_reduce(torch.ones(1)).wait()
    begin(executor, 4)
    with pytest.raises(Left):
        executor.rank.link.outer.all_reduce(torch.ones(1))


def test_a_death_ends_the_epoch_at_once_and_cuts_the_connections(executor):
    executor.on_signal(EpochAborted(0, "group 1 leaves", after=3))
    executor.on_signal(GroupFailed(1, "group 1 died"))
    assert executor.rank.link.outer._over.aborted
    with pytest.raises(Broken, match="aborted"):
        executor.rank.link.outer.all_reduce(torch.ones(1))


def test_news_of_another_epoch_end_nothing(executor):
    executor.on_signal(EpochAborted(1, "a connection failed"))
    begin(executor, 4)
    executor.rank.link.outer.all_reduce(torch.ones(1)).wait()


def test_a_rank_without_an_engine_ignores_a_question_about_its_state(executor):
    """The notice log holds questions that were asked of an earlier start of the group."""
    del executor.guard
    executor.publish_checksums(signals.ChecksumsRequested(3, (executor.rank.group,)))
    executor.rank.agreement.put.assert_not_called()


@pytest.mark.parametrize(("norm", "named"), [(float("nan"), [3]), (1.0, [])])
def test_a_group_whose_step_the_others_have_committed_is_named_for_its_gradient(executor, norm, named):
    """Chaos seed 116: it takes their state, which clears the gradient that shows whose it was, and then ends the step."""
    executor.engine.local_finite.side_effect = lambda: executor.engine.begin_step.call_count > 1
    result = StepResult(step=3, loss=1.0, microbatches=2, gradient_norm=norm)
    executor.state.load({"engine": {}, "carried": {}, "hyperparameters": None, "result": result.to_json()})
    assert executor.state.result.step == 3
    executor.finishing.end_step(0)
    lines = [line for line in history.read(executor.rank.env.run_dir) if line["event"] == "nonfinite"]
    assert [line["step"] for line in lines] == named


# --- what a rank still has of an epoch that is over --------------------------------------------------------------------

PEER = 2.0
"""Each element of what group 1 adds to a bucket."""


class Cut(Member):
    """A member whose connections break while it receives."""

    def _receive(self, tensor, source, tag):
        operation = super()._receive(tensor, source, tag)
        self.abort()
        return operation


@pytest.fixture
def engine(executor):
    """The engine of the rank, with one bucket."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    made = TorchNativeEngine(
        model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, batch: model(batch).square().mean()
    )
    assert made.num_buckets == 1
    use(executor, made)
    return made


def connect(executor: RankExecutor, kind: type[Member] = Member) -> Member:
    """Begin another epoch of groups 0 and 1. Return the end of group 1."""
    network = Network((0, 1))
    executor.rank.link.outer = kind(network, 0)
    return Member(network, 1)


def gradient(engine: TorchNativeEngine, part: int) -> torch.Tensor:
    """Add the gradient of a microbatch to a part, and return the local gradients."""
    engine.add_to(part)
    batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    engine.compute(Microbatch(3, 1, 0), batch, 0, lambda point: None)
    return engine.local(0).clone()


def summed(executor: RankExecutor, parts: tuple[int, ...] = ()) -> torch.Tensor:
    """Reduce the bucket in another epoch. Return the part of the sum that is not of group 1."""
    connect(executor).all_reduce(torch.full_like(executor.engine.local(0), PEER))
    done = []
    executor.reducing.reduce(Reduce(3, [0], parts, done=done.append))
    assert done == [0]
    return executor.engine.reduced(0) - PEER


def test_a_standby_part_is_contributed_once_in_each_attempt_however_often_its_reduction_is_repeated(executor, engine):
    alone = gradient(engine, OWN)
    assert alone.any()
    for _ in range(2):
        executor.computing.clear()
        assert not gradient(engine, 1).any()
        for _ in range(2):
            connect(executor)
            executor.rank.link.outer.refuses = 1
            with pytest.raises(Broken):
                executor.reducing.reduce(Reduce(3, [0], (1,)))
            executor.close_epoch()
        torch.testing.assert_close(summed(executor, parts=(1,)), alone)


def test_a_reduction_that_was_started_in_an_epoch_is_started_anew_in_the_next(executor, engine):
    """Within the backward pass; the communicator with which it was started is closed."""
    alone = gradient(engine, OWN)
    connect(executor)
    executor.reducing.ahead(3, [0], ())(0)
    executor.close_epoch()
    torch.testing.assert_close(summed(executor), alone)


def test_late_data_of_a_bucket_whose_transfer_broke_changes_nothing(executor, engine):
    connect(executor, Cut)
    executor.rank.link.view = View(1, (0, 1), "a connection broke", step=3, final={0: 1}, missing={0: (0,)})
    late = engine.reduced(0)
    with pytest.raises(Broken):
        executor.reducing.transfer()
    late.fill_(77.0)
    assert not engine.reduced(0).any()


# --- news that come before what they end ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verdict", "error"),
    [
        (GroupFailed(1, "group 1 died"), Broken),
        (EpochAborted(0, "a connection failed"), Broken),
        (EpochAborted(0, "group 1 leaves", after=2), Left),
        (EpochAborted(1, "a connection failed"), None),
    ],
)
def test_a_verdict_that_comes_before_its_communicator_stands_ends_the_waits_in_it(executor, verdict, error):
    outer, executor.rank.link.outer = executor.rank.link.outer, None
    executor.rank.link.connector = MagicMock()
    executor.rank.link.connector.connect.return_value = outer
    executor.on_signal(verdict)
    assert executor.connect(VIEW, 3, lambda: False)
    assert outer.aborted == (error is Broken)
    if error is None:
        outer.all_reduce(torch.ones(1)).wait()
    else:
        with pytest.raises(error):
            outer.all_reduce(torch.ones(1))


@pytest.mark.parametrize("early", [False, True])
def test_a_rank_that_is_lost_ends_the_waits_of_its_group_even_before_the_ranks_have_met(executor, early):
    inner = IntraGroup(GlooCommunicator(None, 0, [0], 0, 60.0), 0)
    calls = [lambda: executor.rank.join(inner), lambda: executor.rank.lose("rank 1 of group 0 died")]
    for call in reversed(calls) if early else calls:
        call()
    with pytest.raises(Lost):
        inner.sum(torch.ones(1))
    assert executor.rank.link.outer.aborted, "and its waits for other groups"


def test_a_rank_that_is_lost_while_the_ranks_of_its_pipeline_connect_ends_the_waits_for_them(
    executor, engine, monkeypatch
):
    end, other = socket.socketpair()
    engine.flush, engine.peers = MagicMock(), (1,)

    def build(*_: object) -> P2PChannels:
        lines = P2PChannels({1: end})
        executor.rank.lose("rank 1 of group 0 died")
        return lines

    monkeypatch.setattr(P2PChannels, "build", build)
    executor.attach(engine)
    other.setblocking(False)
    with end, other:
        assert other.recv(1) == b"", "the other rank does not wait for this one either"
        with pytest.raises(Lost):
            executor.rank.lines.receive_words(1)
