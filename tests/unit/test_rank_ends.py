"""A rank ends when its script has ended."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import multiprocessing
if __name__ == "__main__":
    multiprocessing.held = multiprocessing.get_context("spawn").Manager()
    print("made", multiprocessing.held.dict(a=1))
"""


def test_a_manager_that_the_script_leaves_behind_ends_with_it(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "megatron_ft.agent.rank_bootstrap", str(script)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, start_new_session=True)
    assert (ended.returncode, ended.stdout) == (0, "made {'a': 1}\n"), ended.stderr
