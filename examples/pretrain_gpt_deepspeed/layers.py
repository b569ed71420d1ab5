"""Linear layers split over the slices of a stage (tensor parallelism), with torch's DTensor.

A parameter is a plain tensor, this slice's part of it: DeepSpeed's optimizers and checkpoints never see a DTensor.
It becomes one inside ``forward`` only, where it says which part of what it is, and DTensor finds the communication: an
all-reduce after a layer split by rows, and one of the gradient before a layer split by columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard


@dataclass(frozen=True)
class Slices:
    """The slices of this rank's stage. ``mesh`` is None where there is only one."""

    number: int = 0
    count: int = 1
    mesh: DeviceMesh | None = None

    @classmethod
    def of_stage(cls, count: int) -> Slices:
        """Return the slices of this rank's stage. Positions count slices first. All ranks of the group call this."""
        if count == 1:
            return cls()
        mine = None
        for first in range(0, dist.get_world_size(), count):
            group = dist.new_group(list(range(first, first + count)))
            if first <= dist.get_rank() < first + count:
                mine = group
        return cls(dist.get_rank() % count, count, DeviceMesh.from_group(mine, get_accelerator().device_name()))


class Split(nn.Module):
    """A linear layer without bias of which every slice has a part, cut along ``axis`` of the weight [outputs, inputs].

    Every slice draws the whole weight from the same random numbers and keeps its part, so the model does not depend on
    the number of slices.
    """

    def __init__(self, inputs: int, outputs: int, axis: int, slices: Slices, parts: int = 1) -> None:
        """Make a layer of ``parts`` matrices of equal size below each other (query, key, value), each of which is
        cut."""
        super().__init__()
        whole = torch.empty(outputs, inputs)
        nn.init.normal_(whole, std=0.02)
        cut = [matrix.chunk(slices.count, axis)[slices.number] for matrix in whole.chunk(parts, 0)]
        self.weight = nn.Parameter(torch.cat(cut, 0).contiguous())
        self.weight.tensor_model_parallel = slices.count > 1
        # How an exported checkpoint puts the parts together.
        self.weight.partition_dim, self.weight.partition_stride = axis, parts
        self.mesh, self.axis = slices.mesh, axis


class ByColumns(Split):
    """[..., inputs], the same everywhere -> [..., this slice's outputs]."""

    def __init__(self, inputs: int, outputs: int, slices: Slices, parts: int = 1) -> None:
        super().__init__(inputs, outputs, 0, slices, parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mesh is None:
            return F.linear(x, self.weight)
        whole = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)
        weight = DTensor.from_local(self.weight, self.mesh, [Shard(0)], run_check=False)
        return F.linear(whole, weight).to_local()


class ByRows(Split):
    """[..., this slice's inputs] -> [..., outputs], the same everywhere."""

    def __init__(self, inputs: int, outputs: int, slices: Slices) -> None:
        super().__init__(inputs, outputs, 1, slices)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mesh is None:
            return F.linear(x, self.weight)
        part = DTensor.from_local(x, self.mesh, [Shard(x.dim() - 1)], run_check=False)
        weight = DTensor.from_local(self.weight, self.mesh, [Shard(1)], run_check=False)
        return F.linear(part, weight).redistribute(placements=[Replicate()]).to_local()
