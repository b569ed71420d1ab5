"""The place of this host among those on which another launcher, or a service, has started this command.

Each of them starts one ``megatron-ft`` per host (``config.launch_environment`` has the table). Where one names host 0 and
a free port there, the hosts meet at that port; elsewhere host 0 takes a free one and writes it into the run directory,
which all hosts share.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron_ft.cluster.launchers.slurm import commands
from megatron_ft.config import launch_environment
from megatron_ft.config.launch_environment import JobEnvironment
from megatron_ft.errors import LaunchError
from megatron_ft.utils import hostlist

FOR_ITS_OWN_RANKS = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCHELASTIC_USE_AGENT_STORE")
"""Variables that torchrun sets for its own processes; they are removed before ranks are started."""


def find(environ: Mapping[str, str]) -> JobEnvironment | None:
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
    return found


def target(found: JobEnvironment, environ: Mapping[str, str]) -> str | None:
    """Returns an address in the network that the hosts share; the interface that leads there is used. None: unknown."""
    if found.name != launch_environment.SRUN:
        return found.first
    nodes = hostlist.expand(environ.get("SLURM_STEP_NODELIST", ""))
    other = next((name for number, name in enumerate(nodes) if number != found.host_rank), None)
    return None if other is None else commands.node_address(other)
