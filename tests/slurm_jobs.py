"""Slurm jobs whose run waits for its test."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.slurm import Submission
from tools.slurm_lab import Lab

STEPS = 40


class Submitted(Submission):
    """One job, or array, in a lab. The job ends only after :meth:`go`, so that a test can do much to it before."""

    def __init__(self, lab: Lab, directory: Path, data_dir: Path, batch: Sequence[object], **variables: str) -> None:
        super().__init__(lab, directory, data_dir, batch, STEPS, **variables)

    def await_end(self) -> None:
        self.await_over("the end")

    def check(self, reference: list[dict]) -> None:
        """Check that the job has ended with exit code 0, too."""
        assert self.states() == {"COMPLETED"}, self.said()
        super().check(reference)
