"""Closed forms of the policies without wipe-out by placement: ReCoVer (arXiv 2605.11215) and stacked quotas.

N groups, G microbatches each, k groups dead or absent. Their loads are ceilings of a ratio, so they are exact; what is
modelled is how many groups are away. Functions of k take a number or an array. Checked in tests/unit/test_planner.py.
"""

from __future__ import annotations

from functools import lru_cache
from math import inf, sqrt

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import gammaln, xlogy

from megatron_ft.core.load import Memory, least_load
from megatron_ft.core.replication import golomb

Floats = NDArray[np.float64]
MINOR_SPARES = 0.2
"""ReCoVer's versatile workload: about 20% of the spares stand by for the minor."""


def quota(N: int, G: int, k: ArrayLike) -> Floats:
    """Microbatches of the busiest group, ceil(N G / (N - k)) (ReCoVer: the least G' with W G' >= B)."""
    return np.ceil(N * G / (N - np.asarray(k, dtype=float)))


def patch(N: int, G: int, k: ArrayLike) -> Floats:
    """Microbatches that a failure with k groups dead adds to the step: ceil(lost / survivors), lost = quota(N, G, k).

    ReCoVer's b at a policy boundary; stacked quotas spread the same over the same survivors. k <= N - 2.
    """
    return np.ceil(quota(N, G, k) / (N - 1 - np.asarray(k, dtype=float)))


def boundaries(N: int, G: int) -> NDArray[np.bool_]:
    """Whether the failure with k = 0..N-2 groups dead is a policy boundary of ReCoVer (else a spare stands in).

    After a boundary W groups are dealt roles: majors = floor(B / G'), a minor if B is no multiple of G', the others are
    spares, 80% of them for majors. Losses strike majors and their spares nearly always, so the one after the last major
    spare is the next boundary. Number of boundaries within 15% of ``core.roles``, driven with random losses.
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
    """a = away / m: mean number of groups away, if there were no limit (Little's law; m between failures)."""
    return away_s / mtbf_s


def absent_distribution(N: int, a: float) -> Floats:
    """P(k groups away), k = 0..N: Poisson(a) cut off at N, shape (N + 1,).

    Failures arrive at a constant rate, each group is away by itself for as long as it takes: M/G/inf, and M/G/N/N where
    at most N can be away (Erlang). It depends on the mean time away only, not on its distribution.
    """
    k = np.arange(N + 1)
    exponent = xlogy(k, a) - gammaln(k + 1)
    weights = np.exp(exponent - exponent.max())
    return weights / weights.sum()


def time_to_all_absent_s(N: int, mtbf_s: float, a: float) -> float:
    """Mean time from all groups live until all N are away: m * sum_{n < N} 1 / B_n(a), B_n Erlang's loss formula.

    From n away to n + 1 away for the first time takes m / B_n(a): h_n = m + (n / a) h_{n-1} is the recursion of 1 / B_n.
    Exact for exponential times away; infinite where it exceeds a float.
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


def restart_after(N: int, restarts_s_over_mtbf: float) -> float:
    """After how many failures a restart pays, by calculus: K* = sqrt(R^2 + 2 N R) - R with R = restart / m.

    With k groups away a step takes N / (N - k) as long (fine quotas, no stalls). K failures and a restart take (K + R) m
    and commit (K - K^2 / 2N) m steps' worth; the derivative of the ratio vanishes at K*: there the speed of the moment has
    sunk to the mean speed, restart included.
    """
    R = restarts_s_over_mtbf
    return sqrt(R * R + 2 * N * R) - R


def best_restart(speeds: ArrayLike, restart_over_mtbf: float) -> tuple[int, float]:
    """The K that maximises mean speed (v_0 + ... + v_{K-1}) / (K + R), and that speed; :func:`restart_after` exactly.

    ``speeds[k]`` with k groups away, each state lasting one MTBF; R = restart / MTBF. K = 1 .. len(speeds).
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
    """Expected pairs of shards that are left with the same only host, which then has to do 2 G: exactly, on Golomb.

    A live group hosts r (r-1) / 2 pairs; the r - 1 other hosts of each are 2 (r-1) different groups (Theorem 4.1), all of
    them dead with C(k, 2r-2) / C(N-1, 2r-2). Only this, in practice, keeps a load above the ideal quota.
    """
    if k < 2 * (r - 1):
        return 0.0
    j = np.arange(2 * (r - 1))
    return float((N - k) * r * (r - 1) / 2 * np.prod((k - j) / (N - 1 - j)))


def least_redundancy(N: int, k: int, most: int, rare: float = 0.01) -> int:
    """The least r in 2..most with which k dead groups neither leave shards unhosted nor crowd a group, but rarely."""
    for r in range(2, most + 1):
        if unhosted_shards(N, r, k) + crowded_pairs(N, r, k) <= rare:
            return r
    return most


@lru_cache(maxsize=64)
def hosted_loads(N: int, r: int, G: int, states: int) -> Floats:
    """Stacks of the busiest group with k = 0 .. states-1 groups dead, where hosting few shards makes it more than the ideal.

    No closed form: measured on the Golomb placement with ``core.load``, mean over random orders of losses, the same ones
    every time, fewer of them where one has many losses.
    """
    placement, loads = golomb(N, r), np.empty((min(30, max(1, 1000 // states)), states))
    for order in range(len(loads)):
        live, memory = set(range(N)), Memory()
        for k, group in enumerate(np.random.default_rng([N, r, order]).permutation(N)[:states].tolist()):
            loads[order, k] = least_load(N, G, live, placement, memory)
            live.remove(group)
    return loads.mean(axis=0) / G
