"""How long one ReCtlr decision takes, over whole failure sequences up to the wipe-out (one group lost at a time).

    python -m benchmarks.decisions_rectlr
"""

from __future__ import annotations

import statistics
import time
from collections import Counter

import numpy as np

from benchmarks.common import save
from megatron_ft.core.rectlr import lower_bound, reconfigure

# Golomb rulers shorter than N/2 are cyclic ones mod N (the shortest known of each number of marks).
RULERS = {
    8: (0, 1, 4, 9, 15, 22, 32, 34),
    9: (0, 1, 5, 12, 25, 27, 35, 41, 44),
    12: (0, 2, 6, 24, 29, 40, 43, 55, 68, 72, 75, 85),
    16: (0, 1, 4, 11, 26, 32, 56, 68, 76, 115, 117, 134, 150, 163, 168, 177),
    20: (0, 1, 8, 11, 68, 77, 94, 116, 121, 156, 158, 179, 194, 208, 212, 228, 240, 253, 259, 283),
}


def measure(groups: tuple[int, ...] = (200, 600, 1000), sequences: int = 3, seed: int = 0) -> dict:
    """Times in ms, phases, and how often S is the lower bound, for every (N, r) that has a cyclic Golomb ruler."""
    rows = [_measure_one(N, r, sequences, seed) for N in groups for r, ruler in RULERS.items() if 2 * ruler[-1] < N]
    return {"sequences": sequences, "seed": seed, "rows": rows}


def _measure_one(N: int, r: int, sequences: int, seed: int) -> dict:
    rng = np.random.default_rng([seed, N, r])
    times_ms: list[float] = []
    phases: Counter[str] = Counter()
    failures, moves, tight = [], 0, 0
    for _ in range(sequences):
        orders = tuple(tuple((g + o) % N for o in RULERS[r]) for g in range(N))
        live, S = set(range(N)), 1
        for k, group in enumerate(rng.permutation(N).tolist(), start=1):
            live.remove(group)
            started = time.perf_counter()
            outcome = reconfigure(orders, live, S)
            times_ms.append(1e3 * (time.perf_counter() - started))
            if outcome.wiped_out:
                failures.append(k)
                break
            orders, S = outcome.orders, outcome.S
            phases[outcome.phase] += 1
            moves += len(outcome.moves)
            tight += lower_bound(N, len(live)) == S
    masked = sum(phases.values())
    return {
        "N": N,
        "r": r,
        "decisions": len(times_ms),
        "median_ms": round(statistics.median(times_ms), 3),
        "p95_ms": round(float(np.quantile(times_ms, 0.95)), 3),
        "max_ms": round(max(times_ms), 3),
        "failures_to_wipe_out": failures,
        "fixed_share": round(phases["fixed"] / masked, 4),
        "S_at_lower_bound_share": round(tight / masked, 4),
        "moves_per_failure": round(moves / masked, 4),
    }


def main() -> None:
    result = measure()
    print("   N   r  decisions  median ms  p95 ms  max ms  phase 1 alone  S = bound  moves/failure")
    for row in result["rows"]:
        print(
            f"{row['N']:4d} {row['r']:3d} {row['decisions']:10d} {row['median_ms']:10.2f} {row['p95_ms']:7.2f}"
            f" {row['max_ms']:7.2f} {row['fixed_share']:14.1%} {row['S_at_lower_bound_share']:10.1%}"
            f" {row['moves_per_failure']:14.2f}"
        )
    print(f"written to {save('decisions_rectlr', result)}")


if __name__ == "__main__":
    main()
