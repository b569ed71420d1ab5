"""A small GPT in plain PyTorch: RMSNorm, rotary positions, tied embeddings, no biases, attention within documents."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class GPTConfig:
    vocab_size: int
    layers: int = 4
    width: int = 128
    heads: int = 4
    seq_len: int = 128
    dropout: float = 0.1


class Attention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[batch, sequence, width] -> the same shape. `mask`: who attends to whom, [batch, 1, sequence, sequence]; without
        it each position attends to all before it."""
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        cos, sin = cos.to(q.dtype), sin.to(q.dtype)
        p = self.dropout if self.training else 0.0
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p, is_causal=mask is None)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(config.width), nn.RMSNorm(config.width)
        self.attention = Attention(config)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width, bias=False),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width, bias=False),
            nn.Dropout(config.dropout),
        )

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), cos, sin, mask)
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.head.weight = self.embedding.weight
        cos, sin = rotary_angles(config.seq_len, config.width // config.heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(
        self,
        tokens: torch.Tensor,
        document_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Token ids [batch, sequence] -> logits [batch, sequence, vocabulary]. With `document_ids` a position attends to its
        own document only; `position_ids` are 0, 1, 2, ... if they are not given. Both have the shape of `tokens`."""
        length = tokens.shape[1]
        cos, sin, mask = self.cos[:length], self.sin[:length], None
        if position_ids is not None:
            cos, sin = self.cos[position_ids][:, None], self.sin[position_ids][:, None]  # the same for all heads
        if document_ids is not None:
            mask = (document_ids[:, :, None] == document_ids[:, None, :]).tril()[:, None]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin, mask)
        return self.head(self.norm(x))


def rotary_angles(length: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of the rotary angles, each [length, dim / 2]."""
    frequencies = 10_000.0 ** -(torch.arange(0, dim, 2) / dim)
    angles = torch.arange(length)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn the two halves of the last dimension by their position's angle."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
