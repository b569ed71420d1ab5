"""Runs under another launcher: ``deepspeed --module megatron_ft.cluster.launchers.launcher_shim ... SCRIPT ...``, or
torchrun.

Such a launcher starts one process per rank and ends all of them when one dies. The first of its processes on each host
becomes the agent (``megatron-ft launch``), which starts the ranks of the host and outlives them; the other processes
end at once, with success. The launcher therefore sees one process per host until the run is over.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ft.cluster.launchers import detect
from megatron_ft.config import launch_environment, megatron_arguments, parallelism
from megatron_ft.config import schema as config_module
from megatron_ft.errors import FTError, LaunchError
from megatron_ft.utils.terminal import printable

_FROM = f"--ranks-per-group, or {parallelism.STAGES} x {parallelism.SLICES} of the config"


@dataclass(frozen=True)
class Found:
    """The values in the launcher's environment: ``ranks`` on all hosts, ``local`` of them here; ``store``: host 0 and a
    free port there."""

    launcher: str
    ranks: int
    local: int
    local_rank: int
    hosts: int
    host: int
    store: str


def find(env: Mapping[str, str] = os.environ) -> Found:
    """Detects the launcher. Raises ``LaunchError`` when there is none."""
    place = launch_environment.of("deepspeed", env) or launch_environment.of("torchrun", env)
    if place is None:
        raise LaunchError(
            "megatron_ft.cluster.launchers.launcher_shim was not started by deepspeed or torchrun "
            "(neither CROSS_RANK nor TORCHELASTIC_RUN_ID is set); without a launcher use `megatron-ft launch`"
        )
    launcher, numbers = place.name, ("WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
    missing = [name for name in ("MASTER_ADDR", *numbers) if name not in env]
    if missing or place.hosts is None or place.host_rank is None:
        raise LaunchError(
            f"{launcher} has not set {', '.join(missing) or 'the numbers of hosts'}; use an unmodified {launcher}"
        )
    ranks, local_rank, port = (launch_environment.number(launcher, name, env[name]) for name in numbers)
    above = launcher == "torchrun"  # its own store listens at MASTER_PORT already
    store = f"{env['MASTER_ADDR']}:{port + above}"
    found = Found(launcher, ranks, place.processes, local_rank, place.hosts, place.host_rank, store)
    if found.ranks != found.hosts * found.local:
        raise LaunchError(
            f"{launcher} starts {found.ranks} ranks on {found.hosts} hosts, {found.local} of them on this one; start the "
            f"same number on each host"
        )
    outer = launch_environment.find({name: value for name, value in env.items() if name not in _OF_LAUNCHERS})
    if found.hosts == 1 and outer is not None and outer.hosts != 1:
        hosts_of_job = "several hosts, perhaps," if outer.hosts is None else f"{outer.hosts} hosts"
        raise LaunchError(
            f"{launcher} was started for this host alone, and {outer.name} has {hosts_of_job} for this job: each would "
            f"train the whole job alone. Start {launcher} for all hosts; to train on this host alone, use "
            f"`megatron-ft launch --hosts 1`"
        )
    return found


_OF_LAUNCHERS = ("CROSS_RANK", "LOCAL_SIZE", "TORCHELASTIC_RUN_ID", "WORLD_SIZE", "NODE_RANK")
"""Variables by which :mod:`megatron_ft.config.launch_environment` would find deepspeed or torchrun itself."""


def command(found: Found, options: argparse.Namespace) -> list[str]:
    """Returns the arguments of ``megatron-ft`` on this host. Raises ``FTError``."""
    config, asked = options.config or _config_of(options.arguments), options.ranks_per_group
    if config is None and not options.megatron_lm:
        raise LaunchError("the config is missing; give --config before the script, or --deepspeed_config after it")
    raw = config_module.read(config and Path(config))
    if options.megatron_lm:
        raw = megatron_arguments.settings_of_script(raw, options.arguments, 1, asked)
    per_group = parallelism.ranks_per_group(raw, asked)
    whole_groups, whole_hosts = found.local % per_group == 0, per_group % found.local == 0
    if found.ranks % per_group or not (whole_groups or whole_hosts):
        raise LaunchError(
            f"{found.launcher} starts {found.ranks} ranks, {found.local} on this host, and a group has {per_group} "
            f"({_FROM}); start whole groups, with whole groups or an equal part of one group on each host"
        )
    several = ["--hosts", found.hosts, "--host-rank", found.host, "--store", found.store]
    words = [
        "launch",
        *("--groups", found.ranks // per_group),
        *("--ranks-per-group", per_group),
        *(("--config", config) if config else ()),
        *("--run-dir", options.run_dir),
        *(several if found.hosts > 1 else ("--hosts", 1)),  # explicit: no detection of a launcher
        *(f"--{name.replace('_', '-')}" for name in ("overwrite", "megatron_lm", "module") if getattr(options, name)),
        options.script,
        "--",
        *options.arguments,
    ]
    return [str(word) for word in words]


def _config_of(arguments: Sequence[str]) -> str | None:
    for number, word in enumerate(arguments):
        if word.startswith("--deepspeed_config="):
            return word.partition("=")[2]
        if word == "--deepspeed_config" and number + 1 < len(arguments):
            return arguments[number + 1]
    return None


def main() -> int:
    """Start this host's agent in place of the training script."""
    parser = argparse.ArgumentParser(
        prog="megatron_ft.cluster.launchers.launcher_shim", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--local_rank", "--local-rank", help="ignored: the environment has it, too")
    parser.add_argument(
        "--ranks-per-group", type=int, metavar="M", help="ranks of a group (default: from the config, else 1)"
    )
    parser.add_argument("--run-dir", required=True, metavar="DIR", help="directory for the run record")
    parser.add_argument("--config", metavar="JSON", help="configuration (default: the script's --deepspeed_config)")
    parser.add_argument("--overwrite", action="store_true", help="delete an earlier run in the run directory")
    parser.add_argument("--megatron-lm", action="store_true", help="the script is one of Megatron-LM, unchanged")
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument("script", help="the training script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    options = parser.parse_args()
    try:
        found = find()
        words = command(found, options)
    except FTError as error:
        print(printable(f"megatron_ft: {error}"), file=sys.stderr)
        return error.exit_code
    if found.local_rank:
        return 0
    if found.launcher == "torchrun":
        # These are defaults of torchrun, not of the user. With the first one NCCL would end a rank instead of reporting an
        # error; the second one concerns torchrun's own store.
        for name in detect.FOR_ITS_OWN_RANKS:
            os.environ.pop(name, None)
    print(f"megatron_ft: started by {found.launcher}, on host {found.host} of {found.hosts}", flush=True)
    os.execv(sys.executable, [sys.executable, "-m", "megatron_ft.cli", *words])


if __name__ == "__main__":
    sys.exit(main())
