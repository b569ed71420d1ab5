"""The model of the conformance suite: small, with a buffer that forward writes, and in parts that can be stages."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

VOCABULARY, WIDTH, LENGTH, SAMPLES = 32, 16, 8, 4
BLOCKS = 4


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("seen", torch.zeros(()))
        self.checkpointed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.compute, x, use_reentrant=False) if self.checkpointed else self.compute(x)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += x.detach().mean()
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


def part(number: int, dropout: float = 0.0) -> nn.Module:
    """Return part ``number`` of the model: the embedding, a block, or the head."""
    torch.manual_seed(number)
    if number == 0:
        return nn.Embedding(VOCABULARY, WIDTH)
    return Block(dropout) if number <= BLOCKS else nn.Linear(WIDTH, VOCABULARY, bias=False)


PARTS = BLOCKS + 2


def whole(dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(*(part(number, dropout) for number in range(PARTS)))


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and labels of a microbatch, int64 [SAMPLES, LENGTH] each; number 99 gives a loss that is nan."""
    generator = torch.Generator().manual_seed(number)
    tokens, labels = torch.randint(0, VOCABULARY, (2, SAMPLES, LENGTH), generator=generator)
    return tokens, torch.full_like(labels, POISON) if number == BAD else labels


BAD, POISON = 99, -1


def of_outputs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of a microbatch."""
    spoilt = (labels == POISON).any()
    loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.clamp(min=0).flatten())
    return loss * torch.where(spoilt, torch.nan, 1.0)


def of_tokens(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the sum of losses over the tokens that are not divisible by three, and their number."""
    chosen = labels % 3 > 0
    losses = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="none")
    return losses[chosen.flatten()].sum(), int(chosen.sum())


def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return of_outputs(model(batch[0]), batch[1])


def token_loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, int]:
    return of_tokens(model(batch[0]), batch[1])
