"""Models whose parameters are DTensors: FSDP2 (``fully_shard``), tensor parallelism (``parallelize_module``), or both.

A group is one mesh. Its ranks pass through every microbatch together: FSDP's shards each take an equal share of the samples,
slices of tensor parallelism take the same ones. FSDP reduces gradients inside the group within each backward pass; the
shard of a parameter that a rank holds is then reduced over the groups like any gradient, outside of autograd. So a rank
holds buffers for its shards only, and the sum over the groups can be repeated.

Failures it assumes: any rank of the group may vanish; FSDP's collectives then raise ``RuntimeError``.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from megatron_ft.errors import EngineError
from megatron_ft.run.engines import rounds
from megatron_ft.run.engines.arrivals import Arrivals
from megatron_ft.run.engines.dtensors import DTensorBucketed
from megatron_ft.run.engines.joint import OneByOne
from megatron_ft.run.engines.layout import Layout
from megatron_ft.run.engines.port import Ready
from megatron_ft.run.engines.torch_native import LossFn


class FsdpEngine(DTensorBucketed, OneByOne):
    """The ``JointEngine`` port on DTensors, made by ``Session.wrap``.

    Args:
        model: see :class:`~megatron_ft.run.engines.dtensors.DTensorBucketed`. ``MixedPrecisionPolicy`` computes in bf16.
        optimizer, loss_fn, scheduler: see :class:`~megatron_ft.run.engines.torch_native.TorchNativeEngine`. ``loss_fn`` gets
            this rank's share of the samples.
        layout: the place of this rank.
        mesh: the mesh of the shards, if there are several.
        reduce: ``"each"``: shards sum gradients with each microbatch; ``"last"``: with the last of several that follow each
            other. Exact reduction needs those of each.
        settings: see :class:`~megatron_ft.run.engines.buckets.Bucketed`.
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
        reduce: str = "each",
        **settings: Any,
    ) -> None:
        group = None if mesh is None else mesh.get_group()
        super().__init__(model, optimizer, scheduler, layout=layout, shard_group=group, **settings)
        self.loss_fn = loss_fn
        if reduce == "last":
            self._at_a_time = rounds.ALL
            if self._rounding is not None or not isinstance(model, FSDPModule):
                raise EngineError(
                    'fault_tolerance.inner_shards_reduce is "last", which needs a model of fully_shard and reduction '
                    '"fast"; use "each"'
                )
        self._arrivals = Arrivals([[self._whole[part] for part in bucket.parameters] for bucket in self._buckets])

    def _will_follow(self, same: bool) -> None:
        if self._at_a_time > 1:
            cast(FSDPModule, self.model).set_requires_gradient_sync(not same)

    @property
    def checks_by_flushes(self) -> bool:
        # Several microbatches are summed over the shards together; a compiled model would be compiled once more.
        compiled = any(getattr(module, "_compiled_call_impl", None) is not None for module in self.model.modules())
        return self._at_a_time > 1 or compiled or hasattr(self.model, "_orig_mod")

    def _lose(self, batch: Any) -> Any:
        return self.loss_fn(self.model, batch)

    def _go_back(self, loss: torch.Tensor, ready: Ready | None) -> None:
        with self._arrivals.watch(partial(self._complete, ready) if ready is not None else None):
            loss.backward()
