"""Under somebody else's launcher: ``deepspeed --module megatron_ft.launch.shim ... SCRIPT ...``, or torchrun, or srun.

Such a launcher starts one process for each rank and ends all of them when one dies. What it starts here is not the rank: the
first process on each host becomes the agent (``megatron-ft launch``), which starts the ranks of the host and outlives them;
the others end at once, with success. So the launcher sees one process on each host, until the run is over.

Failures it assumes: none of its own. Who dies after that is the agent's business.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_ft import config as config_module
from megatron_ft import split
from megatron_ft.errors import FTError, LaunchError
from megatron_ft.launch import surroundings

_FROM = f"--ranks-per-group, or {split.STAGES} x {split.SLICES} of the config"


@dataclass(frozen=True)
class Found:
    """What a launcher's environment says. ``ranks`` on all hosts, ``local`` of them here; ``port`` is free on host 0."""

    launcher: str
    ranks: int
    local: int
    local_rank: int
    hosts: int
    host: int
    address: str
    port: int


def find(env: Mapping[str, str] = os.environ) -> Found:
    """Raises ``LaunchError`` when no known launcher has started this process."""
    if "CROSS_RANK" in env and "LOCAL_SIZE" in env:
        return _found("deepspeed", env, "LOCAL_SIZE", "CROSS_SIZE", "CROSS_RANK", 0)
    if "TORCHELASTIC_RUN_ID" in env:
        # Its own store listens at MASTER_PORT already.
        return _found("torchrun", env, "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "GROUP_RANK", 1)
    raise LaunchError(
        "megatron_ft.launch.shim was not started by deepspeed or torchrun (neither CROSS_RANK nor TORCHELASTIC_RUN_ID is "
        "set); without a launcher use `megatron-ft launch`"
    )


def _found(launcher: str, env: Mapping[str, str], local: str, hosts: str, host: str, above: int) -> Found:
    needed = ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", local, hosts, host)
    if missing := [name for name in needed if name not in env]:
        raise LaunchError(f"{launcher} has started this process without {', '.join(missing)}; use the stock launcher")
    return Found(
        launcher=launcher,
        ranks=int(env["WORLD_SIZE"]),
        local=int(env[local]),
        local_rank=int(env["LOCAL_RANK"]),
        hosts=int(env[hosts]),
        host=int(env[host]),
        address=env["MASTER_ADDR"],
        port=int(env["MASTER_PORT"]) + above,
    )


def command(found: Found, options: argparse.Namespace) -> list[str]:
    """The arguments of ``megatron-ft`` on this host. Raises ``FTError``."""
    config = options.config or _config_of(options.arguments)
    if config is None:
        raise LaunchError("no config: pass --config before the script, or --deepspeed_config after it")
    per_group = split.ranks_per_group(config_module.read(config), options.ranks_per_group)
    whole_groups, whole_hosts = found.local % per_group == 0, per_group % found.local == 0
    if found.ranks % per_group or not (whole_groups or whole_hosts):
        raise LaunchError(
            f"{found.launcher} starts {found.ranks} ranks, {found.local} on this host; a group has {per_group} "
            f"({_FROM}), so there must be whole groups, and each host have some of them or an equal part of one"
        )
    several = ["--hosts", found.hosts, "--host-rank", found.host, "--store", f"{found.address}:{found.port}"]
    words = [
        "launch",
        *("--groups", found.ranks // per_group),
        *("--ranks-per-group", per_group),
        *("--config", config),
        *("--run-dir", options.run_dir),
        *(several if found.hosts > 1 else ("--hosts", 1)),  # told, it does not look who has started it
        *(["--overwrite"] if options.overwrite else ()),
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
    parser = argparse.ArgumentParser(prog="megatron_ft.launch.shim", description=__doc__.splitlines()[0])
    parser.add_argument("--local_rank", "--local-rank", help="ignored: the environment says it, too")
    parser.add_argument("--ranks-per-group", type=int, metavar="M", help="default: as the config says, else 1")
    parser.add_argument("--run-dir", required=True, metavar="DIR", help="where the run record goes")
    parser.add_argument("--config", metavar="JSON", help="default: the script's --deepspeed_config")
    parser.add_argument("--overwrite", action="store_true", help="delete the run that the run directory holds")
    parser.add_argument("script", help="the training script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    options = parser.parse_args()
    try:
        found = find()
        words = command(found, options)
    except FTError as error:
        print(f"megatron_ft: {error}", file=sys.stderr)
        return error.exit_code
    if found.local_rank:
        return 0
    if found.launcher == "torchrun":
        # Its own defaults, not the user's: with the first NCCL would end a rank instead of telling, the second is about its
        # own store.
        for name in surroundings.FOR_ITS_OWN_RANKS:
            os.environ.pop(name, None)
    print(f"megatron_ft: started by {found.launcher}, on host {found.host} of {found.hosts}", flush=True)
    os.execv(sys.executable, [sys.executable, "-m", "megatron_ft.cli", *words])


if __name__ == "__main__":
    sys.exit(main())
