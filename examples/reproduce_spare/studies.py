"""The simulations for the table and the pictures: cases, run in several processes, and the summaries of their
trials."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from statistics import mean, pstdev
from typing import Any, get_args

import numpy as np
import published
from rich.console import Console
from rich.progress import Progress

from megatron_ft.core.replication import placement as replication
from megatron_ft.core.scheduling.policies.rectlr import Stacks
from megatron_ft.plan import Cluster, closed_forms
from megatron_ft.plan.setting import Failures, PatchInSpare, Setting
from megatron_ft.plan.training_run import Result, simulate

METHODS = ("spare", "replication")
ASSUMPTIONS: tuple[dict[str, Any], ...] = tuple(
    {"renewal": renewal, "of_the_living": living, "in_restart": in_restart}
    for renewal, living, in_restart in product(
        ("system", "groups", "replaced"), (True, False), ("missing", "none", "again")
    )
    if living or renewal == "system"  # with a clock per group a lost group cannot fail, whatever the switch
)
"""All combinations of the choices that the paper leaves open; the first is the default."""
SENSITIVITY_N, SENSITIVITY_R = 600, 9
RACK = 4


@dataclass(frozen=True)
class Size:
    """The amount of computation; ``--quick`` shows that everything works, its numbers mean nothing."""

    steps: int = 10_000
    redundancies: tuple[int, ...] = tuple(range(2, 21))
    assumptions: tuple[dict[str, Any], ...] = ASSUMPTIONS
    mu_trials: int = 1000
    s_bar_trials: int = 200
    values: slice = field(default_factory=lambda: slice(None))


QUICK = Size(200, (3, 8), ASSUMPTIONS[:2], 20, 1, slice(0, 2))


@dataclass(frozen=True)
class Case:
    """A setting and a policy under the name of its line."""

    labels: dict[str, Any]
    policy: str
    setting: Setting


@dataclass(frozen=True)
class Outcome:
    """The summary of the trials of a case. ``formula`` is A(T_c*), which the published availabilities are."""

    case: Case
    results: tuple[Result, ...]

    @property
    def overhead(self) -> float:
        return mean(result.overhead for result in self.results)

    @property
    def spread(self) -> float:
        return pstdev(result.overhead for result in self.results) if self.finished else float("nan")

    @property
    def finished(self) -> bool:
        return all(result.finished for result in self.results)

    @property
    def availability(self) -> float:
        return mean(result.availability for result in self.results)

    @property
    def formula(self) -> float:
        """A(T_c*) of the measured time from one restart to the next wipe-out (papers: SPARe, checkpoint period)."""
        cluster, wipe_outs = self.case.setting.cluster, sum(result.wipe_outs for result in self.results)
        up_s = sum(result.time_s - result.restart_s for result in self.results)
        uptime_s = up_s / wipe_outs if wipe_outs else up_s
        period_s = closed_forms.checkpoint_period(cluster.checkpoint_s, uptime_s, cluster.restart_s)
        return closed_forms.availability(period_s, cluster.checkpoint_s, uptime_s, cluster.restart_s)

    @property
    def mean_stacks(self) -> float:
        """S_bar as simulated: stacks computed per committed step, patches included."""
        compute_s = self.case.setting.cluster.compute_s
        return mean((result.compute_s + result.patch_s) / (max(result.steps, 1) * compute_s) for result in self.results)


# --- cases ------------------------------------------------------------------------------------------------------------


def table(size: Size) -> list[Case]:
    """SPARe and replication at every redundancy, quotas, ReCoVer: all under the default assumptions."""
    cases = []
    for N in published.GROUPS:
        cluster = published.cluster(N, steps=size.steps)
        cases += [_masked(cluster, method, r) for method, r in product(METHODS, size.redundancies)]
        cases += [_quota(N, name, steps=size.steps) for name in published.QUOTAS]
        recover = published.cluster(N, steps=size.steps, detection_s=5.0)
        cases.append(Case({"N": N, "method": "recover, G=16", "r": ""}, "recover", Setting(cluster=recover)))
    return cases


def assumptions(size: Size) -> list[Case]:
    """Return the same cases under every combination of the switches, near the best redundancy."""
    cases = []
    for switches, N in product(size.assumptions, published.GROUPS):
        cluster = published.cluster(N, steps=size.steps)
        found = [_masked(cluster, "spare", r, switches) for r in (8, 9)]
        found += [_masked(cluster, "replication", r, switches) for r in (2, 3, 4)]
        found += [_quota(N, name, switches, steps=size.steps) for name in published.QUOTAS]
        cases += [Case({**switches, **case.labels}, case.policy, case.setting) for case in found]
    return cases


def patches(size: Size) -> list[Case]:
    """Return SPARe near its best redundancy, under each reading of what a loss that it masks costs."""
    return [
        Case({"N": N, "method": "spare", "patch": reading, "r": r}, "spare",
             Setting(cluster=published.cluster(N, steps=size.steps), redundancy=r, patch_in_spare=reading))
        for N, reading, r in product(published.GROUPS, get_args(PatchInSpare), (7, 8, 9, 10))
    ]  # fmt: skip


def sensitivity(size: Size) -> list[Case]:
    """One input at a time away from N = 600, G = 16, r = 9, 5 s of detection, rejoin after 15 min, MTBF 300 s, no racks."""
    quotas, everybody = ("quota", "quota + rejoin"), ("spare", "quota", "quota + rejoin")
    studies: tuple[tuple[str, Sequence[float], Sequence[str]], ...] = (
        ("microbatches", (1, 2, 4, 8, 16, 32, 64, 128), quotas),
        ("detection_s", (0, 1, 5, 15, 30, 60, 120), everybody),
        ("rejoin_s", (60, 300, 900, 1800, 3600, 7200), quotas[1:]),
        ("mtbf_s", (150, 300, 600, 1200, 2400, 4800), everybody),
        ("rack_share", (0.0, 0.05, 0.1, 0.2, 0.4), (*everybody, "spare, consecutive")),
        ("redundancy", (2, 3, 4, 5, 7, 9, 12, 16), (*everybody, "quota, consecutive")),
    )
    return [
        _sensitive(what, value, method, size.steps)
        for what, values, methods in studies
        for value, method in product(values[size.values], methods)
    ]


def _sensitive(what: str, value: float, method: str, steps: int) -> Case:
    base = {"microbatches": 16, "detection_s": 5.0, "rejoin_s": 900.0, "steps": steps}
    inputs = {**base, what: value} if what in (*base, "mtbf_s") else base
    name, _, placement = method.partition(", ")
    setting = Setting(
        cluster=published.cluster(SENSITIVITY_N, **inputs),
        redundancy=int(value) if what == "redundancy" else SENSITIVITY_R,
        failures=Failures(rack_share=value if what == "rack_share" else 0.0, rack_groups=RACK),
        placement="consecutive" if placement else "golomb",
        hosted=True,
    )
    policy = {"quota": "stacked_quota", "quota + rejoin": "stacked_quota_rejoin"}.get(name, name)
    return Case({"what": what, "value": value, "method": method}, policy, setting)


def _masked(cluster: Cluster, method: str, r: int, switches: dict[str, Any] | None = None) -> Case:
    """Consecutive offsets, as in the paper's text, where no Golomb placement is known."""
    placement = "golomb" if r <= replication.largest_redundancy(cluster.groups) else "consecutive"
    setting = Setting(cluster=cluster, redundancy=r, placement=placement, **_switched(switches))
    return Case({"N": cluster.groups, "method": method, "r": r}, method, setting)


def _quota(N: int, name: str, switches: dict[str, Any] | None = None, **changes: Any) -> Case:
    policy, inputs = published.QUOTAS[name]
    setting = Setting(cluster=published.cluster(N, **inputs, **changes), hosted=True, **_switched(switches))
    return Case({"N": N, "method": name, "r": setting.redundancy}, policy, setting)


def _switched(switches: dict[str, Any] | None) -> dict[str, Any]:
    if switches is None:
        return {}
    failures = Failures(renewal=switches["renewal"], of_the_living=switches["of_the_living"])
    return {"failures": failures, "in_restart": switches["in_restart"]}


# --- Monte Carlo against the closed forms -----------------------------------------------------------------------------


def mu(N: int, r: int, trials: int) -> dict[str, Any]:
    """Return the failures until the wipe-out: groups fail in random order, a shard is gone with the last of its
    hosts."""
    row: dict[str, Any] = {"N": N, "r": r, "closed_form": round(closed_forms.mu(N, r), 3)}
    for name, make in (("golomb", replication.golomb), ("consecutive", replication.consecutive)):
        if name == "golomb" and r > replication.largest_redundancy(N):
            row |= {"golomb": "", "error": ""}
            continue
        hosts, rng = make(N, r).host_table, np.random.default_rng([N, r])
        counts = [int(rng.permutation(N)[hosts].max(axis=1).min()) + 1 for _ in range(trials)]
        row[name] = round(mean(counts), 3)
        if name == "golomb":
            row["error"] = round(row["closed_form"] / row["golomb"] - 1, 4)
    return row


_MONTE_CARLO = ("mc_bound", "mc_with_patch", "fixed_per_loss", "fixed_per_step")


def s_bar(N: int, r: int, trials: int) -> dict[str, Any]:
    """Stacks per step from a restart to the wipe-out, decided by ReCtlr (core.scheduling.policies.rectlr) loss by loss."""
    cluster = published.cluster(N)
    times = (cluster.compute_s, cluster.allreduce_s, cluster.mtbf_s)
    row = {"N": N, "r": r, "bound": round(closed_forms.s_bar_bound(N, r), 4)}
    row |= {"with_patch": round(closed_forms.s_bar(N, r, *times), 4)}
    if r > replication.largest_redundancy(N):
        return row | dict.fromkeys((*_MONTE_CARLO, "error_bound", "error_with_patch"), "")
    stacks, depths, stood = _until_wipe_out(N, r, trials)
    reached = np.isfinite(stacks).sum(axis=0)
    S, depth = np.nanmean(stacks, axis=0), np.nansum(depths, axis=0) / reached
    bare = S * cluster.compute_s + cluster.allreduce_s
    patched = closed_forms.interrupted_step_s(bare, depth * cluster.compute_s, cluster.mtbf_s)
    rho = (patched - bare) / cluster.compute_s
    # One step for each loss has the phase that it needed; in the others before the next loss the order stands.
    steps, fixed = np.maximum(cluster.mtbf_s / patched, 1.0), np.nansum(stood, axis=0) / reached
    per_step = np.average((steps - 1 + fixed) / steps, weights=reached * steps)
    values = (
        np.average(S, weights=reached),
        np.average(S + rho, weights=reached),
        np.average(fixed, weights=reached),
        per_step,
    )
    found = dict(zip(_MONTE_CARLO, values, strict=True))
    row |= {name: round(float(value), 4) for name, value in found.items()}
    row["error_bound"] = round(row["bound"] / row["mc_bound"] - 1, 4)
    row["error_with_patch"] = round(row["with_patch"] / row["mc_with_patch"] - 1, 4)
    return row


def _until_wipe_out(N: int, r: int, trials: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """S, the patch, and whether the order stood (HK-fixed) with k groups dead, each of shape [trials, most failures
    endured]; NaN after the wipe-out."""
    orders = tuple(replication.golomb(N, r).stacks)
    stacks, depths, stood = (np.full((trials, N), np.nan) for _ in range(3))
    for trial in range(trials):
        record = Stacks(orders)
        for k, group in enumerate(np.random.default_rng([N, r, trial]).permutation(N).tolist()):
            record.begin_step()
            stacks[trial, k] = record.S
            depths[trial, k] = (repaired := record.lose(group)).depth
            stood[trial, k] = repaired.phase == "fixed"
            if repaired.phase == "wipe-out":
                break
    endured = np.isfinite(stacks).any(axis=0)
    return stacks[:, endured], depths[:, endured], stood[:, endured]


# --- running ----------------------------------------------------------------------------------------------------------

Task = Callable[[], Any]


def tasks(cases: Sequence[Case], trials: int) -> list[Task]:
    return [partial(simulate, case.setting, case.policy, seed) for case in cases for seed in range(trials)]


def outcomes(cases: Sequence[Case], results: Sequence[Result], trials: int) -> list[Outcome]:
    return [Outcome(case, tuple(results[i * trials : (i + 1) * trials])) for i, case in enumerate(cases)]


def run_all(work: Sequence[Task], jobs: int) -> list[Any]:
    """Run all cases, in order; the number of processes cannot change a result."""
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("simulating", total=len(work))
        found = []
        for result in _results(work, jobs):
            found.append(result)
            progress.advance(bar)
        return found


def _results(work: Sequence[Task], jobs: int) -> Iterator[Any]:
    if jobs == 1:
        yield from (task() for task in work)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(operator.call, work, chunksize=2)
