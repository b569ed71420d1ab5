"""Sums on two levels: inside each host, then between the hosts.

Groups that share a host also share its network, so what a host sends should not grow with their number. A sum takes these
steps, each on a communicator of its own:

1. inside each host, the members add to the leader, the lowest of them;
2. the leaders sum over the hosts;
3. each leader hands the result to the others on its host.

**bf16** tensors are added in fp32 and travel between hosts as bf16: in step 2 each leader receives its share of all other
hosts' sums (an all-to-all), adds them in fp32, and all leaders gather the rounded shares. So an element of the sum is wrong
by at most 2^-8 of its host's sum and 2^-8 of the total, whatever the number of hosts and groups, and 2^-8 of what each group
has rounded before. A ring in bf16 rounds after each addition. Without shared hosts steps 1 and 3 are left out.

A tensor is divided into pieces, in the same way at all members, and one thread moves them all on; it lives while there are
any. Peers match operations by their order: a piece takes a step only after the piece before it has taken that step, or a
later one. A few pieces are under way at a time, which bounds the memory. If a step fails, or an abort has begun, no step is
taken any more, because peers would match it with a wrong one; what runs is left alone until it has ended.

Broadcasts and messages go through the communicator of all members.

Failures it assumes: those of ``run.collectives.base``. When a step fails at one member, the others of that step fail or
wait; an abort ends them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from megatron_ft.run.collectives.base import ABORTED, PAUSES_S, Broken, Communicator, Over, Work
from megatron_ft.run.collectives.gloo_communicator import GlooCommunicator
from megatron_ft.utils.log import first_line
from megatron_ft.utils.vital_thread import VitalThread

PIECE = 2**22
"""Bytes of a piece: while one is summed between hosts, the next is summed inside them."""
_AHEAD = 4
"""The number of pieces that are under way at a time."""
_LOOK_S = 0.02
_UP, _ACROSS, _BACK, _DOWN = range(4)

Steps = Iterator[tuple[int, Callable[[], Work]]]
"""The steps of a piece, each with the function that starts it. The next is asked for when the one before has ended."""


class TwoLevelCommunicator(Communicator):
    """``whole``, with sums on two levels. Their tensors are in the host's memory: a thread of its own works on them, which
    knows nothing of a device's streams.

    Args:
        whole: a communicator of all members, which this one owns from now on.
        hosts: the members of each host; every member is on one.
        make: returns a communicator of some members, this one among them, under a name of their own. It waits for them.
        rounded: whether bf16 travels between hosts as bf16. False: as fp32, and leaders are connected once only.
    """

    def __init__(
        self,
        whole: Communicator,
        hosts: Sequence[Sequence[int]],
        make: Callable[[str, Sequence[int]], GlooCommunicator],
        *,
        rounded: bool,
    ) -> None:
        super().__init__(whole.me, whole.members, whole.epoch, whole.timeout_s)
        self._whole = whole
        self._host = next(host for host in hosts if self.me in host)
        self._leaders = sorted(min(host) for host in hosts)
        self._make, self._rounded = make, rounded
        self._parts: dict[int, GlooCommunicator] = {}
        self._pieces: list[_Piece] = []
        self._failure: Broken | None = None
        self._lock = threading.Lock()
        self._mover: threading.Thread | None = None

    def connect(self) -> None:
        # no limit: it is the inner communicator's
        self._whole.connect()
        if len(self._host) > 1:
            self._join(_UP, self._host)
            self._join(_DOWN, self._host)
        if self.me in self._leaders and len(self._leaders) > 1:
            self._join(_ACROSS, self._leaders)
            if self._rounded:
                self._join(_BACK, self._leaders)

    def _join(self, step: int, members: Sequence[int]) -> None:
        part = self._parts[step] = self._make(f"{step}/{min(members)}", members)
        if self._over.aborted:  # before it was among the parts
            part.close()
            raise RuntimeError(ABORTED)

    def _all_reduce(self, tensor: torch.Tensor) -> Work:
        flat = tensor.detach().view(-1)
        work = _Sum(self._over, [self._sum(one) for one in flat.split(max(1, PIECE // flat.element_size()))])
        with self._lock:
            self._pieces += work.pieces
            if self._mover is None:
                self._mover = VitalThread(self._move, "megatron_ft-sums")
                self._mover.start()
        return work

    def _move(self) -> None:
        """Thread: move all pieces on, until none is left."""
        pause, longest = PAUSES_S
        # no limit: a thread of its own, until nothing is under way or an abort begins; each operation has a limit
        while True:
            with self._lock:
                if self._failure is not None:
                    for piece in self._pieces:
                        piece.whole.end(self._failure)
                    self._pieces.clear()
                self._pieces = [piece for piece in self._pieces if not piece.ended]
                if not self._pieces:
                    self._mover = None
                    return
                under_way = self._pieces[:_AHEAD]
            moved, before = False, _DOWN
            try:
                for piece in under_way:
                    moved |= piece.move(before)
                    before = min(before, piece.taken)
            except Broken as error:
                self._failure = error.with_traceback(None)  # it would keep the frames, and so the communicator
            except RuntimeError as error:
                self._failure = Broken("a sum failed", first_line(error))
            if moved:
                pause = PAUSES_S[0]
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def _sum(self, piece: torch.Tensor) -> Steps:
        parts, leader = self._parts, min(self._host)
        total = piece.float() if piece.dtype == torch.bfloat16 else piece
        if _UP in parts:
            yield _UP, lambda: parts[_UP].reduce(total, leader)
        if _BACK in parts and total is not piece:
            yield from self._sum_rounded(total)
        elif _ACROSS in parts:
            yield _ACROSS, lambda: parts[_ACROSS].all_reduce(total)
        if total is not piece:
            piece.copy_(total)
        if _DOWN in parts:
            yield _DOWN, lambda: parts[_DOWN].broadcast(piece, leader)

    def _sum_rounded(self, total: torch.Tensor) -> Steps:
        hosts = len(self._leaders)
        share = -(-total.numel() // hosts)
        sent, received = torch.zeros(2, hosts * share, dtype=torch.bfloat16)
        sent[: total.numel()].copy_(total)
        yield _ACROSS, lambda: self._parts[_ACROSS].exchange(received, sent)
        mine = received.view(hosts, share).sum(0, dtype=torch.float32).to(torch.bfloat16)
        yield _BACK, lambda: self._parts[_BACK].gather(sent, mine)
        total.copy_(sent[: total.numel()])

    def _broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        return self._whole.broadcast(tensor, self.members[root])

    def _send(self, tensor: torch.Tensor, to: int, tag: int) -> Work:
        return self._whole.send(tensor, self.members[to], tag)

    def _receive(self, tensor: torch.Tensor, source: int, tag: int) -> Work:
        return self._whole.receive(tensor, self.members[source], tag)

    def leave(self) -> None:
        super().leave()
        self._whole.leave()

    def _cut(self) -> None:
        for one in (self._whole, *list(self._parts.values())):
            one.abort()

    def _release(self) -> Any:
        for one in (*list(self._parts.values()), self._whole):
            one.close()
        return None  # the works keep all memory that may still be touched


class _Piece:
    """A piece of the tensor of ``whole``. ``taken``: the number of its latest step; ``ended``: whether it has taken all of
    them. ``steps`` keeps the memory that they use."""

    def __init__(self, whole: _Sum, over: Over, steps: Steps) -> None:
        self.whole, self.taken, self.ended = whole, -1, False
        self._over, self._steps = over, steps
        self._next: tuple[int, Callable[[], Work]] | None = None
        self._work: Work | None = None

    def move(self, before: int) -> bool:
        """Go on without waiting, if possible; ``before``: the latest step of the pieces before it. Return whether a step was
        begun, or the last one has ended. Raises ``Broken``."""
        settled = self.touches_nothing()
        self._over.refuse_aborted()  # in this order: what ends after an abort does not count
        if not settled:
            return False
        if self._work is not None:
            # no limit: it does not block: the operation has ended
            self._work.wait()
            self._work = None
        self._next = self._next or next(self._steps, None)
        if self._next is None:
            self.taken, self.ended = _DOWN, True
            self.whole.end()
            return True
        step, start = self._next
        if step > before:
            return False
        self._work, self._next, self.taken = start(), None, step
        return True

    def touches_nothing(self) -> bool:
        work = self._work  # the thread may take it away meanwhile
        return work is None or work.settled()


class _Sum(Work):
    """A started sum, of which ``steps`` has those of each piece."""

    def __init__(self, over: Over, steps: Sequence[Steps]) -> None:
        super().__init__(over)
        self.pieces = [_Piece(self, over, one) for one in steps]
        self._end = threading.Event()
        self._failure: Broken | None = None

    def end(self, failure: Broken | None = None) -> None:
        """Note that a piece has ended, or that the sum has failed."""
        self._failure = self._failure or failure
        if self._failure is not None or all(piece.ended for piece in self.pieces):
            self._end.set()

    def wait(self) -> None:
        # no limit: detector.collective_timeout_s between groups; an abort ends it when a rank is lost
        while not self._end.wait(_LOOK_S):
            self.give_up()
        if self._failure is not None:
            raise Broken(str(self._failure), self._failure.detail)

    def settled(self) -> bool:
        return self._end.is_set() and all(piece.touches_nothing() for piece in self.pieces)
