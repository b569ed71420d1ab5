"""Kill real ranks of a running job, by pid, from another process, and leave a line about it in the run record.

A planned fault is a :class:`~megatron_ft.runtime.points.Hold`: the rank freezes itself at that point, :func:`strike` sees
the frozen process and sends the signal. So "in the middle of an all-reduce" means exactly that, every time.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

from megatron_ft.errors import LaunchError
from megatron_ft.runtime import history
from megatron_ft.runtime.points import Hold

_POLL_S = 0.001


def pid_of(run_dir: Path, group: int, position: int = 0) -> int | None:
    """The pid of a living rank according to ``ranks.json``; None when it is not there (yet, or any more)."""
    try:
        ranks = json.loads((run_dir / "ranks.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    for rank in ranks:
        if (rank["group"], rank["position"]) == (group, position) and _is_rank(rank["pid"]):
            return rank["pid"]
    return None


def _is_rank(pid: int) -> bool:
    """Whether the process was started by an agent: the file may be old, and the pid somebody else's by now."""
    try:
        return b"megatron_ft.launch.bootstrap" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def is_stopped(pid: int) -> bool:
    """Whether the process is frozen by SIGSTOP (state T of proc(5))."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return text.rsplit(")", 1)[1].split()[0] == "T"


def kill(run_dir: Path, group: int, point: str, number: signal.Signals = signal.SIGKILL, position: int = 0) -> float:
    """Record the injection, then signal the rank; returns when it was sent (unix seconds).

    Raises ``LaunchError`` when the rank does not live.
    """
    pid = pid_of(run_dir, group, position)
    if pid is None:
        raise LaunchError(f"group {group} has no living rank {position} in {run_dir}/ranks.json; nothing was killed")
    history.append(run_dir, "inject", group=group, position=position, pid=pid, signal=number.name, point=point)
    sent = time.time()
    os.kill(pid, number)
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
            pid = pid_of(run_dir, hold.group)
            if pid is not None and is_stopped(pid):
                sent.append(kill(run_dir, hold.group, describe(hold)))
                waiting.remove(hold)
        if not still_running():
            raise LaunchError(f"the run in {run_dir} is over; not reached: {', '.join(map(describe, waiting))}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"not reached within {timeout_s:g} s: {', '.join(map(describe, waiting))}")
        time.sleep(_POLL_S)
    return sent


def describe(hold: Hold) -> str:
    """A hold in words, for records and messages."""
    bucket = "" if hold.bucket is None else f" {hold.bucket}"
    return f"{hold.point}{bucket}, step {hold.step}"
