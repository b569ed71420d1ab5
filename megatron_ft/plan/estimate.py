"""Estimate what each policy costs on a cluster, and recommend one. ``megatron_ft.plan`` lists the assumptions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, inf, isfinite, sqrt
from typing import Literal, get_args

import numpy as np

from megatron_ft.core.replication.placement import largest_redundancy, optimal_redundancy
from megatron_ft.errors import ConfigError
from megatron_ft.plan import closed_forms, quotas
from megatron_ft.plan.closed_forms import Floats
from megatron_ft.plan.cluster import Cluster, check_redundancy
from megatron_ft.utils.durations import duration

Policy = Literal["restart", "replication", "spare", "recover", "stacked_quota", "stacked_quota_rejoin"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
SEARCHED: tuple[Policy, ...] = ("replication", "spare")
"""Policies whose time depends on the redundancy, so that the best redundancy is searched."""
PREFERENCE: tuple[Policy, ...] = ("restart", "stacked_quota_rejoin", "stacked_quota", "recover", "spare", "replication")
"""Order among equal policies: the one that needs least comes first, those that compute whole stacks come last."""
EQUAL = 0.001
"""Relative difference of times below which they count as equal; the estimates are not more accurate."""
_MOST_COPIES, _MOST_HOSTS, _LARGE = 16, 32, 5000


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """One policy on one cluster.

    Attributes:
        policy: Name of the policy.
        redundancy: r, the number of groups that host each shard.
        endured: Mean number of failures from one restart to the next, including the one that causes it (SPARe's mu).
            Infinite where no restart is expected in the run. Failures of the whole job are not among them.
        uptime_s: Mean time from one restart to the next (T_f), in seconds, whatever causes it.
        mean_stacks: Compute of a step in units of the failure-free one, patch included (S_bar).
        slowdown: Wall time per step while the job is up, over that without failures.
        period_s: Checkpoint period T_c*, in seconds.
        availability: A, the share of the time that makes progress.
        time_s: Time-to-train, in seconds.
        relative_time: Time-to-train over the failure-free T_0. Infinite where the job makes no progress.
        gpu_hours: GPU-hours of the job.
        gpu_hours_lost: GPU-hours beyond the failure-free ones.
        notes: Reservations, for the table.
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
    notes: tuple[str, ...] = ()

    @property
    def objective(self) -> float:
        """J = S_bar / A."""
        return closed_forms.objective(self.mean_stacks, self.availability)


@dataclass(frozen=True)
class Recommendation:
    """The recommended policy with the reason, the best estimate of every policy (fastest first), and SPARe's r*."""

    best: Estimate
    reason: str
    estimates: tuple[Estimate, ...]
    r_star: int


def recommend(cluster: Cluster, redundancy: int | None = None) -> Recommendation:
    """Compare the policies, each at its best redundancy or at the one given."""
    ranked = sorted(
        (evaluate(cluster, policy, redundancy) for policy in possible(cluster)), key=lambda e: e.relative_time
    )
    equal = [e for e in ranked if e.relative_time <= ranked[0].relative_time * (1 + EQUAL)]
    best = min(equal, key=lambda e: PREFERENCE.index(e.policy))
    r_star = optimal_redundancy(cluster.groups)
    return Recommendation(best, _reason(cluster, best, ranked), tuple(ranked), r_star)


def possible(cluster: Cluster) -> list[Policy]:
    """Return the policies that this cluster can have."""
    if cluster.groups == 1:
        return ["restart"]
    return [policy for policy in POLICIES if policy != "stacked_quota_rejoin" or cluster.rejoin_s is not None]


def evaluate(cluster: Cluster, policy: Policy, redundancy: int | None = None) -> Estimate:
    """Return the estimate at ``redundancy``, or at the best one.

    Raises ``ConfigError`` for a policy or redundancy that this cluster cannot have.
    """
    if redundancy is not None:
        check_redundancy(redundancy, cluster.groups)
    if policy not in POLICIES:
        raise ConfigError(f"policy is {policy!r}; the planner knows: {', '.join(POLICIES)}")
    if policy == "restart":
        return _restart(cluster)
    if cluster.groups == 1:
        raise ConfigError(
            f"policy is {policy!r} but there is only one group, and no other could continue; use more groups"
        )
    if policy in SEARCHED:
        found = (_at(cluster, policy, redundancy),) if redundancy else search(cluster, policy)
        return min(found, key=lambda e: e.relative_time)
    if policy == "stacked_quota_rejoin":
        return _with_rejoin(cluster, redundancy)
    return _without_rejoin(cluster, policy, redundancy)


def search(cluster: Cluster, policy: Policy) -> tuple[Estimate, ...]:
    """Return the estimates at every redundancy the policy can have, without r = 1, which is checkpoint-restart."""
    most = _MOST_COPIES if policy == "replication" else most_hosts(cluster.groups)
    return tuple(_at(cluster, policy, r) for r in range(2, max(2, min(most, cluster.groups)) + 1))


@lru_cache(maxsize=256)
def most_hosts(groups: int) -> int:
    """Return the largest redundancy that is searched. Every optimum is far below these limits."""
    return max(2, min(_MOST_HOSTS, largest_redundancy(min(groups, _LARGE)))) if groups > 1 else 1


# --- one policy at one redundancy -------------------------------------------------------------------------------------


def _restart(cluster: Cluster) -> Estimate:
    mtbf_s = _either_s(cluster.mtbf_s, cluster.job_mtbf_s)
    period_s = closed_forms.memoryless_period(cluster.checkpoint_s, mtbf_s)
    available = closed_forms.memoryless_availability(period_s, cluster.checkpoint_s, mtbf_s, cluster.down_s)
    return _estimate(cluster, "restart", 1, 1.0, 1.0, 1.0, period_s, available)


def _at(cluster: Cluster, policy: Policy, r: int) -> Estimate:
    """Estimate SPARe or replication: failures are masked until a wipe-out."""
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
    uptime_s = _either_s(endured * cluster.mtbf_s, cluster.job_mtbf_s)
    period_s = closed_forms.checkpoint_period(cluster.checkpoint_s, uptime_s, cluster.down_s)
    available = closed_forms.availability(period_s, cluster.checkpoint_s, uptime_s, cluster.down_s)
    return _estimate(cluster, policy, r, endured, mean_stacks, slowdown, period_s, available)


def _with_rejoin(cluster: Cluster, redundancy: int | None) -> Estimate:
    """Estimate the steady state in which groups come back at the rate at which they are lost."""
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
    absent_s = quotas.time_to_all_absent_s(N, cluster.mtbf_s, a)
    uptime_s, insured_s = _either_s(absent_s, cluster.job_mtbf_s), _insured_s(cluster, slowdown)
    period_s = closed_forms.checkpoint_period(cluster.checkpoint_s, min(uptime_s, insured_s), cluster.down_s)
    if uptime_s > insured_s:
        uptime_s = inf  # assumption 9: not expected in the run
    available = closed_forms.availability(period_s, cluster.checkpoint_s, uptime_s, cluster.down_s)
    endured = absent_s / cluster.mtbf_s if absent_s <= insured_s else inf
    return _estimate(cluster, "stacked_quota_rejoin", r, endured, mean_stacks, slowdown, period_s, available)


def _without_rejoin(cluster: Cluster, policy: Policy, redundancy: int | None) -> Estimate:
    """Estimate ReCoVer or stacked quotas: groups only leave, until a planned restart is worth it."""
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
    # A planned restart leaves a checkpoint; more are taken only where the insurance needs shorter periods.
    insured_s = _insured_s(cluster, slowdown)
    period_s = closed_forms.checkpoint_period(cluster.checkpoint_s, min(insured_s, cluster.job_mtbf_s), cluster.down_s)
    if period_s < uptime_s:
        available *= 1 - cluster.checkpoint_s / period_s
    if cluster.job_mtbf_s <= insured_s:
        available *= cluster.job_mtbf_s / (cluster.job_mtbf_s + cluster.down_s + min(period_s, uptime_s) / 2)
    return _estimate(cluster, policy, r, K, mean_stacks, slowdown, min(period_s, uptime_s), available)


def _either_s(one_s: float, other_s: float) -> float:
    """Return the mean time to whichever comes first of two events with constant rates."""
    if not one_s:
        return 0.0
    rate = 1 / one_s + 1 / other_s
    return 1 / rate if rate else inf


def _best_cycle(cluster: Cluster, stacks: Floats, patches: Floats) -> tuple[int, float]:
    """Return the number of failures after which a planned restart is worth it, and the mean speed with it."""
    step_s = _step_s(cluster, stacks, patches, cluster.reconfigure_s)
    return quotas.best_restart(cluster.step_s / step_s, (cluster.checkpoint_s + cluster.restart_s) / cluster.mtbf_s)


def _insured_s(cluster: Cluster, slowdown: float) -> float:
    """Return the time between wipe-outs to insure against where none is expected: one in a run, or one per failure."""
    run_s = cluster.failure_free_s * slowdown
    return max(run_s, cluster.mtbf_s) if isfinite(run_s) else cluster.mtbf_s


def _quota_states(cluster: Cluster, states: int) -> tuple[Floats, Floats]:
    """Return load and patch in stacks with k = 0 .. states-1 absent groups. The last group has no patch."""
    N, G, k = cluster.groups, cluster.microbatches, np.arange(states)
    patches = np.append(quotas.patch(N, G, k[: N - 1]), np.zeros(max(0, states - (N - 1))))
    return quotas.quota(N, G, k) / G, patches / G


def _hosted_loads(cluster: Cluster, r: int, states: int, known: int) -> Floats:
    """Return the loads where r is too small for the ideal ones; beyond ``known`` absent groups, the last known load."""
    known = min(known, states)
    return np.pad(quotas.hosted_loads(cluster.groups, r, cluster.microbatches, known), (0, states - known), mode="edge")


def _step_s(cluster: Cluster, stacks: Floats, patches: Floats, reconfigure_s: float) -> Floats:
    """Return the wall time per step in each state: computation, and stalls of failures (assumptions 2 and 3)."""
    stall_s = cluster.detection_s + reconfigure_s + patches * cluster.compute_s
    return closed_forms.interrupted_step_s(stacks * cluster.compute_s + cluster.allreduce_s, stall_s, cluster.mtbf_s)


def _slowdown(cluster: Cluster, stacks: Floats, patches: Floats, weights: Floats, reconfigure_s: float) -> float:
    """Return the wall time per step over the failure-free one; ``weights`` are the shares of the *time* of each
    state."""
    speeds = cluster.step_s / _step_s(cluster, stacks, patches, reconfigure_s)
    mean = float(weights @ speeds) / float(weights.sum())
    return 1 / mean if mean > 0 else inf


def _mean_stacks(cluster: Cluster, stacks: Floats, patches: Floats, weights: Floats) -> float:
    """Return the stacks per committed step, load + rho as in S_bar; states are weighted by time as in
    :func:`_slowdown`."""
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
    uptime_s = _either_s(endured * cluster.mtbf_s, cluster.job_mtbf_s)
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
        notes=_notes(cluster, policy, r, uptime_s, period_s, relative),
    )


# --- in words ---------------------------------------------------------------------------------------------------------


def _notes(
    cluster: Cluster, policy: Policy, r: int, uptime_s: float, period_s: float, relative: float
) -> tuple[str, ...]:
    notes = []
    if not isfinite(relative):
        notes.append(f"{policy} makes no progress: its stalls last longer than the time between failures")
    if policy in SEARCHED and period_s > uptime_s / 2:
        notes.append(
            f"{policy}: the checkpoint period is no longer short against the {duration(uptime_s)} between wipe-outs, so A, "
            f"a first-order form, is too high"
        )
    if policy == "spare" and r > most_hosts(cluster.groups):
        notes.append(f"spare: no Golomb placement of {cluster.groups} groups is known at r = {r}; mu assumes one")
    return tuple(notes)


def _reason(cluster: Cluster, best: Estimate, ranked: list[Estimate]) -> str:
    """Explain the choice in one paragraph: what failures cost with this policy, and with the next best."""
    if not isfinite(best.relative_time):
        return (
            f"no policy makes progress: the system fails every {duration(cluster.mtbf_s)}, which is less than any of them "
            f"needs to continue after a failure"
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
    stalls = f"{every} stalls a step for {cluster.detection_s + cluster.reconfigure_s:.3g} s"
    match best.policy:
        case "restart":
            return f"{every} is rare: restarts from checkpoints cost almost nothing"
        case "replication":
            return f"{every} is masked by {best.redundancy} copies of the work until a whole set is lost"
        case "spare":
            return f"{every} is masked by patch compute; {best.endured:.0f} of them lead to a wipe-out"
        case "recover":
            return f"{stalls}, and the remaining groups share the work evenly"
        case "stacked_quota":
            return (
                f"{stalls} and a patch; the remaining groups share the work evenly, and a restart after "
                f"{best.endured:.0f} failures brings the others back"
            )
        case "stacked_quota_rejoin":
            return (
                f"{stalls} and a patch, and the group is back after {duration(cluster.rejoin_s or 0)}: "
                f"{_absent(cluster):.2g} of {cluster.groups} groups are absent on average"
            )


def _absent(cluster: Cluster) -> float:
    a = quotas.mean_absent(cluster.mtbf_s, cluster.detection_s + (cluster.rejoin_s or 0))
    return float(np.arange(cluster.groups + 1) @ quotas.absent_distribution(cluster.groups, a))


def _beaten(cluster: Cluster, best: Estimate, other: Estimate) -> str:
    if other.relative_time < best.relative_time * (1 + EQUAL):
        return (
            ", no significant difference, but more complex"
            if best.policy == "restart"
            else ", no significant difference"
        )
    saved = other.gpu_hours - best.gpu_hours
    return f", {saved:,.0f} GPU-hours more" if isfinite(saved) else ""


def label(estimate: Estimate) -> str:
    """Return the name of the policy with its redundancy."""
    name = estimate.policy.replace("_rejoin", " with rejoin")
    return f"{name}, r = {estimate.redundancy}" if estimate.redundancy > 1 else name


def _times(estimate: Estimate) -> str:
    return f"{estimate.relative_time:.3f}" if isfinite(estimate.relative_time) else "no progress"
