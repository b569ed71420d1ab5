"""A process of the control store that is started again whenever it ends: the loop of a keeper, which does nothing else.
No torch here.

Failures it assumes: the process dies or is stopped, any number of times. One that runs but does not answer is not noticed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

from megatron_ft.runlog import history
from megatron_ft.utils import shared_file, steady_clock
from megatron_ft.utils.console import say
from megatron_ft.utils.process_status import process_status

RESTARTS, WITHIN_S = 5, 60.0
"""This number of restarts within that time is made at once; the next one waits until the time has passed."""
STOPPED_S = 10.0
"""Seconds to wait for a process that is stopped (SIGSTOP, a debugger) before another takes its place."""
_LOOK_S = 0.1
_MOST_S = 0.25
"""The most that one look adds to a time: while the keeper was stopped itself, it has seen nothing."""


def keep(
    start: Callable[[], int],
    what: str,
    run_dir: Path,
    entry: Path,
    said: Mapping[str, str],
) -> NoReturn:
    """Start the process, wait for its end, and repeat.

    SIGCHLD must be blocked. The file ``entry`` names the process that runs, and has ``said``, too. The run record gets
    every event but the first start. A full disk is no reason to have no store.
    """
    deaths: deque[float] = deque(maxlen=RESTARTS)
    host = socket.gethostname()

    def note(event: str, pid: int, detail: str) -> None:
        with contextlib.suppress(OSError):
            history.append(run_dir, "store", what=event, pid=pid, host=host, detail=detail)

    # no limit: a keeper has nothing else to do, and ends with its agent
    while True:
        pid = start()
        with contextlib.suppress(OSError):
            shared_file.write_json(entry, {"pid": pid, "host": host, **said, "started": round(steady_clock.now(), 6)})
        if deaths:
            note("restarted", pid, "")
        _, why = await_end(pid)
        wait_s = deaths[0] + WITHIN_S - time.monotonic() if len(deaths) == RESTARTS else 0.0
        deaths.append(time.monotonic())
        when = f"in {wait_s:.0f} s, it ended {RESTARTS + 1} times within {WITHIN_S:g} s" if wait_s > 0 else "at once"
        note("died", pid, f"{why}; started again {when}")
        say(f"{what} (pid {pid}) {why}; it is started again {when}")
        time.sleep(max(0.0, wait_s))


def await_end(pid: int) -> tuple[int, str]:
    """Wait until the process has ended; kill it when it was stopped for too long. Return its code and a reason."""
    stopped_s, looked = 0.0, time.monotonic()
    # no limit: a keeper has nothing else to do, and ends with its agent
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return code, ended_with(code)
        signal.sigtimedwait({signal.SIGCHLD}, _LOOK_S)
        looked, before = time.monotonic(), looked
        stopped_s = stopped_s + min(looked - before, _MOST_S) if process_status(pid).state == "T" else 0.0
        if stopped_s > STOPPED_S:
            os.kill(pid, signal.SIGKILL)
            # no limit: the process was killed before; it ends, unless it is inside the kernel (state D)
            os.waitpid(pid, 0)
            return -signal.SIGKILL, f"was stopped for {STOPPED_S:g} s and is ended"


def ended_with(code: int) -> str:
    """Describe an exit code as ``subprocess`` reports it."""
    return f"ended with {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
