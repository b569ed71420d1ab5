"""Records the actions of a Slurm job's supervisor in the run record (docs/run-record.md).

Nothing is written before the run's own ``start`` line: until then the run directory may hold the record of an earlier
start. Failures assumed: the disk is full; another supervisor writes as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_ft.launchers.slurm import commands
from megatron_ft.runlog import history


class Notes:
    """The ``slurm`` lines of one supervisor. ``complain`` is called once for each reason why a line cannot be written."""

    def __init__(self, run_dir: Path, job: commands.Job, complain: Callable[[str], None]) -> None:
        self._run_dir, self._job, self._complain = run_dir, job, complain
        self._cancelled: set[str] = set()
        self._old: frozenset[str] = frozenset()
        self._waiting: list[dict[str, Any]] | None = []
        self._complained = ""

    def begin(self) -> None:
        """Announces a start of the whole job: later notes belong to the record that it begins."""
        starts = (line for line in history.lines(self._run_dir) if line["event"] == "start")
        self._old = frozenset(line["run_id"] for line in starts)
        self._waiting = []
        self.note("job", batch=self._job.here, nodes=list(self._job.nodes), restarts=self._job.restarts)

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

    def cancelled(self, name: str, id_: str) -> None:
        """Notes a step that did not end with the run, once."""
        if name not in self._cancelled:
            self._cancelled.add(name)
            self.note("cancelled step", name=name, id=id_)

    def note(self, what: str, **fields: Any) -> None:
        """Writes an action, or keeps it until the run has begun."""
        fields = {"what": what, **fields, "job": self._job.id}
        if self._waiting is not None:
            self._waiting.append(fields)
        else:
            self._write(fields)

    def _write(self, fields: Mapping[str, Any]) -> None:
        try:
            history.append(self._run_dir, "slurm", **fields)
        except OSError as error:
            if str(error) != self._complained:
                self._complain(f"run record not written: {error}")
            self._complained = str(error)
