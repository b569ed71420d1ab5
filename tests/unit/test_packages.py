"""The rules of the package layout (docs/architecture.md) that a machine can read: imports point one way, core decides
only."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

from tests.sources import MODULES, PACKAGE, nodes

ORDER = """
errors codec types utils core config record data run/store run/engines run/injection_points run/collectives run/checkpoint
run __init__ integrations host proof cluster plan commands cli __main__
""".split()
"""Each package, or module at the top, may import itself and those before it."""
IN_CORE = {
    "__future__",
    "abc",
    "bisect",
    "collections",
    "contextlib",
    "dataclasses",
    "functools",
    "heapq",
    "itertools",
    "math",
    "statistics",
}
IN_CORE |= {"types", "typing", "networkx", "numpy", "scipy", "ortools", "megatron_ft"}


def package_of(path: Path) -> str:
    """Return the entry of ``ORDER`` that a module belongs to; its top directory if there is none."""
    name = path.relative_to(PACKAGE).with_suffix("").as_posix()
    return max((one for one in ORDER if f"{name}/".startswith(f"{one}/")), key=len, default=name.partition("/")[0])


def imports(path: Path) -> set[str]:
    """Return the dotted names of everything a module imports, wherever in it."""
    found: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_a_module_imports_only_packages_that_come_before_its_own():
    for path in MODULES:
        package = package_of(path)
        assert package in ORDER, f"{package} is a new package: say in docs/architecture.md and here where it stands"
        used = {
            package_of(Path(PACKAGE, *name.split(".")[1:])) for name in imports(path) if name.startswith("megatron_ft.")
        }
        assert used & set(ORDER) <= set(ORDER[: ORDER.index(package) + 1]), path


def test_no_two_modules_have_the_same_name():
    """``base`` is the contract of what its package has several kinds of."""
    names = Counter(path.stem for path in MODULES if path.stem not in ("__init__", "base"))
    assert [name for name, count in names.items() if count > 1] == []


def test_core_imports_nothing_but_pure_libraries():
    """A clock, thread, process, file, source of randomness or tensor has no place in core."""
    for path in [PACKAGE / "codec.py", *sorted((PACKAGE / "core").rglob("*.py"))]:
        assert {name.split(".")[0] for name in imports(path)} <= IN_CORE, path
        ours = {name.split(".")[1] for name in imports(path) if name.startswith("megatron_ft.")}
        assert ours <= {"codec", "core", "errors", "types"}, path


def test_what_a_login_node_runs_does_not_import_torch():
    """``report`` and ``status`` read a run where torch is not installed (``setup.py``: it is of the extra ``train``), and
    every command has its help."""
    commands = (
        "from megatron_ft import cli; from megatron_ft.commands import report_command, status_command; cli._parser()"
    )
    blocked = f"import sys; sys.modules['torch'] = None; {commands}"
    done = subprocess.run([sys.executable, "-c", blocked], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
