"""The place of this host among those on which another launcher, or a service, has started this command.

Each of them starts one ``megatron-ft`` per host (``config.launch_environment`` has the table). Where one names host 0 and
a free port there, the hosts meet at that port; elsewhere host 0 takes a free one and writes it into the run directory,
which all hosts share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_ft.config import launch_environment
from megatron_ft.errors import LaunchError
from megatron_ft.launchers.slurm import commands
from megatron_ft.utils import hostlist

FOR_ITS_OWN_RANKS = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCHELASTIC_USE_AGENT_STORE")
"""Variables that torchrun sets for its own processes; they are removed before ranks are started."""


@dataclass(frozen=True)
class Surroundings:
    """The place of this host.

    Attributes:
        name: the launcher or service, for messages.
        hosts: number of hosts.
        host_rank: number of this host, from 0.
        job: name that distinguishes this launch from earlier ones; the same on all hosts; "": unknown.
        target: an address in the network that the hosts share; the interface that leads there is used. None: unknown.
        first: name or address of host 0; None: unknown.
        port: a free port of host 0; 0: unknown.
        in_pod: whether this is a pod of Kubernetes, where a name may get its address after its pods have begun.
    """

    name: str
    hosts: int
    host_rank: int
    job: str = ""
    target: str | None = None
    first: str | None = None
    port: int = 0
    in_pod: bool = False


def find(environ: Mapping[str, str]) -> Surroundings | None:
    """Returns None without a launcher, or on a single host.

    Raises ``LaunchError`` for several processes on a host, and for hosts that are not numbered.
    """
    found = launch_environment.find(environ)
    if found is None:
        return None
    if found.processes > 1:
        raise LaunchError(
            f"{found.name} has started {found.processes} processes on this host; megatron-ft starts the ranks of a host "
            f"itself: give {found.name} {found.remedy}, or give `megatron-ft launch` --hosts 1 to train on this host alone"
        )
    if found.hosts is None or found.host_rank is None:
        count = "several hosts, perhaps," if found.hosts is None else f"{found.hosts} hosts"
        remedy = f"{found.remedy}; or give" if found.remedy else "give"
        raise LaunchError(
            f"{found.name} has {count} for this job, and no variable says which of them this is: {remedy} --hosts H, "
            f"--host-rank K and --store HOST:PORT on each host, or --hosts 1 to train on this host alone"
        )
    in_slurm = found.name == launch_environment.SRUN
    return Surroundings(
        name=f"{found.name}, job {found.job}" if in_slurm else found.name,
        hosts=found.hosts,
        host_rank=found.host_rank,
        job=found.job,
        target=_other(environ.get("SLURM_STEP_NODELIST", ""), found.host_rank) if in_slurm else found.first,
        first=found.first,
        port=found.port,
        in_pod="KUBERNETES_SERVICE_HOST" in environ,
    )


def _other(nodes: str, rank: int) -> str | None:
    """Returns the address of another node in the list."""
    other = next((name for number, name in enumerate(hostlist.expand(nodes)) if number != rank), None)
    return None if other is None else commands.node_address(other)
