"""The environments in which several processes or hosts work on one job, and the variables that say so: one table.

``megatron-ft launch`` joins the hosts (``cluster.launchers.detect``), and ``megatron_ft.init`` refuses to train in each
process alone (``run.standalone_run``). Without the table every process would train the whole job by itself, and succeed.

An environment either numbers its hosts (``_NUMBERED``), or only shows that there are several (``_UNNUMBERED``): the shell
of a batch job has the list of its hosts, and is not a process on each of them.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ft.errors import LaunchError
from megatron_ft.utils import hostlist, net

Environ = Mapping[str, str]
_Value = str | Callable[[Environ], str]
"""Names of variables, separated by ``|``, of which the first one that is set counts; or a function that returns a value.
Without a variable the value is "", which means unknown."""
SRUN = "srun"
_SLURM_SHELLS = 4294967000
"""Slurm numbers the steps of its own from here on: the batch shell, the shell of salloc, an external process."""


@dataclass(frozen=True)
class JobEnvironment:
    """What the environment of this process says about the job that the process belongs to.

    Attributes:
        name: the launcher, or the service that started the process, for messages.
        hosts: number of hosts; None: unknown, and possibly several.
        host_rank: number of this host, from 0; None: the environment does not number the hosts.
        processes: number of processes on this host.
        remedy: how to start one process on each host; "": no rule.
        job: name that distinguishes this start from earlier ones, and is the same on all hosts; "": unknown.
        first: name or address of host 0; None: unknown.
        port: a port of host 0 at which no other program listens; 0: unknown.
    """

    name: str
    hosts: int | None
    host_rank: int | None
    processes: int = 1
    remedy: str = ""
    job: str = ""
    first: str | None = None
    port: int = 0

    @property
    def is_shared(self) -> bool:
        """Return whether other processes, here or on other hosts, work on the same job, or may do so."""
        return self.hosts != 1 or self.processes > 1


@dataclass(frozen=True)
class _Environment:
    """A row of the table. ``signs``: variables that are all set in this environment; a sign may be a function that
    returns "" in other environments. Without signs ``hosts`` is the one."""

    name: str
    signs: tuple[_Value, ...] = ()
    hosts: _Value = ""
    rank: _Value = ""
    processes: _Value = ""
    remedy: str = ""
    job: tuple[_Value, ...] = ()
    first: _Value = ""
    port: _Value = ""


def find(environ: Environ) -> JobEnvironment | None:
    """Return the environment that says that this process is not alone; None if it is, or if no variable says anything.

    A launcher may have been started by another one: torchrun on each host of a Slurm job. The first row that shows
    several processes decides. An environment that only lists hosts counts where no launcher has started this process.

    Raises ``LaunchError`` for a variable with an impossible value.
    """
    rows = [row for row in _NUMBERED if _applies(row, environ)] or [
        row for row in _UNNUMBERED if _applies(row, environ)
    ]
    return next((found for row in rows if (found := _read(row, environ)).is_shared), None)


def _applies(row: _Environment, environ: Environ) -> bool:
    return all(_value(sign, environ) for sign in row.signs or (row.hosts,))


def of(name: str, environ: Environ) -> JobEnvironment | None:
    """Return what one launcher says, also of a process that is alone; None if it has not started this process."""
    row = next(row for row in _NUMBERED if row.name == name)
    return _read(row, environ) if _applies(row, environ) else None


def _read(row: _Environment, environ: Environ) -> JobEnvironment:
    hosts, rank, processes, port = (
        number(row.name, value, text) if (text := _value(value, environ)) else None
        for value in (row.hosts, row.rank, row.processes, row.port)
    )
    if hosts is not None and rank is not None and not rank < hosts:
        raise LaunchError(
            f"{row.name}: {_said(row.rank)} is {rank} and {_said(row.hosts)} is {hosts}; hosts are numbered from 0: give "
            f"`megatron-ft launch` --hosts H and --host-rank K instead"
        )
    parts = [_value(part, environ) for part in row.job]
    return JobEnvironment(
        name=row.name,
        hosts=hosts,
        host_rank=rank,
        processes=1 if processes is None else processes,
        remedy=row.remedy,
        job=".".join(parts) if all(parts) else "",
        first=_value(row.first, environ) or None,
        port=port or 0,
    )


def _value(value: _Value, environ: Environ) -> str:
    if callable(value):
        return value(environ)
    return next((environ[name] for name in value.split("|") if environ.get(name)), "")


def _said(value: _Value) -> str:
    return "its number" if callable(value) else value.replace("|", " or ")


def number(name: str, value: _Value, text: str) -> int:
    """Return the number in a variable of launcher ``name``. Raises ``LaunchError``."""
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise LaunchError(
            f"{name} has set {_said(value)} to {text!r}, which is not a number; give `megatron-ft launch` --hosts H and "
            f"--host-rank K instead, or --hosts 1 to train on this host alone"
        )
    return int(text)


# --- values that are not those of one variable ------------------------------------------------------------------------


def _share(processes: str, hosts: str) -> Callable[[Environ], str]:
    """Return a value: processes on a host, rounded up; in an environment with the numbers of all processes and hosts."""

    def share(environ: Environ) -> str:
        all_processes, all_hosts = environ.get(processes, ""), environ.get(hosts, "")
        if not (all_processes.isdigit() and all_hosts.isdigit() and int(all_hosts)):
            return all_processes
        return str(-(-int(all_processes) // int(all_hosts)))

    return share


def _first(*values: _Value) -> Callable[[Environ], str]:
    """Return a value: the first one that is known."""
    return lambda environ: next(filter(None, (_value(value, environ) for value in values)), "")


def _or(value: str, default: str) -> Callable[[Environ], str]:
    return lambda environ: _value(value, environ) or default


def _step(environ: Environ) -> str:
    """Return the id of the Slurm step that runs on every host of this start; "" in a shell of Slurm."""
    step = environ.get("SLURM_STEP_ID", "")
    if not step.isdigit() or int(step) >= _SLURM_SHELLS:
        return ""
    # ``srun --pty bash`` in an allocation of several hosts: a shell on one of them.
    shell = "SLURM_PTY_PORT" in environ and environ.get("SLURM_STEP_NUM_TASKS") == "1"
    return "" if shell and _slurm_hosts(environ) not in ("", "1") else step


def _slurm_hosts(environ: Environ) -> str:
    counts = [environ[name] for name in ("SLURM_JOB_NUM_NODES", "SLURM_NNODES") if environ.get(name)]
    with contextlib.suppress(LaunchError):
        counts.append(str(len(hostlist.expand(environ.get("SLURM_JOB_NODELIST", "")))))
    return max(counts, key=lambda count: int(count) if count.isdigit() else 0, default="")


def _listed(value: str, *, slots: bool = False) -> Callable[[Environ], str]:
    """Return a value: how many different hosts a variable lists, with ``slots`` a number after each name."""

    def count(environ: Environ) -> str:
        words = _value(value, environ).replace(",", " ").replace(";", " ").split()
        return str(len(set(words[::2] if slots else words)) or "")

    return count


def _lines(value: str) -> Callable[[Environ], str]:
    """Return a value: how many different hosts the file has that a variable names."""

    def count(environ: Environ) -> str:
        try:
            text = Path(_value(value, environ)).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return ""
        return str(len({line.split()[0].partition(".")[0] for line in text.splitlines() if line.strip()}) or "")

    return count


def _json(environ: Environ, name: str) -> Any:
    try:
        return json.loads(environ.get(name, ""))
    except ValueError:
        return None


def _sagemaker(what: str) -> Callable[[Environ], str]:
    def read(environ: Environ) -> str:
        hosts = _json(environ, "SM_HOSTS")
        if not isinstance(hosts, list) or environ.get("SM_CURRENT_HOST") not in hosts:
            return ""
        own = hosts.index(environ["SM_CURRENT_HOST"])
        return {"hosts": str(len(hosts)), "rank": str(own), "first": str(hosts[0])}[what]

    return read


_ROLES = ("chief", "master", "workerpool0", "workerpool1", "worker")


def _cluster(variable: str, what: str) -> Callable[[Environ], str]:
    """Return a value of ``{"cluster": {ROLE: [HOST:PORT, ...], ...}, "task": {"type": ROLE, "index": K}}``; "" in an
    environment without that variable, and in a role that does not train."""

    def read(environ: Environ) -> str:
        found = _json(environ, variable)
        try:
            members = {role: list(found["cluster"][role]) for role in _ROLES if role in found["cluster"]}
            hosts = [host for listed in members.values() for host in listed]
            role, index = str(found["task"]["type"]), int(found["task"]["index"])
            before = [listed for other, listed in members.items() if _ROLES.index(other) < _ROLES.index(role)]
            first = net.split(hosts[0]) or (hosts[0], "")
        except (TypeError, KeyError, ValueError, IndexError, AttributeError):
            return ""
        values = {"hosts": len(hosts), "rank": sum(map(len, before)) + index, "first": first[0], "port": first[1]}
        return str(values[what])

    return read


def _head(value: str, separators: str) -> Callable[[Environ], str]:
    """Return a value: what stands before the first of these characters."""

    def head(environ: Environ) -> str:
        text = _value(value, environ).strip()
        for separator in separators:
            text = text.partition(separator)[0]
        return text

    return head


def _aws_first(environ: Environ) -> str:
    """Return the address of the main node if it has number 0; the main node itself is not told."""
    is_first = environ.get("AWS_BATCH_JOB_MAIN_NODE_INDEX", "0") == "0"
    return environ.get("AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS", "") if is_first else ""


def _azure_processes(environ: Environ) -> str:
    return _share("WORLD_SIZE", "AZUREML_NODE_COUNT")(environ) if "LOCAL_RANK" in environ else ""


def _local_processes(environ: Environ) -> str:
    local = environ.get("LOCAL_RANK", "")
    return environ.get("LOCAL_WORLD_SIZE") or (str(int(local) + 1) if local.isdigit() else "")


def _several(value: str) -> Callable[[Environ], str]:
    """Return a sign: the value of the variable if it is not "1"."""
    return lambda environ: "" if _value(value, environ) == "1" else _value(value, environ)


# --- the table --------------------------------------------------------------------------------------------------------

_NUMBERED = (
    _Environment(
        name="torchrun",
        signs=("TORCHELASTIC_RUN_ID",),
        hosts="GROUP_WORLD_SIZE",
        rank="GROUP_RANK",
        processes="LOCAL_WORLD_SIZE",
        remedy="--nproc-per-node 1",
        # torchrun's own store may listen at MASTER_PORT.
        job=(
            "TORCHELASTIC_RUN_ID",
            lambda environ: f"{environ.get('MASTER_ADDR')}:{environ.get('MASTER_PORT')}",
            _or("TORCHELASTIC_RESTART_COUNT", "0"),
        ),
        first="MASTER_ADDR",
    ),
    _Environment(
        name="deepspeed",
        signs=("CROSS_RANK", "LOCAL_SIZE"),
        hosts="CROSS_SIZE",
        rank="CROSS_RANK",
        processes="LOCAL_SIZE",
        remedy="--num_gpus 1, or use megatron_ft.cluster.launchers.launcher_shim",
        first="MASTER_ADDR",
        port="MASTER_PORT",
    ),
    _Environment(
        name="horovodrun",
        signs=("HOROVOD_SIZE",),
        hosts="HOROVOD_CROSS_SIZE",
        rank="HOROVOD_CROSS_RANK",
        processes="HOROVOD_LOCAL_SIZE",
        remedy="one slot for each host",
    ),
    _Environment(
        name=SRUN,
        signs=(_step, "SLURM_JOB_ID"),
        hosts="SLURM_STEP_NUM_NODES",
        rank="SLURM_NODEID",
        processes=_share("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES"),
        remedy="--ntasks-per-node=1",
        job=("SLURM_JOB_ID", "SLURM_STEP_ID", _or("SLURM_RESTART_COUNT", "0")),
    ),
    _Environment(
        name="mpirun of Open MPI",
        hosts="OMPI_COMM_WORLD_SIZE",
        rank="OMPI_COMM_WORLD_RANK",
        processes="OMPI_COMM_WORLD_LOCAL_SIZE",
        remedy="--map-by ppr:1:node",
        job=("PMIX_NAMESPACE|OMPI_MCA_ess_base_jobid",),
    ),
    _Environment(
        name="mpirun of MVAPICH",
        hosts="MV2_COMM_WORLD_SIZE",
        rank="MV2_COMM_WORLD_RANK",
        processes="MV2_COMM_WORLD_LOCAL_SIZE",
        remedy="-ppn 1",
        job=("PMI_ID",),
    ),
    _Environment(
        name="jsrun",
        hosts="JSM_NAMESPACE_SIZE",
        rank="JSM_NAMESPACE_RANK",
        processes="JSM_NAMESPACE_LOCAL_SIZE",
        remedy="--rs_per_host 1 --tasks_per_rs 1",
    ),
    _Environment(
        name="flux run",
        signs=("FLUX_JOB_ID", "FLUX_JOB_NNODES"),
        hosts="FLUX_JOB_NNODES",
        rank="FLUX_TASK_RANK",
        processes=_share("FLUX_JOB_SIZE", "FLUX_JOB_NNODES"),
        remedy="--tasks-per-node=1",
        job=("FLUX_JOB_ID",),
    ),
    # MPICH, Intel MPI and Cray MPI, whose starts have no number.
    _Environment(
        name="mpiexec",
        signs=("PMI_SIZE", "PMI_RANK"),
        hosts="PMI_SIZE",
        rank="PMI_RANK",
        processes="MPI_LOCALNRANKS|PMI_LOCAL_SIZE|PALS_LOCAL_SIZE",
        remedy="-ppn 1",
    ),
    # The training operator sets torchrun's own variables in each pod, whatever the number of GPUs there is.
    _Environment(
        name="Kubernetes' training operator",
        signs=("PET_NNODES",),
        hosts=lambda environ: _value("PET_NNODES", environ).rpartition(":")[2],  # the higher one of LEAST:MOST
        rank="PET_NODE_RANK",
        first="PET_MASTER_ADDR|MASTER_ADDR",
        port="PET_MASTER_PORT|MASTER_PORT",
    ),
    _Environment(
        name="SageMaker",
        hosts=_sagemaker("hosts"),
        rank=_sagemaker("rank"),
        job=("TRAINING_JOB_NAME",),
        first=_sagemaker("first"),
    ),
    *(
        _Environment(
            name=f"{service} ({variable})",
            hosts=_cluster(variable, "hosts"),
            rank=_cluster(variable, "rank"),
            first=_cluster(variable, "first"),
            port=_cluster(variable, "port"),
        )
        for service, variable in (("Vertex AI", "CLUSTER_SPEC"), ("the cluster", "TF_CONFIG"))
    ),
    _Environment(
        name="AWS Batch",
        hosts="AWS_BATCH_JOB_NUM_NODES",
        rank="AWS_BATCH_JOB_NODE_INDEX",
        job=(_head("AWS_BATCH_JOB_ID", "#"), "AWS_BATCH_JOB_ATTEMPT"),
        first=_aws_first,
    ),
    _Environment(
        name="Azure ML",
        hosts="AZUREML_NODE_COUNT",
        rank="NODE_RANK|AZ_BATCHAI_TASK_INDEX",
        processes=_azure_processes,
        remedy="process_count_per_instance: 1",
        first=_head("MASTER_ADDR|AZ_BATCHAI_MPI_MASTER_NODE|AZ_BATCH_MASTER_NODE", ":"),
        port="MASTER_PORT",
    ),
    _Environment(
        name="a LeaderWorkerSet of Kubernetes",
        hosts="LWS_GROUP_SIZE",
        rank="LWS_WORKER_INDEX",
        first="LWS_LEADER_ADDRESS",
    ),
    _Environment(
        name="SkyPilot",
        hosts="SKYPILOT_NUM_NODES",
        rank="SKYPILOT_NODE_RANK",
        first=_head("SKYPILOT_NODE_IPS", "\n"),
    ),
    _Environment(
        name="dstack",
        hosts="DSTACK_NODES_NUM",
        rank="DSTACK_NODE_RANK",
        first="DSTACK_MASTER_NODE_IP",
    ),
    # What torch.distributed's env:// reads; older training operators, Ray Train and many scripts set it.
    _Environment(
        name="the environment (WORLD_SIZE)",
        signs=(_several("WORLD_SIZE"),),
        hosts="WORLD_SIZE",
        rank="RANK",
        processes=_local_processes,
        remedy="one process for each host",
        first="MASTER_ADDR",
        port="MASTER_PORT",
    ),
    _Environment(
        name="the environment (NODE_RANK)",
        signs=("NODE_RANK", _several("NNODES|NUM_NODES")),
        hosts="NNODES|NUM_NODES",
        rank="NODE_RANK",
        first="MASTER_ADDR",
        port="MASTER_PORT",
    ),
)
"""Environments that start a process on each host and number the hosts."""

_UNNUMBERED = (
    _Environment(
        name="this allocation of Slurm",
        signs=("SLURM_JOB_ID", lambda environ: "" if _step(environ) else "shell"),
        hosts=_slurm_hosts,
        remedy="put `srun --ntasks-per-node=1` before the command, or `supervise` before `launch` (slurm/README.md)",
    ),
    _Environment(
        name="LSF",
        signs=("LSB_JOBID", "LSB_MCPU_HOSTS"),
        hosts=_listed("LSB_MCPU_HOSTS", slots=True),
        remedy="start it with jsrun or mpirun, one process for each host",
    ),
    _Environment(
        name="PBS",
        signs=("PBS_JOBID", _first(_lines("PBS_NODEFILE"), "PBS_NUM_NODES")),
        hosts=_first(_lines("PBS_NODEFILE"), "PBS_NUM_NODES"),
        remedy="start it with mpiexec, one process for each host",
    ),
    _Environment(
        name="Grid Engine",
        signs=("NHOSTS", "PE_HOSTFILE"),
        hosts="NHOSTS",
        remedy="start it with mpirun, one process for each host",
    ),
    _Environment(name="OAR", hosts=_lines("OAR_NODEFILE")),
    _Environment(
        name="Azure Batch",
        hosts=_listed("AZ_BATCH_HOST_LIST|AZ_BATCH_NODE_LIST"),
    ),
    # A launcher over PMIx passes the number of its processes through the library alone.
    _Environment(name="a launcher with PMIx (PMIX_RANK)", signs=("PMIX_RANK",)),
    _Environment(name="PALS (PALS_RANKID)", signs=("PALS_RANKID",)),
)
"""Environments that list the hosts of the job, or leave open whether there are several."""
