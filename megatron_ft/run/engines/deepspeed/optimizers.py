"""Adapters for DeepSpeed's optimizer wrappers: where each wrapper expects a gradient, and where it accumulates one.

DeepSpeed wraps the optimizer according to data types and ZeRO stage, and each wrapper accumulates in another place. An
adapter says where the gradients of a microbatch are (:meth:`InPlace.gradients`), puts the step's mean where ``step`` looks
for it (:meth:`InPlace.give`), and hands over the state that the wrapper keeps between steps.

Failures it assumes: none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from megatron_ft.errors import EngineError
from megatron_ft.run.engines.buckets import Bucket


class InPlace:
    """A torch optimizer of fp32 parameters: backward adds to ``.grad``, which is a view of the local bucket."""

    adds_to_buckets = True
    """Without exact reduction, True: backward adds to ``Bucket.adds_to``. False: each microbatch's gradients are taken from
    :meth:`gradients`, and forgotten."""

    def __init__(self, optimizer: Any, buckets: Sequence[Bucket]) -> None:
        self.optimizer, self.buckets = optimizer, buckets
        self.inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
        """The torch optimizer in DeepSpeed's wrapper, or without one."""

    def aim(self) -> None:
        """Take the next gradients to ``Bucket.adds_to``."""
        for bucket in self.buckets if self.adds_to_buckets else ():
            bucket.aim()

    def gradients(self, bucket: Bucket) -> Sequence[torch.Tensor | None]:
        """Return the gradient of each parameter of a bucket in the present microbatch."""
        return [parameter.grad for parameter in bucket.parameters]

    def forget(self) -> None:
        """Clear what :meth:`gradients` returns."""
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
    """ZeRO-1: every rank has the whole gradient, and updates its part of the optimizer's state. Of fp16 parameters backward
    leaves fp16 gradients in ``.grad``."""

    def __init__(self, optimizer: DeepSpeedZeroOptimizer, buckets: Sequence[Bucket]) -> None:
        super().__init__(optimizer, buckets)
        self.adds_to_buckets = optimizer.dtype == torch.float32

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
        self.forget()

    def masters(self) -> list[torch.Tensor]:
        return list(self.optimizer.single_partition_of_fp32_groups)


class Bf16(InPlace):
    """bf16 parameters with fp32 master weights: DeepSpeed accumulates in fp32 buffers of its own."""

    adds_to_buckets = False

    def __init__(self, optimizer: BF16_Optimizer, buckets: Sequence[Bucket]) -> None:
        super().__init__(optimizer, buckets)
        self._places = {
            parameter: (number, index)
            for number, parameters in enumerate(optimizer.bf16_groups)
            for index, parameter in enumerate(parameters)
        }

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


def adapter(optimizer: Any, buckets: Sequence[Bucket]) -> InPlace:
    """Return the adapter for the wrapper that DeepSpeed made. Raises ``EngineError`` for an unknown one."""
    if isinstance(optimizer, BF16_Optimizer):
        return Bf16(optimizer, buckets)
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        return Zero(optimizer, buckets)
    if isinstance(optimizer, torch.optim.Optimizer):
        return InPlace(optimizer, buckets)
    raise EngineError(
        f"DeepSpeed's {type(optimizer).__name__} is not supported; use fp32, fp16 with ZeRO, or bf16 with "
        f'"data_types": {{"grad_accum_dtype": "fp32"}} and ZeRO stage 1'
    )
