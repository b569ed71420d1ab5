"""An adversary that behaves like NCCL, for ``run.collectives.nccl_communicator``: threads of one process are its ranks.

Operations queue on a stream and run when all ranks have started them. Their ends are events that the host sees later. An
abort ends a rank's kernels as if they were done and leaves garbage in their tensors; the other ranks see nothing of it. What
else goes wrong is in :class:`Temper`; each field is a reported behaviour of NCCL. What may never be done to it is
collected in ``Fabric.misuse``.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

GARBAGE = float("nan")
PATIENCE_S = 60.0
"""Seconds after which a hang of the fake ends with an error, so that a test fails and does not hang itself."""


@dataclass
class Temper:
    """How NCCL behaves.

    Attributes:
        looks: largest number of times that the host looks at an event before it sees an end that has happened.
        abort_hangs: ranks whose abort does not return (pytorch#119797, nccl#1013: kernels that do not stop).
        abort_needs_all: an abort returns only when every living rank has begun to abort the same communicator
            (nccl#1777, pytorch#150690): aborting several ones in turn, in different orders, hangs.
        connect_hangs: ranks whose connect does not return, although all ranks are there (pytorch#194774).
        connect_ignores_abort: and an abort does not end it.
        says_error: looks after which a rank learns that a peer has aborted or died; None: never (nccl#1071).
        leaks: an aborted kernel lets the kernels of its peers end as if they were done, with garbage (``postPeer`` of NCCL's
            ``prims_simple.h``).
        late_writes: the kernel of a rank whose abort hangs writes to its tensors later.
    """

    looks: int = 3
    abort_hangs: frozenset[int] = frozenset()
    abort_needs_all: bool = False
    connect_hangs: frozenset[int] = frozenset()
    connect_ignores_abort: bool = False
    says_error: int | None = None
    leaks: bool = False
    late_writes: bool = False


@dataclass
class _Operation:
    kind: str
    tensors: dict[int, torch.Tensor] = field(default_factory=dict)
    root: int = -1
    done: bool = False
    spoilt: bool = False


@dataclass
class _Link:
    """One communicator."""

    size: int
    present: set[int] = field(default_factory=set)
    aborting: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)
    started: list[int] = field(default_factory=list)
    operations: dict[object, _Operation] = field(default_factory=dict)


class Fabric:
    """What the ranks of all communicators share. ``misuse``: rules of NCCL that were broken."""

    def __init__(self, temper: Temper, seed: int = 0) -> None:
        self.temper, self.random = temper, random.Random(seed)
        self.changed = threading.Condition()
        self.links: dict[str, _Link] = {}
        self.misuse: list[str] = []
        self._released = False

    def rank(self) -> FakeNccl:
        return FakeNccl(self)

    def die(self, number: int) -> None:
        """A process ends: rank ``number`` of every communicator is gone, and nobody is told."""
        with self.changed:
            for link in self.links.values():
                link.gone.add(number)
            self.changed.notify_all()

    def release(self) -> None:
        """End everything that hangs; the last call of a test."""
        with self.changed:
            self._released = True
            self.changed.notify_all()

    def wait(self, condition: Callable[[], bool]) -> None:
        """Block like C code of NCCL. The lock is held by the caller."""
        if not self.changed.wait_for(lambda: self._released or condition(), PATIENCE_S):
            self.misuse.append("a test left a hang of the fake behind")


class _Event:
    def __init__(self, rank: FakeNccl, operation: _Operation) -> None:
        self._rank, self._operation = rank, operation
        self._looks = rank.fabric.random.randint(0, rank.fabric.temper.looks)

    def ended(self) -> bool:
        with self._rank.fabric.changed:
            if not (self._operation.done or self._operation.spoilt or self._rank.kernels_ended):
                return False
            self._looks -= 1
            return self._looks < 0


class FakeNccl:
    """One rank of one communicator (``nccl_communicator.Nccl``)."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self.kernels_ended = False
        self._link: _Link | None = None
        self._number = -1
        self._inside = 0
        self._pending: list[tuple[_Operation, torch.Tensor]] = []
        self._aborted = False
        self._error_in = fabric.temper.says_error
        self._sequence: dict[object, int] = {}

    def connect(self, rendezvous: Any, rank: int, size: int) -> None:
        fabric, temper = self.fabric, self.fabric.temper
        with fabric.changed:
            link = self._link = fabric.links.setdefault(str(rendezvous), _Link(size))
            if rank in link.present:
                fabric.misuse.append(f"the id {rendezvous} is used a second time by rank {rank}")
            self._number = rank
            link.present.add(rank)
            fabric.changed.notify_all()
            hangs = rank in temper.connect_hangs
            fabric.wait(
                lambda: (
                    (self._aborted and not temper.connect_ignores_abort)
                    or (not hangs and len(link.present - link.gone - link.aborting) == size)
                )
            )
            if self._aborted:
                raise RuntimeError("NCCL error: the communicator was aborted while it was initialised")

    def all_reduce(self, tensor: torch.Tensor) -> _Event:
        return self._start("collective", "all_reduce", tensor)

    def broadcast(self, tensor: torch.Tensor, root: int) -> _Event:
        return self._start("collective", "broadcast", tensor, root)

    def send(self, tensor: torch.Tensor, to: int) -> _Event:
        return self._start((self._number, to), "message", tensor, self._number)

    def receive(self, tensor: torch.Tensor, source: int) -> _Event:
        return self._start((source, self._number), "message", tensor, source)

    def error(self) -> str:
        with self.fabric.changed:
            link = self._link
            if link is None or self._error_in is None or not (link.gone | link.aborting) - {self._number}:
                return ""
            self._error_in -= 1
            return "ncclRemoteError: a peer has gone" if self._error_in < 0 else ""

    def abort(self) -> None:
        fabric, temper, link = self.fabric, self.fabric.temper, self._link
        with fabric.changed:
            self._aborted = True
            if self._inside:
                fabric.misuse.append("a thread is in a call of NCCL while its communicator is aborted")
            if link is None:
                return
            link.aborting.add(self._number)
            fabric.changed.notify_all()
            if self._number in temper.abort_hangs:
                fabric.wait(lambda: False)
                if temper.late_writes:
                    self._spoil()
                return
            if temper.abort_needs_all:
                fabric.wait(lambda: not link.present - link.gone - link.aborting)
            self._spoil()
            self.kernels_ended = True
            fabric.changed.notify_all()

    def _spoil(self) -> None:
        for operation, tensor in self._pending:
            if not operation.done:
                tensor.fill_(GARBAGE)
                if self.fabric.temper.leaks:
                    operation.spoilt = True
                    for other in operation.tensors.values():
                        other.fill_(GARBAGE)

    def _start(self, lane: object, kind: str, tensor: torch.Tensor, root: int = -1) -> _Event:
        fabric, link = self.fabric, self._link
        assert link is not None, "it is not connected"
        with fabric.changed:
            self._inside += 1
        try:
            with fabric.changed:
                if self._aborted:
                    fabric.misuse.append("an operation was started after the abort had begun")
                number = self._sequence[lane] = self._sequence.get(lane, -1) + 1
                operation = link.operations.setdefault((lane, number), _Operation(kind, root=root))
                if (operation.kind, operation.root) != (kind, root):
                    fabric.misuse.append(
                        f"rank {self._number} starts {kind} where another rank starts {operation.kind}"
                    )
                operation.tensors[self._number] = tensor
                self._pending.append((operation, tensor))
                self._run(link, lane, operation)
                return _Event(self, operation)
        finally:
            with fabric.changed:
                self._inside -= 1

    def _run(self, link: _Link, lane: object, operation: _Operation) -> None:
        """Compute the operation if all of its ranks have started it, and none has aborted."""
        members = set(range(link.size)) if lane == "collective" else set(lane)  # type: ignore[call-overload]
        if operation.spoilt:
            operation.tensors[self._number].fill_(GARBAGE)
        if operation.tensors.keys() < members or members & (link.aborting | link.gone):
            return
        given = operation.tensors
        if operation.kind == "all_reduce":
            total = torch.stack([given[number] for number in sorted(given)]).sum(0)
            for tensor in given.values():
                tensor.copy_(total)
        else:
            for number, tensor in given.items():
                if number != operation.root:
                    tensor.copy_(given[operation.root])
        operation.done = True
