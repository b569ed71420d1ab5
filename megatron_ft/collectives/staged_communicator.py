"""Sums and messages of tensors on a device over a communicator that knows the host's memory only, such as gloo's.

An operation copies the tensor to pinned host memory, runs there, and copies the result back. It is complete when the copy
back has been seen to be complete. Copies have streams of their own, so an operation waits for what the device was told to
compute before it, and for nothing after it; all of them together overlap with the computation.

Operations are divided into pieces of at most ``device_copies.PIECE`` bytes, in the same way at all members and wherever the
tensor is: also one in the host's memory, which needs no copy, keeps the order (``collectives.chained_operations``). A few
pieces at a time hold pinned memory. After an abort no copy back begins.

Failures it assumes: those of ``collectives.base``; a device that is stuck behind a kernel which never ends, so that a copy,
or a call that pins memory, never returns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Hashable
from typing import Any

import torch

from megatron_ft.collectives import device_copies
from megatron_ft.collectives.base import Communicator, Work
from megatron_ft.collectives.chained_operations import Chain, ChainingCommunicator
from megatron_ft.collectives.device_copies import Port

_STUCK_S = 10.0
"""Seconds after an abort in which the thread has to be back from the device."""


class StagedCommunicator(ChainingCommunicator):
    """``inner`` for tensors on any device.

    Args:
        inner: a communicator of the same members, which this one owns from now on.
        port_of: returns the port of a tensor's device, None if ``inner`` can take the tensor as it is.
    """

    FAILED = "a copy between the device and the host failed"

    def __init__(
        self, inner: Communicator, port_of: Callable[[torch.Tensor], Port | None] = device_copies.port_of
    ) -> None:
        super().__init__(inner)
        self._port_of = port_of
        self._streams: dict[tuple[Port, str], Any] = {}

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

        def steps(chain: Chain, piece: torch.Tensor) -> Generator[None]:
            if port is None:
                yield from chain.step(0, lambda: start(piece))
                return
            buffer = port.pool.take(max(piece.nbytes, 1))
            chain.kept.append(buffer)
            host = buffer[: piece.nbytes].view(piece.dtype)
            if out:
                yield from self._copied(chain, port, host, piece, "out", after)
            yield from chain.step(0, lambda: start(host))
            if back:
                yield from self._copied(chain, port, piece, host, "back", after)
            chain.kept.clear()
            port.pool.give(buffer)

        return self._chain(lane, flat.split(max(1, device_copies.PIECE // flat.element_size())), steps)

    def _copied(
        self, chain: Chain, port: Port, target: torch.Tensor, source: torch.Tensor, way: str, after: Any
    ) -> Generator[None]:
        """Copy, and return when the end has been seen before an abort began."""
        if (port, way) not in self._streams:  # copies back must not wait for what is computed meanwhile
            self._streams[port, way] = port.stream()
        event = port.copy_async(target, source, self._streams[port, way], after)
        by, late = time.monotonic() + self._timeout_s, f"a copy {way} has not ended after {self._timeout_s:g} s"
        yield from chain.until(lambda: port.event_query(event), by, late)

    def _stuck_because(self) -> str:
        mover = self._mover
        if mover is not None:
            mover.join(_STUCK_S)
            if mover.is_alive():
                return f"a copy between the device and the host has not returned within {_STUCK_S:g} s"
        return ""
