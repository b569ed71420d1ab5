"""The signals that end a launcher in order."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

CODE = "from megatron_ft.utils.signal_wakeup import stop_signals; print(*(int(number) for number in stop_signals()))"
ENDS = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2}


@pytest.mark.parametrize(("first", "numbers"), [([], {*ENDS, signal.SIGHUP}), (["nohup"], ENDS)])
def test_a_closed_terminal_ends_a_launcher_unless_it_was_started_with_nohup(first, numbers):
    hears = (
        "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL);" if not first else ""
    )  # the parent of pytest may have ignored it
    done = subprocess.run([*first, sys.executable, "-c", hears + CODE], capture_output=True, text=True, check=True)
    assert set(map(int, done.stdout.split())) == numbers
