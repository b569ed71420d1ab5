"""What Slurm says of a job now, for a report: from accounting, where there is any, else from the controller.

Failures it assumes: the machine has no Slurm, or is of another cluster; the controller has forgotten the job.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from megatron_ft.core import slurm_said
from megatron_ft.core.slurm_said import JOB, UNKNOWN, Said
from megatron_ft.errors import LaunchError
from megatron_ft.launch import slurm


def ask(job_ids: Sequence[str], cluster: str | None) -> list[Said]:
    """Of these jobs. Raises ``LaunchError`` where there is nobody to ask, or not the ``cluster`` that they ran on."""
    if shutil.which("squeue") is None:
        raise LaunchError("--slurm: no squeue on this machine; ask on the cluster, or give --sacct FILE")
    here = slurm.cluster()
    if here is None:
        raise LaunchError("--slurm: Slurm's controller does not answer; leave --slurm out to see what the record says")
    if cluster is not None and here != cluster:
        raise LaunchError(f"--slurm: this is the cluster {here}, and the run was on {cluster}; ask there")
    return [said for job_id in job_ids for said in _of_job(job_id)]


def _of_job(job_id: str) -> list[Said]:
    """The controller knows better of what is still there: why a job waits, and which steps have not ended."""
    rows = slurm.accounted(job_id)
    shown = slurm.shown(job_id)
    now = shown and slurm_said.scontrol_job(shown)
    steps = slurm.steps(job_id) or []
    ended = any(row.kind == JOB and not row.start for row in rows) and now and now.base not in slurm_said.OPEN
    job = [now] if now and not ended else []  # accounting knows who has cancelled it
    if not rows and not now:
        job = [Said(JOB, job_id, UNKNOWN, id=job_id)]
    newer = {slurm_said.key(said) for said in [*job, *steps]}
    return [*(row for row in rows if row.start or slurm_said.key(row) not in newer), *job, *steps]
