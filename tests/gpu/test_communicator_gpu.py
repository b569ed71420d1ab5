"""The contract of communicators on NCCL, whose members are threads, each with a GPU of its own. Not measured yet."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist

from megatron_ft.run.collectives.base import Communicator
from megatron_ft.run.collectives.communicator_choice import NCCL, Choice, Maker
from tests.communicator_contract import CommunicatorContract

GPUS = torch.cuda.device_count() if dist.is_nccl_available() else 0


@pytest.mark.gpu
@pytest.mark.skipif(
    GPUS < CommunicatorContract.MEMBERS,
    reason=f"NCCL needs a GPU for each of {CommunicatorContract.MEMBERS} members; here are {GPUS}",
)
class TestNccl(CommunicatorContract):
    """NCCL for tensors on a GPU, gloo beside it."""

    def make(
        self, rendezvous: dist.Store, me: int, members: Sequence[int], epoch: int, timeout_s: float
    ) -> Communicator:
        torch.cuda.set_device(me)
        maker = Maker(me, members, epoch, timeout_s, "127.0.0.1", self.device(me))
        made = maker.make(Choice(NCCL, ()), "outer", lambda name: dist.PrefixStore(name, rendezvous))
        made.connect()
        return made

    def device(self, me: int) -> torch.device:
        return torch.device("cuda", me)
