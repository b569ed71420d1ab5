"""The model of ``recovery.py``, the same for both systems: as many MB of gradients as asked for, hardly any computing."""

from __future__ import annotations

import time

import torch
from torch import nn

WIDTH = 512  # a square layer of this width has 1 MiB of fp32 gradients
LEARNING_RATE = 1e-3


def build(megabytes: int) -> nn.Module:
    """The same initial model in every process."""
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(megabytes)))


def batch(*number: int, samples: int = 1) -> torch.Tensor:
    """Samples, a pure function of their number."""
    seed = 0
    for part in number:
        seed = seed * 1_000_003 + part + 1
    return torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(seed % 2**63))


def loss_of(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return (model(inputs) - inputs).square().mean()


def slowly(compute_s: float):
    """That loss, on a device that takes so long for a microbatch."""

    def loss(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(compute_s)
        return loss_of(model, inputs)

    return loss


def flat_gradients(model: nn.Module, megabytes: int = 25) -> list[torch.Tensor]:
    """Flat buckets with the parameters' gradients as views, last parameter first."""
    parameters = list(model.parameters())[::-1]
    buckets = []
    for first in range(0, len(parameters), megabytes):
        part = parameters[first : first + megabytes]
        flat = torch.zeros(len(part) * WIDTH * WIDTH)
        for parameter, view in zip(part, flat.split(WIDTH * WIDTH), strict=True):
            parameter.grad = view.view_as(parameter)
        buckets.append(flat)
    return buckets
