"""A rank that the kernel kills for lack of memory, in a control group with a limit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stores import await_
from tests.support import ROOT, TIMEOUT_S, Run, command

pytestmark = pytest.mark.system
LIMIT_BYTES = 1 << 30
JOIN = "import os, sys; open(sys.argv[1], 'w').write(str(os.getpid())); os.execvp(sys.argv[2], sys.argv[2:])"
HUNGRY = """
import os, signal, megatron_ft
session = megatron_ft.init()
if session.group == 1:
    hoard = []
    while True:
        hoard.append(bytearray(b"x") * (32 << 20))
signal.pause()
"""


@pytest.fixture
def limited() -> Iterator[Path]:
    """A control group with ``LIMIT_BYTES``, of whichever version controls memory here."""
    for parent, most in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        group = parent / f"megatron_ft-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / most).write_text(str(LIMIT_BYTES))
        except OSError:
            group.rmdir()
            continue
        yield group
        await_(lambda procs=group / "cgroup.procs": not procs.read_text(), "all processes of the group have ended")
        group.rmdir()
        return
    pytest.skip("no control group with a limit of memory can be made here")


def test_a_loss_for_lack_of_memory_says_so(tmp_path, limited):
    script = tmp_path / "hungry.py"
    script.write_text(HUNGRY)
    words = command("launch", "--groups", 2, "--run-dir", tmp_path / "run", script)
    joined = [sys.executable, "-c", JOIN, str(limited / "cgroup.procs"), *words]
    process = subprocess.Popen(joined, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    run = Run(tmp_path / "run", process, groups=2)
    try:
        await_(
            lambda: run.events("fault") if (tmp_path / "run" / "history.jsonl").exists() else None,
            "a rank is lost",
            TIMEOUT_S,
        )
        fault = run.events("fault")[0]
        assert (fault["group"], fault["signal"]) == (1, "SIGKILL")
        assert fault["detail"].startswith(
            f"out of memory: the kernel has killed a process of cgroup {limited} (limit 1.07 GB)"
        )
    finally:
        process.terminate()
        shown, _ = process.communicate(timeout=TIMEOUT_S)
    assert "out of memory: the kernel has killed" in shown, shown
