"""The sockets of this process: which ones were opened meanwhile, and to cut them.

gloo cannot be told to give up an operation. What works is to shut its connections down: operations in them fail within
milliseconds, here and at the peers. It does not say which connections are its own, so they are found by comparison.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import struct
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

_SIOCGIFADDR = 0x8915
Sockets = Mapping[int, int]
"""fd -> inode. The inode tells a socket from a later one on the same fd."""


def opened() -> Sockets:
    """Every socket of this process."""
    found: dict[int, int] = {}
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        try:
            status = os.fstat(int(name))
        except OSError:
            continue  # closed since the listing
        if stat.S_ISSOCK(status.st_mode):
            found[int(name)] = status.st_ino
    return found


def connected_since(before: Sockets, except_to: Collection[int] = ()) -> Sockets:
    """Those with a peer that were not there before, but for those whose peer's port is one of ``except_to``.

    Without the listening ones: to shut down gloo's would stop its event loop.
    """
    found: dict[int, int] = {}
    for fd, inode in opened().items():
        peer = _peer(fd) if before.get(fd) != inode else None
        if peer is not None and not (isinstance(peer, tuple) and peer[1] in except_to):
            found[fd] = inode
    return found


def connected_to(address: tuple[str, int]) -> Sockets:
    """Those whose peer is there."""
    found: dict[int, int] = {}
    for fd, inode in opened().items():
        peer = _peer(fd)
        # A socket of the Unix domain has a name, or none, instead of an address.
        if isinstance(peer, tuple) and (peer[0].removeprefix("::ffff:"), peer[1]) == address:
            found[fd] = inode
    return found


def _peer(fd: int) -> Any:
    """None where there is none."""
    try:
        with socket.socket(fileno=os.dup(fd)) as duplicate:
            return duplicate.getpeername()
    except OSError:
        return None


def interface_of(address: str) -> str | None:
    """The name of the network interface that has this address; None where none has."""
    address = address.partition("%")[0]
    if address == "::1" or address.startswith("127."):
        return "lo0" if sys.platform == "darwin" else "lo"
    return next((name for _, name in socket.if_nameindex() if address in addresses_of(name)), None)


def addresses_of(interface: str) -> list[str]:
    """Its first IPv4 address, and all its IPv6 ones where the system tells (Linux)."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):  # it has none
        answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        found.append(socket.inet_ntoa(answer[20:24]))
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
            digits, _, _, _, _, name = line.split()
            if name == interface:
                found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    return found


def shut_down(sockets: Sockets) -> None:
    """Any thread, any number of times."""
    for fd, inode in sockets.items():
        try:
            if os.fstat(fd).st_ino != inode:
                continue
            with socket.socket(fileno=os.dup(fd)) as duplicate:
                duplicate.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue  # already closed, or the peer was faster
