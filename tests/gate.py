"""Training scripts that a test holds back: a run must not be over before its test has done, and seen, what it is about."""

from __future__ import annotations

from pathlib import Path

from tests import support

_CHANGE = """
import itertools
import os
import time
from pathlib import Path
from megatron_ft.runtime.session import Session
make, steps = Session.train_step, itertools.count(1)
def train_step(self, *arguments, **options):
    step = next(steps)
    deadline = time.monotonic() + step * float({pace!r})
    while step > {free} and not Path({gate!r}).exists() and time.monotonic() < deadline:
        Path({gate!r} + f".{{os.getpid()}}").touch()
        time.sleep(0.02)
    return make(self, *arguments, **options)
Session.train_step = train_step
"""
FREE = 5
SHUT = float("inf")


class Gate:
    """Each process makes ``free`` steps, then each step waits for :meth:`open`, but not for ever: the n-th for n times
    ``pace_s``. So there are steps for a group to come back in, soon, and the last of them are minutes away. With ``SHUT`` a
    step waits as long as it takes."""

    def __init__(self, directory: Path, pace_s: float = 0.1, free: int = FREE, script: Path = support.SCRIPT) -> None:
        self._directory = directory / "gate"
        self._directory.mkdir(exist_ok=True)
        change = _CHANGE.format(pace=str(pace_s), free=free, gate=str(self._directory / "open"))
        self.script = support.changed_script(self._directory / "train.py", change, script)

    def open(self) -> None:
        (self._directory / "open").touch()

    def waiting(self) -> int:
        """How many processes have come to it."""
        return len(list(self._directory.glob("open.*")))
