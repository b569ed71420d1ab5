"""Files that are replaced atomically, by processes that share a directory and may share host name and process id."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from megatron_ft.utils import atomic_file

PACKAGE = Path(atomic_file.__file__).parent.parent
MOVES = {
    "utils/atomic_file.py",
    "runlog/run_directory.py",  # moves the files of an earlier start into a new directory
    "data/dataset.py",  # writes to a temporary directory with a random name
    "data/corpus.py",
    "checkpoint/export.py",  # moves a whole directory into place
}


def test_writers_with_the_same_host_name_and_process_id_never_tear_a_file(tmp_path):
    """Two containers whose agents are both process 1 do this; here two threads of one process stand for them."""
    path, failed = tmp_path / "ranks.json", []

    def write(number: int) -> None:
        try:
            for _ in range(300):
                atomic_file.write_json(path, [{"writer": number}] * (200 * number))
        except OSError as error:
            failed.append(error)

    atomic_file.write_json(path, [])
    writers = [threading.Thread(target=write, args=(number,)) for number in (1, 2)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        found = json.loads(path.read_text())
        assert len({entry["writer"] for entry in found}) <= 1
    assert not failed
    assert os.listdir(tmp_path) == ["ranks.json"]


def test_a_file_that_exists_is_not_created_again(tmp_path):
    path = tmp_path / "decision"
    assert atomic_file.create(path, "first") and not atomic_file.create(path, "second")
    assert path.read_text() == "first" and os.listdir(tmp_path) == ["decision"]


CHILD = """
import resource, sys
from pathlib import Path
from megatron_ft.utils import atomic_file as atomic
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
atomic.write(Path(sys.argv[1]), b"x" * 1000)
"""


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "file"
    atomic_file.write(path, "old")
    done = subprocess.run([sys.executable, "-c", CHILD, path], capture_output=True, text=True)
    assert "File too large" in done.stderr
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_module_has_an_atomic_write_of_its_own(path):
    if str(path.relative_to(PACKAGE)) in MOVES:
        return
    calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    names = [call.attr for call in calls if isinstance(call, ast.Attribute) and getattr(call.value, "id", "") == "os"]
    assert not {"replace", "rename", "link"} & set(names), "use ``utils.atomic_file``"
