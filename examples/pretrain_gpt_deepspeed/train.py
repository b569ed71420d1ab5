"""Pre-train a GPT with DeepSpeed's pipeline engine, tensor parallelism and fault-tolerant data parallelism.

    megatron-ft launch --groups 2 --ranks-per-group 4 --config examples/pretrain_gpt_deepspeed/ds_config.json \
        --run-dir runs/3d examples/pretrain_gpt_deepspeed/train.py -- --data data/sotu --stages 2 --slices 2 --steps 20

A group is ``stages x slices`` ranks. The lines marked `ft` make it fault-tolerant.
"""

import argparse

import torch
from model import GPTConfig, build

import megatron_ft  # ft


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="data/sotu", help="directory made by `megatron-ft prepare`")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--slices", type=int, default=1)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--positions", choices=("rotary", "learned"), default="rotary")
    parser.add_argument("--norm", choices=("rms", "layer"), default="rms")
    parser.add_argument("--untied", action="store_true", help="an output layer with a weight of its own")
    parser.add_argument("--deepspeed_config", help="ignored: the launcher has told")
    args = parser.parse_args()

    session = megatron_ft.init(seed=args.seed)  # ft
    session.init_distributed()  # ft: instead of deepspeed.init_distributed(); the world is this group
    dataset = session.dataset(args.data, seq_len=args.seq_len)  # ft: microbatch id -> tensors
    config = GPTConfig(
        dataset.vocab_size,
        args.layers,
        args.width,
        args.heads,
        args.seq_len,
        args.dropout,
        args.positions,
        args.norm,
        not args.untied,
    )
    model = build(config, args.stages, args.slices, args.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / args.warmup))

    engine = session.deepspeed(model, optimizer=optimizer, lr_scheduler=scheduler)  # ft: instead of deepspeed.initialize
    for step in session.steps(args.steps):  # ft
        result = session.train_step(engine, dataset)  # ft: instead of engine.train_batch
        print(f"step {step}  loss {result.loss:.4f}  |g| {result.gradient_norm:.3f}", flush=True)


if __name__ == "__main__":
    main()
