"""The job of ``test_sequence``: the ranks of a group hold parts of each sequence, and exchange them in the attention
(DeepSpeed's ``DistributedAttention``, Ulysses). With one rank per group the attention is an ordinary one."""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

import megatron_ft
from megatron_ft.types import Microbatch

VOCABULARY, WIDTH, HEADS, LENGTH, SAMPLES = 32, 32, 4, 16, 1


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attend to earlier positions; [samples, positions, heads, size of a head]."""
    query, key, value = (one.transpose(1, 2) for one in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)


class Attending(nn.Module):
    def forward(self, query, key, value, *rest, **options):
        return attend(query, key, value)


class Model(nn.Module):
    def __init__(self, group, rank: int, ranks: int) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.qkv, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.first, self.attend = rank * LENGTH // ranks, attend
        if ranks > 1:
            from deepspeed.sequence.layer import DistributedAttention

            exchanged = DistributedAttention(Attending(), group, scatter_idx=2, gather_idx=1)
            self.attend = lambda query, key, value: exchanged(query, key, value, 0)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        at = self.first + torch.arange(tokens.shape[1])
        x = self.embedding(tokens) + self.places(at)
        query, key, value = self.qkv(x).unflatten(2, (3, HEADS, -1)).unbind(2)
        return self.head(x + self.attend(query, key, value).flatten(2))


def samples(microbatch: Microbatch) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * microbatch.step + 100 * microbatch.shard + microbatch.index)
    tokens = torch.randint(VOCABULARY, (SAMPLES, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, :-1].cumsum(1) % VOCABULARY  # what a model without attention cannot learn


def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    tokens, labels = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--engine")
    args = parser.parse_args()
    if args.engine != "plain":
        global DistributedAttention
        from deepspeed.sequence.layer import (
            DistributedAttention,
        )  # before the world is made, which is DeepSpeed's then, too
    session = megatron_ft.init(seed=args.seed)
    session.init_distributed()
    mesh = session.mesh("cpu")["dp"]
    torch.manual_seed(args.seed)
    model = Model(mesh.get_group(), mesh.get_local_rank(), mesh.size())
    if args.engine == "fsdp":
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if args.engine == "zero":
        engine = session.deepspeed(model, optimizer=optimizer, loss_fn=loss_fn)
    else:
        engine = session.wrap(model, optimizer, loss_fn)
    for _ in session.steps(args.steps):
        session.train_step(engine, samples)


if __name__ == "__main__":
    main()
