"""A rank ends when its script has ended, and its agent learns how."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from megatron_ft.config.schema import RunConfig
from megatron_ft.host.local_ranks import LocalRanks

MANAGER = """
import multiprocessing
if __name__ == "__main__":
    multiprocessing.held = multiprocessing.get_context("spawn").Manager()
    print("made", multiprocessing.held.dict(a=1))
"""
WORKERS = """
import multiprocessing, signal
from megatron_ft.data.loader import Loader
signal.signal(signal.SIGTERM, lambda *_: None)  # as that of a rank, which processes inherit
multiprocessing.Process(target=signal.pause, daemon=True).start()
held = Loader([1, 2], groups=1, microbatches_per_group=1, samples_per_microbatch=1, seed=0, num_workers=1)
print("started")
"""


@pytest.mark.parametrize(
    ("script", "printed"), [(MANAGER, "made {'a': 1}\n"), (WORKERS, "started\n")], ids=["manager", "workers"]
)
def test_what_the_script_leaves_behind_ends_with_it(tmp_path, script, printed):
    path = tmp_path / "script.py"
    path.write_text(script)
    command = [sys.executable, "-m", "megatron_ft.host.rank_bootstrap", str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, start_new_session=True)
    assert (ended.returncode, ended.stdout) == (0, printed), ended.stderr


def test_a_rank_that_has_ended_is_no_stray(tmp_path):
    rank, stray = (subprocess.Popen([sys.executable, "-c", f"exit({code})"]) for code in (3, 4))
    for ended in (rank, stray):  # until they are there to be reaped
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    started = SimpleNamespace(group=0, process=rank, ended=None)
    ranks = LocalRanks(
        MagicMock(), tmp_path, RunConfig(groups=1), MagicMock(start=lambda _environment: started), MagicMock()
    )
    ranks.start(group=0, position=0, incarnation=0, epoch=0)
    ranks.reap_strays(known=set())
    assert rank.wait() == 3
    ranks.reap_strays(known=set())  # no further than to a child that is waited for elsewhere
    with pytest.raises(ChildProcessError):
        os.waitpid(stray.pid, 0)
    stray.wait()
