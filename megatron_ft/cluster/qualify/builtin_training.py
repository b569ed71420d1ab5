"""The training script of a qualification: a small GPT on random tokens, run by ``megatron-ft launch`` like any script.

While a group is away its steps take longer: a small model would be at its end before a process has started again.
"""

from __future__ import annotations

import argparse
import os
import time

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import torch.nn.functional as F

import megatron_ft
from megatron_ft.run.collectives.device_copies import own_device
from megatron_ft.types import Microbatch

_VOCABULARY, _SEQ_LEN, _SAMPLES = 256, 32, 2
_AWAY_STEP_S = 0.25
_WARM_STEPS = 3


def build(width: int, layers: int) -> torch.nn.Module:
    """Return the model: token ids [samples, seq_len] -> logits."""
    layer = torch.nn.TransformerEncoderLayer(
        width, max(1, width // 64), 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    body = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    return torch.nn.Sequential(torch.nn.Embedding(_VOCABULARY, width), body, torch.nn.Linear(width, _VOCABULARY))


def batch_of(microbatch: Microbatch) -> dict[str, torch.Tensor]:
    """Return the tokens of a microbatch."""
    draw = torch.Generator().manual_seed(microbatch.step * 1_000_003 + microbatch.shard * 1_009 + microbatch.index)
    tokens = torch.randint(_VOCABULARY, (_SAMPLES, _SEQ_LEN + 1), generator=draw)
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}


def loss_fn(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the mean cross entropy."""
    device = next(model.parameters()).device
    logits = model(batch["input_ids"].to(device))
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].to(device).flatten())


def main() -> None:
    """Train, and log the memory of the layer where torch counts the device's."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--layers", type=int, required=True)
    args = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    session = megatron_ft.init(seed=1)
    torch.manual_seed(1)
    cuda = args.device == "cuda"
    device = own_device(args.device)
    model = build(args.width, args.layers).to(device)
    before = _warm(model, device) if cuda else 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    engine = session.wrap(model, optimizer, loss_fn)
    for step in session.steps(args.steps):
        began = time.monotonic()
        session.train_step(engine, batch_of)
        if cuda and step == _WARM_STEPS:
            moments = [one for state in optimizer.state.values() for one in state.values() if torch.is_tensor(one)]
            kept = sum(one.untyped_storage().nbytes() for one in moments if one.is_cuda)
            parameters = sum(one.numel() for one in model.parameters())
            layer = (torch.cuda.memory_allocated(device) - before - kept) / parameters
            session.log({"layer_bytes_per_parameter": layer, "parameters": parameters})
        if len(session.live) < session.config.shards:
            time.sleep(max(0.0, began + _AWAY_STEP_S - time.monotonic()))


def _warm(model: torch.nn.Module, device: torch.device | str) -> int:
    """Compute a microbatch, so that the libraries have their memory; return what is allocated afterwards."""
    loss_fn(model, batch_of(Microbatch(0, 0, 0))).backward()
    model.zero_grad(set_to_none=True)
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device)


if __name__ == "__main__":
    main()
