"""Where the tensors of a rank belong in the whole Megatron model, as Megatron's own distributed checkpoints have it.

Failures it assumes: none.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory

CONTENT = {"non_homogeneous_layers": True}
"""Megatron's metadata of the names: each layer has names of its own."""
_OF_MODEL = (
    "position_embedding_type",
    "rotary_percent",
    "rotary_base",
    "rotary_scaling",
    "max_sequence_length",
    "share_embeddings_and_output_weights",
)
"""Settings that a GPTModel has beside its config."""


def described(chunks: Sequence[Any], config: Any) -> dict[str, Any]:
    """Return what ``run.engines.port.MEGATRON`` says of a rank. ``chunks``: its model chunks; ``config``: their config.

    A tensor that Megatron divides in another way than into pieces along its first axis is left out, and so is a chunk that
    is no Megatron module.
    """
    tensors: dict[str, Any] = {}
    objects: list[str] = []
    for number, chunk in enumerate(chunks):
        if not hasattr(chunk, "sharded_state_dict"):
            continue
        own = chunk.state_dict()
        for name, what in chunk.sharded_state_dict(metadata=dict(CONTENT)).items():
            if isinstance(what, ShardedObject):
                objects.append(what.unique_key)
            elif (found := _described(name, what, own[name])) is not None:
                tensors[f"{number}.{name}"] = found
    settings = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    model = chunks[0]
    while hasattr(model, "module"):  # Megatron's wrapper for bf16
        model = model.module
    settings |= {name: getattr(model, name) for name in _OF_MODEL if hasattr(model, name)}
    settings["activation_func"] = getattr(config.activation_func, "__name__", "")
    return {
        "tensors": tensors,
        "objects": objects,
        "content": CONTENT,
        "settings": {name: value for name, value in settings.items() if _is_plain(value)},
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _described(name: str, what: Any, own: torch.Tensor) -> Mapping[str, Any] | None:
    pieces = what.build() if isinstance(what, ShardedTensorFactory) else [what]
    if not isinstance(pieces, list) or len({piece.key for piece in pieces}) > 1:
        return None
    first = pieces[0]
    if not torch.equal(first.data if len(pieces) == 1 else torch.cat([piece.data for piece in pieces]), own):
        return None
    if layer := re.search(r"layers\.(\d+)\.", first.key):  # a stage counts its own layers from 0
        name = re.sub(r"layers\.\d+\.", f"layers.{layer[1]}.", name, count=1)
    stacked = first.prepend_axis_num
    if stacked:  # and a rank its own experts
        name = re.sub(r"local_experts\.\d+\.", f"local_experts.{first.global_offset[0]}.", name)
    return {
        "name": name,
        "key": first.key,
        "shape": list(first.global_shape),
        "stacked": stacked,
        "boxes": [[list(piece.global_offset), [1] * stacked + list(piece.local_shape)] for piece in pieces],
    }
