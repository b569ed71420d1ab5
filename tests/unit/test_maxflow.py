"""Balanced flows compared with every possible way."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.core.scheduling.maxflow import Edges, balance


@st.composite
def problems(draw):
    """Up to three rows and columns; a row may go along its edges, or anywhere."""
    columns = draw(st.integers(1, 3))
    allowed = [sorted(draw(st.sets(st.integers(0, columns - 1)))) for _ in range(draw(st.integers(1, 3)))]
    supply = [draw(st.integers(1, 3)) for _ in allowed]
    edges = [(row, column) for row, own in enumerate(allowed) for column in own]
    kept = [draw(st.integers(0, supply[row])) for row, _ in edges]
    return supply, allowed, columns, edges, kept


def splits(amount: int, columns: list[int]):
    """All ways to cut ``amount`` into parts for the columns."""
    if len(columns) == 1:
        yield {columns[0]: amount}
        return
    for first in range(amount + 1):
        for rest in splits(amount - first, columns[1:]):
            yield {columns[0]: first, **rest}


def best(supply, allowed, columns, kept: dict[tuple[int, int], int]) -> tuple[int, int]:
    """Return the least largest load, and how much can stay among all flows with that load."""
    everywhere = list(range(columns))
    ways = [list(splits(amount, own or everywhere)) for amount, own in zip(supply, allowed, strict=True)]
    found = []
    for way in product(*ways):
        load = max(sum(row.get(column, 0) for row in way) for column in everywhere)
        stays = sum(min(row.get(c, 0), kept.get((number, c), 0)) for number, row in enumerate(way) for c in row)
        found.append((load, stays))
    least = min(load for load, _ in found)
    return least, max(stays for load, stays in found if load == least)


@given(problems())
@settings(max_examples=100)
def test_no_other_way_is_more_level_or_moves_less(problem):
    supply, allowed, columns, edges, kept = problem
    rows, ends = (np.array([edge[i] for edge in edges], dtype=np.int64) for i in (0, 1))
    anywhere = np.array([row for row, own in enumerate(allowed) if not own], dtype=np.int64)
    given_edges = Edges(rows, ends, anywhere)
    found = balance(np.array(supply, dtype=np.int64), given_edges, columns, np.array(kept, dtype=np.int64))
    assert len(found) == columns
    for row, amount in enumerate(supply):
        assert sum(own.get(row, 0) for own in found) == amount
    for column, own in enumerate(found):
        assert all(amount > 0 and (not allowed[row] or column in allowed[row]) for row, amount in own.items())
    at_home = dict(zip(edges, kept, strict=True))
    least, most = best(supply, allowed, columns, at_home)
    assert max(sum(own.values()) for own in found) == least
    stays = sum(min(amount, at_home.get((row, c), 0)) for c, own in enumerate(found) for row, amount in own.items())
    assert stays == most
