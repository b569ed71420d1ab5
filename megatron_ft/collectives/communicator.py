"""A communicator that can be unblocked from any thread: the outer one, and the one inside a group.

The outer one sums gradients over the live groups of one epoch, at one position; the inner one joins the ranks of one
group (``collectives.intra_group``). Neither is ever repaired, only replaced. ``ProcessGroup.abort`` does nothing on
gloo, and after a ``kill -9`` only the ring neighbours of the dead rank see a reset, so :meth:`Communicator.abort` shuts
down gloo's connections (``collectives.gloo_sockets`` finds them). That makes pending operations here *and at the peers*
fail within milliseconds, which also informs peers without an agent's notice.

There is an exception: gloo can forget to fail an operation whose payload is half received when the connection breaks
(seen when a rank had been descheduled in the last all-reduce of a step). Such an operation is abandoned a moment after
the abort, its buffer is never used again, and its process group is kept until it has ended: the destructor would wait
for it.

When an epoch ends without a failure (a group leaves or enters), a peer may still be in the last operations of the step
before, which have ended here: an abort could cut data that is on its way to it. Then :meth:`Communicator.leave` ends
the waits here only, and the connections stay until the next view stands.

Failures it assumes: any peer may vanish or stop at any time; an operation may then fail, or complete here and fail
elsewhere. The buffer of a failed in-place all-reduce is partly overwritten.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_ft.collectives import gloo_sockets
from megatron_ft.utils import socket_tracker

_POLL_S = 0.0005
_LOOK_S = 0.02
"""Seconds between two checks of a wait. A check costs 0.2 ms: 1% of a core, while there is nothing else to do."""
BUILD_TIMEOUT_S = 30.0
"""Seconds to build one. A peer that has not come by then will not, and a longer wait keeps a thread and descriptors."""
_GRACE_S = 0.1
"""Seconds in which an aborted operation may fail before it is abandoned. A failing one needs a few milliseconds."""

_ABANDONED = "the communicator was aborted; an operation that did not end is abandoned"
_LEFT = "the epoch is over; an operation in which not all groups take part is not waited for"


class Broken(Exception):
    """An operation did not complete: the epoch is over. An event, converted where the operation was started.

    The message is in plain language and goes into the run record; ``detail`` is the library's own text, for the rank's
    log.
    """

    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail

    @property
    def in_full(self) -> str:
        """Return message and detail."""
        return f"{self}: {self.detail}" if self.detail else str(self)


class Left(Broken):
    """The operation was not waited for, because the epoch has ended without a failure."""


@dataclass
class Over:
    """The reason why a communicator's operations are no longer waited for, if there is one. Any thread writes it."""

    aborted: bool = False
    left: bool = False


class Communicator:
    """A gloo process group of some members; gloo's ranks are the members' places in ``members``, sorted.

    Args:
        rendezvous: torch store, with a prefix that no other communicator uses.
        me: the member that this process is.
        members: all of them: the live groups of an epoch, or the positions of a group.
        epoch: the view's number.
        timeout_s: seconds after which an operation fails by itself.
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
        self.epoch = epoch
        self.members = tuple(sorted(members))
        self._sockets: socket_tracker.Sockets = {}
        self._over = Over()
        self._group: Any = None
        self._started: list[Work] = []
        self._timeout_s = timeout_s
        if len(self.members) > 1:
            before = socket_tracker.opened()
            gloo: Any = dist.ProcessGroupGloo  # torch's stubs lack its options
            options = gloo._Options()
            options._timeout = timedelta(seconds=min(timeout_s, BUILD_TIMEOUT_S))
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
            mine, size = self.members.index(me), len(self.members)
            self._group = dist.ProcessGroupGloo(rendezvous, mine, size, options)
            self._sockets = gloo_sockets.connections(rendezvous, mine, size, before)
            self._group._set_default_timeout(timedelta(seconds=timeout_s))

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        """Start summing ``tensor`` in place over the members."""
        return self._start(lambda group: group.allreduce([tensor]), Work)

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        """Start copying ``source``'s tensor into that of all other members."""
        return self._start(lambda group: group.broadcast([tensor], _from(self.members.index(source))), Work)

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Work:
        """Start sending a contiguous tensor to one member."""
        return self._start(lambda group: group.send([tensor], self.members.index(to), tag), PointToPoint)

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Work:
        """Start receiving into a contiguous tensor of the sender's shape and dtype."""
        return self._start(lambda group: group.recv([tensor], self.members.index(source), tag), PointToPoint)

    def leave(self) -> None:
        """Make every pending wait and future operation fail, here only. Callable from any thread, repeatedly.

        A buffer in which an operation is pending belongs to it until :meth:`close`.
        """
        self._over.left = True

    def abort(self) -> None:
        """Make every pending and future operation fail, here and at the peers. Callable from any thread, repeatedly."""
        self._over.aborted = True
        socket_tracker.shut_down(self._sockets)

    def close(self) -> None:
        """Abort. The first :func:`sweep` after the last operation has ended frees memory, threads and sockets."""
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
            return kind(None, self._over, self._timeout_s)
        try:
            work = kind(operation(self._group), self._over, self._timeout_s)
        except RuntimeError as error:
            raise broken(error) from None
        self._started = [other for other in self._started if not other.settled()] + [work]
        return work


class Work:
    """A started collective. ``timeout_s``: the communicator's timeout."""

    def __init__(self, work: Any, over: Over, timeout_s: float = BUILD_TIMEOUT_S) -> None:
        self._work, self._over, self._timeout_s = work, over, timeout_s

    def wait(self) -> None:
        """Return when it is complete; raise :class:`Broken` if it failed or was abandoned. Releases the GIL."""
        while self._work is not None:
            ended = self._work.is_completed()
            try:
                self._work.wait(timedelta(seconds=_LOOK_S))
                return
            except RuntimeError as error:
                # The error is certain to be the operation's own only if it had ended before. Otherwise it may be the
                # error of this wait, and the operation may have succeeded right after it.
                if ended:
                    raise broken(error) from None
            self._give_up()

    def _give_up(self) -> None:
        """Raise ``Broken`` if the operation is not to be waited for any more."""
        if self._over.aborted and not self.settles_within(_GRACE_S):
            raise Broken(_ABANDONED)
        if self._over.left and not self._over.aborted:
            raise Left(_LEFT)

    def settled(self) -> bool:
        """Return True if the operation has ended, successfully or not, and does not touch its buffer any more."""
        return self._work is None or self._work.is_completed()

    def settles_within(self, timeout_s: float) -> bool:
        """After an abort: return True if the operation ends in time."""
        deadline = time.monotonic() + timeout_s
        while not self.settled():
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True


class PointToPoint(Work):
    """A started send or receive. gloo ends one whose wait times out, so a thread waits, which can be abandoned."""

    def __init__(self, work: Any, over: Over, timeout_s: float = BUILD_TIMEOUT_S) -> None:
        super().__init__(work, over, timeout_s)
        self._failure: Broken | None = None
        self._thread: threading.Thread | None = None
        if work is not None:
            self._thread = threading.Thread(target=self._wait_for, args=(work,), name="megatron_ft-p2p", daemon=True)
            self._thread.start()

    def _wait_for(self, work: Any) -> None:
        try:
            work.wait(timedelta(seconds=self._timeout_s))  # the default is the timeout of the build
        except Exception as error:  # of any kind: otherwise the operation would count as done
            self._failure = broken(error)

    def wait(self) -> None:
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(_LOOK_S)
            self._give_up()
        if self._failure is not None:
            raise Broken(self._failure.args[0], self._failure.detail)

    def settled(self) -> bool:
        return self._thread is None or not self._thread.is_alive()


_closed: list[tuple[Any, list[Work]]] = []
"""Process groups that are not destroyed yet, with their started operations."""


def sweep() -> bool:
    """Destroy the closed process groups whose operations have all ended. Returns whether there was one."""
    before = len(_closed)
    if _closed:
        _closed[:] = [entry for entry in _closed if not all(work.settled() for work in entry[1])]
    return len(_closed) < before


def _from(root: int) -> Any:
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
    detail = (str(error).splitlines() or [type(error).__name__])[0].partition(_ADVICE)[0]
    return Broken(next((words for words, sign in _MEANINGS if sign.search(detail)), "an operation failed"), detail)


_ADVICE = ". This is typically caused by"
"""Begins the part of gloo's message that speaks of reporting the error."""
_MEANINGS = (
    ("an operation timed out", re.compile("timed? ?out", re.IGNORECASE)),
    ("a connection broke", re.compile("connection|broken pipe|read error|write error|socket", re.IGNORECASE)),
)
"""Patterns and their meaning; the first pattern found in the text counts."""
