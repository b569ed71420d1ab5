"""The section "Slurm" of the report: the actions of the job's supervisor."""

from __future__ import annotations

import time

from rich.table import Table

from megatron_ft.runlog.run_record import RunRecord

_OLDER = ("step", "node")
"""Values of ``what`` in lines about steps and nodes, which versions before 0.2 wrote."""


def jobs(record: RunRecord) -> list[str]:
    """Return the ids of the Slurm jobs in which the run was supervised, the newest last."""
    return list(dict.fromkeys(line["job"] for line in record.events("slurm")))


def supervisor_table(record: RunRecord) -> Table:
    """Return a table with one row for each line that a supervisor wrote to the record."""
    table = Table(title=f"Slurm: job {', '.join(jobs(record))}", title_justify="left")
    for name in ("time", "what the supervisor did", "details"):
        table.add_column(name, overflow="fold")
    for line in record.events("slurm"):
        if line["what"] in _OLDER:
            continue
        fields = {name: value for name, value in line.items() if name not in ("t", "event", "what", "job")}
        details = ", ".join(f"{name} {_text(value)}" for name, value in fields.items())
        table.add_row(time.strftime("%H:%M:%S", time.localtime(line["t"])), line["what"], details)
    return table


def _text(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
