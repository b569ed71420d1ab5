"""The contract of communicators, for each library that this machine and this torch have; NCCL's run is in ``tests/gpu``."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch.distributed as dist

from megatron_ft.run.collectives import two_level_communicator
from megatron_ft.run.collectives.base import Communicator
from megatron_ft.run.collectives.communicator_choice import GLOO, Choice, Maker
from megatron_ft.run.collectives.gloo_communicator import GlooCommunicator
from tests.communicator_contract import CommunicatorContract


class TestGloo(CommunicatorContract):
    """A process group for each view."""

    def make(
        self, rendezvous: dist.Store, me: int, members: Sequence[int], epoch: int, timeout_s: float
    ) -> Communicator:
        return GlooCommunicator(rendezvous, me, members, epoch, timeout_s)


class TestTwoLevels(CommunicatorContract):
    """Members 1 and 2 share a host. Pieces are small, so that an operation has several."""

    ROUNDED, LARGE = False, 100_000

    @pytest.fixture(autouse=True)
    def small_pieces(self, monkeypatch):
        monkeypatch.setattr(two_level_communicator, "PIECE", 1000)

    def make(
        self, rendezvous: dist.Store, me: int, members: Sequence[int], epoch: int, timeout_s: float
    ) -> Communicator:
        choice = Choice.of(GLOO, {member: (member + 1) // 2 for member in members})
        maker = Maker(me, members, epoch, timeout_s, "127.0.0.1", rounded=self.ROUNDED)
        made = maker.make(choice, "outer", lambda name: dist.PrefixStore(name, rendezvous))
        made.connect()
        return made


class TestTwoLevelsRounded(TestTwoLevels):
    """bf16 travels as bf16 between the hosts."""

    ROUNDED = True
