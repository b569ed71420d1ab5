"""The cost of checks: of the state (``detector.state_check_steps``), and of the first microbatch, against a step.

    python benchmarks/state_check.py [--trials 9]

One group, one process, one thread. A step is 4 microbatches of 8 x 128 tokens of the example's GPT, forward and backward,
and AdamW's update. The checksums of one whole period are timed between the steps of the same process, alternating, and
divided by the number of steps of a period; medians of the trials.

The checks of the first step are those of a gradient (``run.engines.gradient_check``) and of a batch (``data.batch_digest``;
the group that compares also loads one microbatch more, which is not measured here). They are divided by the forward and
backward pass of one microbatch, which is the least that a group does in a step.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import common
import torch
import torch.nn.functional as F

sys.path.insert(0, str(common.ROOT / "examples" / "pretrain_gpt"))

from model import GPT, GPTConfig

from megatron_ft.config.schema import DetectorConfig
from megatron_ft.data import batch_digest
from megatron_ft.run.engines.torch_native import TorchNativeEngine
from megatron_ft.run.state_checksum import StateCheck
from megatron_ft.types import Microbatch

SIZES = {"1.3 M parameters": (4, 128), "15 M parameters": (8, 384)}
MICROBATCHES, SAMPLES, LENGTH, VOCABULARY = 4, 8, 128, 4096


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    period = DetectorConfig().state_check_steps
    results = {name: measure(*size, period, options.trials) for name, size in SIZES.items()}
    print(common.save("state_check", {"state_check_steps": period, "sizes": results}))


def measure(layers: int, width: int, period: int, trials: int) -> dict:
    """Return the seconds of steps, of the checksums of whole periods, and of the checks of a first microbatch, one after the
    other."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(VOCABULARY, layers, width, seq_len=LENGTH, dropout=0.0))
    tokens = torch.randint(0, VOCABULARY, (SAMPLES, LENGTH + 1))
    engine = TorchNativeEngine(model, torch.optim.AdamW(model.parameters()), lambda model, batch: loss(model, tokens))
    check = StateCheck(engine, period)
    steps, checks, passes, firsts = [], [], [], []
    for trial in range(trials + 1):  # the first warms up
        began = time.perf_counter()
        engine.begin_step()
        for _ in range(MICROBATCHES):
            loss(model, tokens).backward()
        engine.optimizer.step()
        middle = time.perf_counter()
        for step in range(period):
            check.of_step(step)
        end = time.perf_counter()
        first_pass, first_checks = first(engine, tokens)
        if trial:
            steps.append(middle - began)
            checks.append(end - middle)
            passes.append(first_pass)
            firsts.append(first_checks)
    state_bytes = sum(tensor.numel() * tensor.element_size() for _, tensor in engine.state_tensors())
    share = statistics.median(checks) / period / statistics.median(steps)
    share_of_first = statistics.median(firsts) / statistics.median(passes)
    print(f"{layers} layers x {width}: {100 * share:.4f}% of a step; first step: {share_of_first:.2f} of a microbatch")
    return {
        "state_mb": round(state_bytes / 2**20, 1),
        "share_of_step": share,
        "step_s": steps,
        "whole_period_s": checks,
        "share_of_first_microbatch": share_of_first,
        "first_microbatch_s": passes,
        "first_checks_s": firsts,
    }


def first(engine: TorchNativeEngine, tokens: torch.Tensor) -> tuple[float, float]:
    """Return the seconds of one microbatch, and of the checks that follow it in the first step."""
    engine.begin_step()
    began = time.perf_counter()
    engine.compute(Microbatch(0, 0, 0), tokens, 0, lambda point: None)
    engine.collect()
    middle = time.perf_counter()
    engine.check_gradient({})
    batch_digest.digest(batch_digest.leaves(tokens))
    return middle - began, time.perf_counter() - middle


def loss(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


if __name__ == "__main__":
    main()
