"""What has started this command on several hosts, as its environment tells: Slurm, torchrun or an MPI.

Each of them starts one ``megatron-ft`` on every host and says in variables how many there are and which one this is. None of
them gives a port for a control store; host 0 takes a free one and writes it into the run directory, which all hosts see.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_ft.errors import LaunchError
from megatron_ft.launch import slurm

FOR_ITS_OWN_RANKS = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCHELASTIC_USE_AGENT_STORE")
"""What torchrun sets for the processes that it starts; our ranks must not see it."""


@dataclass(frozen=True)
class Surroundings:
    """``what``: for people. ``job``: tells this launch from earlier ones, the same on all hosts. ``target``: an address on
    the network that the hosts share, where one is known; the interface that leads there is the one to be used."""

    what: str
    hosts: int
    host_rank: int
    job: str
    target: str | None = None


def find(environ: Mapping[str, str]) -> Surroundings | None:
    """None where nothing has started it, or on one host only. Raises ``LaunchError`` for several processes on a host."""
    for look in (_torchrun, _slurm, _open_mpi, _mvapich, _hydra):  # torchrun may itself run in one of the others
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
            f"this is the shell of Slurm job {job}, which has {nodes} nodes, not a step on each of them; put `srun "
            f"--ntasks-per-node=1` before the command, or `supervise` before `launch` (slurm/README.md), or give --hosts 1"
        )
    step = environ["SLURM_STEP_ID"]
    hosts, tasks, rank = _numbers("srun", environ, "SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS", "SLURM_NODEID")
    if tasks != hosts:
        raise LaunchError(
            f"srun has started {tasks} tasks on {hosts} nodes; megatron-ft starts the ranks of a node by itself: give srun "
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
    """MPICH's and Intel's. It numbers no job."""
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
            f"{what} has started {each} processes on this host; megatron-ft starts the ranks of a host by itself: give "
            f"{what} {option}"
        )


def _numbers(what: str, environ: Mapping[str, str], *names: str) -> list[int]:
    found = {name: environ.get(name, "") for name in names}
    for name, value in found.items():
        if not value.isdigit():
            raise LaunchError(
                f"{what} has set {name} to {value!r}, which is no number; say which host this is: --hosts H --host-rank K"
            )
    return [int(value) for value in found.values()]


def _other(nodes: str, rank: int) -> str | None:
    """Another node of that list, by the address Slurm reaches it under."""
    names = slurm.node_names(nodes)
    other = next((name for number, name in enumerate(names) if number != rank), None)
    return None if other is None else slurm.node_address(other)
