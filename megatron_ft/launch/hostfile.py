"""A hostfile, as DeepSpeed's launcher and MPI have it: a line ``NAME slots=RANKS`` for each host; ``#`` begins a comment."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ft.errors import LaunchError

if TYPE_CHECKING:
    from megatron_ft.config import RunConfig


@dataclass(frozen=True)
class Host:
    """One line."""

    name: str
    slots: int


def read(path: Path) -> list[Host]:
    """The hosts in order. Raises ``LaunchError`` naming the line, as all here do."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"--hostfile {path} cannot be read: {error}") from None
    hosts = []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        found = re.fullmatch(r"(\S+)\s+slots=([1-9]\d*)", text)
        if found is None:
            raise LaunchError(f"--hostfile {path}, line {number}: {text!r} is no entry; write NAME slots=RANKS")
        hosts.append(Host(found[1], int(found[2])))
    if not hosts:
        raise LaunchError(f"--hostfile {path} names no host; write a line NAME slots=RANKS for each")
    twice = [name for name, count in Counter(host.name for host in hosts).items() if count > 1]
    if twice:
        raise LaunchError(f"--hostfile {path} names {twice[0]} twice; write one line for each host, with all its slots")
    return hosts


def check(path: Path, hosts: list[Host], run: RunConfig) -> None:
    """Whether the run fits onto these hosts."""
    from megatron_ft.launch.hosts import ranks_of  # needs torch, which the doctor reads hostfiles without

    needed, there = run.groups * run.ranks_per_group, sum(host.slots for host in hosts)
    what = f"{run.groups} groups of {run.ranks_per_group} ranks"
    if needed != there:
        raise LaunchError(
            f"--hostfile {path} has {there} slots on {len(hosts)} hosts, {what} are {needed}: is an entry missing? "
            f"Add it, or change --groups"
        )
    if run.groups < len(hosts) and len(hosts) % run.groups:
        return  # ``hosts.place`` refuses that
    for rank, host in enumerate(hosts):
        own = len(ranks_of(rank, len(hosts), run.groups, run.ranks_per_group))
        if own != host.slots:
            raise LaunchError(
                f"--hostfile {path}: {host.name} has slots={host.slots}, and {what} on {len(hosts)} hosts put {own} there; "
                f"hosts need equal parts: change the entry, or --groups"
            )


def own_rank(path: Path, hosts: list[Host]) -> int:
    """Which of them this machine is."""
    names = {socket.gethostname(), socket.gethostname().partition(".")[0], socket.getfqdn()}
    found = [rank for rank, host in enumerate(hosts) if host.name in names] or [
        rank for rank, host in enumerate(hosts) if _is_here(host.name)
    ]
    if len(found) != 1:
        raise LaunchError(
            f"--hostfile {path} has {'no entry' if not found else 'several entries'} for this host, {socket.gethostname()}; "
            f"it has {', '.join(host.name for host in hosts)}: add it, or say which one this is by --host-rank"
        )
    return found[0]


def _is_here(name: str) -> bool:
    """Whether the name stands for an address of this machine, other than that by which every machine reaches itself."""
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(name, None)}
    except OSError:
        return False
    return any(not ipaddress.ip_address(address.partition("%")[0]).is_loopback and _binds(address) for address in addresses)


def _binds(address: str) -> bool:
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True
