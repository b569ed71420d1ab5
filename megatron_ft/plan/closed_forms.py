"""SPARe's closed forms (arXiv 2603.00357), one function per equation, and the two that it leaves open: q_k and rho_k.

Each shard is hosted by r of the N groups; k of the N are dead. Times are in seconds, ``compute_s`` is that of one
stack. Functions of k take a number or an array and return the same shape. The stated errors are those against Monte
Carlo simulation, see tests/unit/test_planner.py.
"""

from __future__ import annotations

from math import exp, expm1, floor, gamma, isinf, sqrt

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.integrate import quad
from scipy.special import lambertw

from megatron_ft.core.lifecycle.checkpoint_policy import (
    checkpoint_period as checkpoint_period,  # it is defined there because a running job uses it, too
)

Floats = NDArray[np.float64]


# --- how many failures until a wipe-out -------------------------------------------------------------------------------


def survival(k: ArrayLike, N: int, r: int) -> Floats:
    """P(no wipe-out after k failures) = exp(-N (k/N)^r). SPARe, endurable failures: the step before mu.

    A shard has lost all r hosts with probability (k/N)^r. Any two shards share at most one host (Theorem 4.1), so these
    events are nearly independent, and the number of such shards nearly Poisson.
    """
    return np.exp(-N * (np.asarray(k, dtype=float) / N) ** r)


def mu(N: int, r: int) -> float:
    """Endurable failures mu(N, r) = Gamma(1/r)/r * N^(1-1/r) (SPARe), the integral of :func:`survival` over k >= 0.

    Counts the failure that wipes out, so mu(N, 1) = 1. Error on Golomb placements below 2% for r >= 4 and N >= 200, up
    to 6% at r = 2 and 3; published: 1.13%. Always too low, because k failures hit k *different* groups; by 17% at N =
    8, r = 3.
    """
    return gamma(1 / r) / r * N ** (1 - 1 / r)


def survival_replication(k: ArrayLike, N: int, r: int) -> Floats:
    """P(no wipe-out after k failures) of r-fold replication: N/r sets of r equal groups, exp(-(N/r) (k/N)^r).

    Where r does not divide N, the last set has only N mod r groups, and is often the first to be lost.
    """
    dead = np.asarray(k, dtype=float) / N
    rest = dead ** (N % r) if N % r else 0.0
    return np.exp(-(N // r) * dead**r - rest)


def mu_replication(N: int, r: int) -> float:
    """Mean failures until a replica set has lost all r copies: N (N/r)^(-1/r) Gamma(1 + 1/r) = r^(1/r) mu(N, r).

    Derivation as for mu with N/r sets in place of N shards; for r = 2 it is the birthday problem, sqrt(pi N / 2). Where
    r does not divide N: the integral of :func:`survival_replication`. Error below 3% for N >= 64 and r <= 4.
    """
    if N % r == 0:
        return r ** (1 / r) * mu(N, r)
    return float(quad(lambda k: survival_replication(k, N, r), 0, N, limit=200)[0])


# --- how long a step takes --------------------------------------------------------------------------------------------


def stacks(N: int, k: ArrayLike) -> Floats:
    """c(k) = ceil(N / (N - k)): the smallest S with k groups dead (SPARe, step), reached in 99.8% of the states."""
    return np.ceil(N / (N - np.asarray(k, dtype=float)))


def patch_chance(N: int, k: ArrayLike) -> Floats:
    """q_k: probability that a failure with k groups dead needs patch compute, which is one stack then.

    The paper does not give it. Derivation, with S = c(k): the N - k live groups compute S (N - k) = N + E stack
    entries, E < N - k. Every shard is among them. A failure removes S entries. A surplus entry lowers the coverage of a
    shard that has more than one, and a shard without an entry displaces a surplus entry elsewhere, with the same
    effect. So failures use up the surplus, which stays evenly spread: shards are covered once or twice, 2N - S (N - k)
    of them once. An entry of the lost group is the only one of its shard with probability

        p_k = (2N - S (N - k)) / (S (N - k)) = 2N / (S (N - k)) - 1,

    and there is no patch only if none of its S entries is: q_k = 1 - (1 - p_k)^S. Where S has to grow, p_k = 1.
    Compared with ReCtlr, the mean over a run to wipe-out is within 0.05, and single k are within 0.12.
    """
    S = stacks(N, k)
    only = np.clip(2 * N / (S * (N - np.asarray(k, dtype=float))) - 1, 0.0, 1.0)
    return 1 - (1 - only) ** S


def interrupted_step_s(step_s: ArrayLike, stall_s: ArrayLike, mtbf_s: float) -> Floats:
    """Mean wall time per committed step when failures stall it: t = step + (t / m) stall, so t = step / (1 - stall /
    m).

    Failures occur during stalls, too. The time is infinite where a stall lasts until the next failure.
    """
    step_s, free = np.asarray(step_s, dtype=float), 1 - np.asarray(stall_s, dtype=float) / mtbf_s
    return np.where(free > 0, step_s / np.where(free > 0, free, 1.0), np.inf)


def patch_stacks(N: int, k: ArrayLike, compute_s: float, allreduce_s: float, mtbf_s: float) -> Floats:
    """rho_k: expected patch stacks *per step* with k groups dead (SPARe, S_bar; the paper gives no formula).

    A failure costs q_k stacks, a step has t_k / m failures, and patching makes the step longer:
    t_k = c(k) T_comp + T_allreduce + rho_k T_comp with rho_k = q_k t_k / m.
    """
    bare = stacks(N, k) * compute_s + allreduce_s
    return (interrupted_step_s(bare, patch_chance(N, k) * compute_s, mtbf_s) - bare) / compute_s


def s_bar_bound(N: int, r: int) -> float:
    """S_bar without patch, (1/floor(mu)) sum_{k < floor(mu)} c(k) (SPARe). Published: 2.34 at N = 600, r = 20."""
    return float(stacks(N, np.arange(floor(mu(N, r)))).mean())


def s_bar(N: int, r: int, compute_s: float, allreduce_s: float, mtbf_s: float) -> float:
    """S_bar(N, r) = (1/floor(mu)) sum_{k < floor(mu)} (c(k) + rho_k) (SPARe), stacks per step.

    Published: 2.8 at N = 600, r = 20 in the paper's setting (64 s, 6 s, 300 s); this gives 2.78.
    """
    k = np.arange(floor(mu(N, r)))
    return float((stacks(N, k) + patch_stacks(N, k, compute_s, allreduce_s, mtbf_s)).mean())


def s_bar_replication(r: int, compute_s: float, allreduce_s: float, mtbf_s: float) -> float:
    """S_bar of replication: r stacks in every step, and one stack of patch for each masked failure, r + rho.

    One stack although a copy of the work exists: SPARe's published times imply it (time-to-train times availability is
    3.75, 3.41, 3.28 at r = 3).
    """
    bare = r * compute_s + allreduce_s
    return float((interrupted_step_s(bare, compute_s, mtbf_s) - allreduce_s) / compute_s)


# --- checkpoints ------------------------------------------------------------------------------------------------------


def availability(period_s: float, checkpoint_s: float, uptime_s: float, restart_s: float) -> float:
    """A(T_c) = (1 - T_s/T_c) * T_f / (T_f + T_r + T_c/2) (SPARe): share of the wall time that makes progress.

    T_f = mu * m is the time between two restarts, T_r a restart, T_s a checkpoint, T_c their period; half a period is
    computed again after a restart. First order in T_c / T_f: too high where T_c is not small (see
    :func:`memoryless_availability`).
    """
    if isinf(uptime_s):
        return 1 - checkpoint_s / period_s
    return (1 - checkpoint_s / period_s) * uptime_s / (uptime_s + restart_s + period_s / 2)


def memoryless_availability(period_s: float, checkpoint_s: float, mtbf_s: float, restart_s: float) -> float:
    """Exact availability when every failure ends the attempt and their times are exponential (Daly 2006, not SPARe).

    To complete one period takes m (e^(T_c/m) - 1) of uptime and e^(T_c/m) - 1 restarts: A = (T_c - T_s) / ((m + T_r)
    (e^(T_c/m) - 1)). No failure occurs in a restart. It agrees with :func:`availability` to first order when T_c and
    T_r are short compared with m, and is far below it where they are not (4% against 6% in SPARe's setting).
    """
    if period_s / mtbf_s > 700:
        return 0.0
    return (period_s - checkpoint_s) / ((mtbf_s + restart_s) * expm1(period_s / mtbf_s))


def memoryless_period(checkpoint_s: float, mtbf_s: float) -> float:
    """The T_c that maximizes :func:`memoryless_availability`: m (1 + s + W(-e^(-1-s))), s = T_s / m, W Lambert's.

    From A' = 0: x = T_c / m solves x - s = 1 - e^(-x). It is sqrt(2 T_s m) for small s, and does not depend on the time
    of a restart.
    """
    s = checkpoint_s / mtbf_s
    if s < 1e-8:  # this close to its branch point W is lost in rounding
        return mtbf_s * (sqrt(2 * s) + s / 3)
    return mtbf_s * (1 + s + float(lambertw(-exp(-1 - s)).real))


def objective(mean_stacks: float, available: float) -> float:
    """J(r) = S_bar(N, r) / A(T_c*) (SPARe): time-to-train in units of failure-free compute. The best r
    minimizes it."""
    return mean_stacks / available if available > 0 else float("inf")


# --- rates ------------------------------------------------------------------------------------------------------------

DAY_S = 86_400.0
HOUR_S = 3_600.0


def system_mtbf_s(node_mtbf_s: float, nodes: float) -> float:
    """Mean time between failures of all nodes together. The rates of independent failures add up."""
    return node_mtbf_s / nodes


def node_mtbf_from_rate_s(failures_per_1000_node_days: float) -> float:
    """Mean time between failures of one node: Llama 3's 3.79 failures per 1000 node-days are 264 days."""
    return 1000 * DAY_S / failures_per_1000_node_days
