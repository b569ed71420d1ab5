"""Pre-train a small GPT with torch's own parallelism inside each group: pipeline stages, tensor parallelism, FSDP2.

    megatron-ft launch --groups 2 --config examples/pretrain_gpt_native3d/ds_config.json --run-dir runs/native \
        examples/pretrain_gpt_native3d/train.py -- --data data/sotu --steps 20

A group is `pipeline.stages` x `fault_tolerance.inner_shards` x `tensor_parallel.autotp_size` ranks; each may be 1. The lines
marked `ft` make it fault-tolerant.
"""

import argparse
from functools import partial

import torch
import torch.nn.functional as F
from model import GPTConfig, Stage
from torch.distributed import pipelining
from torch.distributed.fsdp import fully_shard

import megatron_ft  # ft

SCHEDULES = {
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zero-bubble": pipelining.ScheduleInterleavedZeroBubble,
}


def loss_fn(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def whole_loss_fn(device: str, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return loss_fn(model(batch["input_ids"].to(device)), batch["labels"].to(device))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="data/sotu", help="directory made by `megatron-ft prepare`")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1, help="initial weights, order of the samples, dropout")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--dropout", type=float, default=0.1)
    args = parser.parse_args()

    session = megatron_ft.init(seed=args.seed)  # ft
    dataset = session.dataset(args.data, seq_len=args.seq_len)  # ft: microbatch id -> tensors
    mesh = session.mesh(args.device)  # ft: instead of init_process_group and init_device_mesh
    config = GPTConfig(dataset.vocab_size, args.layers, args.width, seq_len=args.seq_len, dropout=args.dropout)
    ranks, chunks = mesh["pp"].size(), 1 if args.schedule == "1f1b" else 2  # stages of each rank
    mine = [chunk * ranks + mesh["pp"].get_local_rank() for chunk in range(chunks)] if ranks > 1 else [0]
    count = ranks * len(mine)
    modules = [Stage(config, number, count, args.seed).to(args.device) for number in mine]
    for module in modules:
        for block in module.blocks.values():
            if mesh["tp"].size() > 1:
                block.divide(mesh["tp"])
            if mesh["dp"].size() > 1:
                fully_shard(block, mesh=mesh["dp"])
        if mesh["dp"].size() > 1:
            fully_shard(module, mesh=mesh["dp"])
    parameters = [parameter for module in modules for parameter in module.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)

    if count > 1:
        group = mesh["pp"].get_group()
        stages = [
            pipelining.PipelineStage(module, number, count, torch.device(args.device), group=group)
            for number, module in zip(mine, modules, strict=True)
        ]
        engine = session.pipeline(stages, optimizer, loss_fn, SCHEDULES[args.schedule])  # ft: instead of the schedule
    else:
        engine = session.wrap(modules[0], optimizer, partial(whole_loss_fn, args.device))  # ft
    for step in session.steps(args.steps):  # ft
        result = session.train_step(engine, dataset)  # ft: instead of schedule.step, clip_grad_norm_, optimizer.step
        print(f"step {step}  loss {result.loss:.4f}  |g| {result.gradient_norm:.3f}", flush=True)


if __name__ == "__main__":
    main()
