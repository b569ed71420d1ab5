"""Plain PyTorch: any ``nn.Module`` with any torch optimizer, one rank per group.

Parameters' ``.grad`` are views into one flat local buffer per bucket, so autograd accumulates microbatches in place and
no flattening happens. A bucket's flat buffer ends with two more numbers: the sum of the losses and the number of
microbatches. They are reduced with the gradients, so every bucket proves by itself that all of the step's microbatches are
in it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from megatron_ft.engines.base import Progress, StepResult
from megatron_ft.errors import EngineError
from megatron_ft.types import Bucket, Microbatch

LossFn = Callable[[nn.Module, Any], torch.Tensor]
"""(model, batch) -> scalar loss, the mean over the microbatch."""

_TAIL = 2  # sum of losses, number of microbatches


class _Bucket:
    """Some parameters, their local gradient and its reduction. Both flat, fp32, [elements + _TAIL]."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.elements = sum(parameter.numel() for parameter in parameters)
        device = parameters[0].device
        self.local = torch.zeros(self.elements + _TAIL, dtype=torch.float32, device=device)
        self.reduced = torch.zeros_like(self.local)
        self.local_views = self._views(self.local)
        self.reduced_views = self._views(self.reduced)

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        views, offset = [], 0
        for parameter in self.parameters:
            views.append(flat[offset : offset + parameter.numel()].view_as(parameter))
            offset += parameter.numel()
        return views

    def replace_reduced(self) -> None:
        self.reduced = torch.zeros_like(self.local)
        self.reduced_views = self._views(self.reduced)

    def point_gradients_at(self, views: list[torch.Tensor]) -> None:
        for parameter, view in zip(self.parameters, views, strict=True):
            parameter.grad = view


class TorchNativeEngine:
    """The :class:`~megatron_ft.engines.base.Engine` port on plain PyTorch.

    Args:
        model: all trainable parameters in fp32 (use ``torch.autocast`` in ``loss_fn`` for bf16 compute).
        optimizer: any ``torch.optim.Optimizer`` over the model's parameters; do not call it yourself.
        loss_fn: (model, batch) -> scalar mean loss of one microbatch.
        scheduler: optional learning-rate scheduler, stepped once per committed step.
        bucket_mb: largest bucket in MiB; a single larger parameter gets a bucket of its own.
        gradient_clipping: clip to this global norm; 0 turns clipping off.

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
        bucket_mb: float = 25.0,
        gradient_clipping: float = 0.0,
    ) -> None:
        self.model, self.optimizer, self.loss_fn, self.scheduler = model, optimizer, loss_fn, scheduler
        self._clipping = gradient_clipping
        self._parameters = _trainable(model)
        _check_optimizer(optimizer, self._parameters)
        self._buckets = [_Bucket(group) for group in _fill_buckets(self._parameters, bucket_mb)]

    @property
    def num_buckets(self) -> int:
        return len(self._buckets)

    def begin_step(self) -> None:
        for bucket in self._buckets:
            bucket.local.zero_()
            bucket.point_gradients_at(bucket.local_views)

    def compute(self, microbatch: Microbatch, batch: Any, seed: int, progress: Progress) -> None:
        torch.manual_seed(seed)
        progress("forward")
        loss = self.loss_fn(self.model, batch)
        progress("backward")
        loss.backward()
        for bucket in self._buckets:
            bucket.local[-2].add_(loss.detach())
            bucket.local[-1].add_(1)
            if bucket.parameters[0].grad is not bucket.local_views[0]:
                raise EngineError(
                    "a gradient was replaced during a microbatch (zero_grad or a hook in loss_fn?); leave .grad to the "
                    "engine: it keeps the gradients until the step is committed"
                )

    def load_reduced(self, bucket: Bucket) -> torch.Tensor:
        return self._buckets[bucket].reduced.copy_(self._buckets[bucket].local)

    def reduced(self, bucket: Bucket) -> torch.Tensor:
        return self._buckets[bucket].reduced

    def replace_reduced(self, bucket: Bucket) -> None:
        self._buckets[bucket].replace_reduced()

    def update(self, step: int, microbatches: int, progress: Progress) -> StepResult:
        counts = [int(bucket.reduced[-1]) for bucket in self._buckets]
        assert set(counts) == {microbatches}, f"step {step}: buckets hold {counts} microbatches, not {microbatches}"
        loss = float(self._buckets[0].reduced[-2]) / microbatches
        for bucket in self._buckets:
            bucket.reduced.div_(microbatches)
            bucket.point_gradients_at(bucket.reduced_views)
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._clipping or float("inf"))
        progress("update")
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        return StepResult(step, loss, counts[0], float(norm))

    def state(self) -> Mapping[str, Any]:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return state | ({"scheduler": self.scheduler.state_dict()} if self.scheduler is not None else {})

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])

    def fingerprint(self) -> tuple[float, str]:
        digest, square = hashlib.sha256(), 0.0
        for parameter in self._parameters:
            values = parameter.detach().cpu().contiguous()
            digest.update(values.numpy().tobytes())
            square += float(values.double().square().sum())
        return square**0.5, digest.hexdigest()


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


def _fill_buckets(parameters: list[nn.Parameter], bucket_mb: float) -> list[list[nn.Parameter]]:
    """Consecutive parameters, last layer first: the order in which backward finishes them."""
    limit = bucket_mb * 2**20 / 4
    buckets: list[list[nn.Parameter]] = []
    filled = 0.0
    for parameter in reversed(parameters):
        if not buckets or filled + parameter.numel() > limit or buckets[-1][0].device != parameter.device:
            buckets.append([])
            filled = 0.0
        buckets[-1].append(parameter)
        filled += parameter.numel()
    return buckets
