"""The sockets of this process: which ones were opened meanwhile, and to cut them.

gloo cannot be told to give up an operation. What works is to shut its connections down: operations in them fail within
milliseconds, here and at the peers. It does not say which connections are its own, so they are found by comparison.

Other threads connect at the same time, and theirs must not be cut: who follows this rank calls when a communicator is being
built, because both happen after a loss. So connections that are known to be something else are told apart (:func:`keep`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import struct
import sys
import threading
import weakref
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

_IP = (socket.AF_INET, socket.AF_INET6)
_SIOCGIFADDR = 0x8915
_PRIVILEGED = 1024
"""Ports below are not given to who asks for any, as gloo does."""
Sockets = Mapping[int, int]
"""fd -> inode. The inode tells a socket from a later one on the same fd."""


_Owner = TypeVar("_Owner")
_kept: weakref.WeakKeyDictionary[Any, Sockets] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def keep(owner: _Owner, own: Sockets | None = None) -> _Owner:
    """As long as ``owner`` is there, ``own`` are nobody else's, nor are those that one of them accepts. It may be a socket
    itself."""
    if own is None:
        own = {owner.fileno(): os.fstat(owner.fileno()).st_ino}
    with _lock:
        _kept[owner] = own
    return owner


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
    """Those with a peer that were not there before, but for those whose peer's port is one of ``except_to``, or one that the
    system gives to nobody (a user's HTTPS), those that are kept, and those accepted where somebody had listened before.

    Without the listening ones: to shut down gloo's would stop its event loop.
    """
    with _lock:
        kept = {inode for own in _kept.values() for inode in own.values()}
    now = opened()
    others = {_listens_on(fd) for fd, inode in now.items() if before.get(fd) == inode or inode in kept} - {None}
    found: dict[int, int] = {}
    for fd, inode in now.items():
        if before.get(fd) == inode or inode in kept:
            continue
        here, peer = _ends(fd)
        if peer is not None and peer[1] >= _PRIVILEGED and peer[1] not in except_to and here[1] not in others:
            found[fd] = inode
    return found


def connected_to(address: tuple[str, int]) -> Sockets:
    """Those whose peer is there."""
    found: dict[int, int] = {}
    for fd, inode in opened().items():
        _, peer = _ends(fd)
        if peer is not None and (peer[0].removeprefix("::ffff:"), peer[1]) == address:
            found[fd] = inode
    return found


def _ends(fd: int) -> tuple[Any, Any]:
    """The addresses of an IP connection, this end's first; None where there is none. Those of the Unix domain connect this
    process to others of this host, such as a data loader's."""
    try:
        with socket.socket(fileno=os.dup(fd)) as duplicate:
            if duplicate.family not in _IP:
                return None, None
            return duplicate.getsockname(), duplicate.getpeername()
    except OSError:
        return None, None


def _listens_on(fd: int) -> int | None:
    """The port where connections are accepted."""
    try:
        with socket.socket(fileno=os.dup(fd)) as duplicate:
            listens = duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            return duplicate.getsockname()[1] if listens and duplicate.family in _IP else None
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
