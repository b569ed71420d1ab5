"""The example that converts a script for DistributedDataParallel."""

from __future__ import annotations

import ast
import difflib
import re
import subprocess
import sys

from tests import support

EXAMPLE = support.ROOT / "examples" / "your_own_loop"
HELD_OUT = re.compile(r"held-out loss ([\d.]+); saved in")


def code(name: str) -> list[str]:
    """Return the lines of a script that are not empty, without its docstring."""
    text = (EXAMPLE / name).read_text(encoding="utf-8")
    first = ast.parse(text).body[0]
    return [line for line in text.splitlines()[first.end_lineno :] if line.strip()]


def test_the_conversion_changes_few_lines_as_the_documents_say():
    new = [line for line in difflib.ndiff(code("ddp.py"), code("ft.py")) if line.startswith("+ ")]
    assert len(new) <= 15, new
    said = [support.ROOT / "docs" / "script.md", support.ROOT / "examples" / "README.md"]
    assert all(f"{len(new)} lines" in path.read_text(encoding="utf-8") for path in said)


def test_both_scripts_learn_the_task(tmp_path):
    """The losses are not equal: the two orders of the samples differ."""
    ddp = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--standalone",
        EXAMPLE / "ddp.py",
    ]
    by_ddp = subprocess.run(
        [*map(str, ddp), "--out", str(tmp_path / "ddp.pt")], capture_output=True, text=True, timeout=120, check=False
    )
    assert by_ddp.returncode == 0, by_ddp.stderr
    config = EXAMPLE / "ds_config.json"
    where = ["--groups", 2, "--config", config, "--run-dir", tmp_path / "run"]
    ours = support.ft("launch", *where, EXAMPLE / "ft.py", "--", "--out", tmp_path / "ft.pt")
    assert ours.returncode == 0, ours.stdout + ours.stderr
    logs = "".join(path.read_text() for path in sorted((tmp_path / "run" / "logs").glob("*.log")))
    losses = [float(HELD_OUT.search(text)[1]) for text in (by_ddp.stdout, logs)]
    assert all(loss < 2.6 for loss in losses), losses  # 3.4 before training
    assert (tmp_path / "ft.pt").exists()
