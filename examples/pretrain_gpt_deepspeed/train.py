"""Pre-train a GPT with DeepSpeed's pipeline engine, tensor parallelism and fault-tolerant data parallelism.

    megatron-ft launch --groups 2 --config examples/pretrain_gpt_deepspeed/ds_config.json --run-dir runs/3d \
        examples/pretrain_gpt_deepspeed/train.py -- --data data/sotu --steps 20

A group is ``pipeline.stages`` x ``tensor_parallel.autotp_size`` ranks. The config says which model: this directory's GPT
(gpt.json), or a Llama made of Hugging Face's own layers (llama.json). The lines marked `ft` make it fault-tolerant.
"""

import argparse
import os

import torch

import megatron_ft  # ft
from megatron_ft.run.engines import fused


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="data/sotu", help="directory made by `megatron-ft prepare`")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    found = os.environ.get("DS_ACCELERATOR") or ("cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--device", default=found, choices=("cpu", "cuda"))
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--deepspeed_config", help="ignored: the launcher has told")
    args = parser.parse_args()

    os.environ["DS_ACCELERATOR"] = args.device  # before anything imports DeepSpeed
    import deepspeed  # noqa: F401  init_distributed then initialises its communication, also for a group of one rank

    session = megatron_ft.init(seed=args.seed)  # ft
    session.init_distributed(
        "gloo" if args.device == "cpu" else None
    )  # ft: instead of deepspeed.init_distributed(); the world is this group
    seq_len = session.config.model.get("max_position_embeddings", 128)
    dataset = session.dataset(args.data, seq_len=seq_len)  # ft: microbatch id -> tensors
    if session.config.model.get("model_type") == "llama":
        import llama as architecture  # transformers' own layers
    else:
        import model as architecture
    model = architecture.build(session.config, dataset.vocab_size, args.seed)
    optimizer = scheduler = None
    if "optimizer" not in session.config.engine:  # otherwise DeepSpeed makes it, and the scheduler
        optimizer = fused.adamw(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / args.warmup))

    engine = session.deepspeed(
        model, optimizer=optimizer, lr_scheduler=scheduler
    )  # ft: instead of deepspeed.initialize
    for step in session.steps(args.steps):  # ft
        result = session.train_step(engine, dataset)  # ft: instead of engine.train_batch
        print(f"step {step}  loss {result.loss:.4f}  |g| {result.gradient_norm:.3f}", flush=True)


if __name__ == "__main__":
    main()
