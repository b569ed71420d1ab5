"""A process that is started again whenever it ends: the loop of a keeper, which does nothing else. No torch here.

Failures it assumes: the process dies or is stopped, any number of times. One that runs but does not answer is not noticed.
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from megatron_ft.launch.console import say

RESTARTS, WITHIN_S = 5, 60.0
"""So often in that time it is started again at once; the next time waits until that time has passed."""
STOPPED_S = 10.0
"""One that is stopped (SIGSTOP, a debugger) is waited for; after that long another takes its place."""
_LOOK_S = 0.1
_MOST_S = 0.25
"""What one look adds to a time at most: while the keeper was stopped itself, it has seen nothing."""


def keep(
    start: Callable[[], int],
    what: str,
    started: Callable[[int], None],
    note: Callable[[str, int, str], None],
    over: Callable[[int], bool] = lambda code: False,
    last_words: Callable[[], str] = lambda: "",
) -> None:
    """Start it, wait for its end, and so on, until ``over`` says so of how it ended (as ``returncode``).

    SIGCHLD must be blocked. ``started`` hears of each pid, ``note`` (what, pid, detail) of all but the first start.
    """
    deaths: deque[float] = deque(maxlen=RESTARTS)
    while True:
        pid = start()
        started(pid)
        if deaths:
            note("restarted", pid, "")
        code, why = await_end(pid)
        if over(code):
            return
        wait_s = deaths[0] + WITHIN_S - time.monotonic() if len(deaths) == RESTARTS else 0.0
        deaths.append(time.monotonic())
        when = f"in {wait_s:.0f} s, it ended {RESTARTS + 1} times within {WITHIN_S:g} s" if wait_s > 0 else "at once"
        why += last_words()
        note("died", pid, f"{why}; started again {when}")
        say(f"{what} (pid {pid}) {why}; training goes on without it, it is started again {when}")
        time.sleep(max(0.0, wait_s))


def await_end(pid: int) -> tuple[int, str]:
    """Wait until it has ended; kill it when it has been stopped for too long. Returns its code and what became of it."""
    stopped_s, looked = 0.0, time.monotonic()
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return code, ended_with(code)
        signal.sigtimedwait({signal.SIGCHLD}, _LOOK_S)
        looked, before = time.monotonic(), looked
        stopped_s = stopped_s + min(looked - before, _MOST_S) if _is_stopped(pid) else 0.0
        if stopped_s > STOPPED_S:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return -signal.SIGKILL, f"was stopped for {STOPPED_S:g} s and is ended"


def ended_with(code: int) -> str:
    return f"ended with {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _is_stopped(pid: int) -> bool:
    text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")  # not waited for, so it is there
    return text.rpartition(")")[2].split()[0] == "T"
