"""The contract of every communicator: sums and messages between members, whose waits can be ended from any thread.

A communicator is never repaired, only replaced: each view has one of its own. What a back end has to bring is in
:class:`Communicator`'s abstract methods; the rest is the same for all and lives here.

The contract, which is that of torchcomms' fault tolerance (liveness, not error propagation):

- :meth:`Communicator.abort` makes every pending and future operation *of this process* fail, whatever the peers do. Where
  the back end can, it makes them fail at the peers, too; nothing may depend on it, because the watcher brings the news.
- An operation counts only if its completion was seen here **before** the abort began. A device's kernels return after an
  abort as if they were done, and their data is garbage; so :meth:`Work.wait` looks at the completion first and then at
  whether an abort has begun, and an abort says so before it does anything. Where the abort of *another* member can have that
  effect (:attr:`Communicator.confirms`), sums count when all members have confirmed that they saw the ends of theirs.
- A buffer belongs to an operation until :meth:`Work.settled` is true. A buffer of an operation that never settles is given
  up by its owner.
- :meth:`Communicator.close` returns within a bounded time. If the back end is stuck by then, :func:`stuck` says so from
  then on: the process cannot use its device any more, and another one has to take its place.

When an epoch ends without a failure (a group leaves or enters), a peer may still be in the last operations of the step
before, which have ended here: an abort could cut data that is on its way to it. Then :meth:`Communicator.leave` ends
the waits here only, and the connections stay until the next view stands.

Failures it assumes: any peer may vanish or stop at any time; an operation may then fail, complete here and fail
elsewhere, or never end. The buffer of a failed in-place all-reduce is partly overwritten.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_ft.core.protocol.ports import Broken

POLL_S = 0.0005
PAUSES_S = (0.00002, 0.0005)
"""Shortest and longest pause in seconds between two looks at a device's event: a bucket takes a millisecond."""
GRACE_S = 0.1
"""Seconds in which an aborted operation may fail before it is abandoned. A failing one needs a few milliseconds."""
BUILD_TIMEOUT_S = 30.0
"""Seconds to build one. A peer that has not come by then will not, and a longer wait keeps a thread and descriptors."""

ABORTED = "the communicator was aborted"
_ABANDONED = "the communicator was aborted; an operation that did not end is abandoned"


class Left(Broken):
    """The operation was not waited for, because the epoch has ended without a failure."""


@dataclass
class Over:
    """The reason why a communicator's operations are no longer waited for, if there is one. Any thread writes it."""

    aborted: bool = False
    left: bool = False

    def refuse_aborted(self) -> None:
        """Raise ``Broken`` if an abort has begun."""
        if self.aborted:
            raise Broken(ABORTED)

    def refuse_left(self) -> None:
        """Raise ``Left`` if the epoch was left."""
        if self.left:
            raise Left("the epoch is over; an operation in which not all groups take part is not waited for")


class Work(ABC):
    """A started operation."""

    def __init__(self, over: Over) -> None:
        self._over = over

    @abstractmethod
    def wait(self) -> None:
        """Return when it is complete; raise :class:`Broken` if it failed or was abandoned. Releases the GIL."""

    @abstractmethod
    def settled(self) -> bool:
        """Return True if the operation has ended, successfully or not, and does not touch its buffer any more."""

    def settles_within(self, timeout_s: float) -> bool:
        """After an abort: return True if the operation ends in time."""
        deadline = time.monotonic() + timeout_s
        return wait_for(self.settled, lambda: time.monotonic() > deadline, (POLL_S, POLL_S))

    def give_up(self) -> None:
        """Raise ``Broken`` if the operation is not to be waited for any more."""
        if self._over.aborted and not self.settles_within(GRACE_S):
            raise Broken(_ABANDONED)
        if not self._over.aborted:
            self._over.refuse_left()


class Done(Work):
    """An operation among one member."""

    def wait(self) -> None:
        pass

    def settled(self) -> bool:
        return True


class Followed(Work):
    """An operation whose first wait does something more when it is complete."""

    def __init__(self, work: Work, then: Callable[[], object]) -> None:
        super().__init__(work._over)
        self._work, self._then = work, then
        self._done = False

    def wait(self) -> None:
        # no limit: that of the operation
        self._work.wait()
        if not self._done:
            self._then()
            self._done = True

    def settled(self) -> bool:
        return self._work.settled()


class Communicator(ABC):
    """The members' communicator in one process; a back end's ranks are the members' places in ``members``, sorted.

    Args:
        me: the member that this process is.
        members: all of them: the live groups of an epoch, or the positions of a group.
        epoch: the view's number.
        timeout_s: seconds after which an operation fails by itself.
    """

    confirms = False
    """Whether sums and broadcasts count only after :meth:`confirm`."""

    def __init__(self, me: int, members: Sequence[int], epoch: int, timeout_s: float) -> None:
        self.me, self.members, self.epoch, self.timeout_s = me, tuple(sorted(members)), epoch, timeout_s
        self._place = self.members.index(me)
        self._over = Over()
        self._started: list[Work] = []

    def connect(self) -> None:  # noqa: B027, not every back end has such a part
        """Do the part of building that waits for the other members. :meth:`close`, called from another thread, ends it
        where the back end can; the constructor does it where it cannot be ended. Raises ``RuntimeError``."""

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        """Start summing ``tensor`` in place over the members, in its type; bf16 is added in fp32 and rounded at the end."""
        return self._start(lambda: self._all_reduce(tensor))

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        """Start copying ``source``'s tensor into that of all other members."""
        return self._start(lambda: self._broadcast(tensor, self.members.index(source)))

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Work:
        """Start sending a contiguous tensor to one member."""
        return self._start(lambda: self._send(tensor, self.members.index(to), tag))

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Work:
        """Start receiving into a contiguous tensor of the sender's shape and dtype."""
        return self._start(lambda: self._receive(tensor, self.members.index(source), tag))

    def confirm(self) -> None:  # noqa: B027, for most there is nothing to confirm
        """Return once every member has seen the end of what it started before; all members call it alike. Raises ``Broken``.

        It is needed where the abort of one member can end an operation at another one, with garbage and without an error.
        """

    @property
    def aborted(self) -> bool:
        """Whether an abort has begun."""
        return self._over.aborted

    def leave(self) -> None:
        """Make every pending wait and future operation fail, here only. Callable from any thread, repeatedly.

        A buffer in which an operation is pending belongs to it until :meth:`close`.
        """
        self._over.left = True

    def abort(self) -> None:
        """Make every pending and future operation fail. Callable from any thread, repeatedly; does not block."""
        self._over.aborted = True
        self._cut()

    def close(self) -> None:
        """Abort. The first :func:`sweep` after the last operation has ended frees memory, threads and sockets."""
        self.abort()
        if reason := self._stuck_because():
            _stuck.append(reason)
        deadline = time.monotonic() + GRACE_S
        wait_for(
            lambda: all(work.settled() for work in self._started),
            lambda: time.monotonic() > deadline,
            (POLL_S, POLL_S),
        )
        _closed.append((self._release(), self._started))
        self._started = []

    # --- what a back end brings ---------------------------------------------------------------------------------------

    @abstractmethod
    def _all_reduce(self, tensor: torch.Tensor) -> Work: ...

    @abstractmethod
    def _broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        """``root``, here and below ``to`` and ``source``: a place in ``members``."""

    @abstractmethod
    def _send(self, tensor: torch.Tensor, to: int, tag: int) -> Work: ...

    @abstractmethod
    def _receive(self, tensor: torch.Tensor, source: int, tag: int) -> Work: ...

    @abstractmethod
    def _cut(self) -> None:
        """Begin to end all operations. Any thread calls it, more than once; it must not block."""

    def _stuck_because(self) -> str:
        """Wait, for a bounded time, for what :meth:`_cut` has begun. Return the reason if it is not over then, else ""."""
        return ""

    @abstractmethod
    def _release(self) -> Any:
        """Return what must live until the last operation has ended, and drop every reference to it."""

    def _start(self, operation: Callable[[], Work]) -> Work:
        self._over.refuse_aborted()
        self._over.refuse_left()
        work = operation() if len(self.members) > 1 else Done(self._over)
        self._started = [other for other in self._started if not other.settled()] + [work]
        return work


def wait_for(
    condition: Callable[[], bool], interrupted: Callable[[], bool], pauses_s: tuple[float, float] = (0.001, 0.01)
) -> bool:
    """Poll until ``condition`` or ``interrupted`` is true. Return True in the first case, False in the second. ``pauses_s``:
    the shortest and the longest between two looks."""
    pause, longest = pauses_s
    # no limit: its callers' condition, or interrupted, ends it
    while not condition():
        if interrupted():
            return False
        time.sleep(pause)
        pause = min(2 * pause, longest)
    return True


_closed: list[tuple[Any, list[Work]]] = []
"""What closed communicators must keep, with their started operations."""


_stuck: list[str] = []


def stuck() -> str:
    """Return the reason why this process must be replaced: a back end does not come back from an abort; else ""."""
    return _stuck[0] if _stuck else ""


def sweep() -> bool:
    """Destroy the closed communicators whose operations have all ended. Returns whether there was one."""
    before = len(_closed)
    if _closed:
        _closed[:] = [entry for entry in _closed if not all(work.settled() for work in entry[1])]
    return len(_closed) < before
