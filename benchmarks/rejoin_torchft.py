"""One trial of ``rejoin.py`` with torchft 0.2.0: a replica group comes back and heals from another.

Started with torchft's interpreter (``recovery_torchft.environment``), this file is one replica group. A new one waits, warm,
for a file before it asks for a quorum.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import recovery_torchft
from recovery_torchft import GROUPS, TIMEOUT_S, attempts_of, trained

_PORT = 29511
PER_GROUP = 3
"""Microbatches of one group in a step, as in ours."""
SETTINGS = recovery_torchft.DEFAULTS
"""Healing a large state takes longer than tight timeouts allow: with 5 s the four never came together again."""


def trial(directory: Path, megabytes: int, victim: int, without: int) -> dict:
    """Run one trial; return durations of the survivors' attempts at steps, and the seconds from going on to having a
    part."""
    python = recovery_torchft.environment()
    lighthouse, env = recovery_torchft.lighthouse(SETTINGS, _PORT)
    workers: dict[int, subprocess.Popen] = {}
    with (directory / "log").open("w") as log:
        options = {"cwd": directory, "env": env, "stdout": log, "stderr": subprocess.STDOUT}
        server = subprocess.Popen(lighthouse, **options)

        def start(group: int, name: str) -> None:
            command = [str(python), __file__, str(group), str(megabytes), str(directory / name)]
            workers[group] = subprocess.Popen(command, **options)

        try:
            for group in range(GROUPS):
                (directory / f"attempts.{group}.go").touch()
                start(group, f"attempts.{group}")
            watched = (victim + 1) % GROUPS
            _await("all take part", lambda: trained(directory, watched) >= 3)
            workers[victim].send_signal(signal.SIGKILL)
            workers[victim].wait()
            _await("the others go on without the victim", lambda: trained(directory, watched, GROUPS - 1) >= 1)
            back = directory / "attempts.back"
            start(victim, back.name)
            _await("the victim is warm", lambda: back.with_suffix(".back.warm").exists())
            first = len(attempts_of(directory, watched)) + 1
            _await("some attempts", lambda: len(attempts_of(directory, watched)) >= first + without)
            going_on = time.time()
            back.with_suffix(".back.go").touch()
            _await("all take part again", lambda: trained(directory, watched) >= 1)
            attempts = attempts_of(directory, watched)
        except _Late as late:
            made = [attempt["participants"] for attempt in attempts_of(directory, watched)]
            return {"failed": f"{late}; participants of each attempt: {made}"}
        except Exception:
            print((directory / "log").read_text()[-3000:], file=sys.stderr)
            raise
        finally:
            for process in (*workers.values(), server):
                process.kill()
                process.wait()
    during = [attempt for attempt in attempts if attempt["ended"] > going_on]
    durations = lambda some: [attempt["ended"] - attempt["begun"] for attempt in some]  # noqa: E731
    return {
        "without_s": durations([attempt for attempt in attempts[first:] if attempt["ended"] < going_on]),
        "during_s": durations(during),
        "back_s": during[-1]["ended"] - going_on,
        "discarded": sum(not attempt["committed"] for attempt in during),
    }


class _Late(RuntimeError):
    """An error: torchft has not come to the awaited point."""


def _await(what: str, condition) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise _Late(f"not within {TIMEOUT_S:g} s: {what}")
        time.sleep(0.02)


def replica(group: int, megabytes: int, out: Path) -> None:
    """Run one replica group of one rank, with Adam; a new one reports when it is warm, and waits until it may go on."""
    import torch

    def warm() -> None:
        out.with_suffix(out.suffix + ".warm").touch()
        while not out.with_suffix(out.suffix + ".go").exists():
            time.sleep(0.05)

    adam = lambda parameters: torch.optim.Adam(parameters, lr=1e-6)  # noqa: E731
    recovery_torchft.replica(group, megabytes, str(out), "127.0.0.1", SETTINGS["manager"], adam, PER_GROUP, warm)


if __name__ == "__main__":
    replica(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
