"""Balanced integer flows from shards to groups for ``assignment``, solved with scipy and ortools.

A problem is a supply per row (shard) and edges from rows to columns (groups) that may carry any amount. The solution of
:func:`balance` has the least limit of all columns with which the whole supply fits; at that limit, it is the flow that
moves least. Rows without an edge may go to any column through one shared node.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow

Ints = NDArray[np.int64]


class Edges(NamedTuple):
    """The edges of a problem.

    Attributes:
        rows: row of each edge.
        columns: column of each edge, aligned with ``rows``.
        anywhere: rows that may go to any column.
    """

    rows: Ints
    columns: Ints
    anywhere: Ints


class _Graph(NamedTuple):
    """The arcs of the whole network: source -> rows -> (anybody ->) columns -> sink. ``last`` arcs end in the sink.

    ``anybody`` is the shared node; the arcs from ``source`` begin at index ``middle``.
    """

    tails: Ints
    heads: Ints
    capacities: Ints
    source: int
    sink: int
    middle: int
    last: int


def balance(supply: Ints, edges: Edges, columns: int, kept: Ints) -> list[dict[int, int]]:
    """Return the amount of each row that each column gets: ``[{row: amount}]``, one entry per column.

    Args:
        supply: amount of each row, at least 1, shape [rows].
        edges: the columns that each row may go to.
        columns: number of columns.
        kept: amount that is on each edge already, shape [edges].
    """
    limits = np.full(columns, least_limit(supply, edges, columns))
    graph = _graph(supply, edges, columns)
    return _found(graph, edges, _cheapest_flow(graph, limits, supply, kept))


def place(supply: Ints, edges: Edges, limits: Ints, kept: Ints) -> list[dict[int, int]]:
    """Return amounts as :func:`balance` does, for given limits; any row may go to any column if its edges do not suffice.

    As little as possible leaves its edges; then as much as possible stays where it is. ``limits`` (shape [columns])
    must have room for the whole supply.
    """
    edges = edges._replace(anywhere=np.arange(len(supply)))
    graph = _graph(supply, edges, len(limits))
    return _found(graph, edges, _cheapest_flow(graph, limits, supply, kept, far=int(supply.sum()) + 1))


def _found(graph: _Graph, edges: Edges, amounts: Ints) -> list[dict[int, int]]:
    """Return the amounts on all arcs as ``[{row: amount}]``, per column."""
    found: list[dict[int, int]] = [{} for _ in range(graph.last)]
    count = len(edges.rows)
    used = np.flatnonzero(amounts[:count])
    triples = zip(edges.rows[used].tolist(), edges.columns[used].tolist(), amounts[used].tolist(), strict=True)
    for row, column, amount in triples:
        found[column][row] = amount
    through = amounts[count + graph.last : graph.middle]
    _share_anywhere(found, edges.anywhere, through, amounts[count : count + graph.last])
    return found


def most(supply: Ints, edges: Edges, limits: Ints) -> list[dict[int, int]]:
    """Return the amount of each row that each column gets when as much as possible is placed along the edges.

    ``limits`` (shape [columns]) is the capacity of each column. Supply that finds no place along the edges is in no
    column; ``edges.anywhere`` is ignored.
    """
    edges = edges._replace(anywhere=edges.anywhere[:0])
    graph = _graph(supply, edges, len(limits))
    capacities = graph.capacities.copy()
    capacities[-graph.last :] = limits
    matrix = csr_array(
        (capacities.astype(np.int32), (graph.tails.astype(np.int32), graph.heads.astype(np.int32))),
        shape=(graph.sink + 1, graph.sink + 1),
    )
    carried = maximum_flow(matrix, graph.source, graph.sink).flow.tocsr()
    return _found(graph, edges, np.asarray(carried[graph.tails, graph.heads]).ravel().astype(np.int64))


def _graph(supply: Ints, edges: Edges, columns: int) -> _Graph:
    """Build the arcs in a fixed order: edges, anybody -> columns, rows -> anybody, source -> rows, columns -> sink."""
    rows = len(supply)
    anybody, source, sink = rows + columns, rows + columns + 1, rows + columns + 2
    everyone = np.arange(columns, dtype=np.int64)
    total = int(supply.sum())
    tails = [edges.rows, np.full(columns, anybody), edges.anywhere, np.full(rows, source), everyone + rows]
    heads = [
        edges.columns + rows,
        everyone + rows,
        np.full(len(edges.anywhere), anybody),
        np.arange(rows),
        np.full(columns, sink),
    ]
    capacities = [
        supply[edges.rows],
        np.full(columns, total if len(edges.anywhere) else 0),
        supply[edges.anywhere],
        supply,
        np.zeros(columns),
    ]
    return _Graph(
        tails=np.concatenate(tails).astype(np.int64),
        heads=np.concatenate(heads).astype(np.int64),
        capacities=np.concatenate(capacities).astype(np.int64),
        source=source,
        sink=sink,
        middle=len(edges.rows) + columns + len(edges.anywhere),
        last=columns,
    )


def least_limit(supply: Ints, edges: Edges, columns: int) -> int:
    """Return the least limit of all columns with which the whole supply fits.

    The ideal limit is tried first: with a Golomb placement it nearly always fits. It does if every row can be divided
    evenly among its edges (where fractions fit, integers do, too); else a flow tells. Where the ideal limit does not fit,
    the search doubles, then halves. Rows without an edge only need room, and the ideal limit leaves enough.
    """
    degrees = np.bincount(edges.rows, minlength=len(supply))
    low = high = -(-int(supply.sum()) // columns)
    evenly = supply[edges.rows] / degrees[edges.rows]
    if np.bincount(edges.columns, evenly, minlength=columns).max() <= low and degrees.all():
        return low
    # Rows, columns, source and sink: the arcs of each node, one node after the other.
    source, sink = len(supply) + columns, len(supply) + columns + 1
    heads = np.concatenate([edges.columns + len(supply), np.full(columns, sink), np.arange(len(supply))])
    ends = np.cumsum(np.concatenate([[0], degrees, np.ones(columns), [len(supply), 0]]))
    hosted = np.where(degrees, supply, 0)

    def fits(limit: int) -> bool:
        capacities = np.concatenate([supply[edges.rows], np.full(columns, limit), hosted])
        arcs = [array.astype(np.int32) for array in (capacities, heads, ends)]
        found = maximum_flow(csr_array(tuple(arcs), shape=(sink + 1, sink + 1)), source, sink)
        return bool(found.flow_value == hosted.sum())

    width = 1
    while not fits(high):
        low, high, width = high + 1, high + width, 2 * width
    return low + bisect_left(range(low, high), True, key=fits)


def _cheapest_flow(graph: _Graph, limits: Ints, supply: Ints, kept: Ints, far: int = 0) -> Ints:
    """Return the amounts on all arcs of the flow that moves least.

    A unit that stays on its edge is free, one that takes another edge costs 1, one through the shared node ``far``.
    """
    capacities = graph.capacities.copy()
    capacities[-graph.last :] = limits
    costs = np.zeros(len(capacities), dtype=np.int64)
    costs[: len(kept)] = 1
    costs[len(kept) + graph.last : graph.middle] = far
    homes = np.flatnonzero(kept)
    stays = np.minimum(kept[homes], capacities[homes])
    from ortools.graph.python import min_cost_flow  # of the extra "train", which simulations do without

    solver = min_cost_flow.SimpleMinCostFlow()
    solver.add_arcs_with_capacity_and_unit_cost(
        np.concatenate([graph.tails, graph.tails[homes]]),
        np.concatenate([graph.heads, graph.heads[homes]]),
        np.concatenate([capacities, stays]),
        np.concatenate([costs, np.zeros(len(homes), dtype=np.int64)]),
    )
    total = int(supply.sum())
    solver.set_node_supply(graph.source, total)
    solver.set_node_supply(graph.sink, -total)
    status = solver.solve()
    assert status == solver.OPTIMAL, f"minimum-cost flow ended with {status} although a flow exists"
    amounts: Ints = solver.flows(np.arange(len(capacities) + len(homes)))
    amounts[homes] += amounts[len(capacities) :]
    return amounts[: len(capacities)]


def _share_anywhere(found: list[dict[int, int]], anywhere: Ints, through: Ints, shares: Ints) -> None:
    """Divide the amounts ``through`` the shared node into the columns' ``shares``, rows in ascending order."""
    rows = [[int(row), int(amount)] for row, amount in zip(anywhere, through, strict=True) if amount]
    for column, share in enumerate(shares):
        left = int(share)
        while left:
            row, amount = rows[0]
            taken = min(left, amount)
            found[column][row] = found[column].get(row, 0) + taken
            left -= taken
            rows[0][1] -= taken
            if not rows[0][1]:
                rows.pop(0)
