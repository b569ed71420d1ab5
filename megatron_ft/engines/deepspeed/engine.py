"""The engine ports on DeepSpeed's engines.

DeepSpeed computes; what it would do between replicas (reduce, clip, count loss) is done here, over all groups. Its optimizer
wrapper and learning-rate scheduler make the update.

:class:`DeepSpeedPipeline`: pipeline and tensor parallelism inside a group. Every rank holds the parameters of its stage and
slice, and buckets of their gradients. A parameter may be in several ranks of a group: replicated over the slices of a stage,
or tied between stages. Replicas get the same gradient in every slice. The copies of a tied parameter get different parts of
it; these are summed when the step is committed, after the sum over the groups, so that a bucket can be reduced as often as
needed.

:class:`DeepSpeedData`: every rank holds the whole model and computes microbatches of its own; ZeRO splits the optimizer's
state over the ranks of the group.

Failures they assume: any rank of the group may vanish; a collective inside the group raises ``RuntimeError`` then.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from math import isfinite, sqrt
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn

from megatron_ft.engines.base import Control, Progress, Ready, StepResult, Work, manual_seed
from megatron_ft.engines.buckets import Bucketed
from megatron_ft.engines.deepspeed.optimizers import adapter
from megatron_ft.engines.deepspeed.pipeline import FlushingEngine
from megatron_ft.types import Microbatch

_SHARDED = ("tensor_model_parallel", "model_parallel")
"""Attributes by which Megatron and DeepSpeed mark a parameter of which each slice has another part."""


class _Adapter(Bucketed, ABC):
    """What both have in common.

    Args:
        engine: the group's, not used for anything else.
        bucket_mb: largest bucket in MiB; None: ``engines.buckets.Buckets`` decides.
        gradient_clipping: clip to this norm of the whole model's gradient; 0 turns clipping off.
        slots: numbers that the session sends along with bucket 0 (``engines.base.TAIL``).
    """

    def __init__(
        self, engine: DeepSpeedEngine, *, bucket_mb: float | None = None, gradient_clipping: float = 0.0, slots: int = 0
    ) -> None:
        super().__init__([p for p in engine.module.parameters() if p.requires_grad], bucket_mb, slots)
        self.engine = engine
        self._clipping = gradient_clipping
        self._optimizer = adapter(engine.optimizer, self._buckets)

    alike = False
    """Each rank has its own part of the model, or of the optimizer's state (ZeRO)."""

    def begin_step(self) -> None:
        for bucket in self._buckets:
            bucket.begin_step()
        self._optimizer.begin_step()

    def update(self, step: int, microbatches: int, progress: Progress) -> StepResult:
        loss, norm = self._loss_and_norm(self._buckets.check(step, microbatches))
        loss, norm = loss / microbatches, norm / microbatches
        self._buckets.average(microbatches, norm, self._clipping)
        progress("update")
        result = StepResult(step, loss, microbatches, norm)
        self.repeat(result)
        return result

    def repeat(self, result: StepResult) -> None:
        if isfinite(result.gradient_norm):
            self._optimizer.give()
            # What ``DeepSpeedEngine.step`` and ``PipelineEngine``'s OptimizerStep come to at the end of an accumulation.
            self.engine._take_model_step({})

    @abstractmethod
    def _loss_and_norm(self, loss: float) -> tuple[float, float]:
        """Of the step's sums; ``loss`` is what this rank's buckets hold."""

    def state(self) -> Mapping[str, Any]:
        scheduler = self.engine.lr_scheduler
        state = {
            "module": dict(nn.Module.state_dict(self.engine.module)),
            "optimizer": self._optimizer.state(),
            "counters": [self.engine.global_steps, self.engine.global_samples, self.engine.skipped_steps],
        }
        return state | ({"scheduler": scheduler.state_dict()} if scheduler is not None else {})

    def load_state(self, state: Mapping[str, Any]) -> None:
        own = nn.Module.state_dict(self.engine.module)
        with torch.no_grad():  # in place: DeepSpeed's flat buffers are the same memory
            for name, value in state["module"].items():
                own[name].copy_(value)
        self._optimizer.load_state(state["optimizer"])
        self.engine.global_steps, self.engine.global_samples, self.engine.skipped_steps = state["counters"]
        if "scheduler" in state:
            self.engine.lr_scheduler.load_state_dict(state["scheduler"])


class DeepSpeedPipeline(_Adapter):
    """A ``JointEngine``; made by ``Session.deepspeed``."""

    engine: FlushingEngine

    def __init__(self, engine: FlushingEngine, **settings: Any) -> None:
        super().__init__(engine, **settings)
        self._tied = engine.module.get_tied_weights_and_groups()
        self._counted = self._unique()

    @property
    def loads(self) -> bool:
        return self.engine.is_first_stage() or self.engine.is_last_stage()

    @property
    def peers(self) -> Sequence[int]:
        return self.engine.layout.peers

    def compute(
        self, microbatch: Microbatch, batch: Any, seed: int, progress: Progress, ready: Ready | None = None
    ) -> None:
        raise AssertionError("the ranks of a pipeline compute together: flush")

    def flush(self, control: Control, work: Work) -> None:
        microbatches, losses = self.engine.flush(control, work)
        self._optimizer.collect()
        self._buckets.count(losses, microbatches)

    def _loss_and_norm(self, loss: float) -> tuple[float, float]:
        self._sum_tied()
        told = torch.zeros(2, dtype=torch.float64, device=self.engine.device)
        told[0] = loss if self.engine.layout.slice == 0 else 0.0  # only the last stage has one
        told[1] = sum(norm.double().square() for norm in torch._foreach_norm(self._views(self._counted)))
        dist.all_reduce(told)
        return float(told[0]), sqrt(float(told[1]))

    def _unique(self) -> set[nn.Parameter]:
        """The parameters that this rank counts in norms: each is counted by one rank of the group."""
        first_slice = self.engine.layout.slice == 0
        elsewhere = {weight for weight, group in self._tied if dist.get_rank(group) > 0}
        sharded = {p for p in self._parameters if any(getattr(p, name, False) for name in _SHARDED)}
        return {p for p in self._parameters if p not in elsewhere and (first_slice or p in sharded)}

    def _counts(self, parameter: nn.Parameter) -> bool:
        return parameter in self._counted

    def _sum_tied(self) -> None:
        for weight, group in self._tied:
            (view,) = self._views({weight})
            dist.all_reduce(view, group=group)

    def _views(self, parameters: set[nn.Parameter]) -> list[torch.Tensor]:
        """Of the step's sums."""
        return [
            view
            for bucket in self._buckets
            for parameter, view in zip(bucket.parameters, bucket.sum_views, strict=True)
            if parameter in parameters
        ]


class DeepSpeedData(_Adapter):
    """An ``Engine``; made by ``Session.deepspeed``. ``loss_fn``: (engine, batch) -> mean loss of one microbatch."""

    def __init__(self, engine: DeepSpeedEngine, loss_fn: Callable[[Any, Any], torch.Tensor], **settings: Any) -> None:
        super().__init__(engine, **settings)
        self.loss_fn = loss_fn

    def compute(
        self, microbatch: Microbatch, batch: Any, seed: int, progress: Progress, ready: Ready | None = None
    ) -> None:
        manual_seed(seed)
        progress("forward")
        loss = self.loss_fn(self.engine, batch)
        progress("backward")
        self.engine.backward(loss)
        self._buckets.count(loss)
        self._optimizer.collect()

    def _loss_and_norm(self, loss: float) -> tuple[float, float]:
        views = [view for bucket in self._buckets for view in bucket.sum_views]
        return loss, float(torch.nn.utils.get_total_norm(views))
