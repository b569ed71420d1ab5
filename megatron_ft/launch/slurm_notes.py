"""What the supervisor on duty saw of Slurm, for the run record: so a report needs no Slurm, and no accounting.

A line for each step when it is first listed, when it is listed no more, and with what it ended where accounting says so; for
each node whose state changes; for the job at the beginning and at the end (docs/run-record.md). Nothing is written before
the run's own ``start`` line: until then the run directory may still hold the record of an earlier start.

Failures it assumes: Slurm does not answer (nothing is noted); another supervisor has noted part of it; a disk that is full.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_ft.core import slurm_said
from megatron_ft.core.slurm_said import STEP, Said
from megatron_ft.launch import slurm
from megatron_ft.runtime import history


class Notes:
    """Of one supervisor. ``complain`` is told what cannot be written, once."""

    def __init__(self, run_dir: Path, job: slurm.Job, complain: Callable[[str], None]) -> None:
        self._run_dir, self._job, self._complain = run_dir, job, complain
        self._seen: dict[tuple[str, str], Said] = {}
        self._roles: dict[str, dict[str, Any]] = {}
        self._sruns: dict[str, int | None] = {}
        self._cancelled: set[str] = set()
        self._old: frozenset[str] = frozenset()
        self._waiting: list[dict[str, Any]] | None = []
        self._complained = ""

    def begin(self) -> None:
        """The whole job is about to be started (again): what follows belongs to the record that it will begin."""
        starts = (line for line in history.read(self._run_dir) if line["event"] == "start")
        self._old = frozenset(line["run_id"] for line in starts)
        self._seen, self._waiting = {}, []

    @property
    def begun(self) -> bool:
        """Whether the start that :meth:`begin` has announced was heard; a line before it is of an earlier one."""
        return self._waiting is None

    def hear(self, line: Mapping[str, Any]) -> None:
        """A line of the record, which another supervisor may have written."""
        if line["event"] == "start" and self._waiting is not None and line["run_id"] not in self._old:
            waiting, self._waiting = self._waiting, None
            for fields in waiting:
                self._write(fields)
        said = slurm_said.from_line(line)
        if said is not None and line.get("job") == self._job.id:
            self._seen[slurm_said.key(said)] = said

    def asked(self, name: str, **role: Any) -> None:
        """A step has been asked for: ``node``, ``role`` (agent, reserve, second) and of an agent its ``host`` number."""
        self._roles[name] = role
        self._sruns[name] = None
        said = Said(STEP, name, slurm_said.ASKED, nodes=role["node"])
        self._seen.setdefault(slurm_said.key(said), said)

    def srun_ended(self, name: str, code: int) -> None:
        self._sruns[name] = code

    def look(self, steps: Sequence[Said] | None, nodes: Sequence[Said] | None) -> None:
        """What is listed now; None while Slurm does not say."""
        if steps is not None:
            ours = [said for said in steps if said.name.startswith("mft")]
            names = [said.name for said in ours]
            self._news([*ours, *slurm_said.gone(self._seen, names, self._sruns)])
        if nodes is not None:
            self._news([said for said in nodes if _trouble(said) != _trouble(self._seen.get(slurm_said.key(said)))])

    def job(self) -> None:
        """The job itself."""
        shown = slurm.shown(self._job.id)
        said = shown and slurm_said.scontrol_job(shown)
        if said:
            fields = slurm_said.fields_of(shown)
            more = {"batch": fields.get("BatchHost"), "restarts": self._job.restarts}
            self._news([said], **more, cluster=os.environ.get("SLURM_CLUSTER_NAME"))

    def last(self) -> None:
        """At the end of a supervisor: the job, and the steps as accounting has them, where there is any."""
        steps = slurm.steps(self._job.id)
        if steps is None:
            return  # the controller is away, and would keep each question waiting
        self.look(steps, None)
        rows = [row for row in slurm.accounted(self._job.id) if row.kind == STEP and row.start == 0]
        # What accounting has not heard of yet is no news: the controller knows better.
        self._news([row for row in rows if row.base not in slurm_said.OPEN and row.name != "extern"])
        self.job()

    def note(self, what: str, **fields: Any) -> None:
        """What the supervisor has done."""
        self._put({"what": what, **fields})

    def cancelled(self, name: str, id_: str) -> None:
        """A step that did not end with the run; told once, however often it takes."""
        if name not in self._cancelled:
            self._cancelled.add(name)
            self.note("cancelled step", name=name, id=id_)

    def _news(self, now: Sequence[Said], **more: Any) -> None:
        for said in slurm_said.changed(self._seen, now):
            self._seen[slurm_said.key(said)] = said
            fields = {**self._roles.get(said.name, {}), **slurm_said.to_line(said), **more}
            self._put({name: value for name, value in fields.items() if value not in (None, "")})

    def _put(self, fields: dict[str, Any]) -> None:
        fields = {**fields, "job": self._job.id}
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


def _trouble(node: Said | None) -> tuple[bool, bool]:
    """What is worth a line when it changes: busy and idle are not."""
    return node is not None and slurm_said.is_bad(node), node is not None and slurm_said.is_given_up(node)
