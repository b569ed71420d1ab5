"""The job of ``test_state``: buffers that forward writes, ragged microbatches, an optimizer that draws random numbers."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import nn

import megatron_ft
from megatron_ft.run.engines.torch_native import TorchNativeEngine
from megatron_ft.types import Microbatch

ROWS, WIDTH = 6, 8


class Experts(nn.Module):
    """Scales that a forward pass changes and then uses, and counts that are in no state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(16))
        self.register_buffer("load", torch.zeros(16), persistent=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        chosen = (rows.detach() > 0).float().sum(0)
        self.load += chosen
        self.scale += 0.01 * torch.sign(chosen.mean() - chosen)
        return rows * self.scale


class Noisy(torch.optim.SGD):
    """Adds random numbers to the parameters."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(torch.randn_like(parameter), alpha=1e-3)


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), Experts(), nn.Linear(16, 4)]


def samples(microbatch: Microbatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows, and a mask of the rows that count: from none to all of them."""
    step, shard, index = microbatch
    generator = torch.Generator().manual_seed(1000 * step + 100 * shard + index)
    count = torch.randint(0, ROWS + 1, (), generator=generator)
    return torch.randn(ROWS, WIDTH, generator=generator), (torch.arange(ROWS) < count).float()


def summed(outputs: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (outputs.square().mean(1) * mask).sum(), mask.sum()


def loss_fn(model, batch) -> tuple[torch.Tensor, torch.Tensor]:
    rows, mask = batch
    return summed(model(rows), mask)


def buffers_of(model: nn.Module) -> dict[str, list]:
    """Return the buffers by the number of the layer, whichever module holds the layers."""
    return {name.removeprefix("module."): tensor.tolist() for name, tensor in model.named_buffers()}


def alone(steps: int, groups: int, per_group: int, optimizer, seed: int) -> tuple[list[float], dict[str, list]]:
    """Run all microbatches in one process; return the loss of each step, and the buffers at the end."""
    model, losses = nn.Sequential(*layers()), []
    engine = TorchNativeEngine(
        model, optimizer(model.parameters(), lr=0.05), loss_fn, loss_reduction="token", seed=seed
    )
    for step in range(steps):
        engine.begin_step()
        for number in range(groups * per_group):
            microbatch = Microbatch(step, *divmod(number, per_group))
            engine.compute(microbatch, samples(microbatch), 0, lambda point: None)
        for bucket in range(engine.num_buckets):
            engine.keep_local(bucket)
        losses.append(engine.update(step, groups * per_group, lambda point: None).loss)
    return losses, buffers_of(model)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--engine")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    session = megatron_ft.init(seed=args.seed)
    if args.engine == "native":
        model = nn.Sequential(*layers())
        engine = session.wrap(model, Noisy(model.parameters(), lr=0.05), loss_fn)
    elif args.engine == "data":
        model = nn.Sequential(*layers())
        engine = session.deepspeed(model, loss_fn=loss_fn, optimizer=Noisy(model.parameters(), lr=0.05))
    else:
        session.init_distributed()
        from deepspeed.pipe import PipelineModule

        model = PipelineModule(layers(), num_stages=2, loss_fn=summed, partition_method="uniform")
        engine = session.deepspeed(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.05))
    for _ in session.steps(args.steps):
        session.train_step(engine, samples)
    (args.out / f"{session.group}.{session.position}.json").write_text(json.dumps(buffers_of(model)))


if __name__ == "__main__":
    main()
