"""A training script in the style of nanoGPT, in one process: random batches of a memory map, a learning rate set by hand,
an evaluation now and then, the best model kept.

    python examples/your_own_loop/nano_style.py --data data/sotu
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--data", default="data/sotu", help="a directory that megatron-ft prepare has written")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--out", default="best.pt")
args = parser.parse_args()
block_size, batch_size, accumulation = 16, 4, 4
learning_rate, warmup, eval_interval, eval_iters = 1e-2, 5, 10, 4

torch.manual_seed(1337)
vocab_size = json.loads((Path(args.data) / "meta.json").read_text())["vocab_size"]
tokens = np.memmap(Path(args.data) / "tokens.bin", dtype=np.uint16, mode="r")
split_at = int(0.9 * len(tokens))


def get_batch(split):
    data = tokens[:split_at] if split == "train" else tokens[split_at:]
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy(data[i : i + block_size].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + block_size].astype(np.int64)) for i in ix])
    return x, y


def get_lr(step):
    if step < warmup:
        return learning_rate * (step + 1) / warmup
    return learning_rate * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, args.steps - warmup)))


@torch.no_grad()
def estimate_loss(model):
    model.eval()
    found = [
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).item() for x, y in map(get_batch, ["val"] * eval_iters)
    ]
    model.train()
    return sum(found) / eval_iters


model = nn.Sequential(
    nn.Embedding(vocab_size, 32), nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, vocab_size)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
best_val_loss = math.inf

for step in range(args.steps):
    for param_group in optimizer.param_groups:
        param_group["lr"] = get_lr(step)
    for _ in range(accumulation):
        x, y = get_batch("train")
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        (loss / accumulation).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if step % eval_interval == eval_interval - 1:
        val_loss = estimate_loss(model)
        print(f"step {step}: val loss {val_loss:.4f}", flush=True)
        if val_loss < best_val_loss:
            best_val_loss = val_loss
            torch.save({"model": model.state_dict(), "best_val_loss": best_val_loss}, args.out)
