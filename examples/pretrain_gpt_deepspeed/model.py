"""A GPT as a DeepSpeed ``PipelineModule`` with tensor-parallel layers: rotary or learned positions, RMSNorm or LayerNorm,
tied or untied embeddings."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from layers import ByColumns, ByRows, Slices
from torch import nn

from megatron_ft.config import RunConfig
from megatron_ft.errors import ConfigError
from megatron_ft.run.engines import fused

NORMS = {"rms": fused.rms_norm(), "layer": fused.layer_norm()}


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The config of the model, with the names of Hugging Face's config.json."""

    vocab_size: int
    num_hidden_layers: int = 4
    hidden_size: int = 128
    num_attention_heads: int = 4
    max_position_embeddings: int = 128
    dropout: float = 0.0
    tie_word_embeddings: bool = True
    """True: the embedding and the output layer share their weight."""
    positions: str = "rotary"
    """rotary or learned"""
    norm: str = "rms"
    """rms or layer"""

    @classmethod
    def of(cls, run: RunConfig, vocab_size: int) -> GPTConfig:
        """Read the config from ``fault_tolerance.model``. Raises ``ConfigError``."""
        shape = {name: value for name, value in run.model.items() if name != "model_type"}
        known = {f.name for f in fields(cls)} - {"vocab_size"}
        if unknown := sorted(shape.keys() - known):
            raise ConfigError(
                f"fault_tolerance.model.{unknown[0]} is not known here; known are: {', '.join(sorted(known))}"
            )
        config = cls(vocab_size=vocab_size, **shape)
        for name, choices in (("positions", ("rotary", "learned")), ("norm", tuple(NORMS))):
            if getattr(config, name) not in choices:
                raise ConfigError(
                    f"fault_tolerance.model.{name} is {shape[name]!r}; it must be one of {', '.join(choices)}"
                )
        return config


def build(run: RunConfig, vocab_size: int, seed: int) -> PipelineModule:
    """Build this rank's stage and slice; call it after ``session.init_distributed()``."""
    config, own = GPTConfig.of(run, vocab_size), Slices.of_stage(run.slices)
    embedding = TiedLayerSpec("embedding", Embedding, config, forward_fn=embed, tied_weight_attr="weight")
    if config.tie_word_embeddings:
        head = TiedLayerSpec("embedding", Embedding, config, forward_fn=project, tied_weight_attr="weight")
    else:
        embedding, head = LayerSpec(Embedding, config), LayerSpec(Head, config)
    blocks = [LayerSpec(Block, config, own) for _ in range(config.num_hidden_layers)]
    return pipeline([embedding, *blocks, LayerSpec(NORMS[config.norm], config.hidden_size), head], "Block", run, seed)


def pipeline(layers: list[LayerSpec], block: str, run: RunConfig, seed: int) -> PipelineModule:
    """Build the pipeline. ``block``: the class of which each stage gets the same number."""
    return PipelineModule(
        layers,
        topology=PipeModelDataParallelTopology(num_pp=run.stages, num_mp=run.slices, num_dp=1),
        loss_fn=loss_fn,
        partition_method=f"type:{block}",
        seed_layers=True,  # a layer's weights depend on its number, not on the ranks of the group
        seed_fn=lambda number: torch.manual_seed(int(number)),
        base_seed=1000 * seed,
    )


def loss_fn(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


class Embedding(nn.Module):
    """Token ids [batch, sequence] -> [batch, sequence, width]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        nn.init.normal_(self.weight, std=0.02)
        if config.positions == "learned":
            self.positions = nn.Parameter(torch.empty(config.max_position_embeddings, config.hidden_size))
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
        super().__init__(config.hidden_size, config.vocab_size, bias=False)
        nn.init.normal_(self.weight, std=0.02)


class Block(nn.Module):
    """Attention and MLP, [batch, sequence, width] -> the same."""

    def __init__(self, config: GPTConfig, slices: Slices) -> None:
        super().__init__()
        width = config.hidden_size
        self.heads = config.num_attention_heads // slices.count
        self.dropout, self.rotary = config.dropout, config.positions == "rotary"
        self.norm1, self.norm2 = NORMS[config.norm](width), NORMS[config.norm](width)
        self.qkv, self.out = ByColumns(width, 3 * width, slices, parts=3), ByRows(width, width, slices)
        self.up, self.down = ByColumns(width, 4 * width, slices), ByRows(4 * width, width, slices)
        cos, sin = rotary_angles(config.max_position_embeddings, width // config.num_attention_heads)
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
        """Apply dropout to the same activations in every slice, so all drop the same."""
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
