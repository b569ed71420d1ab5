"""Attention over a sequence that is divided among the ranks of a context: Megatron's own is in Transformer Engine only."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.transformer.module import MegatronModule


class _Whole(torch.autograd.Function):
    """The parts of all ranks of the context, along the sequence."""

    @staticmethod
    def forward(context, part, group):
        context.group, context.length = group, len(part)
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(context, gradient):
        whole = gradient.contiguous()
        dist.all_reduce(whole, group=context.group)
        begin = dist.get_rank(context.group) * context.length
        return whole[begin : begin + context.length], None


class ContextAttention(MegatronModule):
    """Causal attention. A rank has two pieces of each sequence, as Megatron slices it: of the front and of the back."""

    def __init__(self, config, *arguments, **options):
        super().__init__(config=config)

    def forward(self, query, key, value, *arguments, **options):
        group = mpu.get_context_parallel_group()
        ranks, mine = dist.get_world_size(group), dist.get_rank(group)
        pieces = torch.arange(len(query) * ranks).view(2 * ranks, -1)
        places = [torch.cat((pieces[rank], pieces[2 * ranks - 1 - rank])) for rank in range(ranks)]
        key, value = _Whole.apply(key, group), _Whole.apply(value, group)
        scores = torch.einsum("sbhd,tbhd->bhst", query, key) / query.shape[-1] ** 0.5
        later = torch.cat(places)[None, :] > places[mine][:, None]
        weights = scores.masked_fill(later, float("-inf")).softmax(-1)
        return torch.einsum("bhst,tbhd->sbhd", weights, value).flatten(2)


def put_into(spec):
    """Let a layer of Megatron's local implementation use this attention."""
    spec.submodules.self_attention.submodules.core_attention = ContextAttention
