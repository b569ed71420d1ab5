"""The house rules of docs/architecture.md that a machine can read: imports point one way, core decides only."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent.parent / "megatron_ft"
SHARED = {"errors", "types", "config", "checks", "split"}
# A room (or a module at the top) may import the rooms named here, itself and the shared words; core only types and errors.
ALLOWED = {
    "types": set(),
    "errors": set(),
    "config": {"core"},
    "checks": set(),
    "split": set(),
    "core": set(),
    "data": set(),
    "engines": {"core", "data"},
    "runtime": {"core", "engines", "data"},
    "faults": {"core", "runtime"},
    "sim": {"core", "faults", "planner"},
    "planner": {"core"},
    "report": {"core", "runtime", "faults"},
    "launch": {"core", "runtime", "__version__"},
    "burnin": {"faults", "launch", "runtime"},
    "doctor": {"core", "launch", "runtime", "__version__"},
    "cli": {"data", "faults", "planner", "launch", "report", "doctor", "sim", "burnin", "__version__"},
    "__init__": {"runtime"},
}
PURE = {"__future__", "bisect", "collections", "dataclasses", "functools", "heapq", "itertools", "math", "statistics"}
PURE |= {"typing"}
IN_CORE = PURE | {"networkx", "numpy", "scipy", "ortools", "megatron_ft"}
MODULES = sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """Dotted names of everything a module imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down_the_arrows(path):
    room = room_of(path)
    assert room in ALLOWED, f"{room} is a new room: say in docs/architecture.md and here what it may import"
    ours = {name.split(".")[1] for name in imports(path) if name.startswith("megatron_ft.")}
    shared = {"errors", "types"} if room in ("core", "types", "errors") else SHARED
    assert ours <= ALLOWED[room] | shared | {room}


@pytest.mark.parametrize("name", sorted(SHARED))
def test_shared_words_use_no_room_but_config_asks_which_placements_exist(name):
    ours = {found for found in imports(PACKAGE / f"{name}.py") if found.startswith("megatron_ft.")}
    rooms = {found for found in ours if found.split(".")[1] not in SHARED}
    assert rooms <= ({"megatron_ft.core.replication"} if name == "config" else set())


@pytest.mark.parametrize("path", sorted((PACKAGE / "core").glob("*.py")), ids=lambda path: path.name)
def test_core_imports_nothing_but_pure_libraries(path):
    """No clock, thread, process, file, randomness or tensor: what is not on the list is not in core."""
    assert {name.split(".")[0] for name in imports(path)} <= IN_CORE


def test_files_fit_on_a_few_screens():
    long = {str(path.relative_to(PACKAGE)): n for path in MODULES if (n := len(path.read_text().splitlines())) > 500}
    assert not long, f"when a file grows past 500 lines its owner has two jobs: {long}"
