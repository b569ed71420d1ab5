"""The activities of this rank over time, for the pictures: two lines a step in
``timeline/g<group>.p<position>.jsonl``."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from megatron_ft.utils import shared_file, steady_clock


class Span:
    """A measured block; a generator would take three times as long, several times a step."""

    def __init__(self, phase: str, add: Callable[[str, float, float], None]) -> None:
        self._phase, self._add = phase, add

    def __enter__(self) -> None:
        self._start = steady_clock.now()

    def __exit__(self, *raised: object) -> None:
        self._add(self._phase, round(self._start, 6), round(steady_clock.now(), 6))


class Timeline:
    """Collects spans in memory. They are assigned to a step before its reduction and after its update."""

    def __init__(self, run_dir: Path, group: int, position: int) -> None:
        self._path = os.fspath(run_dir / "timeline" / f"g{group}.p{position}.jsonl")
        self._fd: int | None = None
        self._spans: list[tuple[str, float, float]] = []
        self._assigned: list[dict[str, object]] = []

    def span(self, phase: str) -> Span:
        """Measure a block, whether it succeeds or not."""
        return Span(phase, self._add)

    def _add(self, phase: str, start: float, end: float) -> None:
        """Add a span. Waiting consists of many short looks; spans a few looks apart are merged."""
        if phase == "recover" and self._spans and self._spans[-1][0] == phase and start - self._spans[-1][2] < 0.005:
            start = self._spans.pop()[1]
        self._spans.append((phase, start, end))

    def assign(self, step: int, epoch: int) -> None:
        """Assign the spans since the last call to ``step``."""
        self._assigned.append({"step": step, "epoch": epoch, "spans": self._spans})
        self._spans = []

    def write(self) -> None:
        """Append the assigned spans. A full disk loses them and nothing else: pictures are not worth stopping for."""
        if not self._assigned:
            return
        lines = "".join(json.dumps(line) + "\n" for line in self._assigned)
        self._assigned = []
        try:
            if self._fd is None:
                self._fd = shared_file.open_file(self._path, shared_file.APPENDS)
                if os.fstat(self._fd).st_size:  # an older start of the group may have died within a line
                    lines = "\n" + lines
            os.write(self._fd, lines.encode())
        except OSError:
            self._close()  # a file system that is back may not know the old descriptor any more

    def _close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            with suppress(OSError):
                os.close(fd)
