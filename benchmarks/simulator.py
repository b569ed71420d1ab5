"""The duration of simulated runs of 600k GPUs: one run of each policy, and SPARe's whole published table.

    python benchmarks/simulator.py [--jobs 2] [--quick]

A run: 10,000 steps, a failure every 300 s (arXiv 2603.00357), in one process, after one that warms up imports and caches.
The table: N = 200, 600, 1000, r = 2..20, SPARe and replication, 3 trials, in ``--jobs`` processes, start included.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from dataclasses import replace
from typing import Any

import common

sys.path.insert(0, str(common.ROOT / "examples" / "reproduce_spare"))  # the published setting is there, once
import published
import studies

from megatron_ft.plan.training_run import simulate

RUN_S, TABLE_S = 3.0, 300.0
"""The goals."""
REPEATS = 5


def one_run_each(size: studies.Size, repeats: int) -> list[dict[str, Any]]:
    """Run every policy at every N, each at the redundancy of its published best or at 9."""
    rows = []
    for case in studies.table(size):
        method, N, r = (case.labels[name] for name in ("method", "N", "r"))
        if method in published.PUBLISHED and r != published.PUBLISHED[method][N].r:
            continue
        simulate(case.setting, case.policy, 0)
        times = []
        for seed in range(repeats):
            started = time.perf_counter()
            result = simulate(case.setting, case.policy, seed)
            times.append(round(time.perf_counter() - started, 3))
        row = {"method": method, "N": N, "r": r, "policy": case.policy, "steps": result.steps, "times_s": times}
        row |= {"median_s": statistics.median(times), "asked_s": RUN_S}
        rows.append(row)
        verdict = "ok" if row["median_s"] <= RUN_S else "MISS"
        took = f"{row['median_s']:6.2f} s (most {max(times):.2f})"
        print(f"{method:22} N={N:<5} r={r or '-':<3} {took}  {verdict}", flush=True)
    return rows


def whole_table(size: studies.Size, trials: int, jobs: int) -> dict[str, Any]:
    cases = [case for case in studies.table(size) if case.labels["method"] in published.PUBLISHED]
    started = time.perf_counter()
    results = studies.run_all(studies.tasks(cases, trials), jobs)
    took_s = round(time.perf_counter() - started, 1)
    verdict = "ok" if took_s <= TABLE_S else "MISS"
    print(
        f"the published table, {len(results)} runs in {jobs} processes: {took_s:.0f} s (asked {TABLE_S:.0f})  {verdict}"
    )
    return {"runs": len(results), "trials": trials, "jobs": jobs, "took_s": took_s, "asked_s": TABLE_S}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="processes for the table (default: all cores)"
    )
    parser.add_argument("--quick", action="store_true", help="a fiftieth of the steps, nothing is written")
    options = parser.parse_args()
    size = replace(studies.Size(), steps=200) if options.quick else studies.Size()
    load_before = os.getloadavg()
    rows = one_run_each(size, 1 if options.quick else REPEATS)
    table = whole_table(size, 1 if options.quick else 3, options.jobs)
    if not options.quick:
        load = {"before": load_before, "after": os.getloadavg()}
        print(f"raw numbers in {common.save('simulator', {'load_average': load, 'runs': rows, 'table': table})}")


if __name__ == "__main__":
    main()
