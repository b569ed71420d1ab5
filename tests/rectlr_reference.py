"""ReCtlr as published (SPARe, arXiv 2603.00357), with scipy's matchings: what ``rectlr`` decides by repair.

Phase 2 is a maximum matching (Hopcroft-Karp). Phase 3 as an assignment: shard <-> (group, slot), where an entry among the
first S* may take its own slot at no cost and one behind them any slot of its group at the cost of one move. Its optimum is
that of the min-cost flow with capacity S* per group: a contributed entry among the first S* never gains by leaving its
slot, and the moved ones fill the free slots.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import maximum_bipartite_matching, min_weight_full_bipartite_matching

from megatron_ft.core.scheduling.policies.rectlr import Orders, Outcome, lower_bound
from megatron_ft.types import GroupId

Shard = int


def reconfigure(orders: Orders, live: Collection[GroupId], S: int) -> Outcome:
    """Return the decision for the groups of ``live`` (SPARe, ReCtlr, phases 1 to 3), without the new orders."""
    alive = np.array(sorted(live), dtype=np.int64)
    hosted = np.asarray(orders, dtype=np.int64)[alive]
    N = len(orders)
    if len(slots := _first_slots(hosted[:, :S], N)) == N:
        return Outcome("fixed", S, (), _contributions(alive, slots // S, slots % S))
    if (hosts := np.bincount(hosted.ravel(), minlength=N)).min() == 0:
        return Outcome("wipe-out", S, (), {}, wiped_out=tuple(np.flatnonzero(hosts == 0).tolist()))
    least = _smallest_S(hosted, N, S)
    rows, entries = _fewest_moves(hosted, N, S, least)
    contributes = _contributions(alive, rows, entries)
    moves = tuple((g, shard) for g, own in contributes.items() for shard in own if shard not in orders[g][:least])
    return Outcome("free", least, (), contributes, moves)


def patch(before: Orders, S: int, outcome: Outcome) -> dict[GroupId, tuple[Shard, ...]]:
    """Return the shards that each survivor has yet to compute in the interrupted step (SPARe, patch compute).

    ``before`` and ``S`` are those that the step began with: a survivor computes its first S entries of it in any case.
    """
    todo = {g: tuple(s for s in own if s not in before[g][:S]) for g, own in outcome.contributes.items()}
    return {group: shards for group, shards in todo.items() if shards}


def _first_slots(first: np.ndarray, N: int) -> np.ndarray:
    """HK-fixed. Return the place (row * S + slot) of each shard among the first S entries; empty unless all are covered.

    With the orders given, a (group, slot) holds one shard, so no two shards compete for it: the maximum matching of this
    graph is the set of covered shards. Each is contributed from its lowest slot; ties go to the lowest group.
    """
    rows, S = first.shape
    by_slot = first.T.ravel()  # slot 0 of all groups, then slot 1, ...: the first occurrence is the lowest slot
    shards, at = np.unique(by_slot, return_index=True)
    return (at % rows) * S + at // rows if len(shards) == N else np.empty(0, dtype=np.int64)


def _smallest_S(hosted: np.ndarray, N: int, S: int) -> int:
    """HK-free. Return the least S* >= S with a matching of all shards into S* slots per live group; r always works."""
    rows, r = hosted.shape
    for least in range(max(S, lower_bound(N, rows)), r):
        columns = np.arange(rows)[:, None, None] * least + np.arange(least)
        shards = np.repeat(hosted.ravel(), least)
        columns = np.broadcast_to(columns, (rows, r, least)).ravel()
        graph = csr_matrix((np.ones(len(shards), dtype=np.int8), (shards, columns)), shape=(N, rows * least))
        if (maximum_bipartite_matching(graph, perm_type="column") >= 0).all():
            return least
    return int(r)


def _fewest_moves(hosted: np.ndarray, N: int, S: int, least: int) -> tuple[np.ndarray, np.ndarray]:
    """MCMF. Return for each shard the row of the group that contributes it, and its present entry in that group's stack.

    A move weighs more than all the patches of a decision together. Weights begin at 1: a sparse 0 would be no edge.
    """
    rows, r = hosted.shape
    slots = np.arange(rows * least).reshape(rows, 1, least)
    # An entry behind the first ``least`` may go to any slot of its group, one among them only to its own.
    anywhere = np.broadcast_to(slots, (rows, r - least, least)).ravel()
    shards = np.concatenate([hosted[:, :least].ravel(), np.repeat(hosted[:, least:].ravel(), least)])
    columns = np.concatenate([slots.ravel(), anywhere])
    stay = np.where(np.arange(least) < S, 1.0, 2.0)
    weights = np.concatenate([np.tile(stay, rows), np.full(len(anywhere), N + 2.0)])
    graph = csr_matrix((weights, (shards, columns)), shape=(N, rows * least))
    _, column = min_weight_full_bipartite_matching(graph)

    chosen_row, slot = column // least, column % least
    entry = np.where(hosted[chosen_row, slot] == np.arange(N), slot, -1)
    for shard in np.flatnonzero(entry < 0):
        entry[shard] = least + np.flatnonzero(hosted[chosen_row[shard], least:] == shard)[0]
    return chosen_row, entry


def _contributions(alive: np.ndarray, rows: np.ndarray, entries: np.ndarray) -> dict[GroupId, tuple[Shard, ...]]:
    """Return group -> the shards it contributes, in stack order; shard j is entry ``entries[j]`` of ``rows[j]``."""
    chosen: dict[GroupId, list[Shard]] = {group: [] for group in alive.tolist()}
    in_order = np.lexsort((entries, rows))
    for group, shard in zip(alive[rows[in_order]].tolist(), in_order.tolist(), strict=True):
        chosen[group].append(shard)
    return {group: tuple(own) for group, own in chosen.items()}
