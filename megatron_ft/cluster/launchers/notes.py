"""Records the actions of a supervisor in the run record (docs/run-record.md).

Nothing is written before the run's own ``start`` line: until then the run directory may hold the record of an earlier
start. Failures assumed: the disk is full; another supervisor writes as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_ft.record import history
from megatron_ft.utils.console import say


class Notes:
    """The lines of one supervisor, with the event ``event`` and ``fields`` in each. A reason why no line can be written
    is reported once."""

    def __init__(self, run_dir: Path, event: str, **fields: Any) -> None:
        self._run_dir, self._event, self._fields = run_dir, event, fields
        self._old: frozenset[str] = frozenset()
        self._waiting: list[dict[str, Any]] | None = []
        self._complained = ""

    def begin(self) -> None:
        """Announces a start of the whole job: later notes belong to the record that it begins."""
        starts = (line for line in history.lines(self._run_dir) if line["event"] == "start")
        self._old = frozenset(line["run_id"] for line in starts)
        self._waiting = []

    @property
    def begun(self) -> bool:
        """Returns True once the announced start is in the record; earlier lines belong to an earlier start."""
        return self._waiting is None

    def on_line(self, line: Mapping[str, Any]) -> None:
        """Takes a line of the record, which another supervisor may have written."""
        if line["event"] == "start" and self._waiting is not None and line["run_id"] not in self._old:
            waiting, self._waiting = self._waiting, None
            for fields in waiting:
                self._write(fields)

    def note(self, what: str, **fields: Any) -> None:
        """Writes an action, or keeps it until the run has begun."""
        fields = {"what": what, **fields, **self._fields}
        if self._waiting is not None:
            self._waiting.append(fields)
        else:
            self._write(fields)

    def _write(self, fields: Mapping[str, Any]) -> None:
        try:
            history.append(self._run_dir, self._event, **fields)
        except OSError as error:
            if str(error) != self._complained:
                say(f"run record not written: {error}")
            self._complained = str(error)
