"""Pre-train a small GPT. An ordinary training script; the lines marked `ft` make it fault-tolerant.

    megatron-ft launch --groups 4 --config examples/pretrain_gpt/ds_config.json --run-dir runs/a \
        examples/pretrain_gpt/train.py -- --data data/sotu --steps 60 --seed 1
"""

import argparse
import os

import torch
import torch.nn.functional as F
from model import GPT, GPTConfig

import megatron_ft  # ft


def loss_fn(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    batch = {name: values.to(next(model.parameters()).device) for name, values in batch.items()}
    logits = model(batch["input_ids"], batch.get("document_ids"), batch.get("position_ids"))
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="data/sotu", help="directory made by `megatron-ft prepare`")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1, help="initial weights, order of the samples, dropout")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--warmup", type=int, default=20, help="steps until the full learning rate")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--document-mask", action="store_true", help="no attention across the ends of documents")
    parser.add_argument("--deepspeed_config", help="for deepspeed's launcher; megatron-ft's has told")
    args = parser.parse_args()

    session = megatron_ft.init(seed=args.seed)  # ft
    dataset = session.dataset(args.data, seq_len=args.seq_len, documents=args.document_mask)  # ft: id -> tensors
    torch.manual_seed(args.seed)
    model = GPT(GPTConfig(dataset.vocab_size, args.layers, args.width, seq_len=args.seq_len, dropout=args.dropout))
    model.to("cpu" if args.device == "cpu" else f"cuda:{int(os.environ['LOCAL_RANK']) % torch.cuda.device_count()}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / args.warmup))

    engine = session.wrap(model, optimizer, loss_fn, scheduler)  # ft
    for step in session.steps(args.steps):  # ft
        result = session.train_step(engine, dataset)  # ft: instead of backward, all_reduce, clip, optimizer.step
        print(f"step {step}  loss {result.loss:.4f}  |g| {result.gradient_norm:.3f}", flush=True)


if __name__ == "__main__":
    main()
