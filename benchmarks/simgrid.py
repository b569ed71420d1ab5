"""SimGrid beside our formula of the all-reduce (tools/allreduce.py) and our simulator of whole runs.

    python benchmarks/simgrid.py

Needs Debian's python3-simgrid, which runs under the system's Python. With the model "plain" SimGrid assumes of the network
what the formula does, so a difference is a mistake in either; "lv08" is SimGrid's own idea of TCP, so a difference is
what the formula leaves out. ``ratio`` is SimGrid over formula, ``fitted_ratio`` the same with lv08's three published
factors put into the formula. ``runs``: 200 groups, 500 steps, failures, of three policies (tools/simgrid_run.py).
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import common

from tools.allreduce import allreduce_s

sys.path.insert(0, str(common.ROOT))
from tools import simgrid_allreduce as tool
from tools import simgrid_run

HOSTS = [2, 3, 4, 8, 13, 16, 64, 200]
BYTES = [1_000_000, 1_000_000_000]


def formula_s(case: dict[str, Any], bandwidth_share: float = 1.0, latency_factor: float = 1.0) -> float:
    """All rounds are as slow as the slow link, the root's, which positions share."""
    return allreduce_s(
        case["hosts"],
        case["bytes"] * case["positions"],
        bandwidth_share * case["bandwidth"] / case["slowdown"],
        latency_factor * case["latency"],
        case["algorithm"],
    )


def compared(case: dict[str, Any]) -> dict[str, Any]:
    row = {**case, "formula_s": formula_s(case), "ratio": round(case["time_s"] / formula_s(case), 6)}
    if case["model"] == "lv08":
        share = tool.LV08_BOTH_WAYS if case["algorithm"] == "ring" else tool.LV08_FORWARD
        row["fitted_ratio"] = round(case["time_s"] / formula_s(case, share, tool.LV08_LATENCY), 6)
    return row


def show(rows: list[dict[str, Any]]) -> None:
    """Ranges of the ratios over all N, per kind of case."""
    kinds: dict[tuple, list[dict[str, Any]]] = {}
    for row in rows:
        link = "healthy" if row["slowdown"] == 1 else f"{row['slowdown']:g} x slower at {row['slow_host']}"
        kinds.setdefault((row["model"], row["algorithm"], row["bytes"], row["positions"], link), []).append(row)
    print(
        f"{'model':6} {'algorithm':9} {'bytes':>7} {'positions':>9} {'link':18} SimGrid / formula over all N     fitted"
    )
    for (model, algorithm, size, positions, link), own in kinds.items():
        ratios = [row["ratio"] for row in own]
        fitted = [row["fitted_ratio"] for row in own if "fitted_ratio" in row]
        told = f"{min(fitted):11.4f} to {max(fitted):.4f}" if fitted else ""
        line = f"{model:6} {algorithm:9} {size:7.0e} {positions:9d} {link:18} {min(ratios):8.4f} to {max(ratios):7.4f}"
        print(f"{line} {told}")


def main() -> None:
    python = tool.python_with_simgrid()
    if python is None:
        print("simgrid: skipped, no Python here can import SimGrid; as root: apt-get install python3-simgrid")
        return
    started, load_before = time.perf_counter(), os.getloadavg()
    cases = tool.simulate(python, model=list(tool.MODELS), hosts=HOSTS, bytes=BYTES, slowdown=[1, 10])
    cases += tool.simulate(python, hosts=[8], bytes=BYTES, slowdown=[1, 10], positions=[4])
    took_s = time.perf_counter() - started
    rows = [compared(case) for case in cases]
    show(rows)
    load = {"before": load_before, "after": os.getloadavg()}
    about = {"interpreter": python, "version": tool.version(python), "took_s": round(took_s, 1), "load_average": load}
    runs = [simgrid_run.compare(python, name, 200, 500, seed=0) for name in simgrid_run.REDUNDANCY]
    for one in runs:
        print(f"{one['policy']}: {one['time_s']}, SimGrid over ours {one['simgrid_over_ours']:.5f}")
    path = common.save("simgrid", {"simgrid": about, "rows": rows, "runs": runs})
    print(f"\n{len(rows)} cases in {took_s:.0f} s, {len(runs)} runs; raw numbers in {path}")


if __name__ == "__main__":
    main()
