"""ReCtlr: orders inside the stacks that keep every shard contributed when groups are lost (SPARe, arXiv 2603.00357).

N groups host r shards each. Every live group computes the first S entries of its stack and contributes some of them, so
that each of the N shards is contributed exactly once. After a loss the controller goes through three phases:

1. *HK-fixed*: if the present orders and the present S still cover every shard, nothing moves.
2. *HK-free*: find the smallest S* >= S for which some order inside the stacks does (Hopcroft-Karp). Every live group
   may put any S* of its shards first, so this is a matching of the shards into S* interchangeable slots per group.
3. *MCMF*: at S*, find the orders with the fewest moved entries.

A stack entry counts as **moved** when it stood behind the first S* entries and now stands among them. The entry that
makes room for it falls right behind the first S*; this is the other half of the same move and is not counted. All other
entries keep their relative order.

Phase 3 as an assignment: shard <-> (group, slot), where an entry among the first S* may take its own slot at no cost and
one behind them any slot of its group at the cost of one move. Its optimum is that of the min-cost flow with capacity S*
per group: a contributed entry among the first S* never gains by leaving its slot, and the moved ones fill the free
slots. Among the orders with the fewest moves, one with the fewest shards to patch is taken (not in the paper; it breaks
ties).

Assumed: a group is lost as a whole, and ``live`` is the same at all callers. The outcome is then the same, too, because
it is a pure function of the arguments.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import maximum_bipartite_matching, min_weight_full_bipartite_matching

from megatron_ft.types import GroupId, listed

Shard = int
Orders = Sequence[Sequence[Shard]]
"""``orders[g]`` is the stack of group g, present order first to last; those of dead groups are kept as they were."""


@dataclass(frozen=True)
class Outcome:
    """The controller's decision.

    Attributes:
        phase: the phase that decided: ``fixed`` (nothing moves, S stays), ``free`` (S grew, orders changed, or both) or
            ``wipe-out`` (the run restarts with S = 1).
        S: the new S; with ``wipe-out`` the old one.
        orders: the new orders; with ``wipe-out`` the old ones.
        contributes: the shards of every live group; each shard is there once.
        moves: (group, shard) of each entry that came forward.
        wiped_out: with ``wipe-out``, the shards without a live host.
        reason: why, for people.
    """

    phase: Literal["fixed", "free", "wipe-out"]
    S: int
    orders: tuple[tuple[Shard, ...], ...]
    contributes: Mapping[GroupId, tuple[Shard, ...]]
    moves: tuple[tuple[GroupId, Shard], ...] = ()
    wiped_out: tuple[Shard, ...] = ()
    reason: str = ""


def lower_bound(groups: int, live: int) -> int:
    """Return c(k) = ceil(N / (N - k)), the least S with which N - k live groups can compute N shards (SPARe, step)."""
    if not 0 < live <= groups:
        raise ValueError(f"live must lie between 1 and groups = {groups}, got {live}")
    return -(-groups // live)


def reconfigure(orders: Orders, live: Collection[GroupId], S: int) -> Outcome:
    """Decide S, the orders and the contributions for the groups of ``live`` (SPARe, ReCtlr, phases 1 to 3)."""
    alive = np.array(sorted(set(live)), dtype=np.int64)
    stacks = _stacks(orders, alive, S)
    hosted = stacks[alive]
    N, r = stacks.shape

    if len(slots := _first_slots(hosted[:, :S], N)) == N:
        contributes = _contributions(alive, slots // S, slots % S)
        reason = f"{len(alive)} of {N} groups live; the first {S} of the present orders cover every shard"
        return Outcome("fixed", S, _as_tuples(orders), contributes, reason=reason)

    hosts = np.bincount(hosted.ravel(), minlength=N)
    if not hosts.all():
        wiped = tuple(np.flatnonzero(hosts == 0).tolist())
        reason = (
            f"wipe-out: no live group hosts shard {listed(wiped, most=8)} any more, {len(alive)} of {N} groups live"
        )
        return Outcome("wipe-out", S, _as_tuples(orders), {}, wiped_out=wiped, reason=reason)

    least = _smallest_S(hosted, N, S)
    rows, entries = _fewest_moves(hosted, N, S, least)
    contributes = _contributions(alive, rows, entries)
    reordered, moves = _reorder(_as_tuples(orders), contributes, least)
    why = "the present orders leave shards uncovered" if least == S else f"no order works with S = {S}"
    reason = f"{len(alive)} of {N} groups live; {why}: S = {least}, {len(moves)} stack entries moved"
    return Outcome("free", least, reordered, contributes, moves, reason=reason)


def patch(before: Orders, S: int, outcome: Outcome) -> dict[GroupId, tuple[Shard, ...]]:
    """Return the shards that each survivor has yet to compute in the interrupted step (SPARe, patch compute).

    ``before`` and ``S`` are those that the step began with: a survivor computes its first S entries of it in any case.
    """
    todo = {g: tuple(s for s in own if s not in before[g][:S]) for g, own in outcome.contributes.items()}
    return {group: shards for group, shards in todo.items() if shards}


def _stacks(orders: Orders, alive: np.ndarray, S: int) -> np.ndarray:
    """Check the orders, and return them as an N x r array."""
    try:
        stacks = np.asarray(orders, dtype=np.int64)
    except ValueError as error:
        raise ValueError(f"all stacks must have the same height, got {sorted({len(o) for o in orders})}") from error
    if stacks.ndim != 2 or stacks.size == 0:
        raise ValueError(f"orders must hold one stack of at least one shard per group, got shape {stacks.shape}")
    N, r = stacks.shape
    if stacks.min() < 0 or stacks.max() >= N:
        raise ValueError(f"{N} groups have shards 0 to {N - 1}, got {stacks.min()} to {stacks.max()}")
    in_stack = np.sort(stacks, axis=1)
    if (twice := np.flatnonzero((in_stack[:, 1:] == in_stack[:, :-1]).any(axis=1))).size:
        raise ValueError(f"a stack must hold a shard once, that of group {twice[0]} is {stacks[twice[0]].tolist()}")
    if not 1 <= S <= r:
        raise ValueError(f"S must lie between 1 and the height of the stacks, {r}, got {S}")
    if alive.size and not (alive[0] >= 0 and alive[-1] < N):
        raise ValueError(f"live groups must be of 0 to {N - 1}, got {alive[0]} to {alive[-1]}")
    return stacks


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


def _reorder(
    orders: tuple[tuple[Shard, ...], ...], contributes: Mapping[GroupId, tuple[Shard, ...]], S: int
) -> tuple[tuple[tuple[Shard, ...], ...], tuple[tuple[GroupId, Shard], ...]]:
    """Put the shards that each group contributes among its first S; the last ones that it does not contribute make room."""
    new, moves = list(orders), []
    for group, own in contributes.items():
        order = orders[group]
        first, rest = order[:S], order[S:]
        moved = [shard for shard in own if shard not in first]
        if not moved:
            continue
        idle = [shard for shard in first if shard not in own]
        out = idle[len(idle) - len(moved) :]
        stay = [shard for shard in first if shard not in out]
        new[group] = (*stay, *moved, *out, *(shard for shard in rest if shard not in moved))
        moves += [(group, shard) for shard in moved]
    return tuple(new), tuple(moves)


def _as_tuples(orders: Orders) -> tuple[tuple[Shard, ...], ...]:
    """Return the orders as tuples for the outcome; stacks that are tuples already are not copied."""
    return tuple(stack if isinstance(stack, tuple) else tuple(int(shard) for shard in stack) for stack in orders)
