"""Plain PyTorch: any ``nn.Module`` with any torch optimizer. Every rank of a group holds the whole model.

Parameters' ``.grad`` are views into one flat local buffer per bucket, so autograd accumulates microbatches in place and
no flattening happens. Autograd's hooks tell when the last gradient of a bucket has been added.

Failures it assumes: none. A model, a loss function or a user's hook that removes gradients or adds to them twice is
refused with an ``EngineError``, which ends this group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from megatron_ft.errors import EngineError
from megatron_ft.run.engines.arrivals import Arrivals
from megatron_ft.run.engines.single_rank import SingleRank
from megatron_ft.run.engines.state_tensors import named_state, plain_name

LossFn = Callable[[nn.Module, Any], torch.Tensor | tuple[torch.Tensor, int | torch.Tensor]]
"""(model, batch) -> scalar loss, the mean over the microbatch; with ``loss_reduction`` ``"token"``: (sum of the tokens'
losses, number of these tokens)."""

_REPLACED = (
    "a gradient was replaced during a microbatch (zero_grad or a hook in loss_fn?); leave .grad to the engine: it keeps the "
    "gradients until the step is committed"
)


class TorchNativeEngine(SingleRank):
    """The :class:`~megatron_ft.run.engines.port.Engine` port on plain PyTorch.

    Args:
        model: all trainable parameters in fp32 (use ``torch.autocast`` in ``loss_fn`` for bf16 compute).
        optimizer: any ``torch.optim.Optimizer`` over the model's parameters; do not call it yourself.
        loss_fn: see :data:`LossFn`.
        scheduler: optional learning-rate scheduler, stepped once per committed step.
        settings: see :class:`~megatron_ft.run.engines.buckets.Bucketed`.

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
        **settings: Any,
    ) -> None:
        self.model, self.optimizer, self.loss_fn, self.scheduler = model, optimizer, loss_fn, scheduler
        parameters = _trainable(model)
        _check_optimizer(optimizer, parameters)
        super().__init__(model, parameters, **settings)
        self._arrivals = Arrivals([bucket.parameters for bucket in self._buckets], self._refuse_replaced)

    replicated = True

    def _aim(self, part: int) -> None:
        super()._aim(part)
        for bucket in self._buckets:
            bucket.aim()

    def _lose(self, batch: Any) -> Any:
        return self.loss_fn(self.model, batch)

    def _go_back(self, loss: torch.Tensor) -> None:
        loss.backward()

    def _on_backward(self) -> None:
        if self._rounding is None and any(
            bucket.parameters[0].grad is not bucket.adds_to.views[0] for bucket in self._buckets
        ):
            raise EngineError(_REPLACED)

    def _refuse_replaced(self, number: int, index: int, parameter: nn.Parameter) -> None:
        if self._rounding is None and parameter.grad is not self._buckets[number].adds_to.views[index]:
            raise EngineError(_REPLACED)

    def _torch_optimizers(self) -> Sequence[torch.optim.Optimizer]:
        return (self.optimizer,)

    def _optimize(self) -> None:
        for bucket in self._buckets:
            bucket.give()
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()

    def state(self) -> Mapping[str, Any]:
        model = {plain_name(name): value for name, value in self.model.state_dict().items()}
        state = {"model": model, "optimizer": self.optimizer.state_dict()}
        return state | self._rest(self.scheduler)

    def load_state(self, state: Mapping[str, Any]) -> None:
        own = {plain_name(name): name for name in self.model.state_dict()}
        saved = {plain_name(name): value for name, value in state["model"].items()}
        self.model.load_state_dict({own.get(name, name): value for name, value in saved.items()})
        self.optimizer.load_state_dict(state["optimizer"])
        self._load_rest(state, self.scheduler)

    def state_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return named_state(self.model, self.optimizer, self._buffers.unsaved())


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
