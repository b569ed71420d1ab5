"""Slurm's commands, as the supervisor of a job needs them. Nothing is decided here.

Failures it assumes: slurmctld may be down or slow for minutes. Then a question has no answer (None), and an order is not
carried out; those that matter say why.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ft.core import slurm_said
from megatron_ft.core.slurm_said import Said
from megatron_ft.errors import LaunchError

_ASK_S = 20.0
_START_S = 20
_NOT_FOR_STEPS = tuple(
    f"SLURM_{name}"
    for name in (
        *("STEP", "NTASKS", "NPROCS", "NNODES", "JOB_NUM_NODES", "TASKS_PER_NODE", "DISTRIBUTION", "CPU_BIND"),
        *("MEM_PER", "CPUS_PER_TASK", "TRES_PER_TASK", "GPUS_PER", "EXPORT_ENV"),
    )
)
"""What sbatch or another step has set for itself; srun would take it for options of the new step."""


@dataclass(frozen=True)
class Job:
    """This one, from its environment and ``scontrol``."""

    id: str
    restarts: int
    nodes: tuple[str, ...]
    here: str


def job(environ: Mapping[str, str]) -> Job:
    """Raises ``LaunchError`` outside of a job."""
    number, nodes = environ.get("SLURM_JOB_ID"), environ.get("SLURM_JOB_NODELIST")
    if number is None or nodes is None:
        raise LaunchError("this is not a Slurm job (no SLURM_JOB_ID); call it in a batch script, or in salloc")
    names = tuple(node_names(nodes))
    return Job(number, int(environ.get("SLURM_RESTART_COUNT", 0)), names, environ.get("SLURMD_NODENAME", names[0]))


def node_names(nodes: str) -> list[str]:
    """``n[1-3]`` as names. Raises ``LaunchError``."""
    return _answer("scontrol", "show", "hostnames", nodes).split()


def node_address(name: str) -> str:
    """A node's address as Slurm has it, else its name."""
    words = _answer("scontrol", "--oneliner", "show", "node", name).split()
    return next((word.partition("=")[2] for word in words if word.startswith("NodeAddr=")), name)


def numeric_address(node: str) -> str:
    """Raises ``LaunchError``."""
    name = node_address(node)
    try:
        return socket.getaddrinfo(name, None)[0][4][0]
    except OSError as error:
        raise LaunchError(f"node {node} has the address {name}, which stands for nothing here: {error}") from None


def switches(nodes: Sequence[str]) -> dict[str, str]:
    """The switch next to each node, by topology.conf; empty where Slurm knows of none, or of one only."""
    found: dict[str, str] = {}
    for line in (_ask("scontrol", "show", "topology") or "").splitlines():
        fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
        if fields.get("Level") == "0" and "Nodes" in fields:
            found |= dict.fromkeys(set(node_names(fields["Nodes"])) & set(nodes), fields["SwitchName"])
    return found if found.keys() == set(nodes) and len(set(found.values())) > 1 else {}


def node_up(name: str) -> bool | None:
    """Whether Slurm believes that the node answers. It notices a lost one after SlurmdTimeout only."""
    state = _ask("sinfo", "--noheader", "--nodes", name, "--format", "%T")
    if not state:
        return None
    return not (state.rstrip().endswith("*") or state.startswith(("down", "fail", "unknown")))


def steps(job_id: str) -> list[Said] | None:
    """The job's steps that have not ended."""
    listed = _ask("squeue", "--noheader", "--steps", "--jobs", job_id, "--format", slurm_said.SQUEUE_STEPS)
    return None if listed is None else slurm_said.squeue_steps(listed)


def node_states(names: Sequence[str]) -> list[Said] | None:
    listed = _ask("sinfo", "--noheader", "--Node", "--nodes", ",".join(names), "--format", "%N %T")
    return None if listed is None else slurm_said.sinfo_nodes(listed)


def shown(job_id: str) -> str | None:
    """``scontrol``'s words about a job; it knows one for some minutes after its end."""
    return _ask("scontrol", "--oneliner", "show", "job", job_id)


def accounted(job_id: str) -> list[Said]:
    """The job and its steps, also those that have ended, of all its starts; empty where there is no accounting."""
    columns = ",".join(slurm_said.SACCT)
    return slurm_said.sacct(_ask("sacct", "--duplicates", "--parsable2", "--jobs", job_id, "--format", columns) or "")


def cluster() -> str | None:
    """The name of the one that answers here."""
    lines = (_ask("scontrol", "show", "config") or "").splitlines()
    return next((line.partition("=")[2].strip() for line in lines if line.startswith("ClusterName")), None)


def ends_at(job_id: str) -> float | None:
    """When the job's time is up (seconds since 1970); None while that is unknown, or never."""
    said = _ask("squeue", "--noheader", "--jobs", job_id, "--format", "%e")
    try:
        return time.mktime(time.strptime((said or "").strip(), "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None


def ending(job_id: str) -> bool:
    """Whether Slurm is about to end it: it was cancelled, or its time is up."""
    state = (_ask("squeue", "--noheader", "--jobs", job_id, "--format", "%T") or "").strip()
    return state in ("COMPLETING", "CANCELLED", "TIMEOUT")


def start_step(job_: Job, node: str, name: str, command: Sequence[str], log: Path) -> subprocess.Popen:
    """A step of one task on that node, beside what runs there. Its output goes to ``log``, which the node itself writes,
    so the step lives on without the ``srun`` that is returned."""
    options = [
        f"--jobid={job_.id}",
        f"--nodelist={node}",
        "--nodes=1",
        "--ntasks=1",
        "--overlap",
        "--no-kill",
        "--kill-on-bad-exit=0",
        "--unbuffered",
        # A controller that has just restarted calls all nodes busy, and a patient srun would sleep for two minutes.
        f"--immediate={_START_S}",
        f"--job-name={name}",
        "--open-mode=append",
        # A name with a pattern is opened on the node; another one by srun, and with that the output would end.
        f"--output={str(log).replace('%', '%%')}.%N",
    ]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(_NOT_FOR_STEPS)}
    return subprocess.Popen(["srun", *options, *command], env=environment, stdin=subprocess.DEVNULL)


def cancel_step(step: str) -> None:
    _ask("scancel", step)


def kill_step(step: str) -> str:
    """All its processes, at once. Why not; empty if it is sent."""
    return _order("scancel", "--signal=KILL", step)


def down(node: str, why: str) -> str:
    """Why not; empty if it is. It needs an operator's rights."""
    return _order("scontrol", "update", f"nodename={node}", "state=down", f"reason={why}")


def resume(node: str) -> str:
    """Why not; empty if it is."""
    return _order("scontrol", "update", f"nodename={node}", "state=resume")


def cancel_job(job_id: str) -> None:
    _ask("scancel", job_id)


def comment(job_id: str, what: str) -> None:
    """For whoever looks at the job with ``scontrol show job`` or ``sacct``."""
    _ask("scontrol", "update", f"jobid={job_id}", f"comment={what}")


def requeue(job_id: str) -> str:
    """Why not; empty if it is."""
    return _order("scontrol", "requeue", job_id)


def drain(node: str, why: str) -> str:
    """Why not; empty if it is. It needs an operator's rights."""
    return _order("scontrol", "update", f"nodename={node}", "state=drain", f"reason={why}")


def _order(*command: str) -> str:
    try:
        _answer(*command)
    except LaunchError as error:
        return str(error)
    return ""


def _ask(*command: str) -> str | None:
    try:
        return _answer(*command)
    except LaunchError:
        return None


def _answer(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{' '.join(command)}: {error}; is this a node of a Slurm cluster?") from None
    if done.returncode:
        raise LaunchError(f"{' '.join(command)}: {done.stderr.strip() or f'ended with {done.returncode}'}")
    return done.stdout
