"""A GPT model of Megatron-core as Hugging Face's Llama: the same computation, other names and divisions of weights."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from megatron_ft.errors import ConfigError

_SAME = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": "silu",
    "position_embedding_type": "rope",
    "rotary_percent": 1.0,
    "rotary_scaling": False,
    "rotary_interleaved": False,
    "layernorm_zero_centered_gamma": False,
    "multi_latent_attention": False,
    "num_moe_experts": None,
    "softmax_scale": None,
    "window_size": None,
    "no_rope_freq": None,
}
"""What a Megatron model must be set to for its computation to be Llama's."""
_OTHERS = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_IN_LAYER = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")


def converted(
    tensors: Mapping[str, torch.Tensor], settings: Mapping[str, Any]
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors of the Llama, and its ``config.json``.

    Args:
        tensors: by their names in Megatron's checkpoints.
        settings: of the Megatron model (``run.checkpoint.undivided.Model``).

    Raises:
        ConfigError: the model computes something else than a Llama.
    """
    for name, value in _SAME.items():
        if settings.get(name, value) != value:
            raise ConfigError(
                f"--format hf: the Megatron model has {name} {settings[name]!r}, Hugging Face's Llama {value!r}, and no "
                f"other model is known here; use --format megatron or torch, or write them under your own names (--names)"
            )
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        for new, part in _renamed(name, tensor, settings):
            found[new] = part.contiguous()
    return found, _config(found, settings)


def _renamed(name: str, tensor: torch.Tensor, settings: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    if name in _OTHERS:
        yield _OTHERS[name], tensor
        return
    layer = _LAYER.fullmatch(name)
    own = layer[2] if layer else ""
    prefix = f"model.layers.{layer[1]}." if layer else ""
    if own in _IN_LAYER:
        yield prefix + _IN_LAYER[own], tensor
    elif own == "mlp.linear_fc1.weight":
        for new, part in zip(("gate", "up"), tensor.chunk(2), strict=True):
            yield f"{prefix}mlp.{new}_proj.weight", part
    elif own == "self_attention.linear_qkv.weight":
        # For each group of queries: its queries, their key and their value.
        groups, width = settings["num_query_groups"], settings["kv_channels"]
        divided = tensor.view(groups, -1, width, tensor.shape[1])
        parts = {"q": divided[:, :-2], "k": divided[:, -2:-1], "v": divided[:, -1:]}
        for new, part in parts.items():
            yield f"{prefix}self_attn.{new}_proj.weight", part.reshape(-1, tensor.shape[1])
    else:
        raise ConfigError(
            f"--format hf: the Megatron model has {name}, which Hugging Face's Llama has not, and no other model is known "
            f"here; use --format megatron or torch, or write them under your own names (--names)"
        )


def _config(tensors: Mapping[str, torch.Tensor], settings: Mapping[str, Any]) -> dict[str, Any]:
    embedding = tensors["model.embed_tokens.weight"]
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": len(embedding),  # with the rows that Megatron has filled up
        "hidden_size": settings["hidden_size"],
        "intermediate_size": settings["ffn_hidden_size"],
        "num_hidden_layers": settings["num_layers"],
        "num_attention_heads": settings["num_attention_heads"],
        "num_key_value_heads": settings["num_query_groups"],
        "head_dim": settings["kv_channels"],
        "hidden_act": "silu",
        "max_position_embeddings": settings["max_sequence_length"],
        "rms_norm_eps": settings["layernorm_epsilon"],
        "rope_theta": float(settings["rotary_base"]),
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "torch_dtype": str(embedding.dtype).removeprefix("torch."),
    }
