"""The exit of a command while one of its threads is still inside a call to a control store that is gone."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import threading, time
from datetime import timedelta

from torch.distributed import TCPStore

from megatron_ft import cli

class Slow:
    def __del__(self, sleep=time.sleep):  # the thread's call ends while the interpreter shuts down
        sleep(1.0)

def ask():
    asked.set()
    try:
        client.wait(["a key that is never set"], timedelta(seconds=0.5))
    except Exception:
        pass

slow, asked = Slow(), threading.Event()
server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
client = TCPStore("127.0.0.1", server.port, wait_for_workers=False)
threading.Thread(target=ask, daemon=True).start()
asked.wait()
cli.main = lambda: print("the last line") or 143
"""


def run(last_line: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", PROGRAM + last_line], capture_output=True, text=True)


def test_a_thread_inside_the_control_store_does_not_change_the_exit_code():
    ended = run("cli.run_and_exit()")
    assert (ended.returncode, ended.stdout) == (143, "the last line\n"), ended.stderr


def test_the_interpreters_own_shutdown_aborts_there():
    """Without this, `run_and_exit` would have no reason to exist."""
    assert run("import sys; sys.exit(cli.main())").returncode == -6
