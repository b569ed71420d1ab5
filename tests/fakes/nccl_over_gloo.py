"""Real runs on a CPU whose gradients go between groups as if by NCCL (``run.collectives.nccl_communicator``).

The data travels on a second process group of gloo, in private copies. It behaves like NCCL to its user: a peer's end is
never seen, an operation that fails never ends, and an abort ends this rank's operations at once, as if they were done,
with garbage in their tensors.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_ft.run.collectives import communicator_choice
from megatron_ft.run.collectives.communicator_choice import Offer
from megatron_ft.run.collectives.gloo_communicator import broadcast_from
from tests.fakes.nccl import GARBAGE


class _Event:
    def __init__(self, rank: OverGloo, work: Any, tensor: torch.Tensor, copy: torch.Tensor) -> None:
        self._rank, self._work, self._tensor, self._copy = rank, work, tensor, copy
        self._done = False

    def ended(self) -> bool:
        if not self._done and not self._rank.aborted and self._work.is_completed():
            try:
                self._work.wait()
            except RuntimeError:
                return False  # NCCL's kernel would spin for ever
            self._tensor.copy_(self._copy)
            self._done = True
        return self._done or self._rank.aborted

    def spoil(self) -> None:
        if not self._done:
            self._tensor.fill_(GARBAGE if self._tensor.is_floating_point() else 99)


class OverGloo:
    """One rank (``nccl_communicator.Nccl``). ``abort_hangs``: so it never returns."""

    def __init__(self, abort_hangs: bool) -> None:
        self._abort_hangs = abort_hangs
        self._group: Any = None
        self._events: list[_Event] = []
        self.aborted = False

    def connect(self, rendezvous: Any, rank: int, size: int) -> None:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=30)
        self._group = gloo(rendezvous, rank, size, options)
        self._group._set_default_timeout(timedelta(hours=1))

    def all_reduce(self, tensor: torch.Tensor) -> _Event:
        return self._queue(lambda copy: self._group.allreduce([copy]), tensor)

    def broadcast(self, tensor: torch.Tensor, root: int) -> _Event:
        return self._queue(lambda copy: self._group.broadcast([copy], broadcast_from(root)), tensor)

    def send(self, tensor: torch.Tensor, to: int) -> _Event:
        return self._queue(lambda copy: _InThread(self._group.send([copy], to, 0)), tensor)

    def receive(self, tensor: torch.Tensor, source: int) -> _Event:
        return self._queue(lambda copy: _InThread(self._group.recv([copy], source, 0)), tensor)

    def error(self) -> str:
        return ""

    def abort(self) -> None:
        if self._abort_hangs:
            threading.Event().wait()
        self.aborted = True
        for event in self._events:
            event.spoil()

    def _queue(self, operation: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> _Event:
        copy = tensor.float() if tensor.dtype == torch.bfloat16 else tensor.clone()
        event = _Event(self, operation(copy), tensor, copy)
        self._events = [*(one for one in self._events if not one._done), event]
        return event


class _InThread:
    """gloo's messages end in the thread that waits for them."""

    def __init__(self, work: Any) -> None:
        self._work, self._failed = work, False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work.wait()
        except RuntimeError:
            self._failed = True

    def is_completed(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        if self._failed:
            raise RuntimeError("a message was not delivered")


def install(abort_hangs: bool = False) -> None:
    """Make all communicators of this process so. ``abort_hangs``: of those between groups."""

    def make(device: torch.device, name: str) -> OverGloo:
        return OverGloo(abort_hangs and name.startswith("outer/"))

    communicator_choice.CudaNccl = make  # type: ignore[assignment, misc]
    kinds = (communicator_choice.NCCL, communicator_choice.GLOO)
    Offer.of = lambda setting, device, host: Offer(kinds, f"device of process {os.getpid()}", host)  # type: ignore[method-assign]
