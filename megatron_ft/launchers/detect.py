"""Detects from the environment which launcher runs this command on several hosts: Slurm, torchrun or an MPI.

Each of them starts one ``megatron-ft`` per host and sets variables with the number of hosts and the number of this one.
None of them provides a port for a control store; host 0 takes a free one and writes it into the run directory, which
all hosts share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_ft.errors import LaunchError
from megatron_ft.launchers.slurm import commands

FOR_ITS_OWN_RANKS = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCHELASTIC_USE_AGENT_STORE")
"""Variables that torchrun sets for its own processes; they are removed before ranks are started."""


@dataclass(frozen=True)
class Surroundings:
    """The values in the launcher's environment.

    Attributes:
        what: description of the launcher for messages.
        hosts: number of hosts.
        host_rank: number of this host, from 0.
        job: name that distinguishes this launch from earlier ones; the same on all hosts.
        target: an address in the network that the hosts share; the interface that leads there is used. None: unknown.
    """

    what: str
    hosts: int
    host_rank: int
    job: str
    target: str | None = None


def find(environ: Mapping[str, str]) -> Surroundings | None:
    """Returns None without a launcher, or on a single host. Raises ``LaunchError`` for several processes per host."""
    for look in (_torchrun, _slurm, _open_mpi, _mvapich, _hydra):  # torchrun may itself run inside one of the others
        found = look(environ)
        if found is not None:
            return found if found.hosts > 1 else None
    return None


def _torchrun(environ: Mapping[str, str]) -> Surroundings | None:
    if "TORCHELASTIC_RUN_ID" not in environ:
        return None
    _one_each("torchrun", environ, "LOCAL_WORLD_SIZE", "--nproc-per-node 1")
    master, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    job = f"{environ['TORCHELASTIC_RUN_ID']}.{master}:{port}.{environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
    hosts, rank = _numbers("torchrun", environ, "GROUP_WORLD_SIZE", "GROUP_RANK")
    return Surroundings(f"torchrun, run {environ['TORCHELASTIC_RUN_ID']}", hosts, rank, job, master)


def _slurm(environ: Mapping[str, str]) -> Surroundings | None:
    job = environ.get("SLURM_JOB_ID")
    if job is None:
        return None
    if not environ.get("SLURM_STEP_ID", "").isdigit():
        nodes = environ.get("SLURM_JOB_NUM_NODES", "1")
        if nodes == "1":
            return None
        raise LaunchError(
            f"this is the batch shell of Slurm job {job} with {nodes} nodes, not a step on each of them; put `srun "
            f"--ntasks-per-node=1` before the command, or `supervise` before `launch` (slurm/README.md), or give --hosts 1"
        )
    step = environ["SLURM_STEP_ID"]
    hosts, tasks, rank = _numbers("srun", environ, "SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS", "SLURM_NODEID")
    if tasks != hosts:
        raise LaunchError(
            f"srun has started {tasks} tasks on {hosts} nodes; megatron-ft starts the ranks of a node itself: give srun "
            f"--ntasks-per-node=1"
        )
    name = f"{job}.{step}.{environ.get('SLURM_RESTART_COUNT', 0)}"
    target = None if hosts == 1 else _other(environ.get("SLURM_STEP_NODELIST", ""), rank)
    return Surroundings(f"Slurm, job {job}, step {step}", hosts, rank, name, target)


def _open_mpi(environ: Mapping[str, str]) -> Surroundings | None:
    if "OMPI_COMM_WORLD_SIZE" not in environ:
        return None
    _one_each("mpirun", environ, "OMPI_COMM_WORLD_LOCAL_SIZE", "--map-by ppr:1:node")
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid", "")
    return _mpi("Open MPI", environ, "OMPI_COMM_WORLD", job)


def _mvapich(environ: Mapping[str, str]) -> Surroundings | None:
    if "MV2_COMM_WORLD_SIZE" not in environ:
        return None
    _one_each("mpirun", environ, "MV2_COMM_WORLD_LOCAL_SIZE", "-ppn 1")
    return _mpi("MVAPICH", environ, "MV2_COMM_WORLD", environ.get("PMI_ID", ""))


def _hydra(environ: Mapping[str, str]) -> Surroundings | None:
    """Detects the MPIs of MPICH and Intel, which do not number jobs."""
    if not {"PMI_SIZE", "PMI_RANK"} <= environ.keys():
        return None
    _one_each("mpiexec", environ, "MPI_LOCALNRANKS", "-ppn 1")
    return _mpi("an MPI with PMI", environ, "PMI", "")


def _mpi(what: str, environ: Mapping[str, str], prefix: str, job: str) -> Surroundings:
    hosts, rank = _numbers(what, environ, f"{prefix}_SIZE", f"{prefix}_RANK")
    return Surroundings(what, hosts, rank, job)


def _one_each(what: str, environ: Mapping[str, str], name: str, option: str) -> None:
    each = environ.get(name, "1")
    if each != "1":
        raise LaunchError(
            f"{what} has started {each} processes on this host; megatron-ft starts the ranks of a host itself: give "
            f"{what} {option}"
        )


def _numbers(what: str, environ: Mapping[str, str], *names: str) -> list[int]:
    found = {name: environ.get(name, "") for name in names}
    for name, value in found.items():
        if not value.isdigit():
            raise LaunchError(
                f"{what} has set {name} to {value!r}, which is not a number; give --hosts H and --host-rank K instead"
            )
    return [int(value) for value in found.values()]


def _other(nodes: str, rank: int) -> str | None:
    """Returns the address of another node in the list."""
    names = commands.node_names(nodes)
    other = next((name for number, name in enumerate(names) if number != rank), None)
    return None if other is None else commands.node_address(other)
