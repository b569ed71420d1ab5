"""Find the connections of this process that belong to a process group of gloo.

gloo does not tell which sockets are its own, and other threads of the process open connections at the same time: the
user's to an object store, a rank's to the ranks that receive its state. So gloo's are recognised by address. Each
member of a gloo group listens on a socket made for that group alone and publishes its address in the group's store;
each pair of members is connected once, by a call to one of the two addresses. A connection therefore belongs to the
group exactly if it leads to an address that another member has published, or was accepted at the one that this process
has published.

Failures it assumes: the store stops answering; a call then ends or blocks as torch's own calls do.
"""

from __future__ import annotations

import itertools
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_ft.utils import socket_tracker
from megatron_ft.utils.socket_tracker import Sockets


def connections(store: Any, me: int, size: int, before: Sockets) -> Sockets:
    """Return this process's connections to the other members of one gloo process group, which is complete.

    From then on the group's listening socket accepts no connection. gloo would keep each one that a stranger opens, and
    its thread ends the process when no descriptor is left.

    Args:
        store: the one that the group was built with.
        me: rank of this process in the group.
        size: number of members.
        before: sockets that were open before the group was built.

    Raises ``RuntimeError`` if this torch publishes the addresses in an unknown way, and the errors of the store.
    """
    published = _published(store, 0, size)
    for fd in _listeners(published[me]):
        socket_tracker.accept_no_more(fd)
    return _connections(published, me, before)


def of_world(before: Sockets) -> Sockets:
    """Return the same for all gloo process groups that ``torch.distributed`` knows in this process."""
    found: dict[int, int] = {}
    for group, (_, store) in list(dist.distributed_c10d._world.pg_map.items()):
        me, size = group.rank(), group.size()
        for device in (torch.device("cpu"), torch.device("cuda")) if size > 1 else ():
            of_device = dist.PrefixStore(f"{device.type}/", store)
            for number in itertools.count():  # one for each interface that GLOO_SOCKET_IFNAME names
                if not of_device.check([f"{number}/{me}"]):
                    break
                published = _published(of_device, number, size)
                _listeners(published[me])  # raises if this process listens nowhere
                found.update(_connections(published, me, before))
    return found


def _published(store: Any, number: int, size: int) -> list[bytes]:
    return store.multi_get([f"{number}/{rank}" for rank in range(size)])


def _connections(published: Sequence[bytes], me: int, before: Sockets) -> Sockets:
    """``published``: the published bytes of each member, by rank, which contain a ``sockaddr``."""
    others = [published[rank] for rank in range(len(published)) if rank != me]
    mine, theirs = _windows([published[me]]), _windows(others)
    return {
        fd: inode
        for fd, inode, here, peer in socket_tracker.connected()
        if before.get(fd) != inode and (_packed(here) in mine or _packed(peer) in theirs)
    }


def _listeners(published: bytes) -> list[int]:
    """Return the listening sockets of this process whose address is in what it has published. Raises ``RuntimeError`` if
    there is none."""
    found = [fd for fd, end in socket_tracker.listening().items() if _packed(end) in published]
    if not found:
        raise RuntimeError(
            f"gloo of torch {torch.__version__} does not publish its address in a known way, so its connections cannot be "
            f"told from others and not be aborted; use torch 2.13"
        )
    return found


_LENGTHS = (struct.calcsize("!H4s"), struct.calcsize("!HI16s"))


def _windows(values: Sequence[bytes]) -> set[bytes]:
    """Return all parts of ``values`` that could be a packed address, in one pass for any number of connections."""

    def each() -> Iterator[bytes]:
        for value in values:
            for length in _LENGTHS:
                for start in range(len(value) - length + 1):
                    yield value[start : start + length]

    return set(each())


def _packed(end: tuple[Any, ...]) -> bytes:
    """Return port and address as they are in a ``sockaddr`` of IPv4 or IPv6."""
    host, port = end[0].partition("%")[0], end[1]
    if ":" in host:
        return struct.pack("!HI16s", port, 0, socket.inet_pton(socket.AF_INET6, host))
    return struct.pack("!H4s", port, socket.inet_aton(host))
