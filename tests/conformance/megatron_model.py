"""The model of the suite out of megatron-core's layers. Imported by :mod:`kits` only, after the stand-in for a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from torch import nn

from tests.conformance import model as toy


class Block(nn.Module):
    """The toy's block with its two linear layers divided over the slices, and the same weights."""

    def __init__(self, config: Any, same: toy.Block) -> None:
        super().__init__()
        how = {"config": config, "init_method": nn.init.zeros_, "bias": True, "skip_bias_add": False}
        self.norm, self.dropout = same.norm, same.dropout
        self.up = ColumnParallelLinear(toy.WIDTH, 4 * toy.WIDTH, gather_output=False, **how)
        self.down = RowParallelLinear(4 * toy.WIDTH, toy.WIDTH, input_is_parallel=True, **how)
        self.register_buffer("seen", torch.zeros(()))
        rank, size = parallel_state.get_tensor_model_parallel_rank(), config.tensor_model_parallel_size
        with torch.no_grad():
            self.up.weight.copy_(same.up.weight.chunk(size, 0)[rank])
            self.up.bias.copy_(same.up.bias.chunk(size, 0)[rank])
            self.down.weight.copy_(same.down.weight.chunk(size, 1)[rank])
            self.down.bias.copy_(same.down.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += x.detach().mean()
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x))[0]))[0])


class Stage(MegatronModule):
    """Some parts of the model, with their names in the whole."""

    def __init__(self, config: Any, number: int, count: int, dropout: float) -> None:
        super().__init__(config)
        self.model_type, self.vp_stage = ModelType.encoder_or_decoder, number // config.pipeline_model_parallel_size
        for one in range(number * toy.PARTS // count, (number + 1) * toy.PARTS // count):
            part = toy.part(one, dropout)
            self.add_module(str(one), Block(config, part) if isinstance(part, toy.Block) else part)
        self.pre_process, self.post_process = number == 0, number == count - 1
        self.share_embeddings_and_output_weights = False
        self.given = None

    def set_input_tensor(self, tensor: Any) -> None:
        self.given = tensor[0] if isinstance(tensor, list) else tensor

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        # Stages exchange [sequence, samples, width].
        x = tokens if self.pre_process else self.given.transpose(0, 1)
        parts = list(self.children())
        for part in parts:
            x = part(x)
        return x if self.post_process else x.transpose(0, 1).contiguous()


def forward_step(per_token: bool, three: bool) -> Callable[[Any, Any], Any]:
    """Return Megatron's function of the same name. ``three``: it returns what Megatron-LM's ``loss_func`` returns."""

    def step(batches: Any, model: Any) -> Any:
        tokens, labels = next(batches)

        def loss(output: torch.Tensor) -> Any:
            if not per_token and not three:
                return toy.of_outputs(output, labels), {}
            count = labels.numel()
            total, count = (
                toy.of_tokens(output, labels) if per_token else (toy.of_outputs(output, labels) * count, count)
            )
            machine = get_rerun_state_machine()
            machine.validate_result(total, lambda found: False, "a spiky loss")
            return total, torch.tensor(count, dtype=torch.int), {}

        return model(tokens), loss

    return step


def full(parameter: Any) -> torch.Tensor:
    """Return a parameter of all slices together. All slices of a stage call it."""
    size = parallel_state.get_tensor_model_parallel_world_size()
    if size == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return parameter.detach()
    parts = [torch.empty_like(parameter) for _ in range(size)]
    group = parallel_state.get_tensor_model_parallel_group()
    torch.distributed.all_gather(parts, parameter.detach().contiguous(), group=group)
    return torch.cat(parts, parameter.partition_dim)
