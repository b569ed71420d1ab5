"""The package's modules, parsed once for all tests that read them."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from tests.support import ROOT

PACKAGE = ROOT / "megatron_ft"
MODULES = sorted(PACKAGE.rglob("*.py"))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a module's syntax tree, which no test may change, in the order of ``ast.walk``."""
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
