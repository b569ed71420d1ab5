"""Models whose parameters are DTensors: FSDP2 (``fully_shard``), tensor parallelism (``parallelize_module``), or both.

A group is one mesh. Its ranks pass through every microbatch together: FSDP's shards each take an equal share of the samples,
slices of tensor parallelism take the same ones. FSDP reduces gradients inside the group within each backward pass; the
shard of a parameter that a rank holds is then reduced over the groups like any gradient, outside of autograd. So a rank
holds buffers for its shards only, and the sum over the groups can be repeated.

Failures it assumes: any rank of the group may vanish; FSDP's collectives then raise ``RuntimeError``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron_ft.engines.arrivals import Arrivals
from megatron_ft.engines.dtensors import DTensorBucketed
from megatron_ft.engines.joint import OneByOne
from megatron_ft.engines.layout import Layout
from megatron_ft.engines.port import Ready
from megatron_ft.engines.torch_native import LossFn


class FsdpEngine(DTensorBucketed, OneByOne):
    """The ``JointEngine`` port on DTensors, made by ``Session.wrap``.

    Args:
        model: see :class:`~megatron_ft.engines.dtensors.DTensorBucketed`. ``MixedPrecisionPolicy`` computes in bf16.
        optimizer, loss_fn, scheduler: see :class:`~megatron_ft.engines.torch_native.TorchNativeEngine`. ``loss_fn`` gets
            this rank's share of the samples.
        layout: the place of this rank.
        mesh: the mesh of the shards, if there are several.
        settings: see :class:`~megatron_ft.engines.buckets.Bucketed`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: LossFn,
        *,
        scheduler: Any = None,
        layout: Layout,
        mesh: DeviceMesh | None = None,
        **settings: Any,
    ) -> None:
        group = None if mesh is None else mesh.get_group()
        super().__init__(model, optimizer, scheduler, layout=layout, shard_group=group, **settings)
        self.loss_fn = loss_fn
        self._arrivals = Arrivals([[self._whole[part] for part in bucket.parameters] for bucket in self._buckets])

    def _lose(self, batch: Any) -> Any:
        return self.loss_fn(self.model, batch)

    def _go_back(self, loss: torch.Tensor, ready: Ready | None) -> None:
        with self._arrivals.watch(partial(self._complete, ready) if ready is not None else None):
            loss.backward()
