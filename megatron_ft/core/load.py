"""The largest load of a quota plan, without making the plan (papers: SPARe's stacks, ReCoVer's quotas).

Intuition: a fractional plan of load L proves that an integral one exists, because flows with integral supplies and
capacities are integral. Spreading every shard evenly over its live hosts is nearly such a plan; when it is not, hosts
above L get less of each of their shards, a few rounds. Only when that proves nothing a maximum flow decides.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from megatron_ft.core.replication import Placement
from megatron_ft.types import GroupId

_ROUNDS = 30


def least_load(
    shards: int,
    per_shard: int,
    live: Collection[GroupId],
    placement: Placement | None = None,
    spread: NDArray[np.float64] | None = None,
) -> int:
    """The least largest load, in microbatches, with which the groups of ``live`` can compute all N*G of them.

    The same as that of ``scheduler.plan_step`` for equally fast groups. Shards without a live host go to anybody.
    ``spread``, shape [N], ones at first, is changed: handed in again after a loss it makes the answer faster, never another.
    Raises ``ValueError`` for an empty ``live``.
    """
    if not live:
        raise ValueError("least_load needs at least one live group, got none")
    if placement is not None and max(live) >= placement.groups:
        raise ValueError(f"least_load knows the {placement.groups} groups of the placement, not group {max(live)}")
    ideal = -(-shards * per_shard // len(live))
    if placement is None or placement.redundancy >= placement.groups:
        return ideal
    weight = np.ones(shards) if spread is None else spread
    return next(load for load in range(ideal, shards * per_shard + 1) if _fits(per_shard, live, placement, load, weight))


def _fits(
    per_shard: int, live: Collection[GroupId], placement: Placement, load: int, weight: NDArray[np.float64]
) -> bool:
    """Whether the hosts can compute their shards with at most ``load`` each; what nobody hosts only needs room."""
    alive = np.zeros(placement.groups, dtype=bool)
    alive[list(live)] = True
    hosted = alive[placement.host_table].any(axis=1)
    rows = placement.host_table[hosted]
    present = alive[rows]
    for _ in range(_ROUNDS):
        parts = np.where(present, weight[rows], 0.0)
        parts *= per_shard / parts.sum(axis=1, keepdims=True)
        loads = np.bincount(rows.ravel(), weights=parts.ravel(), minlength=len(alive))
        if loads.max() <= load + 1e-9:
            return True
        over = np.maximum(loads, 1e-9) / load
        weight *= np.where(over > 1, over**-1.5, np.minimum(over**-0.5, 2.0))
        weight /= weight.max()
        np.maximum(weight, 1e-9, out=weight)
    return _flow_fits(per_shard, rows, present, load)


def _flow_fits(per_shard: int, rows: np.ndarray, present: np.ndarray, load: int) -> bool:
    from megatron_ft.core import flow

    shard, _ = np.nonzero(present)
    members, column = np.unique(rows[present], return_inverse=True)
    edges = flow.Edges(shard.astype(np.int64), column.astype(np.int64), np.empty(0, dtype=np.int64))
    supply = np.full(len(rows), per_shard, dtype=np.int64)
    return flow.fits(supply, edges, np.full(len(members), load, dtype=np.int64))
