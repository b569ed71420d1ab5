"""Adapters for DeepSpeed's optimizer wrappers: where each wrapper expects a gradient, and where it accumulates one.

DeepSpeed wraps the optimizer according to data types and ZeRO stage, and each wrapper accumulates in another place. An
adapter moves the gradients of a backward pass into the buckets (:meth:`collect`), puts the step's mean where
``step`` looks for it (:meth:`give`), and hands over the state that the wrapper keeps between steps.

Failures it assumes: none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from megatron_ft.engines.buckets import Bucket, Buckets
from megatron_ft.errors import EngineError


class InPlace:
    """A torch optimizer of fp32 parameters: backward adds to ``.grad``, which is a view of the local bucket."""

    in_grad = True
    """True: a gradient is in ``.grad``, and complete when autograd has added it."""

    def __init__(self, optimizer: Any, buckets: Buckets) -> None:
        self.optimizer, self.buckets = optimizer, buckets

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The wrapped torch optimizer."""
        return self.optimizer

    def begin_step(self) -> None:
        """Clear what the wrapper has accumulated."""

    def aim(self) -> None:
        """Take the next gradients to ``Bucket.adds_to``."""
        for bucket in self.buckets:
            bucket.aim()

    def collect(self) -> None:
        """Move the gradients that the wrapper has accumulated to ``Bucket.adds_to``."""

    def gradients(self, bucket: Bucket) -> Sequence[torch.Tensor | None]:
        """Return what the wrapper has accumulated for each parameter of a bucket."""
        return [parameter.grad for parameter in bucket.parameters]

    def forget(self) -> None:
        """Clear what the wrapper has accumulated."""
        for bucket in self.buckets:
            bucket.clear_gradients()

    def give(self) -> None:
        """Put the gradients of ``Bucket.sum`` where the optimizer's step takes them."""
        for bucket in self.buckets:
            bucket.give()

    def masters(self) -> list[torch.Tensor]:
        """Return the tensors that are kept between steps beside the parameters and the torch optimizer's state."""
        return []

    # The loss scale of fp16 follows from the steps that were skipped, which are the same in all groups. So it is, too.

    @property
    def _scaler(self) -> Any:
        return getattr(self.optimizer, "loss_scaler", None)

    @property
    def loss_scale(self) -> float:
        """The factor of all gradients, which the optimizer's step takes out."""
        return 1.0 if self._scaler is None else float(self._scaler.loss_scale)

    def skip(self) -> None:
        """Note a step whose update is left out, because its gradient is not finite."""
        if self._scaler is not None:
            self._scaler.update_scale(True)

    def state(self) -> Mapping[str, Any]:
        state = {"torch": self.inner.state_dict(), "masters": self.masters()}
        scaler = {} if self._scaler is None else vars(self._scaler)
        numbers = {name: value for name, value in scaler.items() if isinstance(value, bool | int | float)}
        return state | ({"loss_scaler": numbers} if getattr(self._scaler, "dynamic", False) else {})

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.inner.load_state_dict(state["torch"])
        if self._scaler is not None:
            vars(self._scaler).update(state.get("loss_scaler", {}))
        with torch.no_grad():
            for mine, theirs in zip(self.masters(), state["masters"], strict=True):
                mine.copy_(theirs)


class Zero(InPlace):
    """ZeRO-1 of fp32 parameters: every rank has the whole gradient, and updates its part of the optimizer's state."""

    @property
    def inner(self) -> torch.optim.Optimizer:
        return self.optimizer.optimizer

    def give(self) -> None:
        zero = self.optimizer
        sums = {
            parameter: gradient
            for bucket in self.buckets
            for parameter, gradient in zip(bucket.parameters, bucket.fp32_sum(), strict=True)
        }
        for number, parameters in enumerate(zero.params_in_partition):
            zero.all_grad_tensors[number] = [sums[parameter] for parameter in parameters]
            zero.averaged_gradients[number] = zero.get_flat_partition(
                parameters,
                zero.first_offset[number],
                zero.partition_size[number],
                dtype=torch.float32,
                device=self.buckets[0].local.device,
                param_group_idx=number,
                return_tensor_list=True,
            )
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                parameter.grad = None

    def masters(self) -> list[torch.Tensor]:
        return list(self.optimizer.single_partition_of_fp32_groups)


class ZeroHalf(Zero):
    """ZeRO-1 of fp16 parameters: backward leaves fp16 gradients in ``.grad``."""

    in_grad = False  # but not in the buckets

    def aim(self) -> None:
        """Do nothing: :meth:`collect` moves the gradients."""

    def collect(self) -> None:
        for bucket in self.buckets:
            for view, parameter in zip(bucket.adds_to.views, bucket.parameters, strict=True):
                if parameter.grad is not None:
                    view.add_(parameter.grad)
                    parameter.grad = None

    def gradients(self, bucket: Bucket) -> Sequence[torch.Tensor | None]:
        return [None if one is None else one.float() for one in super().gradients(bucket)]


class Bf16(InPlace):
    """bf16 parameters with fp32 master weights: DeepSpeed accumulates in fp32 buffers of its own."""

    in_grad = False

    def __init__(self, optimizer: BF16_Optimizer, buckets: Buckets) -> None:
        super().__init__(optimizer, buckets)
        self._places = {
            parameter: (number, index)
            for number, parameters in enumerate(optimizer.bf16_groups)
            for index, parameter in enumerate(parameters)
        }

    @property
    def inner(self) -> torch.optim.Optimizer:
        return self.optimizer.optimizer

    def begin_step(self) -> None:
        self.optimizer.clear_hp_grads()
        self.optimizer.clear_lp_grads()

    def aim(self) -> None:
        """Do nothing: the wrapper accumulates, and :meth:`collect` moves the result."""

    def collect(self) -> None:
        for bucket in self.buckets:
            for view, gradient in zip(bucket.adds_to.views, self.gradients(bucket), strict=True):
                if gradient is not None:
                    view.add_(gradient)
        self.optimizer.clear_hp_grads()

    def gradients(self, bucket: Bucket) -> Sequence[torch.Tensor | None]:
        zero, found = self.optimizer, list[torch.Tensor | None]()
        for parameter in bucket.parameters:
            number, index = self._places[parameter]
            has = zero.fp32_groups_has_gradients[number][index]
            found.append(zero.fp32_groups_gradients[number][index].view_as(parameter) if has else None)
        return found

    def forget(self) -> None:
        self.optimizer.clear_hp_grads()

    def give(self) -> None:
        for bucket in self.buckets:
            for parameter, view in zip(bucket.parameters, bucket.sum_views, strict=True):
                number, index = self._places[parameter]
                self.optimizer.fp32_groups_gradients[number][index].view_as(view).copy_(view)
                self.optimizer.fp32_groups_has_gradients[number][index] = True

    def masters(self) -> list[torch.Tensor]:
        return list(self.optimizer.fp32_groups_flat_partition)


def adapter(optimizer: Any, buckets: Buckets) -> InPlace:
    """Return the adapter for the wrapper that DeepSpeed made. Raises ``EngineError`` for an unknown one."""
    if isinstance(optimizer, BF16_Optimizer):
        return Bf16(optimizer, buckets)
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        return Zero(optimizer, buckets) if optimizer.dtype == torch.float32 else ZeroHalf(optimizer, buckets)
    if isinstance(optimizer, torch.optim.Optimizer):
        return InPlace(optimizer, buckets)
    raise EngineError(
        f"DeepSpeed's {type(optimizer).__name__} is not supported; use fp32, fp16 with ZeRO, or bf16 with "
        f'"data_types": {{"grad_accum_dtype": "fp32"}} and ZeRO stage 1'
    )
