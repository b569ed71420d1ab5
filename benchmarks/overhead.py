"""What fault tolerance costs when nothing fails: our step against the same loop with a plain ``all_reduce``.

    python benchmarks/overhead.py [--groups 4] [--pairs 40]

Both run in the same processes on equal models and the same microbatches, alternating, in one run; the result is the
ratio of the medians over all pairs. The plain loop is what a user would write: accumulate into flat buckets, all-reduce
them, divide, clip, step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import common
import torch
import torch.distributed as dist

sys.path.insert(0, str(common.ROOT / "examples" / "pretrain_gpt"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--warmup", type=int, default=3)
    options = parser.parse_args()
    data = common.prepare_data(common.ROOT / "data" / "sotu")
    with tempfile.TemporaryDirectory() as directory:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        subprocess.run(
            [
                *(sys.executable, "-m", "megatron_ft.cli", "launch", "--groups", str(options.groups)),
                *("--config", "examples/pretrain_gpt/ds_config.json", "--run-dir", f"{directory}/run", __file__, "--"),
                *(str(data), str(options.warmup + options.pairs), f"{directory}/times", str(server.port)),
            ],
            check=True,
            cwd=common.ROOT,
            env={**os.environ, "PYTHONPATH": str(common.ROOT / "benchmarks")},
            stdout=sys.stderr,
        )
        times = [json.loads(path.read_text()) for path in sorted(Path(directory).glob("times.*"))]
    # A step ends everywhere when its slowest group ends.
    ours, plain = (
        [max(group[kind][i] for group in times) for i in range(options.warmup, options.warmup + options.pairs)]
        for kind in ("ours", "plain")
    )
    ratio = statistics.median(ours) / statistics.median(plain)
    paired = statistics.median(a / b for a, b in zip(ours, plain, strict=True))
    path = common.save(
        "overhead",
        {
            "groups": options.groups,
            "median_ours_s": statistics.median(ours),
            "median_plain_s": statistics.median(plain),
            "ratio_of_medians": ratio,
            "median_of_paired_ratios": paired,
            "ours_s": ours,
            "plain_s": plain,
        },
    )
    print(
        f"step: ours {1e3 * statistics.median(ours):.1f} ms, plain all_reduce {1e3 * statistics.median(plain):.1f} ms, "
        f"ratio {ratio:.3f} (median of pairs {paired:.3f}); raw numbers in {path}"
    )


def rank(data: str, steps: int, out: str, port: int) -> None:
    """One group: alternate between a step of ours and a plain one."""
    from model import GPT, GPTConfig
    from train import loss_fn

    import megatron_ft
    from megatron_ft.types import Microbatch

    session = megatron_ft.init(seed=1)
    dataset = session.dataset(data, seq_len=128)
    group, groups, per_group = session.group, session.config.groups, session.config.microbatches_per_group
    dist.init_process_group(
        "gloo", store=dist.TCPStore("127.0.0.1", port, is_master=False), rank=group, world_size=groups
    )

    def build():
        torch.manual_seed(1)
        model = GPT(GPTConfig(dataset.vocab_size))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    engine = session.wrap(*build(), loss_fn)
    model, optimizer = build()
    flats = flat_gradients(model, [b.elements for b in engine._buckets])

    def plain_step(step: int) -> None:
        for flat in flats:
            flat.zero_()
        for index in range(per_group):
            loss_fn(model, dataset(Microbatch(step, group, index))).backward()
        for work in [dist.all_reduce(flat, async_op=True) for flat in flats]:
            work.wait()
        for flat in flats:
            flat.div_(groups * per_group)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    times: dict[str, list[float]] = {"ours": [], "plain": []}
    for step in session.steps(steps):
        turns = [("ours", lambda s: session.train_step(engine, dataset)), ("plain", plain_step)]
        for name, turn in turns if step % 2 else reversed(turns):
            dist.barrier()
            started = time.perf_counter()
            turn(step)
            times[name].append(time.perf_counter() - started)
    Path(f"{out}.{group}").write_text(json.dumps(times))


def flat_gradients(model: torch.nn.Module, sizes: list[int]) -> list[torch.Tensor]:
    """Flat buckets of the given sizes with the parameters' gradients as views, last parameter first."""
    parameters = list(reversed(list(model.parameters())))
    flats = []
    for size in sizes:
        flat, offset = torch.zeros(size), 0
        while offset < size:
            parameter = parameters.pop(0)
            parameter.grad = flat[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()
        flats.append(flat)
    return flats


if __name__ == "__main__":
    if "MEGATRON_FT_RUN_ID" in os.environ:
        rank(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    else:
        main()
