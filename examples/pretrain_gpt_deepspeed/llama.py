"""Hugging Face's Llama, built from its config, as a ``PipelineModule`` whose linear layers are split over slices."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from layers import ByColumns, ByRows, Slices
from model import pipeline
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from megatron_ft.config import RunConfig


def build(run: RunConfig, vocab_size: int, seed: int) -> PipelineModule:
    """Build this rank's stage and slice; call it after ``session.init_distributed()``."""
    shape = {name: value for name, value in run.model.items() if name not in ("model_type", "vocab_size")}
    config = LlamaConfig(vocab_size=vocab_size, attn_implementation="sdpa", **shape)
    own = Slices.of_stage(run.slices)
    if config.tie_word_embeddings:
        ends = [
            TiedLayerSpec("embedding", Embedding, config, tied_weight_attr="weight"),
            TiedLayerSpec("embedding", Embedding, config, forward_fn=project, tied_weight_attr="weight"),
        ]
    else:
        ends = [LayerSpec(Embedding, config), LayerSpec(Head, config)]
    layers = [LayerSpec(Layer, config, number, own) for number in range(config.num_hidden_layers)]
    norm = LayerSpec(LlamaRMSNorm, config.hidden_size, eps=config.rms_norm_eps)
    return pipeline([ends[0], *layers, norm, ends[1]], "Layer", run, seed)


class Embedding(nn.Embedding):
    """Token ids [batch, sequence] -> [batch, sequence, hidden]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config.vocab_size, config.hidden_size)
        nn.init.normal_(self.weight, std=config.initializer_range)


def project(embedding: Embedding, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, embedding.weight)


class Head(nn.Linear):
    """[batch, sequence, hidden] -> logits."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config.hidden_size, config.vocab_size, bias=False)
        nn.init.normal_(self.weight, std=config.initializer_range)


class Layer(LlamaDecoderLayer):
    """[batch, sequence, hidden] -> the same. Attention looks at how many heads its projections give, so a slice has its
    part of them."""

    def __init__(self, config: LlamaConfig, number: int, slices: Slices) -> None:
        super().__init__(config, number)
        for module, names, split in (
            (self.self_attn, ("q_proj", "k_proj", "v_proj"), ByColumns),
            (self.self_attn, ("o_proj",), ByRows),
            (self.mlp, ("gate_proj", "up_proj"), ByColumns),
            (self.mlp, ("down_proj",), ByRows),
        ):
            for name in names:
                whole = getattr(module, name)
                setattr(module, name, split(whole.in_features, whole.out_features, slices))
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[1], device=x.device)[None]
        angles = self.rotary(x, positions)
        return super().forward(x, attention_mask=None, position_ids=positions, position_embeddings=angles)
