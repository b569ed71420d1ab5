"""Operations that consist of several on other communicators, one after the other, with sums between them.

Such an operation is divided into pieces, in the same way at all members. A piece is a :class:`Chain`: a generator that
takes its steps and yields while it has to wait. One thread moves all chains on; it lives while there are any.

- **Order.** Peers match collectives by their order. A chain takes its steps by rising numbers, and takes a step only
  after the chain before it has taken that step, or a later one; so each inner communicator, which has a step of its own,
  sees one order at all members. If a chain ends before its last step, those behind it fail, too: peers would match them
  with the wrong ones. A few chains are under way at a time, which bounds the memory.
- **Abort.** No step is taken after it; what runs is left alone until it has ended. Memory that it may still touch is never
  used again.

Failures it assumes: those of ``collectives.base``.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any, ClassVar

import torch

from megatron_ft.collectives.base import ABORTED, PAUSES_S, Broken, Communicator, Over, Work
from megatron_ft.utils.log import first_line
from megatron_ft.utils.vital_thread import VitalThread

_AHEAD = 4
"""The number of chains that are under way at a time."""
_LOOK_S = 0.02

Steps = Callable[["Chain", torch.Tensor], Generator[None]]


class ChainingCommunicator(Communicator):
    """A communicator whose operations are chains on ``inner``, and perhaps on others.

    Args:
        inner: a communicator of the same members, which this one owns from now on.
    """

    LAST_STEP: ClassVar[int] = 0
    FAILED: ClassVar[str]
    """The message of the ``Broken`` that a ``RuntimeError`` in a step becomes."""

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner.members[inner._place], inner.members, inner.epoch, inner._timeout_s)
        self._inner = inner
        self._line = _Line()
        self._lock = threading.Lock()
        self._mover: threading.Thread | None = None

    def connect(self) -> None:
        # no limit: it is the inner communicator's
        self._inner.connect()

    def _chain(self, pieces: Sequence[torch.Tensor], steps: Steps) -> Work:
        """Start an operation on ``pieces``, whose ``steps`` are the same for each."""
        work = ChainWork(self._over)
        work.chains = [Chain(self, work, piece, steps) for piece in pieces]
        with self._lock:
            self._line.waiting.extend(work.chains)
            if self._mover is None:
                self._mover = VitalThread(self._move, "megatron_ft-chains")
                self._mover.start()
        return work

    def refuse(self) -> None:
        """Raise ``Broken`` if an abort has begun."""
        self._over.refuse_aborted()

    def _move(self) -> None:
        """Thread: move all chains on, until none is left or an abort has begun."""
        pause, longest = PAUSES_S
        # no limit: a thread of its own, until nothing is under way or an abort begins; each copy and operation has a
        # limit
        while True:
            with self._lock:
                if not self._line.take() or self._over.aborted:
                    self._mover = None
                    for chain in self._line.empty():
                        chain.drop(Broken(ABORTED))
                    return
            if self._line.move():
                pause = PAUSES_S[0]
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def _cut(self) -> None:
        self._inner.abort()

    def _release(self) -> Any:
        self._inner.close()
        return None  # the works keep all memory that may still be touched


class _Line:
    """Chains in their order: those that wait, and those under way. ``failure``: why no step is taken any more."""

    def __init__(self) -> None:
        self.waiting: deque[Chain] = deque()
        self.under_way: list[Chain] = []
        self.failure: Broken | None = None

    def take(self) -> bool:
        """Begin with more chains, if there is room. Return whether any is under way."""
        while self.waiting and len(self.under_way) < _AHEAD:
            self.under_way.append(self.waiting.popleft())
        return bool(self.under_way)

    def empty(self) -> list[Chain]:
        everything = [*self.under_way, *self.waiting]
        self.waiting.clear()
        self.under_way.clear()
        return everything

    def move(self) -> bool:
        """Move each chain on as far as it goes. Return whether one has taken a step or has ended."""
        moved, before = False, None
        for chain in list(self.under_way):
            taken = chain.taken
            try:
                ended = chain.move(before, self.failure)
            except Broken as error:
                ended = True
                if chain.taken < chain.last:
                    self.failure = self.failure or Broken(str(error), error.detail)
                chain.drop(error)
            if ended:
                self.under_way.remove(chain)
            else:
                before = chain
            moved |= ended or chain.taken != taken
        return moved


class Chain:
    """A piece of an operation."""

    def __init__(self, owner: ChainingCommunicator, work: ChainWork, piece: torch.Tensor, steps: Steps) -> None:
        self._owner, self._work = owner, work
        self.last = owner.LAST_STEP
        self.taken = -1
        """The number of the latest step."""
        self.kept: list[Any] = []
        """Objects that must live until the chain has settled."""
        self._before: Chain | None = None
        self._failure: Broken | None = None
        self._over = False
        self._still: Callable[[], bool] = _always
        """Returns True if nothing touches the piece's memory at present."""
        self._course = steps(self, piece)

    def move(self, before: Chain | None, failure: Broken | None) -> bool:
        """Go on as far as possible without waiting; True if the chain has ended. Raises ``Broken``.

        ``before``: the one before it that is under way. ``failure``: why there is no next step.
        """
        self._before, self._failure = before, failure
        try:
            next(self._course)
        except StopIteration:
            self._over = True
            self._work.ended()
            return True
        except RuntimeError as error:
            raise Broken(self._owner.FAILED, first_line(error)) from None
        finally:
            self._before = None
        return False

    def drop(self, why: Broken) -> None:
        """End the chain without success. It keeps memory that may still be touched."""
        self._course.close()
        self._over = True
        self._work.ended(why)

    def settled(self) -> bool:
        return self._over and self._still()

    def step(self, number: int, start: Callable[[], Work]) -> Generator[None]:
        """Start an operation when it is its turn, and return when it has ended. Raises ``Broken``."""
        while self._failure is None and self._before is not None and self._before.taken < number:
            yield
        if self._failure is not None:
            raise Broken(str(self._failure), self._failure.detail)
        self._owner.refuse()
        inner = start()
        self._still, self.taken = inner.settled, number
        while not inner.settled():
            yield
        # no limit: it does not block: the operation has ended
        inner.wait()  # it has ended, so this returns or raises at once
        self._still = _always
        self._owner.refuse()


class ChainWork(Work):
    """A started operation. Its thread calls :meth:`ended` for each of its chains."""

    def __init__(self, over: Over) -> None:
        super().__init__(over)
        self.chains: list[Chain] = []
        self._ended = 0
        self._failure: Broken | None = None
        self._end = threading.Event()

    def ended(self, failure: Broken | None = None) -> None:
        """Count a chain that has ended. The first failure is that of the operation."""
        self._ended += 1
        if failure is not None:
            failure.__traceback__ = None  # it would keep the frames, and so the communicator
            self._failure = self._failure or failure
        if self._failure is not None or self._ended == len(self.chains):
            self._end.set()

    def wait(self) -> None:
        # no limit: detector.collective_timeout_s between groups; an abort ends it when a rank is lost
        while not self._end.wait(_LOOK_S):
            self.give_up()
        if self._failure is not None:
            raise Broken(str(self._failure), self._failure.detail)

    def settled(self) -> bool:
        return self._end.is_set() and all(chain.settled() for chain in self.chains)


def _always() -> bool:
    return True
