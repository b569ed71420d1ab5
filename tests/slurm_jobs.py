"""Slurm jobs whose run waits for its test."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests import support
from tests.slurm import Submission
from tools.slurm_lab import Lab

STEPS = 40
_GATE = """
import itertools
import time
from pathlib import Path
from megatron_ft.runtime.session import Session
make, made = Session.train_step, itertools.count()
def train_step(self, *arguments, **options):
    deadline = time.monotonic() + 2.5 * (next(made) > 4)
    while not Path({gate!r}).exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return make(self, *arguments, **options)
Session.train_step = train_step
"""


class Submitted(Submission):
    """One job, or array, in a lab. Its steps take longer until :meth:`go`: it does not end before its test has seen what it
    waits for."""

    def __init__(self, lab: Lab, directory: Path, data_dir: Path, batch: Sequence[object], **variables: str) -> None:
        self._gate = directory / "go"
        script = support.changed_script(directory / "train.py", _GATE.format(gate=str(self._gate)))
        super().__init__(lab, directory, data_dir, batch, script, STEPS, **variables)

    def go(self) -> None:
        self._gate.touch()

    def await_end(self) -> None:
        self.await_over("the end")

    def check(self, reference: list[dict]) -> None:
        """It has ended with 0, too."""
        assert self.states() == {"COMPLETED"}, self.said()
        super().check(reference)
