"""The budget of lines of code of each package: a contributor has to read them."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable

from tests.sources import MODULES, nodes
from tests.unit.test_packages import package_of

BUDGETS = {
    "cluster": 5070,
    "run": 4980,
    "core": 4710,
    "run/engines": 3770,
    "host": 3160,
    "proof": 2980,
    "record": 2060,
    "run/collectives": 2000,
    "run/store": 1830,
    "data": 1800,
    "utils": 1710,
    "plan": 1690,
    "config": 1630,
    "commands": 1310,
    "run/checkpoint": 1210,
    "integrations": 1190,
    "run/injection_points": 280,
    "cli": 240,
    "types": 180,
    "codec": 90,
    "errors": 30,
    "__init__": 20,
    "__main__": 10,
}
"""Lines that hold a token other than a comment, less docstrings. A change that needs more raises a number here and gives
its reason in the commit; what removes code lowers it."""


def test_every_package_keeps_its_budget():
    found = Counter[str]()
    for path in MODULES:
        found[package_of(path)] += lines_of_code(path.read_text(encoding="utf-8"), nodes(path))
    assert found.keys() == BUDGETS.keys()
    assert {
        package: f"{count} of {BUDGETS[package]}" for package, count in found.items() if count > BUDGETS[package]
    } == {}


def lines_of_code(source: str, tree: Iterable[ast.AST]) -> int:
    text = [line.strip() for line in source.split("\n")]
    lines = {number for number, line in enumerate(text, 1) if line and not line.startswith("#")}
    docstrings = set[int]()
    for node in tree:
        match node:
            case ast.Expr(value=ast.Constant(value=str()), lineno=first, end_lineno=int(last)):
                docstrings.update(range(first, last + 1))
            case ast.Constant(value=str()) | ast.JoinedStr():  # of several lines: all of them hold a token
                lines.update(range(node.lineno, (node.end_lineno or 0) + 1))
    return len(lines - docstrings)
