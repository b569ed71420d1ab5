"""The budget of lines of code of each package: a contributor has to read them."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable

from tests.sources import MODULES, nodes
from tests.unit.test_packages import package_of

BUDGETS = {
    "worker": 4980,
    "core": 4705,
    "engines": 3770,
    "agent": 2990,
    "simulation": 3395,
    "collectives": 2000,
    "coordination": 1820,
    "launchers": 1800,
    "data": 1800,
    "runlog": 1740,
    "utils": 1420,
    "faults": 1370,
    "config": 1630,
    "planning": 1030,
    "qualify": 1210,
    "checkpoint": 1210,
    "doctor": 1180,
    "report": 1180,
    "integrations": 1250,
    "commands": 390,
    "auth": 290,
    "cli": 260,
    "audit": 240,
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
