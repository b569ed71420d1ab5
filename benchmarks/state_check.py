"""The cost of comparing the states of the groups (``detector.state_check_steps``): checksums against their step.

    python benchmarks/state_check.py [--trials 9]

One group, one process, one thread. A step is 4 microbatches of 8 x 128 tokens of the example's GPT, forward and backward,
and AdamW's update. The checksums of one whole period are timed between the steps of the same process, alternating, and
divided by the number of steps of a period; medians of the trials.
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
from megatron_ft.engines.torch_native import TorchNativeEngine
from megatron_ft.worker.state_checksum import StateCheck

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
    """Return the seconds of steps and of the checksums of whole periods, one after the other."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(VOCABULARY, layers, width, seq_len=LENGTH, dropout=0.0))
    tokens = torch.randint(0, VOCABULARY, (SAMPLES, LENGTH + 1))
    engine = TorchNativeEngine(model, torch.optim.AdamW(model.parameters()), lambda model, batch: loss(model, tokens))
    check = StateCheck(engine, period)
    steps, checks = [], []
    for trial in range(trials + 1):  # the first warms up
        began = time.perf_counter()
        engine.begin_step()
        for _ in range(MICROBATCHES):
            loss(model, tokens).backward()
        engine.optimizer.step()
        middle = time.perf_counter()
        for step in range(period):
            check.of_step(step)
        if trial:
            steps.append(middle - began)
            checks.append(time.perf_counter() - middle)
    state_bytes = sum(tensor.numel() * tensor.element_size() for _, tensor in engine.state_tensors())
    share = statistics.median(checks) / period / statistics.median(steps)
    print(f"{layers} layers x {width}: {100 * share:.4f}% of a step")
    return {
        "state_mb": round(state_bytes / 2**20, 1),
        "share_of_step": share,
        "step_s": steps,
        "whole_period_s": checks,
    }


def loss(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


if __name__ == "__main__":
    main()
