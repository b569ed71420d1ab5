"""A rank's handling of news, in cases that no whole run reaches reliably: heard in one step, and meant for the next."""

from __future__ import annotations

from unittest.mock import MagicMock

import pytest
import torch

from megatron_ft.collectives.base import Broken, Left
from megatron_ft.collectives.gloo_communicator import GlooCommunicator
from megatron_ft.config.schema import RunConfig
from megatron_ft.core.protocol import signals
from megatron_ft.core.protocol.messages import EpochAborted, GroupFailed
from megatron_ft.runlog.history import History
from megatron_ft.types import PlanOrigin, View
from megatron_ft.worker.progress_counters import ProgressCounters
from megatron_ft.worker.rank_executor import Needs, RankExecutor

VIEW = View(epoch=0, live=(0, 1), reason="the run starts", step=0, plan_origin=PlanOrigin((0, 1)))


@pytest.fixture
def rank(tmp_path, monkeypatch):
    """A rank in step 3 whose communicator stands (it has one member: no test here needs a second)."""
    monkeypatch.setattr(ProgressCounters, "from_env", MagicMock)
    env = MagicMock(group=0, position=0, incarnation=0, run_dir=tmp_path, config=RunConfig(groups=2))
    rank = RankExecutor(env, MagicMock(), History(tmp_path))
    rank.engine, rank.guard = MagicMock(), MagicMock()
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
