"""The outer communicator: sums gradients over the live groups of one epoch, and can be unblocked from any thread.

One object per epoch; it is never repaired, only replaced. ``ProcessGroup.abort`` does nothing on gloo, and after a
``kill -9`` only the ring neighbours of the dead see a reset, so :meth:`OuterCommunicator.abort` shuts down the sockets
that gloo connected while the process group was built. That makes every pending operation here *and at the peers* fail
within milliseconds, which is also how peers without an agent's notice learn of it.

Failures it assumes: any peer may vanish or stop at any time; an operation may then fail, or complete here and fail
elsewhere. The buffer of a failed in-place all-reduce is partly overwritten.
"""

from __future__ import annotations

import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_ft.types import GroupId


class Broken(Exception):
    """An outer operation did not complete: the epoch is over. An event, converted where the operation was started."""


class OuterCommunicator:
    """The members of one epoch at one position. Ranks are the positions in ``members``, lowest group first.

    Args:
        rendezvous: torch store, with a prefix that no other epoch uses.
        me: this group.
        members: live groups of the epoch, including ``me``.
        epoch: the view's number.
        timeout_s: seconds after which an operation fails by itself.
    """

    def __init__(
        self, rendezvous: Any, me: GroupId, members: Sequence[GroupId], epoch: int, timeout_s: float
    ) -> None:
        self.epoch = epoch
        self.members = tuple(sorted(members))
        self._sockets: dict[int, int] = {}
        self._aborted = threading.Event()
        self._group: Any = None
        if len(self.members) > 1:
            before = _open_sockets()
            self._group = dist.ProcessGroupGloo(
                rendezvous, self.members.index(me), len(self.members), timedelta(seconds=timeout_s)
            )
            self._sockets = _connected({fd: i for fd, i in _open_sockets().items() if before.get(fd) != i})

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        """Start summing ``tensor`` in place over the members."""
        return self._start(lambda group: group.allreduce([tensor]))

    def send(self, tensor: torch.Tensor, to: GroupId, tag: int) -> Work:
        """Start sending a contiguous tensor to one member."""
        return self._start(lambda group: group.send([tensor], self.members.index(to), tag))

    def receive(self, tensor: torch.Tensor, source: GroupId, tag: int) -> Work:
        """Start receiving into a contiguous tensor of the sender's shape and dtype."""
        return self._start(lambda group: group.recv([tensor], self.members.index(source), tag))

    def abort(self) -> None:
        """Make every pending and future operation fail, here and at the peers. Any thread, any number of times."""
        self._aborted.set()
        for fd, inode in self._sockets.items():
            _shutdown(fd, inode)

    def _start(self, operation: Callable[[Any], Any]) -> Work:
        if self._aborted.is_set():
            raise Broken("the communicator was aborted")
        if self._group is None:
            return Work(None)
        try:
            return Work(operation(self._group))
        except RuntimeError as error:
            raise Broken(_first_line(error)) from None


class Work:
    """A started operation."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        """Return when it is complete; raise :class:`Broken` when it failed. Releases the GIL meanwhile."""
        if self._work is None:
            return
        try:
            self._work.wait()
        except RuntimeError as error:
            # The exception's traceback would keep the process group, and so its sockets, alive.
            message = _first_line(error.with_traceback(None))
            raise Broken(message) from None

    def settles_within(self, timeout_s: float) -> bool:
        """After an abort: whether the operation has stopped touching its buffer."""
        deadline = time.monotonic() + timeout_s
        while self._work is not None and not self._work.is_completed():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.0005)
        return True


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _open_sockets() -> dict[int, int]:
    """fd -> inode of every socket of this process. The inode tells a socket from a later one on the same fd."""
    found: dict[int, int] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            status = os.fstat(int(name))
        except OSError:
            continue  # closed since the listing
        if stat.S_ISSOCK(status.st_mode):
            found[int(name)] = status.st_ino
    return found


def _connected(sockets: dict[int, int]) -> dict[int, int]:
    """Those with a peer. Shutting down gloo's listener instead would stop its event loop."""
    found: dict[int, int] = {}
    for fd, inode in sockets.items():
        try:
            with socket.socket(fileno=os.dup(fd)) as duplicate:
                duplicate.getpeername()
        except OSError:
            continue
        found[fd] = inode
    return found


def _shutdown(fd: int, inode: int) -> None:
    try:
        if os.fstat(fd).st_ino != inode:
            return
        with socket.socket(fileno=os.dup(fd)) as duplicate:
            duplicate.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # already closed, or the peer was faster
