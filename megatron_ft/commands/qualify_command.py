"""The command ``megatron-ft qualify``: what holds on these machines."""

from __future__ import annotations

import argparse

from megatron_ft.commands import doctor_command


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``megatron-ft qualify``."""
    parser.add_argument(
        "--gpus", type=int, metavar="N", help="number of GPUs of each host that take part; 0: the CPU (default: all)"
    )
    parser.add_argument(
        "--groups", type=int, metavar="N", help="number of groups (default: one for each GPU; 3 without several GPUs)"
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write the checks to this file, too; -: print them as JSON, and no table"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of the faults (default: 0)")
    hosts = parser.add_argument_group(
        "several hosts",
        "run the same command on each host; in srun, torchrun and mpirun the hosts are numbered already",
    )
    doctor_command.meeting_options(hosts)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Qualify this machine, or all hosts. Returns the exit code; raises ``FTError``."""
    from megatron_ft.cluster.qualify import qualification  # it imports torch, which the options do without

    return qualification.run(options, doctor_command.met(options))
