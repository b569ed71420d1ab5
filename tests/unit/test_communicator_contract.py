"""The contract of communicators, for each library that this machine and this torch have; NCCL's run is in ``tests/gpu``."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist

from megatron_ft.collectives import base, reconfigured_communicator, two_level_communicator
from megatron_ft.collectives.base import Communicator
from megatron_ft.collectives.communicator_choice import GLOO, Choice, Maker
from megatron_ft.collectives.gloo_communicator import GlooCommunicator
from megatron_ft.collectives.reconfigured_communicator import Endpoints, ReconfiguredCommunicator
from tests.communicator_contract import PATIENCE_S, CommunicatorContract


class TestGloo(CommunicatorContract):
    """A process group for each view."""

    def make(
        self, rendezvous: dist.Store, me: int, members: Sequence[int], epoch: int, timeout_s: float
    ) -> Communicator:
        return GlooCommunicator(rendezvous, me, members, epoch, timeout_s)


class TestTwoLevels(CommunicatorContract):
    """Members 1 and 2 share a host. Pieces are small, so that an operation has several."""

    ROUNDED = False

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


@pytest.mark.skipif(
    not reconfigured_communicator.supported(), reason=f"torch {torch.__version__} cannot reconfigure process groups"
)
class TestReconfigured(CommunicatorContract):
    """One process group in each member, for all views."""

    @pytest.fixture(autouse=True)
    def members(self):
        self.endpoints = {me: Endpoints(me) for me in range(self.MEMBERS)}

    def make(
        self, rendezvous: dist.Store, me: int, members: Sequence[int], epoch: int, timeout_s: float
    ) -> Communicator:
        return ReconfiguredCommunicator(self.endpoints[me], rendezvous, me, members, epoch, timeout_s)

    def test_the_next_view_has_the_same_process_group(self):
        outers = self.build(range(3))
        groups = {me: outer._group for me, outer in outers.items()}
        self.close(outers)
        again = self.build(range(2), epoch=1)
        assert all(outer._group is groups[me] for me, outer in again.items())

    def test_an_operation_that_never_ends_holds_up_no_later_view(self, monkeypatch):
        """torch would let it keep a thread of the group, and two of them would keep both."""
        outers = self.build(range(2))
        old = outers[0]._group
        works = [outers[0].all_reduce(self.full(0, 1)) for _ in range(3)]
        with monkeypatch.context() as patch:
            patch.setattr(ReconfiguredCommunicator, "_cut", lambda self: None)  # gloo has forgotten them
            patch.setattr(base, "GRACE_S", 0.01)
            outers[0].close()
        assert not works[0].settled()
        outers[1].leave()
        again = self.build(range(2), epoch=1)
        assert again[0]._group is not old
        self.check_sums(again)
        outers[1].close()  # the peer's end of the connections
        assert all(work.settles_within(PATIENCE_S) for work in works)
        assert base.sweep()

    def test_a_view_that_could_not_be_built_costs_no_process_group(self):
        self.close(self.build(range(2)))
        endpoint = self.endpoints[0]._free[0]
        with pytest.raises(RuntimeError):
            self.make(dist.PrefixStore("alone", self.store), 0, range(2), 1, 0.2)
        assert self.endpoints[0]._free == [endpoint]
        self.check_sums(self.build(range(2), epoch=2))
