"""Plain PyTorch: any ``nn.Module`` with any torch optimizer. Every rank of a group holds the whole model.

Parameters' ``.grad`` are views into one flat local buffer per bucket, so autograd accumulates microbatches in place and
no flattening happens. autograd's hooks tell when the last gradient of a bucket has been added.

Failures it assumes: a model, a loss function or a hook of the user's that takes gradients away or adds to them twice is
refused with an ``EngineError``, which ends this group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import isfinite
from typing import Any

import torch
from torch import nn

from megatron_ft.engines.base import Progress, Ready, StepResult, manual_seed
from megatron_ft.engines.buckets import Bucket as GradientBucket
from megatron_ft.engines.buckets import Bucketed
from megatron_ft.errors import EngineError
from megatron_ft.types import Bucket, Microbatch

LossFn = Callable[[nn.Module, Any], torch.Tensor]
"""(model, batch) -> scalar loss, the mean over the microbatch."""

_REPLACED = (
    "a gradient was replaced during a microbatch (zero_grad or a hook in loss_fn?); leave .grad to the engine: it keeps the "
    "gradients until the step is committed"
)


class _Arrivals:
    """Which gradients of the present microbatch have been added, as autograd's hooks tell.

    A parameter whose gradient comes in several parts (reentrant checkpointing of layers that share it) makes its bucket
    look complete too early. So nobody is told anything before one whole backward pass has shown that there are none.
    """

    def __init__(self, buckets: Sequence[GradientBucket]) -> None:
        self._buckets = buckets
        self._arrived: list[set[int]] = [set() for _ in buckets]
        self._told: set[Bucket] = set()
        self._watching, self._seen_whole, self._in_parts = False, False, False
        self._ready: Ready | None = None
        for number, bucket in enumerate(buckets):
            for index, parameter in enumerate(bucket.parameters):
                parameter.register_post_accumulate_grad_hook(partial(self._add, number, index))

    @contextmanager
    def watch(self, ready: Ready | None) -> Iterator[None]:
        """During a backward pass; ``ready`` is told the complete buckets."""
        for arrived in self._arrived:
            arrived.clear()
        self._told.clear()
        self._ready = ready if self._seen_whole and not self._in_parts else None
        self._watching = True
        try:
            yield
            self._seen_whole = True
        finally:
            self._watching, self._ready = False, None

    def _add(self, number: Bucket, index: int, parameter: nn.Parameter) -> None:
        if not self._watching:
            return
        bucket, arrived = self._buckets[number], self._arrived[number]
        if parameter.grad is not bucket.local_views[index]:
            raise EngineError(_REPLACED)
        if number in self._told:
            raise EngineError(
                f"a parameter of shape {tuple(parameter.shape)} got its gradient in several parts, which it did not before, "
                f"and the first ones have been sent; set fault_tolerance.overlap to false"
            )
        self._in_parts |= index in arrived
        arrived.add(index)
        if self._ready is not None and not self._in_parts and len(arrived) == len(bucket.parameters):
            self._told.add(number)
            self._ready(number)


class TorchNativeEngine(Bucketed):
    """The :class:`~megatron_ft.engines.base.Engine` port on plain PyTorch.

    Args:
        model: all trainable parameters in fp32 (use ``torch.autocast`` in ``loss_fn`` for bf16 compute).
        optimizer: any ``torch.optim.Optimizer`` over the model's parameters; do not call it yourself.
        loss_fn: (model, batch) -> scalar mean loss of one microbatch.
        scheduler: optional learning-rate scheduler, stepped once per committed step.
        bucket_mb: largest bucket in MiB; None: ``engines.buckets.Buckets`` decides.
        gradient_clipping: clip to this global norm; 0 turns clipping off.
        slots: numbers that the session sends along with bucket 0 (``engines.base.TAIL``).

    Raises:
        EngineError: no trainable parameter, or one that is not fp32.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: LossFn,
        *,
        scheduler: Any = None,
        bucket_mb: float | None = None,
        gradient_clipping: float = 0.0,
        slots: int = 0,
    ) -> None:
        self.model, self.optimizer, self.loss_fn, self.scheduler = model, optimizer, loss_fn, scheduler
        self._clipping = gradient_clipping
        parameters = _trainable(model)
        _check_optimizer(optimizer, parameters)
        super().__init__(parameters, bucket_mb, slots)
        self._arrivals = _Arrivals(self._buckets)

    alike = True

    def begin_step(self) -> None:
        for bucket in self._buckets:
            bucket.begin_step()
            bucket.point_gradients_at(bucket.local_views)

    def compute(
        self, microbatch: Microbatch, batch: Any, seed: int, progress: Progress, ready: Ready | None = None
    ) -> None:
        manual_seed(seed)
        progress("forward")
        loss = self.loss_fn(self.model, batch)
        self._buckets.count(loss)  # before backward: it may send a bucket
        progress("backward")
        with self._arrivals.watch(ready):
            loss.backward()
        if any(bucket.parameters[0].grad is not bucket.local_views[0] for bucket in self._buckets):
            raise EngineError(_REPLACED)

    def update(self, step: int, microbatches: int, progress: Progress) -> StepResult:
        loss = self._buckets.check(step, microbatches)
        views = [view for bucket in self._buckets for view in bucket.sum_views]
        norm = float(torch.nn.utils.get_total_norm(views)) / microbatches
        self._buckets.average(microbatches, norm, self._clipping)
        progress("update")
        result = StepResult(step, loss / microbatches, microbatches, norm)
        self.repeat(result)
        return result

    def repeat(self, result: StepResult) -> None:
        for bucket in self._buckets:
            bucket.point_gradients_at(bucket.sum_views)
        if isfinite(result.gradient_norm):
            self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()

    def state(self) -> Mapping[str, Any]:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return state | ({"scheduler": self.scheduler.state_dict()} if self.scheduler is not None else {})

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not named:
        raise EngineError("the model has no trainable parameter; pass the nn.Module that is to be trained")
    for name, parameter in named:
        if parameter.dtype != torch.float32:
            raise EngineError(
                f"parameter {name} is {parameter.dtype}; the torch_native engine keeps parameters in torch.float32 "
                f"(use torch.autocast inside loss_fn for bf16 compute)"
            )
    return [parameter for _, parameter in named]


def _check_optimizer(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    known = {id(parameter) for parameter in parameters}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in known and parameter.requires_grad:
                raise EngineError(
                    f"the optimizer updates a parameter of shape {tuple(parameter.shape)} that is not the model's; "
                    f"build it from model.parameters() of the model you pass"
                )
