"""A class has one job, and its size shows it. A larger one says in its docstring why it is not divided."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.sources import MODULES, nodes

ATTRIBUTES, METHODS = 15, 20
REASON = "Large because "
TO_DIVIDE = """
Agent Agent ArrayTask Cluster Hosts Injector RestartManager _Run
"""
"""Larger classes without a reason. None is added; one that is divided, or gives its reason, goes."""


def attributes_and_methods(of: ast.ClassDef) -> tuple[set[str], list[str]]:
    """Return the names that its methods assign to ``self``, and its methods."""
    methods = [node for node in of.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    assigned = set[str]()
    for node in (inner for method in methods for inner in ast.walk(method)):
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                assigned.add(name)
    return assigned, [method.name for method in methods]


def large_classes() -> Iterator[str]:
    """Yield the name of each class that is too large and does not say why."""
    for node in (node for path in MODULES for node in nodes(path)):
        if isinstance(node, ast.ClassDef) and REASON not in (ast.get_docstring(node) or ""):
            attributes, methods = attributes_and_methods(node)
            if len(attributes) > ATTRIBUTES or len(methods) > METHODS:
                yield node.name


def test_a_class_with_many_attributes_or_methods_gives_the_reason():
    assert sorted(large_classes()) == TO_DIVIDE.split()


def test_what_is_counted():
    (made,) = ast.parse(
        "class A:\n def f(self):\n  self.a, self.b.c = 1, 2\n async def g(self):\n  self.a: int = 3"
    ).body
    assert attributes_and_methods(made) == ({"a"}, ["f", "g"])
