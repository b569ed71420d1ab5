"""A communicator that can be unblocked from any thread: the outer one, and the one inside a group.

The outer one sums gradients over the live groups of one epoch, at one position; the inner one joins the ranks of one group
(``runtime.inner``). Either is never repaired, only replaced. ``ProcessGroup.abort`` does nothing on gloo, and after a
``kill -9`` only the ring neighbours of the dead see a reset, so :meth:`Communicator.abort` shuts down the sockets that gloo
connected while the process group was built. That makes pending operations here *and at the peers* fail within
milliseconds, which is also how peers without an agent's notice learn of it.

Nearly always: gloo can forget to fail an operation whose payload is half received when the connection breaks (seen when
a rank had been descheduled in the last all-reduce of a step). Such an operation is abandoned a moment after the abort,
its buffer is never used again, and its process group is kept until it has ended: the destructor would wait for it.

Where an epoch ends without a failure (somebody leaves or enters), a peer may still be in the last operations of the step
before, which have ended here: an abort could cut what is on its way to it. Then :meth:`Communicator.leave` ends the waiting
here only, and the connections stay until the next view stands.

Failures it assumes: any peer may vanish or stop at any time; an operation may then fail, or complete here and fail
elsewhere. The buffer of a failed in-place all-reduce is partly overwritten.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_ft.runtime import sockets

_POLL_S = 0.0005
_LOOK_S = 0.02
"""So often a wait looks whether it is still wanted. A look costs 0.2 ms: 1% of a core, while there is nothing else to do."""
_GRACE_S = 0.1
"""How long an aborted operation may take to fail before it is abandoned. A failing one needs a few milliseconds."""

_ABANDONED = "the communicator was aborted; an operation that did not end is abandoned"
_LEFT = "the epoch is over; an operation that not everybody takes part in is not waited for"


class Broken(Exception):
    """An operation did not complete: the epoch is over. An event, converted where the operation was started."""


class Left(Broken):
    """It was not waited for, because the epoch has ended without a failure."""


@dataclass
class Over:
    """Whether, and why, the operations of a communicator are not waited for any more. Any thread writes it."""

    aborted: bool = False
    left: bool = False


class Communicator:
    """Who its members are to each other is the user's matter; gloo's ranks are their places in ``members``, sorted.

    Args:
        rendezvous: torch store, with a prefix that no other communicator uses.
        me: which member this is.
        members: all of them: the live groups of an epoch, or the positions of a group.
        epoch: the view's number.
        timeout_s: seconds after which an operation fails by itself.
        address: of this host, by which its peers reach it.
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
        self.epoch = epoch
        self.members = tuple(sorted(members))
        self._sockets: sockets.Sockets = {}
        self._over = Over()
        self._group: Any = None
        self._started: list[Work] = []
        if len(self.members) > 1:
            before = sockets.opened()
            options = dist.ProcessGroupGloo._Options()
            options._timeout = timedelta(seconds=timeout_s)
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
            self._group = dist.ProcessGroupGloo(rendezvous, self.members.index(me), len(self.members), options)
            self._sockets = sockets.connected_since(before)

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        """Start summing ``tensor`` in place over the members."""
        return self._start(lambda group: group.allreduce([tensor]), Work)

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        """Start copying ``source``'s tensor into everybody's."""
        return self._start(lambda group: group.broadcast([tensor], _from(self.members.index(source))), Work)

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Work:
        """Start sending a contiguous tensor to one member."""
        return self._start(lambda group: group.send([tensor], self.members.index(to), tag), PointToPoint)

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Work:
        """Start receiving into a contiguous tensor of the sender's shape and dtype."""
        return self._start(lambda group: group.recv([tensor], self.members.index(source), tag), PointToPoint)

    def leave(self) -> None:
        """Make every pending wait and future operation fail, here only. Any thread, any number of times.

        A buffer in which an operation is pending belongs to it until :meth:`close`.
        """
        self._over.left = True

    def abort(self) -> None:
        """Make every pending and future operation fail, here and at the peers. Any thread, any number of times."""
        self._over.aborted = True
        sockets.shut_down(self._sockets)

    def close(self) -> None:
        """Abort. Memory, threads and sockets are given back by the next :func:`sweep` after the last operation has ended."""
        self.abort()
        deadline = time.monotonic() + _GRACE_S
        while not all(work.settled() for work in self._started) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        _closed.append((self._group, self._started))
        self._group, self._started = None, []

    def _start(self, operation: Callable[[Any], Any], kind: type[Work]) -> Work:
        if self._over.aborted:
            raise Broken("the communicator was aborted")
        if self._over.left:
            raise Left(_LEFT)
        if self._group is None:
            return kind(None, self._over)
        try:
            work = kind(operation(self._group), self._over)
        except RuntimeError as error:
            raise Broken(_first_line(error)) from None
        self._started = [other for other in self._started if not other.settled()] + [work]
        return work


class Work:
    """A started collective."""

    def __init__(self, work: Any, over: Over) -> None:
        self._work, self._over = work, over

    def wait(self) -> None:
        """Return when it is complete; raise :class:`Broken` when it failed or was abandoned. Releases the GIL."""
        while self._work is not None:
            ended = self._work.is_completed()
            try:
                self._work.wait(timedelta(seconds=_LOOK_S))
                return
            except RuntimeError as error:
                # The exception's traceback would keep the process group, and so its sockets, alive.
                message = _first_line(error.with_traceback(None))
            # Only of an operation that had ended before is it certain that the error is its own: another one may be that
            # of this wait, and the operation have succeeded right after it.
            if ended:
                raise Broken(message)
            self._give_up()

    def _give_up(self) -> None:
        """Raise ``Broken`` when the operation is not to be waited for any more."""
        if self._over.aborted and not self.settles_within(_GRACE_S):
            raise Broken(_ABANDONED)
        if self._over.left and not self._over.aborted:
            raise Left(_LEFT)

    def settled(self) -> bool:
        """Whether the operation has ended, well or not, and does not touch its buffer any more."""
        return self._work is None or self._work.is_completed()

    def settles_within(self, timeout_s: float) -> bool:
        """After an abort: whether it ends in time."""
        deadline = time.monotonic() + timeout_s
        while not self.settled():
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True


class PointToPoint(Work):
    """A started send or receive. gloo ends one whose wait times out, so a thread waits, and can be left behind."""

    def __init__(self, work: Any, over: Over) -> None:
        super().__init__(work, over)
        self._message: str | None = None
        self._thread: threading.Thread | None = None
        if work is not None:
            self._thread = threading.Thread(target=self._wait_for, args=(work,), name="megatron_ft-p2p", daemon=True)
            self._thread.start()

    def _wait_for(self, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            self._message = _first_line(error.with_traceback(None))

    def wait(self) -> None:
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(_LOOK_S)
            self._give_up()
        if self._message is not None:
            raise Broken(self._message)

    def settled(self) -> bool:
        return self._thread is None or not self._thread.is_alive()


_closed: list[tuple[Any, list[Work]]] = []
"""Process groups that are not destroyed yet, with their started operations."""


def sweep() -> None:
    """Destroy the closed process groups whose operations have all ended."""
    if _closed:
        _closed[:] = [entry for entry in _closed if not all(work.settled() for work in entry[1])]


def _from(root: int) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = root, 0
    return options


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
