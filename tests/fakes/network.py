"""Communicators over a network that is late, failing or forgetful, in one process."""

from __future__ import annotations

import random
import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from functools import reduce

import torch

from megatron_ft.run.collectives.base import Broken, Communicator, Work


class Network:
    """Operations between members in one process. ``pace``: probability that a look at an operation ends it, once all of its
    members have started it. With an abort an operation fails, or is forgotten: it never ends."""

    def __init__(self, members: Sequence[int], seed: int = 0, pace: float = 1.0, forgets: bool = False) -> None:
        self.members, self.pace, self.forgets = members, pace, forgets
        self.random, self.lock = random.Random(seed), threading.Lock()
        self.collectives: dict[int, dict[int, Op]] = defaultdict(dict)
        self.messages: dict[tuple, deque[Op]] = defaultdict(deque)


class Op(Work):
    """``place``: of its member. ``root``: whether it is the source, or the place of the sum. ``target``: where the result
    goes, by default to ``tensor``."""

    def __init__(
        self,
        over,
        network: Network,
        tensor: torch.Tensor,
        kind: str,
        root: bool = False,
        target: torch.Tensor | None = None,
        place: int = 0,
    ) -> None:
        super().__init__(over)
        self.network, self.tensor, self.kind, self.root, self.place = network, tensor, kind, root, place
        self.target = tensor if target is None else target
        self.others: list[Op] | None = None
        self.ended = self.failed = False

    def settled(self) -> bool:
        with self.network.lock:
            if not self.ended and self.others is not None and self.network.random.random() < self.network.pace:
                self._complete()
            if not self.ended and self._over.aborted and not self.network.forgets:
                self.ended = self.failed = True
            return self.ended

    def _complete(self) -> None:
        everyone = [self, *self.others]
        assert len({(op.kind, op.tensor.numel(), op.tensor.dtype) for op in everyone}) == 1, "operations are mixed up"
        for op, value in zip(everyone, _results(self.kind, everyone), strict=True):
            if not op.ended:  # one that has failed writes no more
                op.target.copy_(value)
                op.ended = True

    def wait(self) -> None:
        assert self.settled(), "only an operation that has ended is waited for"
        if self.failed:
            raise Broken("a connection broke")


class Member(Communicator):
    """One member of a network."""

    def __init__(self, network: Network, me: int) -> None:
        super().__init__(me, network.members, 0, 60.0)
        self.network, self.count, self.refuses = network, 0, 0

    def reduce(self, tensor, to):
        return self._start(lambda: self._collective(tensor, "reduce", self.members.index(to) == self._place))

    def exchange(self, received, sent):
        return self._start(lambda: self._collective(sent, "exchange", target=received))

    def gather(self, whole, part):
        return self._start(lambda: self._collective(part, "gather", target=whole))

    def _collective(
        self, tensor: torch.Tensor, kind: str, root: bool = False, target: torch.Tensor | None = None
    ) -> Op:
        if self.refuses:
            self.refuses -= 1
            raise Broken("a connection broke")
        op = Op(self._over, self.network, tensor, kind, root, target, self._place)
        with self.network.lock:
            ops = self.network.collectives[self.count]
            self.count += 1
            ops[self._place] = op
            if len(ops) == len(self.members):
                for one in ops.values():
                    one.others = [other for other in ops.values() if other is not one]
        return op

    def _all_reduce(self, tensor):
        return self._collective(tensor, "all_reduce")

    def _broadcast(self, tensor, root):
        return self._collective(tensor, "broadcast", root == self._place)

    def _send(self, tensor, to, tag):
        return self._message(tensor, (self._place, to, tag), True)

    def _receive(self, tensor, source, tag):
        return self._message(tensor, (source, self._place, tag), False)

    def _message(self, tensor, key, sends):
        op = Op(self._over, self.network, tensor, "message", sends)
        with self.network.lock:
            waiting = self.network.messages[key]
            if waiting and waiting[0].root != sends:
                other = waiting.popleft()
                op.others, other.others = [other], [op]
            else:
                waiting.append(op)
        return op

    def _cut(self):
        pass

    def _release(self):
        return None


def _results(kind: str, everyone: Sequence[Op]) -> list[torch.Tensor]:
    """Return what the target of each operation becomes. A sum at one place leaves garbage at the others."""
    given = [op.tensor.clone() for op in sorted(everyone, key=lambda op: op.place)]
    if kind in ("all_reduce", "reduce"):
        total = reduce(torch.add, given)  # in their type, as gloo does it
        return [total if kind == "all_reduce" or op.root else torch.full_like(total, 77) for op in everyone]
    if kind == "exchange":
        parts = [one.chunk(len(given)) for one in given]
        return [torch.cat([part[op.place] for part in parts]) for op in everyone]
    if kind == "gather":
        return [torch.cat(given)] * len(everyone)
    return [next(op.tensor.clone() for op in everyone if op.root)] * len(everyone)
