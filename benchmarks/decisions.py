"""The duration of the decisions between a loss and the next microbatch: ReCtlr, quotas, patches, placements.

    python benchmarks/decisions.py [--quick]

One process, one decision at a time, after a warm-up of everything (the first flow costs half a second of imports).
Nothing that remembers earlier calls may help: the scheduler's memo of memberships is emptied before every plan, the
placements' before every construction. All raw times are in the result.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import common
import numpy as np

from megatron_ft.core.replication import placement as replication
from megatron_ft.core.replication.placement import Placement, domain_aware, golomb
from megatron_ft.core.scheduling import assignment
from megatron_ft.core.scheduling.policies.rectlr import lower_bound, reconfigure
from megatron_ft.types import GroupId, Plan


class Shape(NamedTuple):
    """N groups, r shards hosted by each, G microbatches a shard."""

    N: int
    r: int
    G: int = 1

    def __str__(self) -> str:
        return f"N={self.N} r={self.r}" + (f" G={self.G}" if self.G > 1 else "")


# The goals as (shape, limit in ms). ReCtlr: SPARe (arXiv 2603.00357) counts 100 ms for N up to about 1000.
RECTLR = [(Shape(200, 12), None), (Shape(600, 20), None), (Shape(1000, 20), 10.0)]
RECTLR_OTHERS = [Shape(N, r) for N in (200, 600, 1000) for r in (8, 9, 12, 16, 20) if r <= (12 if N == 200 else 20)]
QUOTA = [(Shape(1000, 10, 64), 50.0), (Shape(10_000, 14, 16), 1000.0)]
PLACEMENTS = [(Shape(200, 12), 1000.0), (Shape(600, 20), 1000.0), (Shape(1000, 24), 1000.0)]
RACKS = Shape(600, 9)
RACK_SIZE = 4
GROWTH = (100, 300, 1000, 3000, 10_000)
GROWTH_r, GROWTH_G = 8, 16


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """Return the result and its duration in ms."""
    started = time.perf_counter()
    result = call()
    return result, 1e3 * (time.perf_counter() - started)


def row(what: str, shape: Shape, times_ms: list[float], asked_ms: float | None = None, **more: Any) -> dict[str, Any]:
    """One line of the table, with every time behind it."""
    return {
        "what": what,
        **shape._asdict(),
        "asked_ms": asked_ms,
        "median_ms": round(statistics.median(times_ms), 3),
        "p95_ms": round(float(np.quantile(times_ms, 0.95)), 3),
        "max_ms": round(max(times_ms), 3),
        **more,
        "times_ms": [round(ms, 3) for ms in times_ms],
    }


# --- ReCtlr -----------------------------------------------------------------------------------------------------------


def rectlr(shape: Shape, sequences: int, asked_ms: float | None = None, block: int = 1) -> dict[str, Any]:
    """Decisions over whole random failure sequences until the wipe-out, that one included; every ``block``-th is timed."""
    N, r, _ = shape
    rng = np.random.default_rng([N, r])
    times_ms: list[float] = []
    phases: Counter[str] = Counter()
    failures, moves, tight = [], 0, 0
    for _ in range(sequences):
        orders, live, S = tuple(golomb(N, r).stacks), set(range(N)), 1
        for k, group in enumerate(rng.permutation(N).tolist(), start=1):
            live.remove(group)
            if k % block:
                continue
            outcome, ms = timed(lambda given=(orders, live, S): reconfigure(*given))
            times_ms.append(ms)
            if outcome.wiped_out:
                failures.append(k)
                break
            orders, S = outcome.orders, outcome.S
            phases[outcome.phase] += 1
            moves += len(outcome.moves)
            tight += lower_bound(N, len(live)) == S
    masked = sum(phases.values())
    return row(
        "ReCtlr, one decision",
        shape,
        times_ms,
        asked_ms,
        failures_to_wipe_out=failures,
        fixed_share=round(phases["fixed"] / masked, 4),
        S_at_lower_bound_share=round(tight / masked, 4),
        moves_per_decision=round(moves / masked, 4),
    )


# --- quotas -----------------------------------------------------------------------------------------------------------


def plan_anew(step: int, shape: Shape, live: list[GroupId], placement: Placement) -> Plan:
    """Do the work of a group at the first step of a membership: plan, and name its own microbatches."""
    plan = assignment.plan_step(step, shape.N, shape.G, live, placement)
    plan.of(live[len(live) // 2])
    return plan


def memberships(shape: Shape, count: int, largest: float = 0.3) -> Iterator[list[GroupId]]:
    """Return random survivors, from no loss to the loss of ``largest`` of all in equal steps; a membership never comes
    twice."""
    rng = np.random.default_rng([shape.N, shape.r, shape.G])
    for share in np.linspace(0.0, largest, count):
        yield sorted(rng.permutation(shape.N)[int(share * shape.N) :].tolist())


def quota(shape: Shape, count: int, asked_ms: float | None = None) -> list[dict[str, Any]]:
    """Time a plan, and the patch after one more loss."""
    placement = golomb(shape.N, shape.r)
    fresh, patches, loads = [], [], []
    for step, live in enumerate(memberships(shape, count)):
        assignment._even.cache_clear()
        plan, ms = timed(lambda now=(step, live): plan_anew(now[0], shape, now[1], placement))
        fresh.append(ms)
        loads.append(max(len(own) for own in plan.assignment.values()) / -(-shape.N * shape.G // len(live)))
        lost, left = live[0], live[1:]
        plan = assignment.plan_step(step, shape.N, shape.G, live, placement)  # as it was: nothing of it named yet
        _, ms = timed(lambda now=(plan, lost, left): assignment.patch_plan(now[0], [now[1]], placement).of(now[2][-1]))
        patches.append(ms)
    dead = [0.0, 0.3]
    return [
        row("quota, one plan", shape, fresh, asked_ms, dead_share=dead, load_over_ideal=[round(x, 4) for x in loads]),
        row("quota, patch after one loss", shape, patches, None, dead_share=dead),
    ]


# --- placements -------------------------------------------------------------------------------------------------------


def from_nothing(build: Callable[[], Placement]) -> float:
    """Time a placement when nothing is remembered, all its stacks and hosts written out."""
    for function in vars(replication).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()

    def whole() -> None:
        placement = build()
        list(placement.stacks), list(placement.hosts)

    return timed(whole)[1]


def placements(repeats: int) -> list[dict[str, Any]]:
    racks = [group // RACK_SIZE for group in range(RACKS.N)]
    found = [
        row("golomb placement", shape, [from_nothing(lambda s=shape: golomb(s.N, s.r)) for _ in range(repeats)], asked)
        for shape, asked in PLACEMENTS
    ]
    times = [from_nothing(lambda: domain_aware(racks, RACKS.r)) for _ in range(repeats)]
    return [*found, row(f"domain-aware placement, racks of {RACK_SIZE}", RACKS, times)]


# --- growth -----------------------------------------------------------------------------------------------------------


def growth(sizes: tuple[int, ...], count: int) -> list[dict[str, Any]]:
    """The same decisions at growing N with r and G fixed; ``exponent`` is the slope of log(median) over log(N)."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for N in sizes:
        shape = Shape(N, GROWTH_r, GROWTH_G)
        # About 100 decisions over one sequence to the wipe-out, which comes after about half of the groups.
        rows.setdefault("ReCtlr", []).append(rectlr(Shape(N, GROWTH_r), 1, block=max(1, N // 200)))
        for name, line in zip(("plan", "patch"), quota(shape, count), strict=True):
            rows.setdefault(name, []).append(line)
    return [{"what": name, "exponent": exponent(lines), "rows": lines} for name, lines in rows.items()]


def exponent(rows: list[dict[str, Any]]) -> float:
    logs = np.log([[line["N"], line["median_ms"]] for line in rows])
    return round(float(np.polyfit(logs[:, 0], logs[:, 1], 1)[0]), 3)


# --- output -----------------------------------------------------------------------------------------------------------


def show(rows: list[dict[str, Any]]) -> None:
    print(f"{'decision':40} {'shape':20} {'calls':>6} {'asked ms':>9} {'median':>9} {'p95':>9} {'max':>9}")
    for line in rows:
        asked = "" if line["asked_ms"] is None else f"{line['asked_ms']:g}"
        shape = Shape(line["N"], line["r"], line["G"])
        measured = " ".join(f"{line[key]:9.2f}" for key in ("median_ms", "p95_ms", "max_ms"))
        verdict = "" if not asked else "  met" if line["median_ms"] <= line["asked_ms"] else "  MISSED"
        print(f"{line['what']:40} {shape!s:20} {len(line['times_ms']):6d} {asked:>9} {measured}{verdict}")


def show_quality(rows: list[dict[str, Any]]) -> None:
    """Show the quality of ReCtlr's decisions, not their speed."""
    print(
        f"\n{'ReCtlr over whole sequences':28} {'phase 1 alone':>13} {'S = bound':>10} {'moves':>6}  failures to wipe-out"
    )
    for line in rows:
        shape = Shape(line["N"], line["r"])
        print(
            f"{shape!s:28} {line['fixed_share']:13.1%} {line['S_at_lower_bound_share']:10.1%}"
            f" {line['moves_per_decision']:6.2f}  {line['failures_to_wipe_out']}"
        )


def show_growth(tables: list[dict[str, Any]]) -> None:
    sizes = [line["N"] for line in tables[0]["rows"]]
    header = "".join(f"{f'N={N}':>10}" for N in sizes)
    print(f"\n{f'median ms, r={GROWTH_r} G={GROWTH_G}':40}{header}  grows with N to the")
    for table in tables:
        cells = "".join(f"{line['median_ms']:10.2f}" for line in table["rows"])
        print(f"{table['what']:40}{cells}  {table['exponent']:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="a tenth of the work, nothing is written")
    quick = parser.parse_args().quick
    warm = Shape(100, 8, 4)
    rectlr(warm, 1), quota(warm, 3), placements(1)

    load_before = os.getloadavg()
    asked_for = [shape for shape, _ in RECTLR]
    decisions = [rectlr(shape, 1 if quick else 3, asked) for shape, asked in RECTLR]
    others = [] if quick else [rectlr(shape, 2) for shape in RECTLR_OTHERS if shape not in asked_for]
    quotas = [line for shape, asked in QUOTA for line in quota(shape, 4 if quick else _calls(shape), asked)]
    built = placements(1 if quick else 5)
    grown = growth(GROWTH[:3] if quick else GROWTH, 4 if quick else 13)

    show([*decisions, *quotas, *built])
    show_quality([*decisions, *others])
    show_growth(grown)
    if not quick:
        rows = [*decisions, *others, *quotas, *built]
        load = {"before": load_before, "after": os.getloadavg()}
        path = common.save("decisions", {"load_average": load, "rows": rows, "growth": grown})
        print(f"\nraw numbers in {path}")


def _calls(shape: Shape) -> int:
    return 31 if shape.N <= 1000 else 13


if __name__ == "__main__":
    main()
