"""Faults around the ranks: a link that loses packets, a file system that is full. Each can be undone.

A link is cut inside the network namespace of one of its ends (``ip netns``), with nft or else iptables, never in the
machine's own network: a test that cuts off the machine it runs on proves nothing. A file system is filled only where the
user says and only when little is free on it: filling a machine's own disk hurts who is not part of the test.
Failures it assumes: the injector can die before it has undone something; undoing twice, or what was never done, is fine.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_ft.errors import ConfigError
from megatron_ft.faults.schedule import Fault

DEFAULT_LIMIT_MB = 256.0
_NAMESPACES = Path("/run/netns")
_CHUNK = 2**20

Command = list[str]


def check(fault: Fault, which: Callable[[str], str | None] = shutil.which) -> None:
    """Whether this fault can be made here. Raises ``ConfigError`` with what is missing."""
    if fault.kind == "cut":
        _check_cut(fault, which)
    elif fault.kind == "disk_full":
        _check_directory(fault)


def strike(fault: Fault, key: str) -> None:
    """Do it. Raises ``OSError`` when the machine refuses."""
    if fault.kind == "cut":
        _run(cut_commands(fault, key, shutil.which("nft") is not None))
    else:
        _fill(Path(fault.directory), key, (fault.limit_mb or DEFAULT_LIMIT_MB) * 2**20)


def undo(fault: Fault, key: str) -> None:
    """Take it back as far as it is there. Raises ``OSError``."""
    if fault.kind == "cut":
        _run(heal_commands(fault, key, shutil.which("nft") is not None), tolerant=True)
    else:
        _filler(Path(fault.directory), key).unlink(missing_ok=True)


# --- links ------------------------------------------------------------------------------------------------------------


def cut_commands(fault: Fault, key: str, nft: bool) -> list[Command]:
    """What drops the packets of ``fault``'s link in its namespace."""
    inside = ["ip", "netns", "exec", fault.netns]
    if not nft:
        return [[*inside, "iptables", "-w", "-I", *rule] for rule in _iptables_rules(fault, key)]
    table = _table(key)
    commands = [[*inside, "nft", "add", "table", "inet", table]]
    for hook, side in _sides(fault):
        chain = f"{{ type filter hook {hook} priority -300 ; policy accept ; }}"
        commands.append([*inside, "nft", "add", "chain", "inet", table, hook, chain])
        family = "ip6" if ipaddress.ip_address(fault.peer).version == 6 else "ip"
        per_mille = str(max(1, round((fault.share or 1) * 1000)))
        chance = [] if fault.share in (None, 1) else ["numgen", "random", "mod", "1000", "<", per_mille]
        commands.append([*inside, "nft", "add", "rule", "inet", table, hook, family, side, fault.peer, *chance, "drop"])
    return commands


def heal_commands(fault: Fault, key: str, nft: bool) -> list[Command]:
    """The inverse of :func:`cut_commands`."""
    inside = ["ip", "netns", "exec", fault.netns]
    if nft:
        return [[*inside, "nft", "delete", "table", "inet", _table(key)]]
    return [[*inside, "iptables", "-w", "-D", *rule] for rule in _iptables_rules(fault, key)]


def _iptables_rules(fault: Fault, key: str) -> list[list[str]]:
    share = [] if fault.share in (None, 1) else ["-m", "statistic", "--mode", "random", "--probability", str(fault.share)]
    mark = ["-m", "comment", "--comment", _table(key)]
    options = {"saddr": "-s", "daddr": "-d"}
    return [[hook.upper(), options[side], fault.peer, *share, *mark, "-j", "DROP"] for hook, side in _sides(fault)]


def _sides(fault: Fault) -> Sequence[tuple[str, str]]:
    sides = {"in": ("input", "saddr"), "out": ("output", "daddr")}
    return [side for name, side in sides.items() if fault.direction in (None, "both", name)]


def _table(key: str) -> str:
    return "megatron_ft_" + key.replace("/", "_")


def _check_cut(fault: Fault, which: Callable[[str], str | None]) -> None:
    try:
        address = ipaddress.ip_address(fault.peer)
    except ValueError:
        raise ConfigError(f"peer is {fault.peer!r}; it must be the IP address of the link's other end") from None
    if os.geteuid() != 0:
        raise ConfigError("cut needs root, to change the rules of a network namespace; leave it out or run as root")
    if which("ip") is None or (which("nft") is None and (which("iptables") is None or address.version == 6)):
        raise ConfigError("cut needs ip and nft (or iptables, for IPv4): Debian's iproute2 and nftables")
    if not (_NAMESPACES / fault.netns).exists():
        there = ", ".join(sorted(path.name for path in _NAMESPACES.glob("*"))) or "none"
        raise ConfigError(f"network namespace {fault.netns!r} does not exist; `ip netns` shows: {there}")


def _run(commands: Sequence[Command], tolerant: bool = False) -> None:
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode and not tolerant:
            raise OSError(f"`{' '.join(command)}` failed: {' '.join(done.stderr.split())}")


# --- file systems -----------------------------------------------------------------------------------------------------


def _check_directory(fault: Fault) -> None:
    directory, limit_mb = Path(fault.directory), fault.limit_mb or DEFAULT_LIMIT_MB
    if not directory.is_dir():
        raise ConfigError(f"directory {directory} does not exist; name one on the small file system that is to be full")
    free_mb = shutil.disk_usage(directory).free / 2**20
    if free_mb > limit_mb:
        raise ConfigError(
            f"{directory} has {free_mb:.0f} MiB free, more than limit_mb {limit_mb:g}; mount a small tmpfs there, or say a "
            f"higher limit_mb"
        )


def _fill(directory: Path, key: str, limit: float) -> None:
    """Write until nothing fits any more; smaller pieces at the end, so that not a line does."""
    if shutil.disk_usage(directory).free > limit:
        raise OSError(f"{directory} has more than limit_mb free by now; it is not filled")
    descriptor = os.open(_filler(directory, key), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    size, written = _CHUNK, 0
    try:
        while size and written <= limit:
            try:
                written += os.write(descriptor, bytes(size))
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                size //= 2
    finally:
        os.close(descriptor)


def _filler(directory: Path, key: str) -> Path:
    return directory / f".{_table(key)}"
