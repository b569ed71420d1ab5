"""The engine ports on DeepSpeed's engines.

DeepSpeed computes. Its work between replicas (reduce, clip, count loss) is done here instead, over all groups. Its
optimizer wrapper and learning-rate scheduler make the update.

:class:`DeepSpeedPipeline`: pipeline and tensor parallelism inside a group. Every rank holds the parameters of its stage
and slice, and buckets of their gradients. Several ranks of a group may hold the same parameter: it is replicated over
the slices of a stage, or tied between stages. Replicas get the same gradient in every slice. The copies of a tied
parameter get different parts of it. These are summed when the step is committed, after the sum over the groups, so that
a bucket can be reduced any number of times.

:class:`DeepSpeedData`: every rank holds the whole model and computes microbatches of its own; ZeRO splits the
optimizer's state over the ranks of the group.

Failures it assumes: any rank of the group may vanish; a collective inside the group then raises ``RuntimeError``.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe import schedule
from torch import nn

from megatron_ft.errors import EngineError
from megatron_ft.run.engines import pipeline_flush
from megatron_ft.run.engines.arrivals import Arrivals
from megatron_ft.run.engines.buckets import Bucket, Bucketed
from megatron_ft.run.engines.deepspeed.optimizers import InPlace, adapter
from megatron_ft.run.engines.deepspeed.pipeline import FlushingEngine
from megatron_ft.run.engines.joint import JointBucketed
from megatron_ft.run.engines.pipeline_flush import Flow
from megatron_ft.run.engines.port import Control, Work
from megatron_ft.run.engines.single_rank import SingleRank
from megatron_ft.run.engines.state_tensors import named_state

_SHARDED = ("tensor_model_parallel", "model_parallel")
"""Attributes with which Megatron and DeepSpeed mark a parameter that is split over the slices."""


def _sharding(module: nn.Module) -> dict[str, list[int]]:
    """Return how the parameters of a slice were cut, for those that say so (``run.checkpoint.export``)."""
    return {
        name: [parameter.partition_dim, getattr(parameter, "partition_stride", 1)]
        for name, parameter in module.named_parameters()
        if any(getattr(parameter, mark, False) for mark in _SHARDED) and hasattr(parameter, "partition_dim")
    }


class Adapter(Bucketed, ABC):
    """The common part of all adapters.

    Args:
        engine: the group's DeepSpeed engine, used by this adapter only.
        parameters: those whose gradients are reduced. Default: the trainable ones of the model.
        optimizer: the adapter of its optimizer. Default: one that fits it.
        settings: see :class:`~megatron_ft.run.engines.buckets.Bucketed`.
    """

    def __init__(
        self,
        engine: DeepSpeedEngine,
        parameters: Sequence[nn.Parameter] = (),
        optimizer: InPlace | None = None,
        **settings: Any,
    ) -> None:
        own = parameters or [p for p in engine.module.parameters() if p.requires_grad]
        super().__init__(engine.module, own, **settings)
        self.engine = engine
        self._optimizer = adapter(engine.optimizer, self._buckets) if optimizer is None else optimizer
        self.takes_gradients = self._rounding is not None or not self._optimizer.adds_to_buckets

    def _gradients_of(self, bucket: Bucket) -> Sequence[torch.Tensor | None]:
        return self._optimizer.gradients(bucket)

    def _forget_gradients(self) -> None:
        self._optimizer.forget()

    def _aim(self, part: int) -> None:
        super()._aim(part)
        self._optimizer.aim()

    def _torch_optimizers(self) -> Sequence[torch.optim.Optimizer]:
        return (self._optimizer.inner,)

    def _loss_scale(self) -> float:
        return self._optimizer.loss_scale

    def _skip(self) -> None:
        self._optimizer.skip()

    def _optimize(self) -> None:
        self._optimizer.give()
        # The same call as in ``DeepSpeedEngine.step`` and ``PipelineEngine``'s OptimizerStep at the end of an
        # accumulation.
        self.engine._take_model_step({})

    def _module_state(self) -> Mapping[str, Any]:
        """Return the model's tensors that are part of the state, by name."""
        return dict(nn.Module.state_dict(self.engine.module))

    def state(self) -> Mapping[str, Any]:
        state = {
            "module": self._module_state(),
            "optimizer": self._optimizer.state(),
            "counters": [self.engine.global_steps, self.engine.global_samples, self.engine.skipped_steps],
        }
        state |= {"sharding": sharding} if (sharding := _sharding(self.engine.module)) else {}
        return state | self._rest(self.engine.lr_scheduler)

    def load_state(self, state: Mapping[str, Any]) -> None:
        own = self._module_state()
        with torch.no_grad():  # in place: DeepSpeed's flat buffers are the same memory
            for name, value in state["module"].items():
                own[name].copy_(value)
        self._optimizer.load_state(state["optimizer"])
        self.engine.global_steps, self.engine.global_samples, self.engine.skipped_steps = state["counters"]
        if "scheduler" in state:
            self.engine.lr_scheduler.load_state_dict(state["scheduler"])
        self._load_rest(state, None)

    def state_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        optimizer = self._optimizer
        return named_state(self.engine.module, optimizer.inner, self._buffers.unsaved(), optimizer.masters())


class DeepSpeedPipeline(Adapter, JointBucketed):
    """A ``JointEngine``, made by ``Session.deepspeed``."""

    engine: FlushingEngine

    def __init__(self, engine: FlushingEngine, **settings: Any) -> None:
        super().__init__(engine, in_flight=True, layout=engine.layout, **settings)
        self.peers = pipeline_flush.peers(engine.layout)
        if self._per_token and engine.is_last_stage():
            self._count_in_loss_fn(engine.module)
        self._tied = engine.module.get_tied_weights_and_groups()
        self._counted = self._unique()

    @property
    def needs_samples(self) -> bool:
        return self.engine.is_first_stage() or self.engine.is_last_stage()

    def flush(self, control: Control, work: Work) -> None:
        self.engine.run(self._passes(Flow(self.engine.layout, control, work), work))
        self._buffers.restore()

    def _passes(self, flow: Flow, work: Work) -> Iterator[list[schedule.PipeInstruction]]:
        """Yield DeepSpeed's instructions for each pass that ``flow`` decides on; the next are asked for after them."""
        engine = self.engine
        first, last = engine.is_first_stage(), engine.is_last_stage()
        while (turn := flow.next()) is not None:
            buffer = turn.index % engine.in_flight
            if turn.kind == "forward":
                if not first:
                    yield [schedule.RecvActivation(buffer)]
                with work.span("forward", turn.listed):
                    self.add_to(turn.listed.part)
                    engine.begin(buffer, turn.listed.microbatch, work)
                    self._buffers.restore()
                    yield [schedule.ForwardPass(buffer)]
                    self._take_changes()
                    self._count_loss(engine.total_loss)
                    engine.total_loss = None
                if not last:
                    yield [schedule.SendActivation(buffer)]
            else:
                if not last:
                    yield [schedule.RecvGrad(buffer)]
                with work.span("backward", turn.listed):
                    self.add_to(turn.listed.part)
                    yield [schedule.BackwardPass(buffer)]
                if not first:
                    yield [schedule.SendGrad(buffer)]
                work.computed(turn.listed)
                if turn.last:
                    self._all_complete(work.ready())

    def _count_in_loss_fn(self, module: Any) -> None:
        """Make the last stage's loss function count its tokens and return only the sum of losses."""
        loss_fn = module.loss_fn
        if loss_fn is None:
            raise EngineError(
                'fault_tolerance.loss_reduction is "token", but the PipelineModule has no loss_fn; give it one that returns '
                "(sum of the tokens' losses, number of these tokens)"
            )

        def counted(outputs: Any, labels: Any) -> torch.Tensor:
            loss, tokens = self._split_loss(loss_fn(outputs, labels))
            self._count_tokens(tokens)
            return loss

        module.loss_fn = counted

    def _unique(self) -> set[nn.Parameter]:
        """Return the parameters that this rank counts in norms; one rank of the group counts each parameter."""
        first_slice = self.engine.layout.slice == 0
        elsewhere = {weight for weight, group in self._tied if dist.get_rank(group) > 0}
        sharded = {p for p in self._parameters if any(getattr(p, name, False) for name in _SHARDED)}
        return {p for p in self._parameters if p not in elsewhere and (first_slice or p in sharded)}

    def _sum_inside(self) -> None:
        for weight, group in self._tied:
            (view,) = self._views({weight})
            dist.all_reduce(view, group=group)


class DeepSpeedData(Adapter, SingleRank):
    """An ``Engine``, made by ``Session.deepspeed``. ``loss_fn``: (engine, batch) -> mean loss of one microbatch, or
    with ``loss_reduction`` ``"token"`` (sum of the tokens' losses, number of these tokens)."""

    def __init__(self, engine: DeepSpeedEngine, loss_fn: Callable[[Any, Any], torch.Tensor], **settings: Any) -> None:
        super().__init__(engine, **settings)
        self.loss_fn = loss_fn
        watched = self._buckets if self._optimizer.adds_to_buckets else ()
        self._arrivals = Arrivals([bucket.parameters for bucket in watched])

    def _lose(self, batch: Any) -> Any:
        return self.loss_fn(self.engine, batch)

    def _go_back(self, loss: torch.Tensor) -> None:
        self.engine.backward(loss)
