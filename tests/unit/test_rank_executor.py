"""A rank's handling of news, in cases that no whole run reaches reliably: news that are heard before what they end
exists, and operations that are repeated after an epoch has ended."""

from __future__ import annotations

import socket
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn

from megatron_ft.collectives.base import Broken, Left
from megatron_ft.collectives.bucket_allreduce import Reduction
from megatron_ft.collectives.gloo_communicator import GlooCommunicator
from megatron_ft.collectives.intra_group import IntraGroup, Lost
from megatron_ft.collectives.p2p_channel import P2PChannels
from megatron_ft.config.schema import FaultToleranceConfig, RejoinConfig, RunConfig
from megatron_ft.core.protocol import signals
from megatron_ft.core.protocol.messages import EpochAborted, GroupFailed
from megatron_ft.engines.port import OWN, StepResult
from megatron_ft.engines.torch_native import TorchNativeEngine
from megatron_ft.runlog import history
from megatron_ft.runlog.history import History
from megatron_ft.types import Microbatch, PlanOrigin, View
from megatron_ft.worker.orders import Reduce
from megatron_ft.worker.progress_counters import ProgressCounters
from megatron_ft.worker.rank_executor import Needs, RankExecutor
from tests.fakes.network import Member, Network

VIEW = View(epoch=0, live=(0, 1), reason="the run starts", step=0, plan_origin=PlanOrigin((0, 1)))
CONFIG = RunConfig(groups=2, fault_tolerance=FaultToleranceConfig(rejoin=RejoinConfig(enabled=False)))


@pytest.fixture
def rank(tmp_path, monkeypatch):
    """A rank in step 3 whose communicator stands; it has one member."""
    monkeypatch.setattr(ProgressCounters, "from_env", MagicMock)
    env = MagicMock(group=0, position=0, incarnation=0, run_dir=tmp_path, config=CONFIG)
    rank = RankExecutor(env, MagicMock(), History(tmp_path))
    rank.engine, rank.guard, rank.batches = MagicMock(), MagicMock(), MagicMock()
    rank.batches.due.return_value = False
    rank.link.outer, rank.link.view = GlooCommunicator(None, 0, [0], 0, 60.0), VIEW
    begin(rank, 3)
    yield rank
    rank._prefetcher.close()


def begin(rank: RankExecutor, step: int) -> None:
    rank.begin(step, MagicMock(), lambda: Needs((), (), ()))


def test_an_epoch_that_ends_in_order_ends_for_a_rank_that_comes_to_its_step_later(rank):
    """A follower has heard of it in the step before; its leader, which has not, lets the follower reduce the next
    one."""
    rank.on_signal(EpochAborted(0, "group 1 leaves", after=3))
    rank.link.outer.all_reduce(torch.ones(1)).wait()
    begin(rank, 4)
    with pytest.raises(Left):
        rank.link.outer.all_reduce(torch.ones(1))


def test_a_death_ends_the_epoch_at_once_and_cuts_the_connections(rank):
    rank.on_signal(EpochAborted(0, "group 1 leaves", after=3))
    rank.on_signal(GroupFailed(1, "group 1 died"))
    assert rank.link.outer._over.aborted
    with pytest.raises(Broken, match="aborted"):
        rank.link.outer.all_reduce(torch.ones(1))


def test_news_of_another_epoch_end_nothing(rank):
    rank.on_signal(EpochAborted(1, "a connection failed"))
    begin(rank, 4)
    rank.link.outer.all_reduce(torch.ones(1)).wait()


def test_a_rank_without_an_engine_ignores_a_question_about_its_state(rank):
    """The notice log holds questions that were asked of an earlier start of the group."""
    rank.publish_checksums(signals.ChecksumsRequested(3, (rank.group,)))
    rank.agreement.put.assert_not_called()


@pytest.mark.parametrize(("norm", "named"), [(float("nan"), [3]), (1.0, [])])
def test_a_group_whose_step_the_others_have_committed_is_named_for_its_gradient(rank, norm, named):
    """Chaos seed 116: it takes their state, which clears the gradient that shows whose it was, and then ends the step."""
    rank.engine.local_finite.side_effect = lambda: rank.engine.begin_step.call_count > 1
    result = StepResult(step=3, loss=1.0, microbatches=2, gradient_norm=norm)
    rank._load_state({"engine": {}, "carried": {}, "hyperparameters": None, "result": result.to_json()})
    assert rank.result.step == 3
    rank.end_step(0)
    lines = [line for line in history.read(rank._env.run_dir) if line["event"] == "nonfinite"]
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
def engine(rank):
    """The engine of the rank, with one bucket."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    rank.engine = TorchNativeEngine(
        model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, batch: model(batch).square().mean()
    )
    assert rank.engine.num_buckets == 1
    rank._reduction, rank._unchecked = Reduction(rank.engine, rank.points), False
    begin(rank, 3)
    return rank.engine


def connect(rank: RankExecutor, kind: type[Member] = Member) -> Member:
    """Begin another epoch of groups 0 and 1. Return the end of group 1."""
    network = Network((0, 1))
    rank.link.outer = kind(network, 0)
    return Member(network, 1)


def gradient(engine: TorchNativeEngine, part: int) -> torch.Tensor:
    """Add the gradient of a microbatch to a part, and return the local gradients."""
    engine.add_to(part)
    batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    engine.compute(Microbatch(3, 1, 0), batch, 0, lambda point: None)
    return engine.local(0).clone()


def summed(rank: RankExecutor, parts: tuple[int, ...] = ()) -> torch.Tensor:
    """Reduce the bucket in another epoch. Return the part of the sum that is not of group 1."""
    connect(rank).all_reduce(torch.full_like(rank.engine.local(0), PEER))
    done = []
    rank.reduce(Reduce(3, [0], parts, done=done.append))
    assert done == [0]
    return rank.engine.reduced(0) - PEER


def test_a_standby_part_is_contributed_once_in_each_attempt_however_often_its_reduction_is_repeated(rank, engine):
    alone = gradient(engine, OWN)
    assert alone.any()
    for _ in range(2):
        rank._clear()
        assert not gradient(engine, 1).any()
        for _ in range(2):
            connect(rank)
            rank.link.outer.refuses = 1
            with pytest.raises(Broken):
                rank.reduce(Reduce(3, [0], (1,)))
            rank.close_epoch()
        torch.testing.assert_close(summed(rank, parts=(1,)), alone)


def test_a_reduction_that_was_started_in_an_epoch_is_started_anew_in_the_next(rank, engine):
    """Within the backward pass; the communicator with which it was started is closed."""
    alone = gradient(engine, OWN)
    connect(rank)
    rank.ahead(3, [0], ())(0)
    rank.close_epoch()
    torch.testing.assert_close(summed(rank), alone)


def test_late_data_of_a_bucket_whose_transfer_broke_changes_nothing(rank, engine):
    connect(rank, Cut)
    rank.link.view = View(1, (0, 1), "a connection broke", step=3, final={0: 1}, missing={0: (0,)})
    late = engine.reduced(0)
    with pytest.raises(Broken):
        rank.transfer()
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
def test_a_verdict_that_comes_before_its_communicator_stands_ends_the_waits_in_it(rank, verdict, error):
    outer, rank.link.outer = rank.link.outer, None
    rank.link.connector = MagicMock()
    rank.link.connector.connect.return_value = outer
    rank.on_signal(verdict)
    assert rank.connect(VIEW, 3, lambda: False)
    assert outer.aborted == (error is Broken)
    if error is None:
        outer.all_reduce(torch.ones(1)).wait()
    else:
        with pytest.raises(error):
            outer.all_reduce(torch.ones(1))


@pytest.mark.parametrize("early", [False, True])
def test_a_rank_that_is_lost_ends_the_waits_of_its_group_even_before_the_ranks_have_met(rank, early):
    inner = IntraGroup(GlooCommunicator(None, 0, [0], 0, 60.0), 0)
    calls = [lambda: rank.join(inner), lambda: rank.lose("rank 1 of group 0 died")]
    for call in reversed(calls) if early else calls:
        call()
    with pytest.raises(Lost):
        inner.sum(torch.ones(1))
    assert rank.link.outer.aborted, "and its waits for other groups"


def test_a_rank_that_is_lost_while_the_ranks_of_its_pipeline_connect_ends_the_waits_for_them(rank, engine, monkeypatch):
    end, other = socket.socketpair()
    engine.flush, engine.peers = MagicMock(), (1,)

    def build(*_: object) -> P2PChannels:
        lines = P2PChannels({1: end})
        rank.lose("rank 1 of group 0 died")
        return lines

    monkeypatch.setattr(P2PChannels, "build", build)
    rank.attach(engine)
    other.setblocking(False)
    with end, other:
        assert other.recv(1) == b"", "the other rank does not wait for this one either"
        with pytest.raises(Lost):
            rank._lines.receive_words(1)
