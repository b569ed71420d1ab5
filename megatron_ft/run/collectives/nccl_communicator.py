"""Communicators of NCCL for tensors on a device; the gloo communicator beside it carries what is in the host's memory.

The two parts have the same members and the same end. gloo brings what NCCL lacks: messages with tags, and a peer's abort
that is seen at once. What NCCL needs is in :class:`Nccl`, so that the rules below are tested without a GPU
(``tests.fakes.nccl``); ``run.collectives.cuda_nccl`` is the real one.

- **Completion.** An operation is complete when its event on the device has been seen, and no abort had begun by then. The
  order of the two looks matters: an aborted kernel completes its event as well.
- **Abort.** ``ncclCommAbort`` may hang. It runs in a thread of its own, one for each communicator, so that those of a
  process are aborted in parallel: one after the other, they wait for peers that abort another one first. No operation
  may be started meanwhile, because NCCL forbids other threads inside during an abort.
- **Stuck.** If it has not returned after ``ABORT_TIMEOUT_S``, kernels may still run and a new communicator on this device
  may hang behind them. The process is replaced (``base.stuck``).
- **Confirmation.** An aborted kernel lets its peers' kernels go on, with garbage (``checkAbort``, ``postPeer`` in NCCL's
  ``prims_simple.h``). So what a member has seen to end counts when all members have said so by ``host``, whose operations an
  abort ends first, and with an error: a member that has aborted says nothing. A message carries that word of its own: its
  sender tells it, its receiver hears it.
- **Errors.** NCCL reports some and keeps silent about others, so its error ends a wait early and nothing depends on it.

Failures it assumes: those of ``run.collectives.base``; a connect or an abort that never returns; an error that is never
reported, or reported after the end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from megatron_ft.run.collectives.base import PAUSES_S, Broken, Communicator, Followed, Over, Work
from megatron_ft.run.collectives.gloo_communicator import broken

ABORT_TIMEOUT_S = 10.0
MULTI_RANK_NCCL, MULTI_RANK_ENABLE = (2, 30), "NCCL_MULTI_RANK_GPU_ENABLE"
"""The first NCCL that can have several ranks on one GPU, and the variable that lets it (its user guide, "Environment
Variables")."""
_ERROR_EVERY_S = 0.02


class Queued(Protocol):
    """An operation on the device's stream."""

    def ended(self) -> bool:
        """Return True once the device has passed its end. It does not wait for the device."""


class Nccl(Protocol):
    """What a communicator asks of NCCL. Ranks are 0 to ``size`` - 1. Operations run in the order in which they were
    started; messages between two ranks have no tags and are matched by their order."""

    def connect(self, rendezvous: Any, rank: int, size: int) -> None:
        """Meet the other ranks. It may block for ever; :meth:`abort` from another thread may end it."""

    def all_reduce(self, tensor: torch.Tensor) -> Queued:
        """Sum in place; bf16 is added in fp32."""

    def broadcast(self, tensor: torch.Tensor, root: int) -> Queued: ...

    def send(self, tensor: torch.Tensor, to: int) -> Queued: ...

    def receive(self, tensor: torch.Tensor, source: int) -> Queued: ...

    def error(self) -> str:
        """Return the error that NCCL reports by itself, or ""."""

    def abort(self) -> None:
        """End the kernels of all started operations. It may block for ever."""


class NcclCommunicator(Communicator):
    """Sums tensors on ``device`` by NCCL and all others by ``host``.

    Args:
        host: a communicator of the same members, which this one owns from now on.
        nccl: NCCL's part, not connected.
        on_device: returns whether NCCL carries a tensor.
        rendezvous: torch store, with a prefix that no other communicator uses, also not ``host``.
    """

    def __init__(
        self, host: Communicator, nccl: Nccl, on_device: Callable[[torch.Tensor], bool], rendezvous: Any
    ) -> None:
        super().__init__(host.me, host.members, host.epoch, host.timeout_s)
        self._host, self._nccl, self._on_device, self._rendezvous = host, nccl, on_device, rendezvous
        self._inside = threading.Lock()
        """Held by the thread that is in a call of NCCL."""
        self._abort_begun = threading.Lock()
        self._abort: threading.Thread | None = None
        self._unconfirmed = False  # whether there was a sum or a broadcast on the device since

    def connect(self) -> None:
        # no limit: its thread is left behind after BUILD_TIMEOUT_S, and an abort ends it
        self._host.connect()
        if len(self.members) > 1:
            # no limit: its thread is left behind after BUILD_TIMEOUT_S, and an abort ends it
            self._nccl.connect(self._rendezvous, self._place, len(self.members))

    confirms = True

    def confirm(self) -> None:
        if self._unconfirmed:
            # no limit: detector.collective_timeout_s between groups; an abort ends it when a rank is lost
            self._host.all_reduce(torch.zeros(1)).wait()
            self._unconfirmed = False

    def leave(self) -> None:
        super().leave()
        self._host.leave()

    def _all_reduce(self, tensor: torch.Tensor) -> Work:
        if not self._on_device(tensor):
            return self._host.all_reduce(tensor)
        self._unconfirmed = True
        return self._queue(lambda: self._nccl.all_reduce(tensor))

    def _broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        if not self._on_device(tensor):
            return self._host.broadcast(tensor, self.members[root])
        self._unconfirmed = True
        return self._queue(lambda: self._nccl.broadcast(tensor, root))

    def _send(self, tensor: torch.Tensor, to: int, tag: int) -> Work:
        if not self._on_device(tensor):
            return self._host.send(tensor, self.members[to], tag)
        work = self._queue(lambda: self._nccl.send(tensor, to))
        # no limit: detector.collective_timeout_s between groups; an abort ends it when a rank is lost
        return Followed(work, lambda: self._host.send(torch.zeros(1), self.members[to], tag).wait())

    def _receive(self, tensor: torch.Tensor, source: int, tag: int) -> Work:
        if not self._on_device(tensor):
            return self._host.receive(tensor, self.members[source], tag)
        work = self._queue(lambda: self._nccl.receive(tensor, source))
        # no limit: detector.collective_timeout_s between groups; an abort ends it when a rank is lost
        return Followed(work, lambda: self._host.receive(torch.zeros(1), self.members[source], tag).wait())

    def _queue(self, operation: Callable[[], Queued]) -> OnDevice:
        with self._inside:
            self._over.refuse_aborted()
            try:
                queued = operation()
            except RuntimeError as error:
                raise broken(error) from None
        return OnDevice(queued, self._over, self._nccl.error, self.timeout_s, self._gone)

    def _cut(self) -> None:
        self._host.abort()
        with self._abort_begun:
            if self._abort is None and len(self.members) > 1:
                self._abort = threading.Thread(target=self._abort_nccl, name="megatron_ft-abort", daemon=True)
                self._abort.start()

    def _abort_nccl(self) -> None:
        alone = self._inside.acquire(timeout=ABORT_TIMEOUT_S / 2)  # a call that hangs inside is ended by nothing else
        try:
            self._nccl.abort()
        except RuntimeError:
            pass  # it says that the abort took long, after it; or that there was nothing to abort
        finally:
            if alone:
                self._inside.release()

    def _gone(self) -> bool:
        """Return True if an abort has ended, and with it every kernel."""
        return self._abort is not None and not self._abort.is_alive()

    def _stuck_because(self) -> str:
        if self._abort is not None:
            self._abort.join(ABORT_TIMEOUT_S)
            if self._abort.is_alive():
                return f"the abort of an NCCL communicator has not returned within {ABORT_TIMEOUT_S:g} s"
        return ""

    def _release(self) -> Any:
        self._host.close()
        nccl = self._nccl
        del self._nccl
        if self._abort is not None and self._abort.is_alive():
            _kept.append(nccl)
        return nccl


_kept: list[Nccl] = []
"""Those whose abort has not returned: their destructor would wait for it."""


class OnDevice(Work):
    """A started operation of NCCL.

    Args:
        queued: the operation.
        over: its communicator's end.
        error: returns NCCL's own error, or "".
        timeout_s: seconds after which it fails.
        gone: returns whether an abort has ended all kernels.
    """

    def __init__(
        self, queued: Queued, over: Over, error: Callable[[], str], timeout_s: float, gone: Callable[[], bool]
    ) -> None:
        super().__init__(over)
        self._queued, self._error, self._gone = queued, error, gone
        self._timeout_s, self._by = timeout_s, time.monotonic() + timeout_s
        self._complete = False

    def wait(self) -> None:
        pause, longest = PAUSES_S
        ask_at = time.monotonic() + _ERROR_EVERY_S
        while not self._complete:
            ended = self._queued.ended()
            self._over.refuse_aborted()  # in this order: the event of an aborted kernel says that it has ended, too
            if ended:
                self._complete = True
                return
            self._over.refuse_left()
            if (now := time.monotonic()) >= ask_at:
                ask_at = now + _ERROR_EVERY_S
                if error := self._error():
                    raise Broken("NCCL reports an error", error)
                if now >= self._by:
                    raise Broken("an operation timed out", f"not complete after {self._timeout_s:g} s")
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def settled(self) -> bool:
        return self._complete or self._queued.ended() or self._gone()
