"""The command ``megatron-ft supervise``: in a Slurm job, launches on all nodes and replaces agents that end."""

from __future__ import annotations

import argparse
import os

from megatron_ft.commands import launch_command
from megatron_ft.errors import LaunchError


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``megatron-ft supervise``."""
    parser.add_argument(
        "--stop-before-s",
        type=float,
        default=300.0,
        metavar="S",
        help="save and stop before the time limit (default: 300)",
    )
    parser.add_argument(
        "--failures-per-node", type=int, default=3, metavar="N", help="drain a node after N ended agents (default: 3)"
    )
    parser.add_argument(
        "--srun-option",
        action="append",
        default=[],
        metavar="OPTION",
        help="give srun this option, too, for each agent's step; may be repeated (--srun-option=--container-image=IMAGE)",
    )
    parser.add_argument("--second", action="store_true", help="wait until the first supervisor is lost (internal)")
    parser.add_argument("--array", action="store_true", help="run as an element of an array job, which has one node")
    parser.add_argument("launch", nargs=argparse.REMAINDER, help="launch and its options, without those for hosts")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Launch on all nodes, and follow the run. Returns the exit code; raises ``FTError``."""
    from megatron_ft.cluster.launchers import supervisor_loop
    from megatron_ft.cluster.launchers.slurm import supervisor

    asked = _of_job(options)
    run = asked.settings
    if options.array:
        from megatron_ft.cluster.launchers.slurm import job_array

        where = job_array.place(os.environ)
        of_array = job_array.limits(run.fault_tolerance, where, asked.spare_hosts, options.failures_per_node)
        return job_array.ArrayTask(asked.words, asked.run_dir.resolve(), asked.spare_hosts, of_array, where).run()
    limits = supervisor_loop.limits(
        run.fault_tolerance, per_node=options.failures_per_node, stop_before_s=options.stop_before_s
    )
    return supervisor.Supervisor(
        asked.words, run, asked.run_dir.resolve(), asked.spare_hosts, limits, options.second, options.srun_option
    ).run()


def _of_job(options: argparse.Namespace) -> argparse.Namespace:
    """Parse the ``launch`` command of a job. Add ``words`` (its arguments) and ``settings`` (the configuration)."""
    from megatron_ft.cluster.launchers import host_place

    command = options.launch[1:] if options.launch[:1] == ["--"] else options.launch
    if command[:1] != ["launch"]:
        raise LaunchError("the launch command is missing; write: megatron-ft supervise [OPTIONS] launch --groups N ...")
    parser = argparse.ArgumentParser(prog="megatron-ft launch")
    launch_command.options(parser)
    asked = parser.parse_args(command[1:])
    asked.settings = host_place.with_store(asked, launch_command.settings(asked))
    if asked.hosts is not None or asked.host_rank is not None or asked.store or asked.hostfile or asked.job_id:
        raise LaunchError("Slurm provides the hosts; leave --hosts, --host-rank, --store, --hostfile and --job-id out")
    asked.words = command[1:]
    return asked
