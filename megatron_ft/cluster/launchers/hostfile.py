"""Hostfiles as the launchers of DeepSpeed, Open MPI and MPICH read them: one line for each host, ``#`` begins a comment.

A line is ``NAME slots=RANKS`` or ``NAME:RANKS``; ``max_slots=`` is read over. ``NAME`` may be a list in Slurm's brackets,
or an address, of IPv6 in brackets of its own where ``:RANKS`` follows. The number may be omitted for all hosts, which then
get equal numbers of ranks. ``USER@`` before the name and ``port=`` are used by ssh; ``address=`` is the address for the
other hosts, if it is not that of the name. All functions raise ``LaunchError``.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ft.errors import LaunchError
from megatron_ft.types import given
from megatron_ft.utils import hostlist, net

if TYPE_CHECKING:
    from megatron_ft.config.schema import RunConfig

_FORMS = "NAME slots=RANKS or NAME:RANKS; [USER@]NAME[,NAME...] [slots=RANKS] [port=PORT] [address=ADDR]"
_NAME = re.compile(
    r"(?:([\w.][\w.-]*)@)?(?:\[([\da-fA-F:.]*:[\da-fA-F:.]*(?:%[\w.-]+)?)\]|(\w\S*?))(?::(\d+))?", re.ASCII
)
"""User, IPv6 address in brackets or names, ranks. A name must not begin with a hyphen: ssh would take it for an option."""
_PLAIN = re.compile(r"[\w.][\w.-]*", re.ASCII)
_RESOLVE_S, _RESOLVERS = 1.0, 32
"""Time in which the names of a hostfile are resolved, and the number of threads that do so."""


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
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"--hostfile {path} cannot be read: {error}") from None
    hosts: list[Host] = []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if text:
            try:
                hosts += _entry(text)
            except LaunchError as error:
                raise LaunchError(f"--hostfile {path}, line {number}: {text!r} is not an entry: {error}") from None
    if not hosts:
        raise LaunchError(f"--hostfile {path} names no host; write a line NAME slots=RANKS for each host")
    same = _same(hosts)
    if same is not None:
        first, second, reason = same
        twice = f"{first} twice" if first == second else f"{first} and {second}, which are one host ({reason})"
        raise LaunchError(f"--hostfile {path} names {twice}; write one line for each host, with all its slots")
    without = [host.name for host in hosts if host.slots is None]
    if 0 < len(without) < len(hosts):
        raise LaunchError(
            f"--hostfile {path}: {without[0]} has no slots and other hosts have; write slots=RANKS for all hosts or none"
        )
    return hosts


def _entry(text: str) -> list[Host]:
    """Returns the hosts of a line. Raises ``LaunchError`` with the reason for an invalid one."""
    word, *words = text.split()
    pairs = [other.partition("=")[::2] for other in words]
    values = dict(pairs)
    if unknown := [key for key, value in pairs if not value or key not in _KEYS]:
        raise LaunchError(f"{unknown[0]!r} is none of {', '.join(f'{key}=' for key in _KEYS)}; write {_FORMS}")
    if len(values) != len(pairs):
        raise LaunchError("it has a setting twice")
    user, names, ranks = _names(word)
    numbers = {key: values[key] for key in ("slots", "max_slots", "max-slots", "port") if key in values}
    if ranks is not None:
        if "slots" in numbers:
            raise LaunchError(
                f":{ranks} after a name is the number of its ranks, and slots={numbers['slots']} is, too; "
                f"write port={ranks} for the port of sshd"
            )
        numbers["slots"] = ranks
    for key, number in numbers.items():
        if not re.fullmatch(r"[1-9]\d{0,8}", number, re.ASCII) or (key == "port" and int(number) > 65535):
            raise LaunchError(f"{key} is {number}, and must be a number from 1 on, a port up to 65535")
    address = values.get("address")
    if address is not None and (len(names) > 1 or not _is_numeric(address)):
        raise LaunchError(f"address={address} must be the IP address of one host")
    slots, port = (int(numbers[key]) if key in numbers else None for key in ("slots", "port"))
    return [Host(name, slots, user, port, address) for name in names]


_KEYS = ("slots", "max_slots", "max-slots", "port", "address")


def _names(word: str) -> tuple[str, list[str], str | None]:
    """Returns the user ("" for none), the names, and the number after a colon."""
    user, _, rest = word.rpartition("@")
    if _is_numeric(rest):
        if "@" in word and not _PLAIN.fullmatch(user):
            raise LaunchError(f"{user!r} is not the name of a user")
        return user, [rest], None
    found = _NAME.fullmatch(word)
    if found is None:
        raise LaunchError(f"{word!r} is not the name or the address of a host; write {_FORMS}")
    if found[2] is not None:
        if not _is_numeric(found[2]):
            raise LaunchError(f"{found[2]!r} is not an address of IPv6")
        return found[1] or "", [found[2]], found[4]
    names = hostlist.expand(found[3])
    if odd := [name for name in names if not _PLAIN.fullmatch(name)]:
        raise LaunchError(f"{odd[0]!r} is not the name or the address of a host; write {_FORMS}")
    return found[1] or "", names, found[4]


def _same(hosts: list[Host]) -> tuple[str, str, str] | None:
    """Returns two names of one host, with their address or how they are compared; None if all hosts differ.

    Hosts with different ports of sshd may be containers of one machine.
    """
    seen: dict[tuple[str, int | None], str] = {}
    addresses = _resolved([host.name for host in hosts])
    bare = {host.name.lower() for host in hosts if not _is_numeric(host.name) and "." not in host.name}
    for host in hosts:
        name = host.name.lower()
        keys = [name, *addresses[host.name]]
        if not _is_numeric(name) and (short := name.partition(".")[0]) in bare:
            keys.append(short)  # a name without and with its domain
        for key in keys:
            if (other := seen.get((key, host.port))) is not None:
                return (
                    other,
                    host.name,
                    key if key in addresses[host.name] else "names in upper or lower case, with or without domain",
                )
        seen |= {(key, host.port): host.name for key in keys}
    return None


def _resolved(names: list[str]) -> dict[str, list[str]]:
    """Returns the addresses of each name, but none of loopback. Names that are not resolved in time have none here."""
    pool = ThreadPoolExecutor(_RESOLVERS, thread_name_prefix="megatron_ft-resolve")
    calls = {name: pool.submit(net.of, name) for name in names}
    done, _ = futures.wait(calls.values(), _RESOLVE_S)
    pool.shutdown(wait=False, cancel_futures=True)
    # no limit: it does not block: these calls are done
    found = {name: call.result() if call in done else [] for name, call in calls.items()}
    return {name: [one for one in its if not net.is_loopback(one)] for name, its in found.items()}


def _is_numeric(address: str) -> bool:
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return False
    return True


def check(path: Path, hosts: list[Host], run: RunConfig, spares: int = 0) -> None:
    """Checks that the run fits onto these hosts, of which the last ``spares`` are in reserve."""
    from megatron_ft.host.peers import ranks_of  # needs torch, which the doctor does without

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
    name = socket.gethostname().lower()
    names, short = {name, name.partition(".")[0], socket.getfqdn().lower()}, name.partition(".")[0]
    found = (
        [rank for rank, host in enumerate(hosts) if host.name.lower() in names]
        or [rank for rank, host in enumerate(hosts) if net.own(host.name) is not None]
        or [rank for rank, host in enumerate(hosts) if host.name.lower().partition(".")[0] == short]
    )
    if len(found) != 1:
        raise LaunchError(
            f"--hostfile {path} has {'no entry' if not found else 'several entries'} for this host, {socket.gethostname()}; "
            f"it has {', '.join(host.name for host in hosts)}; add this host, or give its number as --host-rank"
        )
    return found[0]
