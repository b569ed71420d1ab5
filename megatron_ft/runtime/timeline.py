"""What this rank did when, for the pictures: two lines a step in ``timeline/g<group>.p<position>.jsonl``."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Timeline:
    """Collects spans in memory; the session writes them before the reduction and after the update of a step."""

    def __init__(self, run_dir: Path, group: int, position: int) -> None:
        self._path = run_dir / "timeline" / f"g{group}.p{position}.jsonl"
        self._spans: list[tuple[str, float, float]] = []

    @contextmanager
    def span(self, phase: str) -> Iterator[None]:
        """Measure a block, whether it succeeds or not."""
        start = time.time()
        try:
            yield
        finally:
            self._spans.append((phase, round(start, 6), round(time.time(), 6)))

    def write(self, step: int, epoch: int) -> None:
        """Append the spans of ``step``. Pictures are not worth stopping for: a full disk loses them, nothing else."""
        line = json.dumps({"step": step, "epoch": epoch, "spans": self._spans}) + "\n"
        self._spans = []
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError:
            return
