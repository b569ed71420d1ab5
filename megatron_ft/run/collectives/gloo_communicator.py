"""Communicators of gloo that can be aborted from any thread.

``ProcessGroup.abort`` does nothing on gloo, and after a ``kill -9`` only the ring neighbours of the dead rank see a
reset, so an abort shuts down gloo's connections (``run.collectives.gloo_sockets`` finds them). That makes pending operations
here *and at the peers* fail within milliseconds, which also informs peers without an agent's notice.

There is an exception: gloo can forget to fail an operation whose payload is half received when the connection breaks
(seen when a rank had been descheduled in the last all-reduce of a step). Such an operation is abandoned a moment after
the abort, its buffer is never used again, and its process group is kept until it has ended: the destructor would wait
for it.

Failures it assumes: those of ``run.collectives.base``.
"""

from __future__ import annotations

import re
import threading
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_ft.run.collectives import gloo_sockets
from megatron_ft.run.collectives.base import BUILD_TIMEOUT_S, Broken, Communicator, Followed, Over, Work
from megatron_ft.utils import socket_tracker
from megatron_ft.utils.log import first_line

_LOOK_S = 0.02
"""Seconds between two checks of a wait. A check costs 0.2 ms: 1% of a core, while there is nothing else to do."""


class GlooCommunicator(Communicator):
    """A process group of gloo.

    Args:
        rendezvous: torch store, with a prefix that no other communicator uses.
        me, members, epoch, timeout_s: see :class:`~megatron_ft.run.collectives.base.Communicator`.
        address: address of this host, by which its peers reach it.
    """

    def __init__(
        self,
        rendezvous: Any,
        me: int,
        members: Sequence[int],
        epoch: int,
        timeout_s: float,
        address: str = "127.0.0.1",
    ) -> None:
        super().__init__(me, members, epoch, timeout_s)
        self._sockets: socket_tracker.Sockets = {}
        self._group: Any = None
        if len(self.members) > 1:
            claim(rendezvous, self._place)
            before, size = socket_tracker.opened(), len(self.members)
            gloo: Any = dist.ProcessGroupGloo  # torch's stubs lack its options
            options = gloo._Options()
            options._timeout = timedelta(seconds=min(timeout_s, BUILD_TIMEOUT_S))
            options._devices = [gloo.create_device(hostname=address)]
            self._group = gloo(rendezvous, self._place, size, options)
            self._sockets = gloo_sockets.connections(rendezvous, self._place, size, before)
            self._group._set_default_timeout(timedelta(seconds=timeout_s))

    def _all_reduce(self, tensor: torch.Tensor) -> Work:
        total = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
        work = Collective(self._call(lambda group: group.allreduce([total])), self._over)
        return work if total is tensor else Followed(work, lambda: tensor.copy_(total))  # the wait rounds

    def reduce(self, tensor: torch.Tensor, to: int) -> Work:
        """Start summing ``tensor`` at one member; it is garbage at the others then."""
        options = dist.ReduceOptions()
        options.rootRank = self.members.index(to)
        return self._collective(lambda group: group.reduce([tensor], options))

    def exchange(self, received: torch.Tensor, sent: torch.Tensor) -> Work:
        """Start sending the parts of ``sent``, equal in size, one to each member, and receiving one from each."""
        return self._collective(lambda group: group.alltoall_base(received, sent, [], []))

    def gather(self, whole: torch.Tensor, part: torch.Tensor) -> Work:
        """Start receiving the ``part`` of every member, equal in size, one after the other, in ``whole``."""
        return self._collective(lambda group: group._allgather_base(whole, part))

    def _collective(self, operation: Callable[[Any], Any]) -> Work:
        return self._start(lambda: Collective(self._call(operation), self._over))

    def _broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        return Collective(self._call(lambda group: group.broadcast([tensor], broadcast_from(root))), self._over)

    def _send(self, tensor: torch.Tensor, to: int, tag: int) -> Work:
        return PointToPoint(self._call(lambda group: group.send([tensor], to, tag)), self._over, self.timeout_s)

    def _receive(self, tensor: torch.Tensor, source: int, tag: int) -> Work:
        return PointToPoint(self._call(lambda group: group.recv([tensor], source, tag)), self._over, self.timeout_s)

    def _call(self, operation: Callable[[Any], Any]) -> Any:
        try:
            return operation(self._group)
        except RuntimeError as error:
            raise broken(error) from None

    def _cut(self) -> None:
        socket_tracker.shut_down(self._sockets)

    def _release(self) -> Any:
        group, self._group = self._group, None
        return group


class Collective(Work):
    """A started collective of gloo."""

    def __init__(self, work: Any, over: Over) -> None:
        super().__init__(over)
        self._work = work

    def wait(self) -> None:
        # no limit: an abort ends it, or gloo after detector.collective_timeout_s (inside a group 30 days)
        while True:
            ended = self._work.is_completed()
            try:
                self._work.wait(timedelta(seconds=_LOOK_S))
                return
            except RuntimeError as error:
                # The error is certain to be the operation's own only if it had ended before. Otherwise it may be the
                # error of this wait, and the operation may have succeeded right after it.
                if ended:
                    raise broken(error) from None
            self.give_up()

    def settled(self) -> bool:
        return bool(self._work.is_completed())


class PointToPoint(Work):
    """A started send or receive. gloo ends one whose wait times out, so a thread waits, which can be abandoned."""

    def __init__(self, work: Any, over: Over, timeout_s: float) -> None:
        super().__init__(over)
        self._timeout_s = timeout_s
        self._failure: Broken | None = None
        self._thread = threading.Thread(target=self._wait_for, args=(work,), name="megatron_ft-p2p", daemon=True)
        self._thread.start()

    def _wait_for(self, work: Any) -> None:
        try:
            work.wait(timedelta(seconds=self._timeout_s))  # the default is the timeout of the build
        except Exception as error:  # of any kind: otherwise the operation would count as done
            self._failure = broken(error)

    def wait(self) -> None:
        # no limit: an abort ends it, or gloo after detector.collective_timeout_s (inside a group 30 days)
        while self._thread.is_alive():
            self._thread.join(_LOOK_S)
            self.give_up()
        if self._failure is not None:
            raise Broken(self._failure.args[0], self._failure.detail)

    def settled(self) -> bool:
        return not self._thread.is_alive()


def claim(rendezvous: Any, place: int) -> None:
    """Take a place in a rendezvous that nobody has used. Raises ``RuntimeError`` at all members if they have used it.

    gloo would look for members at the addresses of those before, until its time is over.
    """
    mine = uuid.uuid4().hex.encode()
    if rendezvous.compare_set(f"claimed/{place}", "", mine) != mine:
        raise RuntimeError(f"the place {place} of this rendezvous was already used; each communicator needs its own")


def broadcast_from(root: int) -> Any:
    """Return torch's options of a broadcast by the rank ``root``."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = root, 0
    return options


def broken(error: Exception) -> Broken:
    """Return an error of gloo as ``Broken`` in plain language, with the first line of the error as its detail.

    The caller raises the result at once and does not keep it in a variable: an exception in a local variable of a frame
    in its own traceback is a reference cycle, which would keep the process group, its thread and its connections until
    the garbage collector runs. For the same reason the error of gloo loses its traceback here.
    """
    error.__traceback__ = None
    detail = first_line(error).partition(_ADVICE)[0]
    return Broken(next((words for words, sign in _MEANINGS if sign.search(detail)), "an operation failed"), detail)


_ADVICE = ". This is typically caused by"
"""Begins the part of gloo's message that speaks of reporting the error."""
_MEANINGS = (
    ("an operation timed out", re.compile("timed? ?out", re.IGNORECASE)),
    ("a connection broke", re.compile("connection|broken pipe|read error|write error|socket", re.IGNORECASE)),
)
"""Patterns and their meaning; the first pattern found in the text counts."""
