"""The cost and the quality of exact reduction.

    python benchmarks/exact.py                     all parts but the long training
    python benchmarks/exact.py --part compute      only one of: compute, wire, quality, training
    python benchmarks/exact.py --device cuda --part compute

compute: a step of the example (``examples/pretrain_gpt``, one group, one thread) with ``reduction`` "fast" and "exact",
alternating in one process; the step has everything but the all-reduce.
wire: an all-reduce between two processes with what each format sends, and the conversions, for 4 and 500 MB of fp32
gradients. Two fp32 words are no setting: they send as much as fp64 and hold fewer bits.
quality: the error of the sum of a step's gradients against their fp64 sum, fast and exact, by quantiles of the elements.
training: 2,000 steps of a small model with both, and the losses at the end.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import common
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn

from megatron_ft.run.engines.buckets import Bucket
from megatron_ft.run.engines.exact_rounding import Rounding
from megatron_ft.run.engines.exact_rounding import statistics as statistics_of
from megatron_ft.run.engines.torch_native import TorchNativeEngine
from megatron_ft.types import Microbatch

sys.path.insert(0, str(common.ROOT / "examples" / "pretrain_gpt"))
from model import GPT, GPTConfig

VOCABULARY, SAMPLES, PER_STEP = 2048, 4, 4
"""The example's batch: 4 microbatches of 4 samples for each group."""
QUANTILES = (0.5, 0.9, 0.99, 0.999, 1.0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", choices=("compute", "wire", "quality", "training"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--steps", type=int, default=2000, help="of the training")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--out", help="name of the result (default: exact)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    parts: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
        "compute": compute, "wire": wire, "quality": quality, "training": training,
    }  # fmt: skip
    chosen = [options.part] if options.part else ["compute", "wire", "quality"]
    results = {name: parts[name](options) for name in chosen}
    about = {"load_average": os.getloadavg(), "device": _device_name(options.device), "options": vars(options)}
    name = options.out or ("exact" if not options.part else f"exact_{options.part}")
    print(f"raw numbers in {common.save(name, {**about, **results})}")


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


def _engine(options: argparse.Namespace, bits: int, seed: int = 1, lr: float = 1e-3) -> TorchNativeEngine:
    torch.manual_seed(seed)
    config = GPTConfig(VOCABULARY, options.layers, options.width, seq_len=options.seq_len, dropout=0.0)
    model = GPT(config).to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    return TorchNativeEngine(model, optimizer, _loss, exact_bits=bits, gradient_clipping=1.0)


def _loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def _batch(options: argparse.Namespace, microbatch: Microbatch) -> torch.Tensor:
    """Return tokens that a model can learn to predict: each follows from the one before, with noise."""
    generator = torch.Generator().manual_seed(1000 * microbatch.step + microbatch.index)
    tokens = torch.randint(0, VOCABULARY, (SAMPLES, options.seq_len + 1), generator=generator)
    for at in range(1, options.seq_len + 1):
        keep = torch.rand(SAMPLES, generator=generator) < 0.7
        tokens[:, at] = torch.where(keep, (3 * tokens[:, at - 1] + 1) % VOCABULARY, tokens[:, at])
    return tokens.to(options.device)


def _step(engine: TorchNativeEngine, batches: list[torch.Tensor], step: int) -> Any:
    """Make a step of one group; copies stand for the all-reduce."""
    while True:
        engine.begin_step(len(batches))
        for index, batch in enumerate(batches):
            engine.compute(Microbatch(step, 0, index), batch, 1, lambda point: None)
            engine.collect()
        for bucket in range(engine.num_buckets):
            reduced, exact = engine.reduced(bucket), engine.exact(bucket)
            if exact is None:
                reduced.copy_(engine.local(bucket))
            else:
                exact.load(engine.local(bucket), reduced)
                assert exact.intact(reduced)
        if not engine.must_discard(len(batches)):
            return engine.update(step, len(batches), lambda point: None)
        engine.discard(len(batches))


def compute(options: argparse.Namespace) -> dict[str, Any]:
    engines = {"fast": _engine(options, 0), "exact": _engine(options, 51), "exact_30": _engine(options, 30)}
    batches = [_batch(options, Microbatch(0, 0, index)) for index in range(PER_STEP)]
    times: dict[str, list[float]] = {name: [] for name in engines}
    for step in range(options.pairs + 3):
        order = list(engines.items())
        for name, engine in order if step % 2 else reversed(order):
            _settle(options)
            started = time.perf_counter()
            _step(engine, batches, step)
            _settle(options)
            if step >= 3:
                times[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(found) for name, found in times.items()}
    ratios = {name: statistics.median(a / b for a, b in zip(times[name], times["fast"], strict=True)) for name in times}
    parameters = sum(p.numel() for p in engines["fast"].model.parameters())
    print(
        f"compute: {parameters:,} parameters, {PER_STEP} microbatches: fast {1e3 * medians['fast']:.1f} ms, exact / fast "
        f"{ratios['exact']:.3f}, with 30 bits {ratios['exact_30']:.3f} (medians of {options.pairs} pairs)"
    )
    tokens = SAMPLES * options.seq_len
    return {
        "parameters": parameters,
        "tokens_of_a_microbatch": tokens,
        "median_s": medians,
        "median_ratio_to_fast": ratios,
        "seconds": times,
    }


def _settle(options: argparse.Namespace) -> None:
    if options.device == "cuda":
        torch.cuda.synchronize()


# --- the wire ---------------------------------------------------------------------------------------------------------


def wire(options: argparse.Namespace) -> dict[str, Any]:
    found = {}
    with tempfile.TemporaryDirectory() as directory:
        for megabytes, times in ((4, 20), (500, 3)):
            path = f"{directory}/{megabytes}"
            mp.spawn(_wire_rank, args=(path, megabytes, times), nprocs=2)
            found[f"{megabytes} MB"] = torch.load(path)
            shown = ", ".join(
                f"{name} {one['bytes'] / 1e6:.0f} MB {1e3 * one['median_s']:.1f} ms"
                for name, one in found[f"{megabytes} MB"].items()
            )
            print(f"wire, {megabytes} MB of fp32 gradients: {shown}")
    return found


def _wire_rank(rank: int, path: str, megabytes: int, times: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{path}.meet", rank=rank, world_size=2, timeout=timedelta(seconds=300)
    )
    elements = megabytes * 250_000
    parameter = nn.Parameter(torch.zeros(elements))
    bucket = Bucket([parameter], 0, 3)
    assert bucket.statistics == statistics_of(3)
    exact = {bits: Rounding([bucket], bits).buckets[0] for bits in (51, 30)}
    bucket.begin_step()
    exact[30].add([torch.randn(elements)])
    flat, ints = bucket.local, torch.empty(elements, dtype=torch.int32)
    fp32, other = torch.randn(elements), torch.randn(elements)

    def two_words() -> None:
        high = flat[:elements].float()
        low = (flat[:elements] - high).float()
        dist.all_reduce(high)
        dist.all_reduce(low)

    def as_int32() -> None:
        exact[30].pack(flat, ints)
        dist.all_reduce(ints)
        exact[30].unpack(ints, bucket.reduced)

    formats: dict[str, tuple[int, Callable[[], object]]] = {
        "fp32 (fast)": (4, lambda: dist.all_reduce(fp32.copy_(other))),
        "fp64": (8, lambda: dist.all_reduce(bucket.reduced.copy_(flat))),
        "int32": (4, as_int32),
        "two fp32 words": (8, two_words),
        "checksums of part and sum": (
            0,
            lambda: (exact[30].load(flat, bucket.reduced), exact[30].intact(bucket.reduced)),
        ),
    }
    results = {}
    for name, (size, run) in formats.items():
        taken = []
        for _ in range(times + 1):
            dist.barrier()
            started = time.perf_counter()
            run()
            taken.append(time.perf_counter() - started)
        results[name] = {"bytes": size * elements, "median_s": statistics.median(taken[1:]), "seconds": taken[1:]}
    if rank == 0:
        torch.save(results, path)
    dist.destroy_process_group()


# --- quality ----------------------------------------------------------------------------------------------------------


def quality(options: argparse.Namespace) -> dict[str, Any]:
    """Compare the sums of one step of 64 microbatches over 16 groups, in the order that a ring would take."""
    count, groups, found = 64, 16, {}
    truth: torch.Tensor | None = None
    for name, bits in (("fast", 0), ("exact", 51), ("exact_30", 30)):
        engine = _engine(options, bits)
        for step in range(4):  # a grid that was measured, and gradients that are not those of the first step
            _step(engine, [_batch(options, Microbatch(step, 0, index)) for index in range(8)], step)
        whole = torch.zeros(sum(bucket.elements for bucket in engine._buckets), dtype=torch.float64)
        sums = None
        for group in range(groups):
            engine.begin_step(count)
            for index in range(count // groups):
                microbatch = Microbatch(9, 0, group * count // groups + index)
                engine.compute(microbatch, _batch(options, microbatch), 1, lambda point: None, keep=True)
                if bits:
                    whole += torch.cat([p.grad.flatten() for b in engine._buckets for p in b.parameters]).double()
                engine.collect()
            local = torch.cat([bucket.local[: bucket.elements] for bucket in engine._buckets])
            sums = local if sums is None else sums + local
        truth = whole if bits == 51 else truth
        found[name] = sums
    # The models of fast and exact differ in their last bits after four steps: fast is summed again from one model.
    found["fast"] = _fast_sum(options, count, groups)
    assert truth is not None
    errors = {}
    for name, sums in found.items():
        relative = (sums.double() - truth).abs() / truth.abs().clamp_min(1e-300)
        relative = relative[truth != 0]
        errors[name] = {str(q): float(_quantile(relative, q)) for q in QUANTILES}
        errors[name]["norm"] = float((sums.double() - truth).norm() / truth.norm())
    for name, one in errors.items():
        print(f"quality, {name}: " + ", ".join(f"{key}: {value:.1e}" for key, value in one.items()))
    return {"microbatches": count, "groups": groups, "relative_error_by_quantile_of_elements": errors}


def _fast_sum(options: argparse.Namespace, count: int, groups: int) -> torch.Tensor:
    """Return the fp32 sum of the gradients of the model that exact reduction has trained."""
    engine = _engine(options, 51)
    for step in range(4):
        _step(engine, [_batch(options, Microbatch(step, 0, index)) for index in range(8)], step)
    total = None
    for group in range(groups):
        local = None
        for index in range(count // groups):
            microbatch = Microbatch(9, 0, group * count // groups + index)
            engine.begin_step(count)
            engine.compute(microbatch, _batch(options, microbatch), 1, lambda point: None, keep=True)
            one = torch.cat([p.grad.flatten() for bucket in engine._buckets for p in bucket.parameters])
            local = one if local is None else local + one
        total = local if total is None else total + local
    assert total is not None
    return total


def _quantile(values: torch.Tensor, quantile: float) -> torch.Tensor:
    ordered = values.sort().values
    return ordered[min(int(quantile * len(ordered)), len(ordered) - 1)]


def training(options: argparse.Namespace) -> dict[str, Any]:
    """Train with both, from two seeds: the difference between the ways must not exceed that between the seeds."""
    losses: dict[str, list[float]] = {}
    for seed in (1, 2):
        for name, bits in (("fast", 0), ("exact", 51)):
            engine = _engine(options, bits, seed)
            losses[f"{name}, seed {seed}"] = [
                _step(engine, [_batch(options, Microbatch(step, 0, index)) for index in range(PER_STEP)], step).loss
                for step in range(options.steps)
            ]
            last = statistics.mean(losses[f"{name}, seed {seed}"][-100:])
            print(f"training, {name}, seed {seed}: mean loss of the last 100 of {options.steps} steps {last:.4f}")
    means = {name: statistics.mean(found[-100:]) for name, found in losses.items()}
    return {
        "steps": options.steps,
        "mean_loss_of_last_100": means,
        "every_100th": {n: f[::100] for n, f in losses.items()},
    }


if __name__ == "__main__":
    main()
