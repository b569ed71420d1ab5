"""Find the sockets of some processes that accept connections or datagrams from any peer, and their addresses, in
proc(5)."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tools import proc

_ACCEPTS = {"tcp": "0A", "udp": "07"}
"""The socket state in which any peer may connect (TCP_LISTEN), or send (an unconnected datagram socket)."""


class Listener(NamedTuple):
    protocol: str
    address: str
    port: int
    pid: int


def listeners(pids: Iterable[int]) -> set[Listener]:
    """Return every listening TCP socket and every bound, unconnected UDP socket of these processes; a socket that
    several processes share is listed for each."""
    return {listener for pid in pids for listener in _of(pid)}


def of_tree(pid: int) -> set[Listener]:
    """Return the listeners of a process and of all its descendants."""
    return listeners(proc.with_descendants({pid}))


def _of(pid: int) -> Iterable[Listener]:
    inodes = {file[len("socket:[") : -1] for file in proc.open_files(pid) if file.startswith("socket:[")}
    for protocol, state in _ACCEPTS.items():
        for name in (protocol, f"{protocol}6"):
            try:
                table = Path(f"/proc/{pid}/net/{name}").read_text(encoding="ascii").splitlines()[1:]
            except OSError:
                continue  # the process has ended, or the kernel has no IPv6
            for fields in map(str.split, table):
                address, port = _parsed(fields[1])
                if fields[3] == state and fields[9] in inodes and port:
                    yield Listener(protocol, address, port, pid)


def _parsed(text: str) -> tuple[str, int]:
    """Parse ``0100007F:1F90``: words of 32 bits in the byte order of the machine, then the port."""
    digits, _, port = text.partition(":")
    words = bytes.fromhex(digits)
    ordered = b"".join(words[start : start + 4][::-1] for start in range(0, len(words), 4))
    return str(ipaddress.ip_address(ordered)), int(port, 16)
