"""Kill real ranks of a running job, by pid, from another process, and leave a line about it in the run record.

A planned fault is a :class:`~megatron_ft.runtime.points.Hold`: the rank freezes itself at that point, :func:`strike` sees
the frozen process and sends the signal. So "in the middle of an all-reduce" means exactly that, every time.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path

from megatron_ft.errors import LaunchError
from megatron_ft.faults import processes
from megatron_ft.runtime import history, points
from megatron_ft.runtime.points import Hold, start_of

_POLL_S = 0.001


def pid_of(run_dir: Path, group: int, position: int = 0) -> int | None:
    """The pid of a living rank according to ``ranks.json``; None when it is not there (yet, or any more)."""
    rank = processes.find(run_dir, group, position)
    return None if rank is None else rank.pid


def is_stopped(pid: int) -> bool:
    """Whether the process is frozen by SIGSTOP (state T of proc(5))."""
    try:
        return processes.Process(pid, start_of(pid)).is_stopped
    except OSError:
        return False


def kill(run_dir: Path, group: int, point: str, number: signal.Signals = signal.SIGKILL, position: int = 0) -> float:
    """Record the injection, then signal the rank; returns when it was sent (unix seconds).

    Raises ``LaunchError`` when the rank does not live.
    """
    rank = processes.find(run_dir, group, position)
    if rank is None:
        raise LaunchError(f"group {group} has no living rank {position} in {run_dir}/ranks.json; nothing was killed")
    history.append(run_dir, "inject", group=group, position=position, pid=rank.pid, signal=number.name, point=point)
    sent = time.time()
    rank.send(number)
    return sent


def strike(run_dir: Path, holds: list[Hold], timeout_s: float, still_running=lambda: True) -> list[float]:
    """Wait for each held rank to freeze, and SIGKILL it there; holds that freeze together die together.

    Returns when each was sent. Raises ``TimeoutError`` when a rank does not get to its point in time, and
    ``LaunchError`` when the run is over before.
    """
    waiting, sent = list(holds), []
    deadline = time.monotonic() + timeout_s
    while waiting:
        for hold in list(waiting):
            pid = pid_of(run_dir, hold.group, hold.position)
            if pid is not None and is_stopped(pid):
                sent.append(kill(run_dir, hold.group, describe(hold), position=hold.position))
                waiting.remove(hold)
        if not waiting:
            break  # the run may well be over by now, without those that were struck
        if not still_running():
            raise LaunchError(f"the run in {run_dir} is over; not reached: {', '.join(map(describe, waiting))}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"not reached within {timeout_s:g} s: {', '.join(map(describe, waiting))}")
        time.sleep(_POLL_S)
    return sent


def describe(hold: Hold) -> str:
    """A hold in words, for records and messages."""
    return points.describe(hold.point, hold.bucket) + ("" if hold.step is None else f", step {hold.step}")
