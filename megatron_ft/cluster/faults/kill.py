"""Kills ranks of a running job from another process, and records it.

A planned fault is a :class:`~megatron_ft.run.injection_points.Breakpoint`: the rank freezes itself at that point, and
:func:`strike` sends the signal to the frozen process. A kill in the middle of an all-reduce is therefore exact and
repeatable.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path

from megatron_ft.cluster.faults import process_lookup
from megatron_ft.errors import LaunchError
from megatron_ft.record import history
from megatron_ft.run import injection_points
from megatron_ft.run.injection_points import Breakpoint

_POLL_S = 0.001


def pid_of(run_dir: Path, group: int, position: int = 0) -> int | None:
    """Returns the pid of a living rank according to ``ranks.json``, else None."""
    rank = process_lookup.find(run_dir, group, position)
    return None if rank is None else rank.pid


def is_frozen(run_dir: Path, group: int, position: int = 0) -> bool:
    """Returns True for a living rank that SIGSTOP has frozen."""
    rank = process_lookup.find(run_dir, group, position)
    return rank is not None and rank.is_stopped


def kill(run_dir: Path, group: int, point: str, number: signal.Signals = signal.SIGKILL, position: int = 0) -> float:
    """Records the injection, then signals the rank. Returns the time of the signal (Unix seconds).

    Raises ``LaunchError`` when the rank is not alive.
    """
    rank = process_lookup.find(run_dir, group, position)
    if rank is None:
        raise LaunchError(f"group {group} has no living rank {position} in {run_dir}/ranks.json; no rank was killed")
    history.append(run_dir, "inject", group=group, position=position, pid=rank.pid, signal=number.name, point=point)
    sent = time.time()
    rank.send(number)
    return sent


def strike(run_dir: Path, holds: list[Breakpoint], timeout_s: float, still_running=lambda: True) -> list[float]:
    """Waits for each held rank to freeze, and kills it there. Returns the times of the signals.

    Raises ``TimeoutError`` when a rank does not reach its point in time, and ``LaunchError`` when the run ends before.
    """
    waiting, sent = list(holds), []
    deadline = time.monotonic() + timeout_s
    while waiting:
        for hold in list(waiting):
            if is_frozen(run_dir, hold.group, hold.position):
                sent.append(kill(run_dir, hold.group, describe(hold), position=hold.position))
                waiting.remove(hold)
        if not waiting:
            break  # without the killed ranks the run may be over by now
        if not still_running():
            raise LaunchError(f"the run in {run_dir} is over; not reached: {', '.join(map(describe, waiting))}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"not reached within {timeout_s:g} s: {', '.join(map(describe, waiting))}")
        time.sleep(_POLL_S)
    return sent


def describe(hold: Breakpoint) -> str:
    """Describes a hold for records and messages."""
    return injection_points.describe(hold.point, hold.bucket) + ("" if hold.step is None else f", step {hold.step}")
