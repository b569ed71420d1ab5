"""Exact reduction on a GPU: the same sums, to the bit, as on a CPU, by Triton's loop and by torch's operations."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron_ft.run.engines import rounding_loops
from megatron_ft.run.engines.buckets import Buckets

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; tests/unit has the same on the CPU"),
]


def sums(device: str, gradients: list[list[torch.Tensor]], bits: int) -> list[torch.Tensor]:
    """Return the buckets after one microbatch for each list of gradients."""
    parameters = [nn.Parameter(torch.zeros_like(one, device=device)) for one in gradients[0]]
    buckets = Buckets(parameters, 0.5, slots=0, exact_bits=bits)
    assert buckets.rounding is not None
    for bucket in buckets:
        bucket.begin_step()
    buckets.rounding.begin(len(gradients))
    for microbatch in gradients:
        named = dict(zip(parameters, microbatch, strict=True))
        for number, bucket in enumerate(buckets):
            buckets.rounding.buckets[number].add([named[one].to(device) for one in bucket.parameters])
    for number, bucket in enumerate(buckets):
        buckets.rounding.buckets[number].load(bucket.local, bucket.reduced)
        assert buckets.rounding.buckets[number].intact(bucket.reduced)
    return [bucket.reduced.cpu() for bucket in buckets]


@pytest.mark.parametrize("kernel", ["triton", "torch"])
@pytest.mark.parametrize("bits", [51, 30])
def test_a_gpu_sums_what_a_cpu_sums(monkeypatch, kernel, bits):
    if kernel == "torch":
        monkeypatch.setattr(rounding_loops, "_on_device", lambda: None)
    generator = torch.Generator().manual_seed(1)
    shapes = [(300, 1000), (7,), (1000,), (129, 65)]
    gradients = [
        [torch.randn(shape, generator=generator) * 10.0 ** (at % 5 - 3) for shape in shapes] for at in range(12)
    ]
    gradients[3][1][2] = float("inf")
    for mine, other in zip(sums("cuda", gradients, bits), sums("cpu", gradients, bits), strict=True):
        assert torch.equal(mine.nan_to_num(), other.nan_to_num())
