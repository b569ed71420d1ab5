"""What each policy costs on a cluster, and which to take. The assumptions are listed in ``megatron_ft.planner``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, inf, isfinite, sqrt
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from megatron_ft.core.replication import largest_redundancy, optimal_redundancy
from megatron_ft.errors import ConfigError
from megatron_ft.planner import closed_forms, quotas
from megatron_ft.planner.cluster import Cluster, check_redundancy

Policy = Literal["restart", "replication", "spare", "recover", "stacked_quota", "stacked_quota_rejoin"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
SEARCHED: tuple[Policy, ...] = ("replication", "spare")
"""Whose time depends on the redundancy, so that the best one is searched."""
PREFERENCE: tuple[Policy, ...] = ("restart", "stacked_quota_rejoin", "stacked_quota", "recover", "spare", "replication")
"""Who is taken among equals: what needs least first; then who keeps the samples of a step; integers of stacks last."""
EQUAL = 0.001
"""Times closer than this are equal: nothing here is known better."""
_MOST_COPIES, _MOST_HOSTS, _LARGE = 16, 32, 5000


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """One policy on one cluster.

    ``endured``: mean failures from one restart to the next, the one that causes it included (SPARe's mu); ``uptime_s`` the
    time that takes (T_f). Both infinite where no restart is due in the run. ``mean_stacks``: compute of a step in units of
    the failure-free one, patch included (S_bar). ``slowdown``: wall time per step while the job is up. ``period_s``: T_c*.
    ``objective``: J = S_bar / A. ``relative_time``: time-to-train over the failure-free T_0; infinite where the job does not
    get on at all.
    """

    policy: Policy
    redundancy: int
    endured: float
    uptime_s: float
    mean_stacks: float
    slowdown: float
    period_s: float
    availability: float
    time_s: float
    relative_time: float
    gpu_hours: float
    gpu_hours_lost: float
    cost_lost: float | None
    notes: tuple[str, ...] = ()

    @property
    def objective(self) -> float:
        return closed_forms.objective(self.mean_stacks, self.availability)


@dataclass(frozen=True)
class Recommendation:
    """The policy to take, and why. ``estimates``: the best of every policy, fastest first. ``r_star``: SPARe's formula."""

    best: Estimate
    reason: str
    estimates: tuple[Estimate, ...]
    r_star: int


def recommend(cluster: Cluster, redundancy: int | None = None) -> Recommendation:
    """Compare the policies, each at its best redundancy or at the one given."""
    policies = [p for p in POLICIES if p != "stacked_quota_rejoin" or cluster.rejoin_s is not None]
    if cluster.groups == 1:
        policies = ["restart"]
    ranked = sorted((evaluate(cluster, p, redundancy) for p in policies), key=lambda e: e.relative_time)
    equal = [e for e in ranked if e.relative_time <= ranked[0].relative_time * (1 + EQUAL)]
    best = min(equal, key=lambda e: PREFERENCE.index(e.policy))
    r_star = optimal_redundancy(cluster.groups)
    return Recommendation(best, _reason(cluster, best, ranked), tuple(ranked), r_star)


def evaluate(cluster: Cluster, policy: Policy, redundancy: int | None = None) -> Estimate:
    """The policy at ``redundancy``, or at its best one. Raises ``ConfigError`` for what this cluster cannot do."""
    if redundancy is not None:
        check_redundancy(redundancy, cluster.groups)
    if policy not in POLICIES:
        raise ConfigError(f"policy is {policy!r}; the planner knows: {', '.join(POLICIES)}")
    if policy == "restart":
        return _restart(cluster)
    if cluster.groups == 1:
        raise ConfigError(f"policy is {policy!r} but there is one group, and nobody to go on without it; use more groups")
    if policy in SEARCHED:
        found = (_at(cluster, policy, redundancy),) if redundancy else search(cluster, policy)
        return min(found, key=lambda e: e.relative_time)
    if policy == "stacked_quota_rejoin":
        return _with_rejoin(cluster, redundancy)
    return _without_rejoin(cluster, policy, redundancy)


def search(cluster: Cluster, policy: Policy) -> tuple[Estimate, ...]:
    """The policy at every redundancy it can have; r = 1 is checkpoint-restart under another name, and left out."""
    most = _MOST_COPIES if policy == "replication" else most_hosts(cluster.groups)
    return tuple(_at(cluster, policy, r) for r in range(2, max(2, min(most, cluster.groups)) + 1))


@lru_cache(maxsize=256)
def most_hosts(groups: int) -> int:
    """Up to where a Golomb placement is searched; every optimum is far below the limits on either number."""
    return max(2, min(_MOST_HOSTS, largest_redundancy(min(groups, _LARGE)))) if groups > 1 else 1


# --- one policy at one redundancy -------------------------------------------------------------------------------------


def _restart(cluster: Cluster) -> Estimate:
    period_s = closed_forms.memoryless_period(cluster.checkpoint_s, cluster.mtbf_s)
    available = closed_forms.memoryless_availability(period_s, cluster.checkpoint_s, cluster.mtbf_s, cluster.down_s)
    return _estimate(cluster, "restart", 1, 1.0, 1.0, 1.0, period_s, available)


def _at(cluster: Cluster, policy: Policy, r: int) -> Estimate:
    """SPARe or replication: masked failures up to a wipe-out."""
    N, k = cluster.groups, np.arange(cluster.groups)
    if policy == "spare":
        endured, alive = closed_forms.mu(N, r), closed_forms.survival(k, N, r)
        stacks, chance = closed_forms.stacks(N, k), closed_forms.patch_chance(N, k)
        mean_stacks = closed_forms.s_bar(N, r, cluster.compute_s, cluster.allreduce_s, cluster.mtbf_s)
    else:
        endured, alive = closed_forms.mu_replication(N, r), closed_forms.survival_replication(k, N, r)
        stacks, chance = np.full(N, float(r)), np.ones(N)
        mean_stacks = closed_forms.s_bar_replication(r, cluster.compute_s, cluster.allreduce_s, cluster.mtbf_s)
    slowdown = _slowdown(cluster, stacks, chance, alive, cluster.reconfigure_s)
    uptime_s = endured * cluster.mtbf_s
    period_s = closed_forms.checkpoint_period(cluster.checkpoint_s, uptime_s, cluster.down_s)
    available = closed_forms.availability(period_s, cluster.checkpoint_s, uptime_s, cluster.down_s)
    return _estimate(cluster, policy, r, endured, mean_stacks, slowdown, period_s, available)


def _with_rejoin(cluster: Cluster, redundancy: int | None) -> Estimate:
    """A steady state: as many groups come back as are lost."""
    if cluster.rejoin_s is None:
        raise ConfigError("rejoin_s is none, so no group comes back; give the seconds until a lost group is back")
    N, a = cluster.groups, quotas.mean_absent(cluster.mtbf_s, cluster.detection_s + cluster.rejoin_s)
    weights = quotas.absent_distribution(N, a)[:N]
    r = quotas.least_redundancy(N, min(N - 1, ceil(a + 3 * sqrt(a))), most_hosts(N))
    loads, patches = _quota_states(cluster, N)
    if redundancy and redundancy < r:
        seldom = int(np.searchsorted(np.cumsum(weights), 1 - 1e-6)) + 1
        loads = _hosted_loads(cluster, redundancy, N, seldom)
    r = redundancy or r
    slowdown = _slowdown(cluster, loads, patches, weights, 2 * cluster.reconfigure_s)
    mean_stacks = _mean_stacks(cluster, loads, patches, weights)
    uptime_s = quotas.time_to_all_absent_s(N, cluster.mtbf_s, a)
    insured_s = _insured_s(cluster, slowdown)
    period_s = closed_forms.checkpoint_period(cluster.checkpoint_s, min(uptime_s, insured_s), cluster.down_s)
    if uptime_s > insured_s:
        uptime_s = inf  # assumption 9: not due in the run
    available = closed_forms.availability(period_s, cluster.checkpoint_s, uptime_s, cluster.down_s)
    endured = uptime_s / cluster.mtbf_s
    return _estimate(cluster, "stacked_quota_rejoin", r, endured, mean_stacks, slowdown, period_s, available)


def _without_rejoin(cluster: Cluster, policy: Policy, redundancy: int | None) -> Estimate:
    """ReCoVer and stacked quotas: groups only leave, until a restart on purpose pays."""
    N, M, r = cluster.groups, cluster.groups - 1, 1
    loads, patches = _quota_states(cluster, M)
    if policy == "recover":
        patches = patches * quotas.boundaries(N, cluster.microbatches)
    K, speed = _best_cycle(cluster, loads, patches)
    if policy == "stacked_quota":
        r = quotas.least_redundancy(N, K - 1, most_hosts(N))
        if redundancy and redundancy < r:
            loads = _hosted_loads(cluster, redundancy, M, 4 * K)
            K, speed = _best_cycle(cluster, loads, patches)
        r = redundancy or r
    weights = np.ones(K)
    mean_stacks = _mean_stacks(cluster, loads[:K], patches[:K], weights)
    slowdown = _slowdown(cluster, loads[:K], patches[:K], weights, cluster.reconfigure_s)
    uptime_s = K * cluster.mtbf_s
    available = speed * slowdown if isfinite(slowdown) else 0.0
    # A restart on purpose leaves a checkpoint; more are taken only where the insurance asks for shorter periods.
    period_s = closed_forms.checkpoint_period(cluster.checkpoint_s, _insured_s(cluster, slowdown), cluster.down_s)
    if period_s < uptime_s:
        available *= 1 - cluster.checkpoint_s / period_s
    return _estimate(cluster, policy, r, K, mean_stacks, slowdown, min(period_s, uptime_s), available)


def _best_cycle(
    cluster: Cluster, stacks: NDArray[np.float64], patches: NDArray[np.float64]
) -> tuple[int, float]:
    """After how many failures a restart on purpose pays, and the mean speed then."""
    step_s = _step_s(cluster, stacks, patches, cluster.reconfigure_s)
    return quotas.best_restart(cluster.step_s / step_s, (cluster.checkpoint_s + cluster.restart_s) / cluster.mtbf_s)


def _insured_s(cluster: Cluster, slowdown: float) -> float:
    """The time between wipe-outs that checkpoints insure against where none is due: one in a run, or one per failure."""
    run_s = cluster.failure_free_s * slowdown
    return max(run_s, cluster.mtbf_s) if isfinite(run_s) else cluster.mtbf_s


def _quota_states(cluster: Cluster, states: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Load and patch in stacks with k = 0 .. states-1 groups away. The last group alone can patch for nobody."""
    N, G, k = cluster.groups, cluster.microbatches, np.arange(states)
    patches = np.append(quotas.patch(N, G, k[: N - 1]), np.zeros(max(0, states - (N - 1))))
    return quotas.quota(N, G, k) / G, patches / G


def _hosted_loads(cluster: Cluster, r: int, states: int, known: int) -> NDArray[np.float64]:
    """The loads where r is too low for the ideal ones. Beyond ``known`` groups away, where nobody goes, as there."""
    known = min(known, states)
    return np.pad(quotas.hosted_loads(cluster.groups, r, cluster.microbatches, known), (0, states - known), mode="edge")


def _step_s(
    cluster: Cluster, stacks: NDArray[np.float64], patches: NDArray[np.float64], reconfigure_s: float
) -> NDArray[np.float64]:
    """Wall time per step in each state: what it computes, and the stalls that failures cause (assumptions 2 and 3)."""
    stall_s = cluster.detection_s + reconfigure_s + patches * cluster.compute_s
    return closed_forms.interrupted_step_s(stacks * cluster.compute_s + cluster.allreduce_s, stall_s, cluster.mtbf_s)


def _slowdown(
    cluster: Cluster,
    stacks: NDArray[np.float64],
    patches: NDArray[np.float64],
    weights: NDArray[np.float64],
    reconfigure_s: float,
) -> float:
    """Wall time per step over the failure-free one; ``weights`` say how much of the *time* each state has."""
    speeds = cluster.step_s / _step_s(cluster, stacks, patches, reconfigure_s)
    mean = float(weights @ speeds) / float(weights.sum())
    return 1 / mean if mean > 0 else inf


def _mean_stacks(
    cluster: Cluster, stacks: NDArray[np.float64], patches: NDArray[np.float64], weights: NDArray[np.float64]
) -> float:
    """Stacks per committed step, load + rho as in S_bar; states weighted by time, as :func:`_slowdown` does."""
    bare = stacks * cluster.compute_s + cluster.allreduce_s
    patched = closed_forms.interrupted_step_s(bare, patches * cluster.compute_s, cluster.mtbf_s)
    rate = float(weights @ (1 / patched)) / float(weights.sum())
    return (1 / rate - cluster.allreduce_s) / cluster.compute_s if rate > 0 else inf


def _estimate(
    cluster: Cluster,
    policy: Policy,
    r: int,
    endured: float,
    mean_stacks: float,
    slowdown: float,
    period_s: float,
    available: float,
) -> Estimate:
    relative = slowdown / available if available > 0 else inf
    time_s = cluster.failure_free_s * relative
    hours = cluster.gpus * time_s / closed_forms.HOUR_S
    lost = hours - cluster.gpus * cluster.failure_free_s / closed_forms.HOUR_S
    price = cluster.price_per_gpu_hour
    uptime_s = endured * cluster.mtbf_s
    return Estimate(
        policy=policy,
        redundancy=r,
        endured=endured,
        uptime_s=uptime_s,
        mean_stacks=mean_stacks,
        slowdown=slowdown,
        period_s=period_s,
        availability=available,
        time_s=time_s,
        relative_time=relative,
        gpu_hours=hours,
        gpu_hours_lost=lost,
        cost_lost=None if price is None else lost * price,
        notes=_notes(cluster, policy, r, uptime_s, period_s, relative),
    )


# --- in words ---------------------------------------------------------------------------------------------------------


def _notes(cluster: Cluster, policy: Policy, r: int, uptime_s: float, period_s: float, relative: float) -> tuple[str, ...]:
    notes = []
    if not isfinite(relative):
        notes.append(f"{policy} does not get on at all: its stalls last longer than the time between failures")
    if policy in SEARCHED and period_s > uptime_s / 2:
        notes.append(
            f"{policy}: the checkpoint period is no longer short against the {duration(uptime_s)} between wipe-outs, so A, "
            f"a first-order form, is too hopeful"
        )
    if policy == "spare" and r > most_hosts(cluster.groups):
        notes.append(f"spare: no Golomb placement of {cluster.groups} groups is known at r = {r}; mu counts on one")
    return tuple(notes)


def _reason(cluster: Cluster, best: Estimate, ranked: list[Estimate]) -> str:
    """Why, in one paragraph: what failures cost with this policy, and what the next best would."""
    if not isfinite(best.relative_time):
        return (
            f"no policy gets on: the system fails every {duration(cluster.mtbf_s)}, and that is less than any of them needs "
            f"to go on after a failure"
        )
    others = [e for e in ranked if e is not best]
    parts = [f"{label(best)}: {best.relative_time:.3f} times the failure-free time. {_why(cluster, best)}."]
    if others:
        first = others[0]
        parts.append(f"Next best: {label(first)}: {_times(first)}{_beaten(cluster, best, first)}.")
    baseline = next((e for e in others[1:] if e.policy == "restart"), None)
    if baseline:
        parts.append(f"Checkpoint-restart: {_times(baseline)}.")
    return " ".join(parts)


def _why(cluster: Cluster, best: Estimate) -> str:
    every = f"A failure every {duration(cluster.mtbf_s)}"
    stall = cluster.detection_s + cluster.reconfigure_s
    explain: dict[Policy, Callable[[], str]] = {
        "restart": lambda: f"{every} is rare: restarts from checkpoints cost next to nothing, and need nothing else",
        "replication": lambda: f"{every} is masked by {best.redundancy} copies of the work until a whole set is lost",
        "spare": lambda: f"{every} is masked by patch compute; {best.endured:.0f} of them lead to a wipe-out",
        "recover": lambda: f"{every} stalls a step for {stall:.3g} s, and the groups that are left share the work evenly",
        "stacked_quota": lambda: (
            f"{every} stalls a step for {stall:.3g} s and a patch; the groups that are left share the work evenly, and a "
            f"restart after {best.endured:.0f} failures brings the others back"
        ),
        "stacked_quota_rejoin": lambda: (
            f"{every} stalls a step for {stall:.3g} s and a patch, and the group is back after "
            f"{duration(cluster.rejoin_s or 0)}: {_absent(cluster):.2g} of {cluster.groups} groups are absent on average"
        ),
    }
    return explain[best.policy]()


def _absent(cluster: Cluster) -> float:
    a = quotas.mean_absent(cluster.mtbf_s, cluster.detection_s + (cluster.rejoin_s or 0))
    return float(np.arange(cluster.groups + 1) @ quotas.absent_distribution(cluster.groups, a))


def _beaten(cluster: Cluster, best: Estimate, other: Estimate) -> str:
    if other.relative_time < best.relative_time * (1 + EQUAL):
        return ", no real difference, but needs more" if best.policy == "restart" else ", no real difference"
    saved = other.gpu_hours - best.gpu_hours
    return f", {saved:,.0f} GPU-hours more" if isfinite(saved) else ""


def label(estimate: Estimate) -> str:
    name = estimate.policy.replace("_rejoin", " with rejoin")
    return f"{name}, r = {estimate.redundancy}" if estimate.redundancy > 1 else name


def _times(estimate: Estimate) -> str:
    return f"{estimate.relative_time:.3f}" if isfinite(estimate.relative_time) else "no progress"


def duration(seconds: float) -> str:
    """A duration as a person says it; never without an end."""
    if not isfinite(seconds):
        return "never"
    for unit, size in (("days", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}" if seconds < 1000 * size else f"{seconds / size:,.0f} {unit}"
    return f"{seconds:.3g} s"
