"""What this rank did when, for the pictures: two lines a step in ``timeline/g<group>.p<position>.jsonl``."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Timeline:
    """Collects spans in memory; the session writes them before the reduction and after the update of a step."""

    def __init__(self, run_dir: Path, group: int, position: int) -> None:
        self._path = os.fspath(run_dir / "timeline" / f"g{group}.p{position}.jsonl")
        self._spans: list[tuple[str, float, float]] = []

    @contextmanager
    def span(self, phase: str) -> Iterator[None]:
        """Measure a block, whether it succeeds or not."""
        start = time.time()
        try:
            yield
        finally:
            self._add(phase, round(start, 6), round(time.time(), 6))

    def _add(self, phase: str, start: float, end: float) -> None:
        """Waiting consists of many short looks; what follows within a few of them is one span."""
        if phase == "recover" and self._spans and self._spans[-1][0] == phase and start - self._spans[-1][2] < 0.005:
            start = self._spans.pop()[1]
        self._spans.append((phase, start, end))

    def write(self, step: int, epoch: int) -> None:
        """Append the spans of ``step``. Pictures are not worth stopping for: a full disk loses them, nothing else."""
        line = json.dumps({"step": step, "epoch": epoch, "spans": self._spans}) + "\n"
        self._spans = []
        try:
            fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(fd, line.encode())
            finally:
                os.close(fd)
        except OSError:
            return
