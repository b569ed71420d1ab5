"""Closed forms of the policies without wipe-out by placement: ReCoVer (arXiv 2605.11215) and stacked quotas.

k of the N groups, with G microbatches each, are dead or absent. The loads are ceilings of a ratio, so they are exact;
only the number of absent groups is modelled. Functions of k take a number or an array. tests/unit/test_planner.py
checks them.
"""

from __future__ import annotations

from functools import lru_cache
from math import inf

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import gammaln, xlogy

from megatron_ft.core.replication.placement import golomb
from megatron_ft.core.scheduling.assignment import least_load
from megatron_ft.plan.closed_forms import Floats

MINOR_SPARES = 0.2
"""Share of the spares that replace the minor in ReCoVer's versatile workload: about 20%."""


def quota(N: int, G: int, k: ArrayLike) -> Floats:
    """Microbatches of the busiest group, ceil(N G / (N - k)) (ReCoVer: the smallest G' with W G' >= B)."""
    return np.ceil(N * G / (N - np.asarray(k, dtype=float)))


def patch(N: int, G: int, k: ArrayLike) -> Floats:
    """Microbatches that a failure with k groups dead adds to the step: ceil(lost / survivors), lost = quota(N, G, k).

    ReCoVer's b at a policy boundary; stacked quotas spread the same over the same survivors. k <= N - 2.
    """
    return np.ceil(quota(N, G, k) / (N - 1 - np.asarray(k, dtype=float)))


def boundaries(N: int, G: int) -> NDArray[np.bool_]:
    """Return for k = 0..N-2 dead groups whether the next failure is a policy boundary of ReCoVer (else a spare
    replaces).

    After a boundary W groups get roles: majors = floor(B / G'), a minor if B is no multiple of G', the others are
    spares, 80% of them for majors. Nearly all losses hit majors and their spares, so the loss after the last major
    spare is the next boundary. The number of boundaries is within 15% of that of
    ``core.scheduling.policies.recover_roles`` with random losses.
    """
    found, k = np.zeros(max(N - 1, 0), dtype=bool), 0
    while k < N - 1:
        found[k] = True  # no spare is left for this one
        W = N - k - 1
        own = -(-N * G // W)
        minor = 1 if N * G % own else 0
        spares = W - N * G // own - minor
        k += 1 + spares - round(MINOR_SPARES * spares) * minor
    return found


# --- groups that come back --------------------------------------------------------------------------------------------


def mean_absent(mtbf_s: float, away_s: float) -> float:
    """a = away / m: mean number of absent groups without a limit (Little's law; m is the time between failures)."""
    return away_s / mtbf_s


def absent_distribution(N: int, a: float) -> Floats:
    """P(k groups absent), k = 0..N: Poisson(a) cut off at N, shape (N + 1,).

    Failures arrive at a constant rate, and the times of absence are independent: M/G/inf, and M/G/N/N where at most N
    can be absent (Erlang). The result depends on the mean of these times only, not on their distribution.
    """
    k = np.arange(N + 1)
    exponent = xlogy(k, a) - gammaln(k + 1)
    weights = np.exp(exponent - exponent.max())
    return weights / weights.sum()


def time_to_all_absent_s(N: int, mtbf_s: float, a: float) -> float:
    """Mean time from all groups live until all N are absent: m * sum_{n < N} 1 / B_n(a), B_n Erlang's loss formula.

    The time from n absent groups to the first n + 1 is m / B_n(a): h_n = m + (n / a) h_{n-1} is the recursion of 1 /
    B_n. It is exact for exponential times of absence, and infinite where it exceeds a float.
    """
    if a == 0 and N > 1:
        return inf
    total, inverse = 0.0, 1.0
    for n in range(N):
        inverse = 1.0 if n == 0 else 1.0 + (n / a) * inverse
        total += inverse
        if total > 1e300:
            return inf
    return mtbf_s * total


# --- restarts that only bring groups back -----------------------------------------------------------------------------


def best_restart(speeds: ArrayLike, restart_over_mtbf: float) -> tuple[int, float]:
    """Return the K that maximizes the mean speed (v_0 + ... + v_{K-1}) / (K + R), and that speed.

    ``speeds[k]`` is the speed with k absent groups; each such state lasts one MTBF. R = restart / MTBF. K = 1 ..
    len(speeds).
    """
    speeds = np.asarray(speeds, dtype=float)
    means = np.cumsum(speeds) / (np.arange(1, len(speeds) + 1) + restart_over_mtbf)
    best = int(means.argmax())
    return best + 1, float(means[best])


# --- how many hosts a shard needs -------------------------------------------------------------------------------------


def unhosted_shards(N: int, r: int, k: int) -> float:
    """Expected shards without a live host when k random groups are dead: N * C(k, r) / C(N, r), exactly."""
    if k < r:
        return 0.0
    j = np.arange(r)
    return float(N * np.prod((k - j) / (N - j)))


def crowded_pairs(N: int, r: int, k: int) -> float:
    """Expected pairs of shards with the same group as their only live host, which then computes 2 G; exact on Golomb.

    A live group hosts r (r-1) / 2 pairs; the r - 1 other hosts of each are 2 (r-1) different groups (Theorem 4.1), all
    of them dead with C(k, 2r-2) / C(N-1, 2r-2). In practice only such pairs keep a load above the ideal quota.
    """
    if k < 2 * (r - 1):
        return 0.0
    j = np.arange(2 * (r - 1))
    return float((N - k) * r * (r - 1) / 2 * np.prod((k - j) / (N - 1 - j)))


def least_redundancy(N: int, k: int, most: int, rare: float = 0.01) -> int:
    """Return the smallest r in 2..most with which, of k dead groups, at most ``rare`` shards are unhosted or pairs
    crowded."""
    for r in range(2, most + 1):
        if unhosted_shards(N, r, k) + crowded_pairs(N, r, k) <= rare:
            return r
    return most


@lru_cache(maxsize=64)
def hosted_loads(N: int, r: int, G: int, states: int) -> Floats:
    """Return the stacks of the busiest group with k = 0 .. states-1 groups dead, where r is too small for the ideal
    load.

    There is no closed form: the load is measured on the Golomb placement with ``core.scheduling.assignment``, as the
    mean over seeded random orders of losses; their number falls with the length of an order.
    """
    placement, loads = golomb(N, r), np.empty((min(30, max(1, 1000 // states)), states))
    for order in range(len(loads)):
        live = set(range(N))
        for k, group in enumerate(np.random.default_rng([N, r, order]).permutation(N)[:states].tolist()):
            loads[order, k] = least_load(N, G, live, placement)
            live.remove(group)
    return loads.mean(axis=0) / G
