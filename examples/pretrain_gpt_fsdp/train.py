"""Pre-train a small GPT with FSDP2 inside each group, and fault-tolerant data parallelism between the groups (HSDP).

    megatron-ft launch --groups 3 --config examples/pretrain_gpt_fsdp/ds_config.json --run-dir runs/hsdp \
        examples/pretrain_gpt_fsdp/train.py -- --data data/sotu --steps 20

`fault_tolerance.inner_shards` in the config is the number of ranks of a group. The lines marked `ft` make an ordinary FSDP2
script fault-tolerant.
"""

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import megatron_ft  # ft

sys.path.append(str(Path(__file__).parent.parent / "pretrain_gpt"))
from model import GPT, GPTConfig


def loss_fn(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    device = next(model.parameters()).device
    logits = model(batch["input_ids"].to(device))
    return F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].to(device).flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="data/sotu", help="directory made by `megatron-ft prepare`")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1, help="initial weights, order of the samples, dropout")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--warmup", type=int, default=20, help="steps until the full learning rate")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--bf16", action="store_true", help="compute in bf16, keep and reduce fp32")
    args = parser.parse_args()

    session = megatron_ft.init(seed=args.seed)  # ft
    dataset = session.dataset(args.data, seq_len=args.seq_len)  # ft: microbatch id -> tensors
    mesh = session.mesh(args.device)["dp"]  # ft: instead of init_process_group and init_device_mesh
    torch.manual_seed(args.seed)
    config = GPTConfig(dataset.vocab_size, args.layers, args.width, seq_len=args.seq_len, dropout=args.dropout)
    model = GPT(config).to(args.device)
    precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if args.bf16 else MixedPrecisionPolicy()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / args.warmup))

    engine = session.wrap(model, optimizer, loss_fn, scheduler)  # ft
    for step in session.steps(args.steps):  # ft
        result = session.train_step(engine, dataset)  # ft: instead of backward, clip_grad_norm_, optimizer.step
        print(f"step {step}  loss {result.loss:.4f}  |g| {result.gradient_norm:.3f}", flush=True)


if __name__ == "__main__":
    main()
