"""The model of ``recovery.py``, the same for both systems: as many MB of gradients as asked for, hardly any computing.

With ``BENCHMARK_MICROBATCH_S`` a microbatch takes that long, as on a device of its own, however busy the cores are
(``policies.py``). With ``BENCHMARK_COMPUTE=gpt`` in the environment (``goodput.py`` and ``rejoin.py`` set it) it is a small
GPT instead, which computes; with ``small_gpt`` one of width 64, of any number of MB. Its text follows a rule with noise, so
that there is something to learn.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

WIDTH = 512  # a square layer of this width has 1 MiB of fp32 gradients
LEARNING_RATE = 1e-3
COMPUTE, PACE = "BENCHMARK_COMPUTE", "BENCHMARK_MICROBATCH_S"
_VOCABULARY, _LENGTH = 512, 64


def _is_gpt() -> bool:
    return os.environ.get(COMPUTE) in ("gpt", "small_gpt")


def _gpt(megabytes: int) -> nn.Module:
    """A GPT with about that number of MB of gradients: a layer of width w has 12 w^2 parameters."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "pretrain_gpt"))
    from model import GPT, GPTConfig

    width = 256 if megabytes < 64 else 1024
    layers = max(1, round(megabytes * 2**20 / 4 / (12 * width**2)))
    if os.environ[COMPUTE] == "small_gpt":
        width, layers = 64, 2
    return GPT(GPTConfig(_VOCABULARY, layers=layers, width=width, heads=4, seq_len=_LENGTH, dropout=0.0))


def _text(samples: int, generator: torch.Generator) -> torch.Tensor:
    """Token ids [samples, length + 1]: each is 5 times the one before, plus 1 to 4."""
    tokens = torch.randint(_VOCABULARY, (samples, 1), generator=generator)
    steps = torch.randint(1, 5, (samples, _LENGTH), generator=generator)
    for step in steps.split(1, dim=1):
        tokens = torch.cat((tokens, (5 * tokens[:, -1:] + step) % _VOCABULARY), dim=1)
    return tokens


def build(megabytes: int) -> nn.Module:
    """Build the same initial model in every process."""
    torch.manual_seed(1)
    if _is_gpt():
        return _gpt(megabytes)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(megabytes)))


def batch(*number: int, samples: int = 1) -> torch.Tensor:
    """Return samples, a pure function of their number."""
    seed = 0
    for part in number:
        seed = seed * 1_000_003 + part + 1
    generator = torch.Generator().manual_seed(seed % 2**63)
    return _text(samples, generator) if _is_gpt() else torch.randn(samples, WIDTH, generator=generator)


def loss_of(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    began = time.monotonic()
    if _is_gpt():
        loss = nn.functional.cross_entropy(model(inputs[:, :-1]).flatten(0, 1), inputs[:, 1:].flatten())
    else:
        loss = (model(inputs) - inputs).square().mean()
    if pace := os.environ.get(PACE):  # the backward pass takes about twice as long as the forward pass
        time.sleep(max(0.0, float(pace) - 3 * (time.monotonic() - began)))
    return loss


def slowly(compute_s: float):
    """Return that loss, on a device that takes this time for a microbatch."""

    def loss(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(compute_s)
        return loss_of(model, inputs)

    return loss


def train(steps: int, megabytes: int, optimizer_of, loss=loss_of) -> nn.Module:
    """Train one group of ours. ``optimizer_of``: (parameters) -> optimizer."""
    import megatron_ft

    session = megatron_ft.init(seed=1)
    model = build(megabytes)
    engine = session.wrap(model, optimizer_of(model.parameters()), loss)
    for _ in session.steps(steps):
        session.train_step(engine, lambda number: batch(*number))
    return model


def flat_gradients(model: nn.Module, megabytes: int = 25) -> list[torch.Tensor]:
    """Flat buckets of at least ``megabytes`` with the parameters' gradients as views, last parameter first."""
    buckets, part = [], []
    parameters = list(model.parameters())[::-1]
    for parameter in parameters:
        part.append(parameter)
        sizes = [one.numel() for one in part]
        if sum(sizes) * 4 >= megabytes * 2**20 or parameter is parameters[-1]:
            flat = torch.zeros(sum(sizes))
            for one, view in zip(part, flat.split(sizes), strict=True):
                one.grad = view.view_as(one)
            buckets.append(flat)
            part = []
    return buckets
