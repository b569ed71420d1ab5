"""Hostfiles in the format of DeepSpeed's launcher and MPI: one line ``NAME slots=RANKS`` per host; ``#`` begins a comment.

``slots`` may be omitted for all hosts, which then get equal numbers of ranks. ``USER@`` before the name and ``port=``
are used by ssh; ``address=`` is the address for the other hosts, if it is not that of the name. All functions raise
``LaunchError``.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ft.errors import LaunchError
from megatron_ft.types import given
from megatron_ft.utils import net

if TYPE_CHECKING:
    from megatron_ft.config.schema import RunConfig

_LINE = "[USER@]NAME [slots=RANKS] [port=PORT] [address=ADDR]"
_NAME = re.compile(r"(?:([\w.][\w.-]*)@)?([\w:.][\w:.%-]*)")
"""A name must not begin with a hyphen: ssh would take it for an option."""


@dataclass(frozen=True)
class Host:
    """One line. ``slots``: number of ranks; None: the file has no slots."""

    name: str
    slots: int | None = None
    user: str = ""
    port: int | None = None
    address: str | None = None

    @property
    def login(self) -> str:
        """Returns the destination for ssh."""
        return f"{self.user}@{self.name}" if self.user else self.name


def read(path: Path) -> list[Host]:
    """Returns the hosts in the order of the file."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"--hostfile {path} cannot be read: {error}") from None
    hosts = []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        host = _entry(text)
        if host is None:
            raise LaunchError(
                f"--hostfile {path}, line {number}: {text!r} is not an entry; write NAME slots=RANKS, or {_LINE}"
            )
        hosts.append(host)
    if not hosts:
        raise LaunchError(f"--hostfile {path} names no host; write a line NAME slots=RANKS for each host")
    twice = [name for name, count in Counter(host.name for host in hosts).items() if count > 1]
    if twice:
        raise LaunchError(f"--hostfile {path} names {twice[0]} twice; write one line for each host, with all its slots")
    without = [host.name for host in hosts if host.slots is None]
    if 0 < len(without) < len(hosts):
        raise LaunchError(
            f"--hostfile {path}: {without[0]} has no slots and other hosts have; write slots=RANKS for all hosts or none"
        )
    return hosts


def _entry(text: str) -> Host | None:
    """Returns None for an invalid line."""
    name, *words = text.split()
    found = _NAME.fullmatch(name)
    pairs = [word.partition("=")[::2] for word in words]
    said = dict(pairs)
    numbers = {key: said.pop(key) for key in ("slots", "port") if key in said}
    address = said.pop("address", None)
    if found is None or said or len(pairs) != len(numbers) + (address is not None):
        return None
    if not all(re.fullmatch(r"[1-9]\d{0,8}", number, re.ASCII) for number in numbers.values()):
        return None
    if int(numbers.get("port", 1)) > 65535 or (address is not None and not _is_numeric(address)):
        return None
    slots, port = (int(numbers[key]) if key in numbers else None for key in ("slots", "port"))
    return Host(found[2], slots, found[1] or "", port, address)


def _is_numeric(address: str) -> bool:
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return False
    return True


def check(path: Path, hosts: list[Host], run: RunConfig, spares: int = 0) -> None:
    """Checks that the run fits onto these hosts, of which the last ``spares`` are in reserve."""
    from megatron_ft.agent.peers import ranks_of  # needs torch, which the doctor does without

    if not 0 <= spares < len(hosts):
        raise LaunchError(
            f"--spare-hosts is {spares} and --hostfile {path} has {len(hosts)} hosts; at least one must not be spare"
        )
    first, rest = hosts[: len(hosts) - spares], hosts[len(hosts) - spares :]
    if hosts[0].slots is None:
        return
    needed, there = run.groups * run.ranks_per_group, sum(given(host.slots) for host in first)
    what = f"{run.groups} groups of {run.ranks_per_group} ranks"
    if needed != there:
        without = f" without the {spares} spare" if spares else ""
        raise LaunchError(
            f"--hostfile {path} has {there} slots on {len(first)} hosts{without}, and {what} need {needed}; add the missing "
            f"entries, or change --groups"
        )
    if run.groups < len(first) and len(first) % run.groups:
        return  # ``peers.place`` refuses that
    most = 0
    for rank, host in enumerate(first):
        own = len(ranks_of(rank, len(first), run.groups, run.ranks_per_group))
        most = max(most, own)
        if own != host.slots:
            raise LaunchError(
                f"--hostfile {path}: {host.name} has slots={host.slots}, and {what} on {len(first)} hosts need {own} there; "
                f"change the entry, or --groups"
            )
    for host in rest:
        if given(host.slots) < most:
            raise LaunchError(
                f"--hostfile {path}: the spare host {host.name} has slots={host.slots} and may have to take over {most} "
                f"ranks; move a host with {most} slots to the end"
            )


def own_rank(path: Path, hosts: list[Host]) -> int:
    """Returns the number of this machine in the file."""
    names = {socket.gethostname(), socket.gethostname().partition(".")[0], socket.getfqdn()}
    found = [rank for rank, host in enumerate(hosts) if host.name in names] or [
        rank for rank, host in enumerate(hosts) if net.own(host.name) is not None
    ]
    if len(found) != 1:
        raise LaunchError(
            f"--hostfile {path} has {'no entry' if not found else 'several entries'} for this host, {socket.gethostname()}; "
            f"it has {', '.join(host.name for host in hosts)}; add this host, or give its number as --host-rank"
        )
    return found[0]
