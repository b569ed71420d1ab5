"""Faults of the environment: a link that loses packets, a full file system. Each can be undone.

A link is cut inside the network namespace of one of its ends (``ip netns``), with nft or iptables, never in the
machine's own network, because that would cut off the test itself. A file system is filled only in a directory that the
user names, and only when little space is free there, because a full system disk would affect other programs. Failures
assumed: the injector dies before it has undone a fault. Undoing is idempotent.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_ft.cluster.faults.schedule import Fault
from megatron_ft.errors import ConfigError
from megatron_ft.types import given
from megatron_ft.utils import shared_file

DEFAULT_LIMIT_MB = 256.0
_NAMESPACES = Path("/run/netns")
_CHUNK = 2**20

Command = list[str]


def check(fault: Fault, which: Callable[[str], str | None] = shutil.which) -> None:
    """Raises ``ConfigError`` when this host lacks something that the fault needs."""
    if fault.kind == "cut":
        _check_cut(fault, which)
    elif fault.kind == "disk_full":
        _check_directory(fault)


def strike(fault: Fault, key: str) -> None:
    """Injects the fault. Raises ``OSError``."""
    if fault.kind == "cut":
        _run(cut_commands(fault, key, shutil.which("nft") is not None))
    else:
        _fill(Path(given(fault.directory)), key, (fault.limit_mb or DEFAULT_LIMIT_MB) * 2**20)


def undo(fault: Fault, key: str) -> None:
    """Undoes the fault, if it was injected. Raises ``OSError``."""
    if fault.kind == "cut":
        _run(heal_commands(fault, key, shutil.which("nft") is not None), tolerant=True)
    else:
        _filler(Path(given(fault.directory)), key).unlink(missing_ok=True)


# --- links ------------------------------------------------------------------------------------------------------------


def cut_commands(fault: Fault, key: str, nft: bool) -> list[Command]:
    """Returns the commands that drop the packets of the link in its namespace."""
    inside, peer = ["ip", "netns", "exec", given(fault.netns)], given(fault.peer)
    if not nft:
        return [[*inside, "iptables", "-w", "-I", *rule] for rule in _iptables_rules(fault, key)]
    table = _table(key)
    commands = [[*inside, "nft", "add", "table", "inet", table]]
    for hook, side in _sides(fault):
        chain = f"{{ type filter hook {hook} priority -300 ; policy accept ; }}"
        commands.append([*inside, "nft", "add", "chain", "inet", table, hook, chain])
        family = "ip6" if ipaddress.ip_address(peer).version == 6 else "ip"
        per_mille = str(max(1, round((fault.share or 1) * 1000)))
        chance = [] if fault.share in (None, 1) else ["numgen", "random", "mod", "1000", "<", per_mille]
        commands.append([*inside, "nft", "add", "rule", "inet", table, hook, family, side, peer, *chance, "drop"])
    return commands


def heal_commands(fault: Fault, key: str, nft: bool) -> list[Command]:
    """Returns the inverse of :func:`cut_commands`."""
    inside = ["ip", "netns", "exec", given(fault.netns)]
    if nft:
        return [[*inside, "nft", "delete", "table", "inet", _table(key)]]
    return [[*inside, "iptables", "-w", "-D", *rule] for rule in _iptables_rules(fault, key)]


def _iptables_rules(fault: Fault, key: str) -> list[list[str]]:
    share = (
        [] if fault.share in (None, 1) else ["-m", "statistic", "--mode", "random", "--probability", str(fault.share)]
    )
    mark = ["-m", "comment", "--comment", _table(key)]
    options = {"saddr": "-s", "daddr": "-d"}
    return [
        [hook.upper(), options[side], given(fault.peer), *share, *mark, "-j", "DROP"] for hook, side in _sides(fault)
    ]


def _sides(fault: Fault) -> Sequence[tuple[str, str]]:
    sides = {"in": ("input", "saddr"), "out": ("output", "daddr")}
    return [side for name, side in sides.items() if fault.direction in (None, "both", name)]


def _table(key: str) -> str:
    return "megatron_ft_" + key.replace("/", "_")


def _check_cut(fault: Fault, which: Callable[[str], str | None]) -> None:
    try:
        address = ipaddress.ip_address(given(fault.peer))
    except ValueError:
        raise ConfigError(f"peer is {fault.peer!r} and must be the IP address of the link's other end") from None
    if os.geteuid() != 0:
        raise ConfigError(
            "cut needs root to change the rules of a network namespace; run inject as root, or leave the fault out"
        )
    if which("ip") is None or (which("nft") is None and (which("iptables") is None or address.version == 6)):
        raise ConfigError("cut needs ip and nft (for IPv4 also iptables); install iproute2 and nftables")
    if not (_NAMESPACES / given(fault.netns)).exists():
        there = ", ".join(sorted(path.name for path in _NAMESPACES.glob("*"))) or "none"
        raise ConfigError(f"network namespace {fault.netns!r} does not exist; use one of `ip netns`: {there}")


_COMMAND_S = 60.0


def _run(commands: Sequence[Command], tolerant: bool = False) -> None:
    for command in commands:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S)
        except subprocess.TimeoutExpired:
            raise OSError(f"`{shlex.join(command)}` has not ended within {_COMMAND_S:g} s") from None
        if done.returncode and not tolerant:
            raise OSError(f"`{shlex.join(command)}` failed: {' '.join(done.stderr.split())}")


# --- file systems -----------------------------------------------------------------------------------------------------


def _check_directory(fault: Fault) -> None:
    directory, limit_mb = Path(given(fault.directory)), fault.limit_mb or DEFAULT_LIMIT_MB
    if not directory.is_dir():
        raise ConfigError(
            f"directory {directory} does not exist; give one on the small file system that is to be filled"
        )
    free_mb = shutil.disk_usage(directory).free / 2**20
    if free_mb > limit_mb:
        raise ConfigError(
            f"{directory} has {free_mb:.0f} MiB free, more than limit_mb {limit_mb:g}; mount a small tmpfs there, or raise "
            f"limit_mb"
        )


def _fill(directory: Path, key: str, limit: float) -> None:
    """Writes until the file system is full, in ever smaller pieces, so that not even a line fits."""
    if shutil.disk_usage(directory).free > limit:
        raise OSError(f"{directory} has more than limit_mb free by now, and is not filled")
    descriptor = shared_file.open_file(_filler(directory, key), shared_file.APPENDS)
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
