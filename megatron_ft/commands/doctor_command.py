"""The command ``megatron-ft doctor``: checks a script, this machine or all hosts of a run."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_ft.cluster.doctor import hosts_check, local, meeting
from megatron_ft.cluster.launchers import host_place
from megatron_ft.errors import ConfigError
from megatron_ft.proof import deterministic
from megatron_ft.proof.audit_run import Script
from megatron_ft.utils.terminal import console


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``megatron-ft doctor``."""
    parser.add_argument("--json", action="store_true", help="print JSON, with all measured values")
    model = parser.add_argument_group("a model", "are its gradients the same bits in two processes?")
    model.add_argument("--deterministic", metavar="SCRIPT", help="run two steps of this training script and compare")
    model.add_argument("--config", type=Path, metavar="FILE", help="its config file")
    model.add_argument("arguments", nargs="*", help="its arguments, after --")
    hosts = parser.add_argument_group(
        "several hosts",
        "run the same command on each host; in srun, torchrun and mpirun the hosts are numbered already",
    )
    meeting_options(hosts)
    hosts.add_argument(
        "--factor", type=float, default=3.0, metavar="X", help="name a host that is slower by this factor (default: 3)"
    )
    parser.set_defaults(run=run)


def meeting_options(hosts: argparse._ArgumentGroup) -> None:
    """Add the options by which the hosts of one check find each other."""
    hosts.add_argument("--hosts", type=int, metavar="H", help="number of hosts (default: check this machine only)")
    hosts.add_argument("--host-rank", type=int, metavar="K", help="number of this host, from 0")
    hosts.add_argument("--store", metavar="HOST:PORT", help="address of host 0 and a free port there")
    hosts.add_argument("--hostfile", type=Path, metavar="FILE", help="instead of these three: lines NAME; needs --port")
    hosts.add_argument(
        "--port", type=int, default=0, metavar="P", help="with --hostfile: a free port of its first host"
    )
    hosts.add_argument(
        "--directory", type=Path, metavar="DIR", help="a directory that all hosts share; it is tried out"
    )
    hosts.add_argument(
        "--job-id", metavar="ID", help="instead of --store: a new name, the same on all hosts; needs --directory"
    )
    hosts.add_argument("--address", metavar="ADDR", help="address of this host for the other hosts (default: detected)")
    hosts.add_argument(
        "--patience-s", type=float, default=60.0, metavar="S", help="time to wait for all hosts (default: 60)"
    )


def run(options: argparse.Namespace) -> int:
    """Check what the options name. Returns the exit code; raises ``FTError``."""
    if options.deterministic is not None:
        return deterministic.run(Script([options.deterministic, *options.arguments], Path.cwd()), options.config)
    if options.arguments or options.config:
        raise ConfigError("--config and arguments are those of a script; name it with --deterministic SCRIPT")
    if not options.factor > 1:
        raise ConfigError(f"--factor is {options.factor:g} and must be greater than 1; leave it out for the default")
    where = met(options)
    if where is None:
        return local.run_doctor(console(), as_json=options.json, directory=options.directory)
    return hosts_check.run_together(where, console(), options.json, options.factor)


def met(options: argparse.Namespace) -> meeting.Meeting | None:
    """Return how the hosts of a check meet; None on a single one."""
    options.target = None
    if options.hosts is None and options.host_rank is None and options.hostfile is None:
        host_place.from_surroundings(options)
    return meeting.find(options)
