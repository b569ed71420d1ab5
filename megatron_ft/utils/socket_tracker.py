"""Lists the sockets of this process, and shuts connections down.

gloo has no call that aborts an operation. Shutting its connections down makes their operations fail within
milliseconds, here and at the peers. ``run.collectives.gloo_sockets`` determines which connections belong to gloo.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import stat
import struct
from collections.abc import Collection, Iterator, Mapping
from typing import Any

_IP = (socket.AF_INET, socket.AF_INET6)
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
_LOAD_WORD, _LOAD_HALF, _JUMP_EQUAL, _RETURN = 0x20, 0x28, 0x15, 0x06
_NETWORK_HEADER = -0x100000
"""The instructions of the kernel's packet filter, and the offset at which it sees the header of IP."""
_DROP_ALL = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))
"""A filter of one instruction for the kernel, "return 0": no byte of any packet passes."""
Sockets = Mapping[int, int]
"""The inode of each file descriptor, which distinguishes a socket from a later one with the same descriptor."""


def opened() -> Sockets:
    """Return all sockets of this process."""
    found: dict[int, int] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            status = os.fstat(int(name))
        except OSError:
            continue  # closed since the listing
        if stat.S_ISSOCK(status.st_mode):
            found[int(name)] = status.st_ino
    return found


def connected() -> Iterator[tuple[int, int, Any, Any]]:
    """Yield every IP connection of this process: file descriptor, inode, own address, and the peer's address."""
    for fd, inode in opened().items():
        here, peer = _ends(fd)
        if peer is not None:
            yield fd, inode, here, peer


def listening() -> dict[int, Any]:
    """Return the address of each file descriptor at which this process accepts IP connections."""
    return {fd: address for fd in opened() if (address := _listens_on(fd)) is not None}


def accept_no_more(fd: int) -> None:
    """Make the kernel drop every further request for a connection to a listening socket.

    Connections that it has accepted stay, and its owner does not notice.
    """
    program = struct.pack("HP", 1, ctypes.addressof(_DROP_ALL))
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as duplicate:
        duplicate.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def accept_only(udp: socket.socket, sources: Collection[tuple[str, int]] | None) -> None:
    """Make the kernel drop every datagram for this socket but those of these addresses and ports (None: pass all).

    A datagram that is dropped takes no space in the socket's buffer.
    """
    with contextlib.suppress(OSError):
        if sources is None:
            udp.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
            return
        instructions = [step for source in sorted(sources) for step in _passes(udp.family, *source)]
        code = b"".join(struct.pack("HBBI", *step) for step in [*instructions, (_RETURN, 0, 0, 0)])
        buffer = ctypes.create_string_buffer(code, len(code))
        program = struct.pack("HP", len(code) // 8, ctypes.addressof(buffer))
        udp.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def _passes(family: int, address: str, port: int) -> list[tuple[int, int, int, int]]:
    """Return instructions that pass a datagram from there, and leave others to the instructions behind them."""
    words = struct.unpack(f"!{len(raw := socket.inet_pton(family, address.partition('%')[0])) // 4}I", raw)
    first = _NETWORK_HEADER + (12 if family == socket.AF_INET else 8)
    wanted = [(_LOAD_WORD, first + 4 * number, word) for number, word in enumerate(words)]
    wanted.append((_LOAD_HALF, 0, port))  # the header of UDP begins with the source's port
    steps: list[tuple[int, int, int, int]] = []
    for number, (load, offset, value) in enumerate(wanted):
        behind = 2 * (len(wanted) - number - 1) + 1  # to the instruction behind the last one of this source
        steps += [(load, 0, 0, offset & 0xFFFFFFFF), (_JUMP_EQUAL, 0, behind, value)]
    return [*steps, (_RETURN, 0, 0, 0xFFFFFFFF)]


def connected_to(address: tuple[str, int]) -> Sockets:
    """Return the sockets whose peer has this address."""
    return {fd: inode for fd, inode, _, peer in connected() if (peer[0].removeprefix("::ffff:"), peer[1]) == address}


def _ends(fd: int) -> tuple[Any, Any]:
    """Return own and peer's address of an IP connection, else None twice. Unix sockets lead to processes of this
    host."""
    try:
        with socket.socket(fileno=os.dup(fd)) as duplicate:
            if duplicate.family not in _IP:
                return None, None
            return duplicate.getsockname(), duplicate.getpeername()
    except OSError:
        return None, None


def _listens_on(fd: int) -> Any:
    """Return the address at which a socket accepts IP connections, or None."""
    try:
        with socket.socket(fileno=os.dup(fd)) as duplicate:
            listens = duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            return duplicate.getsockname() if listens and duplicate.family in _IP else None
    except OSError:
        return None


def shut_down(sockets: Sockets) -> None:
    """Shut connections down. Any thread may call this, any number of times."""
    for fd, inode in sockets.items():
        try:
            if os.fstat(fd).st_ino != inode:
                continue
            with socket.socket(fileno=os.dup(fd)) as duplicate:
                duplicate.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue  # closed already, by this process or the peer
