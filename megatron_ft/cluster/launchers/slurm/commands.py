"""Calls of Slurm's commands.

Failures assumed: slurmctld is down or slow for minutes. A query then returns None, and an order fails; orders return
the reason, or "" for success.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ft.errors import LaunchError
from megatron_ft.utils import hostlist, net

_ASK_S = 20.0
_START_S = 20
_NOT_FOR_STEPS = tuple(
    f"SLURM_{name}"
    for name in (
        *("STEP", "NTASKS", "NPROCS", "NNODES", "JOB_NUM_NODES", "TASKS_PER_NODE", "DISTRIBUTION", "CPU_BIND"),
        *("MEM_PER", "CPUS_PER_TASK", "TRES_PER_TASK", "GPUS_PER", "EXPORT_ENV"),
    )
)
"""Variables that sbatch or another step has set; srun would take them for options of the new step."""


@dataclass(frozen=True)
class Job:
    """This job. ``here``: the node of this process."""

    id: str
    restarts: int
    nodes: tuple[str, ...]
    here: str


def job(environ: Mapping[str, str]) -> Job:
    """Returns the job of this process. Raises ``LaunchError`` outside of a job."""
    number, nodes = environ.get("SLURM_JOB_ID"), environ.get("SLURM_JOB_NODELIST")
    if number is None or nodes is None:
        raise LaunchError(
            "this is not a Slurm job (SLURM_JOB_ID is not set); run the command in a batch script, or in salloc"
        )
    names = tuple(hostlist.expand(nodes))
    return Job(number, int(environ.get("SLURM_RESTART_COUNT", 0)), names, environ.get("SLURMD_NODENAME", names[0]))


def node_address(name: str) -> str:
    """Returns the node's address in Slurm, else its name: a container has no ``scontrol``."""
    words = (_ask("scontrol", "--oneliner", "show", "node", name) or "").split()
    return next((word.partition("=")[2] for word in words if word.startswith("NodeAddr=")), name)


def numeric_address(node: str) -> str:
    """Returns the node's IP address for the other nodes. Raises ``LaunchError``."""
    name = node_address(node)
    found = net.of(name)
    if not found:
        raise LaunchError(f"node {node} has the address {name}, which cannot be resolved here; correct it in Slurm")
    # A node may give its own name a loopback address.
    return next((address for address in found if not net.is_loopback(address)), None) or net.own_address(None)


def switches(nodes: Sequence[str]) -> dict[str, str]:
    """Returns the switch of each node from topology.conf; empty when Slurm has no topology, or a single switch."""
    found: dict[str, str] = {}
    for line in (_ask("scontrol", "show", "topology") or "").splitlines():
        fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
        if fields.get("Level") == "0" and "Nodes" in fields:
            found |= dict.fromkeys(set(hostlist.expand(fields["Nodes"])) & set(nodes), fields["SwitchName"])
    return found if found.keys() == set(nodes) and len(set(found.values())) > 1 else {}


def node_up(name: str) -> bool | None:
    """Returns whether the node responds according to Slurm, which notices a lost node after SlurmdTimeout only."""
    state = _ask("sinfo", "--noheader", "--nodes", name, "--format", "%T")
    if not state:
        return None
    return not (state.rstrip().endswith("*") or state.startswith(("down", "fail", "unknown")))


def steps(job_id: str) -> dict[str, str] | None:
    """Returns name -> id of the job's running steps."""
    listed = _ask("squeue", "--noheader", "--steps", "--jobs", job_id, "--format", "%j|%i")
    if listed is None:
        return None
    rows = (line.rpartition("|") for line in listed.splitlines())
    return {name: number for name, separator, number in rows if separator}


def described(job_id: str) -> str:
    """Returns the table of ``sacct``, or without accounting that of ``scontrol show job``, which Slurm keeps for minutes.

    Raises ``LaunchError`` when neither knows the job.
    """
    columns = "JobID%20,JobName%24,State%20,ExitCode,NodeList%20,Start,End"
    table = _ask("sacct", "--duplicates", "--jobs", job_id, f"--format={columns}") or ""
    return table if len(table.splitlines()) > 2 else _answer("scontrol", "show", "job", job_id)


def ends_at(job_id: str) -> float | None:
    """Returns the end of the job's time limit (Unix seconds); None: unknown or unlimited."""
    said = _ask("squeue", "--noheader", "--jobs", job_id, "--format", "%e")
    try:
        return time.mktime(time.strptime((said or "").strip(), "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None


def ending(job_id: str) -> bool:
    """Returns True when the job was cancelled or has exceeded its time limit."""
    state = (_ask("squeue", "--noheader", "--jobs", job_id, "--format", "%T") or "").strip()
    return state in ("COMPLETING", "CANCELLED", "TIMEOUT")


def start_step(
    job_: Job, node: str, name: str, command: Sequence[str], log: Path, more: Sequence[str] = ()
) -> subprocess.Popen:
    """Starts a step of one task on a node, beside the steps that run there, with ``more`` options of srun. Returns its srun.

    The node itself writes the output to ``log``, so the step does not depend on the srun.
    """
    options = [
        f"--jobid={job_.id}",
        f"--nodelist={node}",
        "--nodes=1",
        "--ntasks=1",
        "--overlap",
        "--no-kill",
        "--kill-on-bad-exit=0",
        "--unbuffered",
        # A slurmctld that has just restarted reports all nodes as busy, and srun would sleep for two minutes by default.
        f"--immediate={_START_S}",
        f"--job-name={name}",
        "--open-mode=append",
        # The node opens a file whose name has a pattern; srun would open another one, and the output would end with srun.
        f"--output={str(log).replace('%', '%%')}.%N",
        *more,
    ]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(_NOT_FOR_STEPS)}
    # In its own process group: a closed terminal sends SIGHUP to the foreground group, and srun would kill its step. The
    # supervisor stops the run in order instead.
    return subprocess.Popen(["srun", *options, *command], env=environment, stdin=subprocess.DEVNULL, process_group=0)


def cancel(number: str) -> None:
    """Ask Slurm to cancel a job or one of its steps."""
    _ask("scancel", number)


def comment(job_id: str, what: str) -> None:
    """Sets the comment that ``scontrol show job`` and ``sacct`` show."""
    _ask("scontrol", "update", f"jobid={job_id}", f"comment={what}")


def requeue(job_id: str) -> str:
    """Puts the job back into Slurm's queue. Returns why Slurm refuses; "" when it does not."""
    return _order("scontrol", "requeue", job_id)


def drain(node: str, why: str) -> str:
    """Drains a node, which needs the rights of an operator."""
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
        raise LaunchError(f"{' '.join(command)}: {error}; check that this is a node of a Slurm cluster") from None
    if done.returncode:
        raise LaunchError(f"{' '.join(command)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout
