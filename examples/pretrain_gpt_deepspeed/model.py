"""A GPT as a DeepSpeed ``PipelineModule`` with tensor-parallel layers: rotary or learned positions, RMSNorm or LayerNorm,
tied or untied embeddings."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from layers import ByColumns, ByRows, Slices
from torch import nn

NORMS = {"rms": nn.RMSNorm, "layer": nn.LayerNorm}


@dataclass(frozen=True)
class GPTConfig:
    vocab_size: int
    layers: int = 4
    width: int = 128
    heads: int = 4
    seq_len: int = 128
    dropout: float = 0.0
    positions: str = "rotary"
    """rotary or learned"""
    norm: str = "rms"
    """rms or layer"""
    tied: bool = True
    """Whether the embedding and the output layer share their weight."""

    def check(self, stages: int, slices: int) -> None:
        """Raises ``ValueError`` for a model that cannot be split so."""
        for name, known in (("positions", ("rotary", "learned")), ("norm", tuple(NORMS))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(known)}")
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not divisible by {self.heads} heads")
        if self.heads % slices:
            raise ValueError(f"{self.heads} heads cannot be split over {slices} slices; use a number that divides them")
        if stages > self.layers:
            raise ValueError(f"{stages} stages for {self.layers} layers: one would have none; use at most {self.layers}")


def build(config: GPTConfig, stages: int, slices: int, seed: int) -> PipelineModule:
    """This rank's stage and slice; call it after ``session.init_distributed()``."""
    config.check(stages, slices)
    own = Slices.of_stage(slices)
    embedding = TiedLayerSpec("embedding", Embedding, config, forward_fn=embed, tied_weight_attr="weight")
    if config.tied:
        head = TiedLayerSpec("embedding", Embedding, config, forward_fn=project, tied_weight_attr="weight")
    else:
        embedding, head = LayerSpec(Embedding, config), LayerSpec(Head, config)
    blocks = [LayerSpec(Block, config, own) for _ in range(config.layers)]
    layers = [embedding, *blocks, LayerSpec(NORMS[config.norm], config.width), head]
    return PipelineModule(
        layers,
        topology=PipeModelDataParallelTopology(num_pp=stages, num_mp=slices, num_dp=1),
        loss_fn=loss_fn,
        partition_method="type:Block",
        seed_layers=True,  # a layer's weights depend on its number, not on which ranks there are
        seed_fn=lambda number: torch.manual_seed(int(number)),
        base_seed=1000 * seed,
    )


def loss_fn(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


class Embedding(nn.Module):
    """Token ids [batch, sequence] -> [batch, sequence, width]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.width))
        nn.init.normal_(self.weight, std=0.02)
        if config.positions == "learned":
            self.positions = nn.Parameter(torch.empty(config.seq_len, config.width))
            nn.init.normal_(self.positions, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return embed(self, tokens)


def embed(embedding: Embedding, tokens: torch.Tensor) -> torch.Tensor:
    x = F.embedding(tokens, embedding.weight)
    return x + embedding.positions[: tokens.shape[1]] if hasattr(embedding, "positions") else x


def project(embedding: Embedding, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, embedding.weight)


class Head(nn.Linear):
    """[batch, sequence, width] -> logits."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config.width, config.vocab_size, bias=False)
        nn.init.normal_(self.weight, std=0.02)


class Block(nn.Module):
    """Attention and MLP, [batch, sequence, width] -> the same."""

    def __init__(self, config: GPTConfig, slices: Slices) -> None:
        super().__init__()
        width = config.width
        self.heads, self.dropout, self.rotary = config.heads // slices.count, config.dropout, config.positions == "rotary"
        self.norm1, self.norm2 = NORMS[config.norm](width), NORMS[config.norm](width)
        self.qkv, self.out = ByColumns(width, 3 * width, slices, parts=3), ByRows(width, width, slices)
        self.up, self.down = ByColumns(width, 4 * width, slices), ByRows(4 * width, width, slices)
        cos, sin = rotary_angles(config.seq_len, width // config.heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self._dropped(self.out(self._attend(self.norm1(x))))
        return x + self._dropped(self.down(F.gelu(self.up(self.norm2(x)))))

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.rotary:
            cos, sin = self.cos[:length].to(q.dtype), self.sin[:length].to(q.dtype)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.transpose(1, 2).reshape(batch, length, -1)

    def _dropped(self, x: torch.Tensor) -> torch.Tensor:
        """Of the same activations in every slice, so all drop the same."""
        return F.dropout(x, self.dropout, self.training)


def rotary_angles(length: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of the rotary angles, each [length, dim / 2]."""
    frequencies = 10_000.0 ** -(torch.arange(0, dim, 2) / dim)
    angles = torch.arange(length)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn the two halves of the last dimension by their position's angle."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
