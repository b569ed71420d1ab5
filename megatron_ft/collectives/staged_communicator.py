"""Sums and messages of tensors on a device over a communicator that knows the host's memory only, such as gloo's.

An operation copies the tensor to pinned host memory, runs there, and copies the result back. It is complete when the copy
back has been seen to be complete. Copies have streams of their own, so an operation waits for what the device was told to
compute before it, and for nothing after it; all of them together overlap with the computation.

- **Pieces.** Operations are divided into pieces of at most ``device_copies.PIECE`` bytes, in the same way at all members and
  wherever the tensor is. A few pieces at a time hold pinned memory.
- **Lanes.** Peers match collectives by their order, and messages by their order for each peer and tag. Each such order is a
  lane: its pieces are started in order, also those in the host's memory, which need no copy. If one of them cannot be
  started, those behind it fail, too: a peer would match them with the wrong ones. Lanes do not wait for each other.
- **Abort.** Nothing is started after it, so no copy back begins; what runs is left alone until it has ended. Host memory
  that it may still touch is never used again.

One thread moves the pieces on; it lives while there are any.

Failures it assumes: those of ``collectives.base``; a device that is stuck behind a kernel which never ends, so that a copy,
or a call that pins memory, never returns.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Hashable
from typing import Any

import torch

from megatron_ft.collectives import device_copies
from megatron_ft.collectives.base import ABORTED, PAUSES_S, Broken, Communicator, Over, Work
from megatron_ft.collectives.device_copies import Port
from megatron_ft.utils.log import first_line
from megatron_ft.utils.vital_thread import VitalThread

_AHEAD = 4
"""The number of pieces of a lane that are under way at a time, and so hold pinned memory."""
_LOOK_S = 0.02
_STUCK_S = 10.0
"""Seconds after an abort in which the thread has to be back from the device."""


class StagedCommunicator(Communicator):
    """``inner`` for tensors on any device.

    Args:
        inner: a communicator of the same members, which this one owns from now on.
        port_of: returns the port of a tensor's device, None if ``inner`` can take the tensor as it is.
    """

    def __init__(
        self, inner: Communicator, port_of: Callable[[torch.Tensor], Port | None] = device_copies.port_of
    ) -> None:
        super().__init__(inner.members[inner._place], inner.members, inner.epoch, inner._timeout_s)
        self._inner, self._port_of = inner, port_of
        self._lanes: dict[Hashable, _Lane] = {}
        self._streams: dict[tuple[Port, str], Any] = {}
        self._lock = threading.Lock()
        self._mover: threading.Thread | None = None

    def connect(self) -> None:
        self._inner.connect()

    def _all_reduce(self, tensor: torch.Tensor) -> Work:
        return self._queue("collectives", tensor, self._inner.all_reduce, out=True, back=True)

    def _broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        mine, source = root == self._place, self.members[root]
        return self._queue(
            "collectives", tensor, lambda host: self._inner.broadcast(host, source), out=mine, back=not mine
        )

    def _send(self, tensor: torch.Tensor, to: int, tag: int) -> Work:
        peer = self.members[to]
        return self._queue(
            ("to", to, tag), tensor, lambda host: self._inner.send(host, peer, tag), out=True, back=False
        )

    def _receive(self, tensor: torch.Tensor, source: int, tag: int) -> Work:
        peer = self.members[source]
        start = lambda host: self._inner.receive(host, peer, tag)  # noqa: E731
        return self._queue(("from", source, tag), tensor, start, out=False, back=True)

    def _queue(
        self, lane: Hashable, tensor: torch.Tensor, start: Callable[[torch.Tensor], Work], *, out: bool, back: bool
    ) -> Work:
        port = self._port_of(tensor)
        after = None if port is None else port.now()
        flat = tensor.detach().view(-1)
        work = StagedWork(self._over)
        for part in flat.split(max(1, device_copies.PIECE // flat.element_size())):
            work.pieces.append(_Piece(self, work, part, port, after, start, out, back))
        with self._lock:
            self._lanes.setdefault(lane, _Lane()).waiting.extend(work.pieces)
            if self._mover is None:
                self._mover = VitalThread(self._move, "megatron_ft-staging")
                self._mover.start()
        return work

    def stream(self, port: Port, way: str) -> Any:
        """Return the stream for copies in one direction: copies back must not wait for what is computed meanwhile."""
        if (port, way) not in self._streams:
            self._streams[port, way] = port.stream()
        return self._streams[port, way]

    def refuse(self) -> None:
        """Raise ``Broken`` if an abort has begun."""
        self._over.refuse_aborted()

    @property
    def patience_s(self) -> float:
        return self._timeout_s

    def _move(self) -> None:
        """Thread: move all pieces on, until none is left or an abort has begun."""
        pause, longest = PAUSES_S
        while True:
            with self._lock:
                lanes = [lane for lane in self._lanes.values() if lane.take()]
                if not lanes or self._over.aborted:
                    self._mover = None
                    for piece in [piece for lane in self._lanes.values() for piece in lane.empty()]:
                        piece.drop(Broken(ABORTED))
                    return
            moved = [lane.move() for lane in lanes]
            if any(moved):
                pause = PAUSES_S[0]
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def _cut(self) -> None:
        self._inner.abort()

    def _stuck_because(self) -> str:
        mover = self._mover
        if mover is not None:
            mover.join(_STUCK_S)
            if mover.is_alive():
                return f"a copy between the device and the host has not returned within {_STUCK_S:g} s"
        return ""

    def _release(self) -> Any:
        self._inner.close()
        return None  # the works keep all memory that may still be touched


class _Lane:
    """Pieces in the order in which they are started: those that wait, and those under way. ``failure``: why no more is
    started."""

    def __init__(self) -> None:
        self.waiting: deque[_Piece] = deque()
        self.under_way: list[_Piece] = []
        self.failure: Broken | None = None

    def take(self) -> bool:
        """Begin with more pieces, if there is room. Return whether any is under way."""
        while self.waiting and len(self.under_way) < _AHEAD:
            self.under_way.append(self.waiting.popleft())
        return bool(self.under_way)

    def empty(self) -> list[_Piece]:
        everything = [*self.under_way, *self.waiting]
        self.waiting.clear()
        self.under_way.clear()
        return everything

    def move(self) -> bool:
        """Move each piece on as far as it goes. Return whether one was started or has ended."""
        moved = False
        for piece in list(self.under_way):
            turn = all(other.started for other in self.under_way[: self.under_way.index(piece)])
            started = piece.started
            try:
                ended = piece.move(turn, self.failure)
            except Broken as error:
                ended = True
                if not piece.started:
                    self.failure = self.failure or Broken(str(error), error.detail)
                piece.drop(error)
            if ended:
                self.under_way.remove(piece)
            moved |= ended or piece.started != started
        return moved


class _Piece:
    """A part of an operation: ``tensor`` and, if it is on a device, its copy in pinned memory."""

    def __init__(
        self,
        owner: StagedCommunicator,
        work: StagedWork,
        tensor: torch.Tensor,
        port: Port | None,
        after: Any,
        start: Callable[[torch.Tensor], Work],
        out: bool,
        back: bool,
    ) -> None:
        self._owner, self._work, self._tensor, self._port, self._after = owner, work, tensor, port, after
        self._start, self._out, self._back = start, out, back
        self.started = False
        """The operation was started in the host's memory."""
        self._over = False
        self._turn = False
        self._failure: Broken | None = None
        self._buffer: torch.Tensor | None = None
        self._still: Callable[[], bool] = _always
        """Returns True if nothing touches the piece's memory at present."""
        self._course = self._run()

    def move(self, turn: bool, failure: Broken | None) -> bool:
        """Go on as far as possible without waiting; True if the piece has ended. Raises ``Broken``.

        ``turn``: all pieces before it have been started. ``failure``: they have not, and never will be.
        """
        self._turn, self._failure = turn, failure
        try:
            next(self._course)
        except StopIteration:
            self._over = True
            self._work.ended()
            return True
        except RuntimeError as error:
            raise Broken("a copy between the device and the host failed", first_line(error)) from None
        return False

    def drop(self, why: Broken) -> None:
        """End the piece without success. It keeps memory that may still be touched."""
        self._course.close()
        self._over = True
        self._work.ended(why)

    def settled(self) -> bool:
        try:
            return self._over and self._still()
        except RuntimeError:
            return True  # the device has failed as a whole, and writes no more

    def _run(self) -> Generator[None]:
        host, port = self._tensor, self._port
        if port is not None:
            self._buffer = port.pool.take(max(self._tensor.nbytes, 1))
            host = self._buffer[: self._tensor.nbytes].view(self._tensor.dtype)
        if port is not None and self._out:
            yield from self._copied(port, host, self._tensor, "out")
        while not self._turn and self._failure is None:
            yield
        if self._failure is not None:
            raise Broken(str(self._failure), self._failure.detail)
        self._owner.refuse()
        inner = self._start(host)
        self._still, self.started = inner.settled, True
        while not inner.settled():
            yield
        inner.wait()  # it has ended, so this returns or raises at once
        self._still = _always
        self._owner.refuse()
        if port is not None and self._back:
            yield from self._copied(port, self._tensor, host, "back")
        if port is not None and self._buffer is not None:
            port.pool.give(self._buffer)
            self._buffer = None

    def _copied(self, port: Port, target: torch.Tensor, source: torch.Tensor, way: str) -> Generator[None]:
        """Copy, and return when the end has been seen before an abort began."""
        event = port.copy_async(target, source, self._owner.stream(port, way), self._after)
        self._still = lambda: port.event_query(event)
        by = time.monotonic() + self._owner.patience_s
        while not port.event_query(event):
            if time.monotonic() > by:
                raise Broken("an operation timed out", f"a copy {way} has not ended after {self._owner.patience_s:g} s")
            yield
        self._owner.refuse()  # in this order: an abort that began before this look may have come before the end
        self._still = _always


class StagedWork(Work):
    """A started operation. Its thread calls :meth:`ended` for each of its pieces."""

    def __init__(self, over: Over) -> None:
        super().__init__(over)
        self.pieces: list[_Piece] = []
        self._ended = 0
        self._failure: Broken | None = None
        self._end = threading.Event()

    def ended(self, failure: Broken | None = None) -> None:
        """Count a piece that has ended. The first failure is that of the operation."""
        self._ended += 1
        if failure is not None:
            failure.__traceback__ = None  # it would keep the frames, and so the communicator
            self._failure = self._failure or failure
        if self._failure is not None or self._ended == len(self.pieces):
            self._end.set()

    def wait(self) -> None:
        while not self._end.wait(_LOOK_S):
            self.give_up()
        if self._failure is not None:
            raise Broken(str(self._failure), self._failure.detail)

    def settled(self) -> bool:
        return self._end.is_set() and all(piece.settled() for piece in self.pieces)


def _always() -> bool:
    return True
