"""The house rules of docs/architecture.md that a machine can read: imports point one way, core decides only."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent.parent / "megatron_ft"
SHARED = {"errors", "types", "config"}
# A room may import the rooms named here, itself and the shared words; core only types and errors.
ALLOWED = {
    "core": set(),
    "data": set(),
    "engines": {"core", "data"},
    "faults": {"core", "runtime"},
    "runtime": {"core", "engines", "data"},
    "report": {"core", "runtime", "faults"},
    "launch": {"core", "runtime"},
}
NOT_IN_CORE = {"torch", "time", "os", "threading", "random", "socket", "subprocess", "datetime"}
MODULES = sorted(PACKAGE.rglob("*.py"))
ROOMS = [path for path in MODULES if path.relative_to(PACKAGE).parts[0] in ALLOWED]


def imports(path: Path) -> set[str]:
    """Dotted names of everything a module imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", ROOMS, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down_the_arrows(path):
    room = path.relative_to(PACKAGE).parts[0]
    ours = {name.split(".")[1] for name in imports(path) if name.startswith("megatron_ft.")}
    shared = {"errors", "types"} if room == "core" else SHARED
    assert ours <= ALLOWED[room] | shared | {room}


@pytest.mark.parametrize("path", sorted((PACKAGE / "core").glob("*.py")), ids=lambda path: path.name)
def test_core_has_no_clock_thread_process_or_tensor(path):
    assert not {name.split(".")[0] for name in imports(path)} & NOT_IN_CORE


def test_files_fit_on_a_few_screens():
    long = {str(path.relative_to(PACKAGE)): n for path in MODULES if (n := len(path.read_text().splitlines())) > 500}
    assert not long, f"when a file grows past 500 lines its owner has two jobs: {long}"
