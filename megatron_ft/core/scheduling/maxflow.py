"""Balanced integer flows from shards to groups for ``assignment``, solved with scipy and ortools.

A problem is a supply per row (shard) and edges from rows to columns (groups) that may carry any amount. The solution of
:func:`balance` has the least limit of all columns with which the whole supply fits; at that limit, it is the flow that
moves least. Rows without an edge may go to any column through one shared node.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any, NamedTuple

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


def balance(supply: Ints, edges: Edges, columns: int, kept: Ints) -> list[dict[int, int]]:
    """Return the amount of each row that each column gets: ``[{row: amount}]``, one entry per column.

    Args:
        supply: amount of each row, at least 1, shape [rows].
        edges: the columns that each row may go to.
        columns: number of columns.
        kept: amount that is on each edge already, shape [edges].
    """
    limits = np.full(columns, least_limit(supply, edges, columns))
    return _cheapest(supply, edges, limits, kept)


def place(supply: Ints, edges: Edges, limits: Ints, kept: Ints) -> list[dict[int, int]]:
    """Return amounts as :func:`balance` does, for given limits; any row may go to any column if its edges do not suffice.

    As little as possible leaves its edges; then as much as possible stays where it is. ``limits`` (shape [columns])
    must have room for the whole supply.
    """
    edges = edges._replace(anywhere=np.arange(len(supply)))
    return _cheapest(supply, edges, limits, kept, far=int(supply.sum()) + 1)


def most(supply: Ints, edges: Edges, limits: Ints) -> list[dict[int, int]]:
    """Return the amount of each row that each column gets when as much as possible is placed along the edges.

    ``limits`` (shape [columns]) is the capacity of each column. Supply that finds no place along the edges is in no
    column; ``edges.anywhere`` is ignored.
    """
    carried = _largest(supply, edges, limits).flow.tocoo()
    placed = (carried.data > 0) & (carried.row < len(supply))
    return _by_column(carried.row[placed], carried.col[placed] - len(supply), carried.data[placed], len(limits))


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
    whole = int(supply[degrees > 0].sum())

    def fits(limit: int) -> bool:
        return bool(_largest(supply, edges, np.full(columns, limit)).flow_value == whole)

    width = 1
    while not fits(high):
        low, high, width = high + 1, high + width, 2 * width
    return low + bisect_left(range(low, high), True, key=fits)


def _largest(supply: Ints, edges: Edges, limits: Ints) -> Any:
    """Return scipy's maximum flow along the edges. The nodes are the rows, the columns, the source and the sink."""
    rows, columns = len(supply), len(limits)
    source, sink = rows + columns, rows + columns + 1
    degrees = np.bincount(edges.rows, minlength=rows)
    # The arcs of each node, one node after the other: rows to columns, columns to the sink, the source to the rows.
    capacities = np.concatenate([supply[edges.rows], limits, supply])
    heads = np.concatenate([edges.columns + rows, np.full(columns, sink), np.arange(rows)])
    ends = np.cumsum(np.concatenate([[0], degrees, np.ones(columns), [rows, 0]]))
    arcs = tuple(array.astype(np.int32) for array in (capacities, heads, ends))
    return maximum_flow(csr_array(arcs, shape=(sink + 1, sink + 1)), source, sink)


def _cheapest(supply: Ints, edges: Edges, limits: Ints, kept: Ints, far: int = 0) -> list[dict[int, int]]:
    """Return the flow that moves least, as :func:`balance` does.

    A unit that stays on its edge is free, one that takes another edge costs 1, one through the shared node ``far``.
    """
    rows, columns, total = len(supply), len(limits), int(supply.sum())
    anybody, source, sink = rows + columns, rows + columns + 1, rows + columns + 2
    everyone, room = np.arange(columns) + rows, total if len(edges.anywhere) else 0
    homes = np.flatnonzero(kept)
    own = edges.rows[homes]
    arcs = (  # in a fixed order: tails, heads, capacities, and the cost of a unit
        (edges.rows, edges.columns + rows, supply[edges.rows], 1),
        (anybody, everyone, room, 0),
        (edges.anywhere, anybody, supply[edges.anywhere], far),
        (source, np.arange(rows), supply, 0),
        (everyone, sink, limits, 0),
        (own, edges.columns[homes] + rows, np.minimum(kept[homes], supply[own]), 0),
    )
    parts = [np.stack(np.broadcast_arrays(*arc)) for arc in arcs]
    from ortools.graph.python import min_cost_flow  # of the extra "train", which simulations do without

    solver = min_cost_flow.SimpleMinCostFlow()
    solver.add_arcs_with_capacity_and_unit_cost(*np.concatenate(parts, axis=1))
    solver.set_node_supply(source, total)
    solver.set_node_supply(sink, -total)
    status = solver.solve()
    assert status == solver.OPTIMAL, f"minimum-cost flow ended with {status} although a flow exists"
    ends = np.cumsum([part.shape[1] for part in parts])
    amounts, shares, through, _, _, stay = np.split(solver.flows(np.arange(ends[-1])), ends[:-1])
    amounts[homes] += stay
    found = _by_column(edges.rows, edges.columns, amounts, columns)
    # What goes through the shared node fills the columns' shares of it, rows in ascending order.
    receivers = np.repeat(np.arange(columns), shares)
    for column, row in zip(receivers.tolist(), np.repeat(edges.anywhere, through).tolist(), strict=True):
        found[column][row] = found[column].get(row, 0) + 1
    return found


def _by_column(rows: Ints, columns: Ints, amounts: Ints, count: int) -> list[dict[int, int]]:
    """Return the amounts as ``[{row: amount}]``, for ``count`` columns."""
    found: list[dict[int, int]] = [{} for _ in range(count)]
    used = np.flatnonzero(amounts)
    for row, column, amount in zip(rows[used].tolist(), columns[used].tolist(), amounts[used].tolist(), strict=True):
        found[column][row] = amount
    return found
