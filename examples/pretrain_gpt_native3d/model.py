"""Stages of a small GPT in plain PyTorch, cut so that torch's tensor parallelism can divide each layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


@dataclass(frozen=True)
class GPTConfig:
    vocab_size: int
    layers: int = 4
    width: int = 128
    heads: int = 4
    seq_len: int = 128
    dropout: float = 0.1


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.width
        self.head_width, self.dropout = width // config.heads, nn.Dropout(config.dropout)
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def divide(self, mesh: DeviceMesh) -> None:
        """Divide the layer over the ranks of a mesh: each has some of the heads, and some of the hidden units."""
        columns = dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel())
        parallelize_module(self, mesh, columns | {"out": RowwiseParallel(), "down": RowwiseParallel()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, sequence, width] -> the same shape."""
        batch, length, _ = x.shape
        normed = self.norm1(x)
        q, k, v = (
            layer(normed).view(batch, length, -1, self.head_width).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).reshape(batch, length, -1)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Stage(nn.Module):
    """Stage ``number`` of ``count``: token ids -> activations -> logits. Parameters have their names in the whole model."""

    def __init__(self, config: GPTConfig, number: int, count: int, seed: int) -> None:
        super().__init__()
        first, end = (at * config.layers // count for at in (number, number + 1))

        def seeded(part: int) -> None:  # the weights do not depend on the number of stages
            torch.manual_seed(seed * 10_007 + part)

        if number == 0:
            seeded(0)
            self.embedding = nn.Embedding(config.vocab_size, config.width)
            self.positions = nn.Embedding(config.seq_len, config.width)
        blocks = {}
        for layer in range(first, end):
            seeded(1 + layer)
            blocks[str(layer)] = Block(config)
        self.blocks = nn.ModuleDict(blocks)
        if number == count - 1:
            seeded(1 + config.layers)
            self.norm = nn.RMSNorm(config.width)
            self.head = nn.Linear(config.width, config.vocab_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "embedding"):
            x = self.embedding(x) + self.positions.weight[: x.shape[1]]
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if hasattr(self, "head") else x
