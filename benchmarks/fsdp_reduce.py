"""FSDP2 alone: gradients reduced inside the group with each microbatch, as the engine does, or after the last one.

    python benchmarks/fsdp_reduce.py [--pairs 20]

Two ranks, four microbatches in a step; the two ways take turns, step by step. Printed are the median ratio of their times,
and the gradients that a rank holds between two microbatches. A reduction after the last microbatch sends less and holds the
gradients of the whole model at every rank.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import common
import engines
import torch
import torch.distributed as dist
import torch.multiprocessing

RANKS, MICROBATCHES, WARMUP, VOCABULARY = 2, 4, 2, 512


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=20)
    pairs = parser.parse_args().pairs
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with torch.multiprocessing.Manager() as manager:
        found = manager.dict()
        torch.multiprocessing.spawn(measure, (store.port, pairs, found), nprocs=RANKS)
        result = dict(found)
    ratio = statistics.median(e / o for e, o in zip(result["each_s"], result["last_s"], strict=True))
    held = {way: result[f"{way}_bytes"] / result["parameters"] for way in ("each", "last")}
    print(f"with each microbatch, over after the last one: {ratio:.3f}; gradients held {held} bytes for each parameter")
    result |= {"ranks": RANKS, "microbatches": MICROBATCHES, "ratio": ratio}
    print(f"raw numbers in {common.save('fsdp_reduce', result)}")
    return 0


def measure(rank: int, port: int, pairs: int, found: Any) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (RANKS,))
    model, loss_fn = engines.sharded(VOCABULARY, mesh)
    before = common.storages(gradients=True)
    tokens = torch.randint(VOCABULARY, (engines.SAMPLES, engines.SEQ_LEN))
    batch = {"input_ids": tokens, "labels": tokens}
    seconds: dict[str, list[float]] = {"each": [], "last": []}
    held = {}
    for number in range(WARMUP + pairs):
        for way in sorted(seconds, reverse=bool(number % 2)):
            dist.barrier()
            began = time.perf_counter()
            for index in range(MICROBATCHES):
                model.set_requires_gradient_sync(way == "each" or index == MICROBATCHES - 1)
                loss_fn(model, batch).backward()
                if number == 0 and index == 1:
                    held[way] = sum(size for at, size in common.storages(gradients=True).items() if at not in before)
            if number >= WARMUP:
                seconds[way].append(time.perf_counter() - began)
            model.zero_grad()
    if rank == 0:
        found.update({f"{way}_s": seconds[way] for way in seconds} | {f"{way}_bytes": held[way] for way in held})
        found["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
