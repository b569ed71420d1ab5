"""The time and memory of a blend of corpora, to make it and for the place of each sample; Megatron's table beside it.

    python benchmarks/blend.py [--samples 244000000]

244 million samples of 4,096 tokens are 10**12 tokens. ``megatron`` is ``build_blending_indices`` of megatron-core, compiled
C++ that makes a table of all samples, where it is installed. One process, one thread.
"""

from __future__ import annotations

import argparse
import random
import resource
import statistics
import time
from typing import Any

import common
import numpy as np

from megatron_ft.data import Blend

CORPORA = (2, 10, 40)
MADE, PLACES = 11, 20_000


def ours(weights: list[float], samples: int) -> dict[str, Any]:
    """Make a blend several times, then ask for places of samples that are drawn at random."""
    made_s = []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(MADE):
        begun = time.perf_counter()
        blend = Blend([range(samples)] * len(weights), weights, samples)
        made_s.append(time.perf_counter() - begun)
    place_us = []
    for index in random.Random(1).choices(range(samples), k=PLACES):
        begun = time.perf_counter()
        blend.place(index)
        place_us.append(1e6 * (time.perf_counter() - begun))
    return {
        "make_ms": round(1e3 * statistics.median(made_s), 3),
        "make_max_ms": round(1e3 * max(made_s), 3),
        "place_us": round(statistics.median(place_us), 1),
        "place_p99_us": round(float(np.quantile(place_us, 0.99)), 1),
        "memory_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before,
        "make_s_all": made_s,
    }


def megatron(weights: list[float], samples: int) -> dict[str, Any]:
    """Make Megatron's table once."""
    try:
        from megatron.core.datasets import helpers_cpp
    except ImportError:
        return {"megatron": "not installed"}
    of, numbers = np.zeros(samples, np.int16), np.zeros(samples, np.int64)
    begun = time.perf_counter()
    helpers_cpp.build_blending_indices(of, numbers, np.array(weights) / sum(weights), len(weights), samples, False)
    return {"megatron_s": round(time.perf_counter() - begun, 3), "megatron_table_bytes": of.nbytes + numbers.nbytes}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=244_000_000)
    samples = parser.parse_args().samples
    rows = []
    for corpora in CORPORA:
        weights = [1.0 + number % 7 for number in range(corpora)]
        row = {"corpora": corpora, "samples": samples, **ours(weights, samples)}
        rows.append(row)
    for row, corpora in zip(rows, CORPORA, strict=True):  # afterwards: its tables are most of the memory of the process
        row.update(megatron([1.0 + number % 7 for number in range(corpora)], samples))
        print({key: value for key, value in row.items() if key != "make_s_all"})
    print(f"raw numbers in {common.save('blend', {'rows': rows})}")


if __name__ == "__main__":
    main()
