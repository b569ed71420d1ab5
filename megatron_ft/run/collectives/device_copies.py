"""Copies between a device and the host's memory, beside the computation and in bounded memory.

A copy runs on a stream of its own, after what its device had been told to compute until then, and ends with an event that
the host asks for: the device never waits for another rank, and the host never believes that a copy is complete before the
device says so. On the host's side a copy needs pinned memory, or it would not run beside anything. Pinning takes long and
cannot be swapped, so pieces have at most :data:`PIECE` bytes, of which a few are in flight; torch's allocator keeps their
memory for the next ones, and hands none out before the copies that it has recorded have ended.

Tensors in the host's memory pass through unchanged, without a copy, a thread or an event. The few operations of a device are
a :class:`Port`, so that tests without a GPU play a device whose copies complete late, in another order or never
(``tests.fakes.device``).

Failures it assumes: a device may be stuck behind a kernel that never ends, e.g. one of NCCL whose peer is gone. No wait for
it is longer than ``PATIENCE_S``.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from megatron_ft.errors import EngineError
from megatron_ft.run.collectives.base import PAUSES_S, wait_for
from megatron_ft.run.collectives.framing import as_bytes

PIECE = 2**25
"""The most bytes that are copied at once; all ranks of a run divide tensors in the same way."""
PATIENCE_S = 600.0
"""Seconds after which a copy that does not end is an error. It waits for what the device computes before it."""
_AHEAD = 4
"""The number of copies in flight."""


class Port(ABC):
    """What copies ask of one device. Streams and events are opaque."""

    @abstractmethod
    def stream(self) -> Any:
        """Return a stream of its own."""

    @abstractmethod
    def now(self) -> Any:
        """Return the event that everything the calling thread has queued on the device is done."""

    @abstractmethod
    def copy_async(self, target: torch.Tensor, source: torch.Tensor, stream: Any, after: Any) -> Any:
        """Begin to copy between the device and pinned memory, in the order of ``stream`` and after the event ``after``.
        Return the event of its end."""

    @abstractmethod
    def event_query(self, event: Any) -> bool:
        """Return True if the event has happened. It does not wait."""

    @abstractmethod
    def pinned(self, size: int) -> torch.Tensor:
        """Return pinned memory of ``size`` bytes. None that a copy may still touch is returned again."""


class CudaPort(Port):
    """A CUDA device. Only tests/gpu runs it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stream(self) -> Any:
        return torch.cuda.Stream(self._device)

    def now(self) -> Any:
        return torch.cuda.current_stream(self._device).record_event()

    def copy_async(self, target: torch.Tensor, source: torch.Tensor, stream: Any, after: Any) -> Any:
        # A thread of its own has device 0, on which leaving the stream's block alone would make a context.
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            stream.wait_event(after)
            target.copy_(source, non_blocking=True)
            # The caching allocator must not give this memory away before, also if its owner lets go of it.
            (target if target.is_cuda else source).record_stream(stream)
            return stream.record_event()

    def event_query(self, event: Any) -> bool:
        return bool(event.query())

    def pinned(self, size: int) -> torch.Tensor:
        with torch.cuda.device(self._device):
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)


_ports: dict[torch.device, Port] = {}


def port_of(tensor: torch.Tensor) -> Port | None:
    """Return the port of the tensor's device; None if it is in the host's memory.

    Raises ``EngineError`` for a device of another kind than CUDA.
    """
    if tensor.device.type == "cpu":
        return None
    if tensor.device not in _ports:
        if tensor.device.type != "cuda":
            raise EngineError(
                f"a tensor is on {tensor.device}; tensors that are sent to other ranks or saved must be on the CPU or on a "
                f"CUDA device"
            )
        _ports[tensor.device] = CudaPort(tensor.device)
    return _ports[tensor.device]


def kind_of(tensor: torch.Tensor) -> str:
    """Return the kind of the tensor's device, without its number, which is another one at another rank."""
    return tensor.device.type


def own_device(kind: str = "cuda") -> torch.device:
    """Return this rank's own device of a kind: that of its LOCAL_RANK, which the agent numbers on each host."""
    if kind != "cuda":
        return torch.device(kind)
    count = torch.cuda.device_count()
    if not count:
        raise EngineError(
            "a tensor belongs on a CUDA device, and this rank has none; all groups need the same kind of device"
        )
    return torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")) % count)


def empty(shape: Sequence[int], dtype: torch.dtype, kind: str) -> torch.Tensor:
    """Return a new tensor on this rank's own device of a kind."""
    return torch.empty(shape, dtype=dtype, device=own_device(kind))


def refuse_capture(tensor: torch.Tensor) -> None:
    """Raise ``EngineError`` while a CUDA graph is captured: what is captured runs later and never reports its end."""
    if port_of(tensor) is not None and _is_capturing():
        raise EngineError(
            "a reduction between groups was started while a CUDA graph is captured; the captured operation would never "
            "report its end. Capture forward and backward without the last hook: set fault_tolerance.overlap to false, or "
            "leave the backward pass of a step's last microbatch outside of the graph"
        )


def _is_capturing() -> bool:
    return torch.cuda.is_current_stream_capturing()


class _Copier:
    """The copies of one loop, on one device and in one direction."""

    def __init__(self, port: Port) -> None:
        self.port, self._stream = port, port.stream()

    def begin(self, target: torch.Tensor, source: torch.Tensor, after: Any = None) -> Any:
        return self.port.copy_async(target, source, self._stream, self.port.now() if after is None else after)

    def end(self, event: Any) -> None:
        """Wait for an event. Raises ``RuntimeError`` if it does not happen within ``PATIENCE_S``."""
        deadline = time.monotonic() + PATIENCE_S
        if not wait_for(lambda: self.port.event_query(event), lambda: time.monotonic() > deadline, PAUSES_S):
            raise RuntimeError(f"a copy between the device and the host has not ended within {PATIENCE_S:g} s")


class _Copiers(dict[Port, _Copier]):
    def __missing__(self, port: Port) -> _Copier:
        return self.setdefault(port, _Copier(port))


def pieces(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the bytes of all tensors in pieces of at most ``PIECE``, in order. A tensor without elements has none."""
    for tensor in tensors:
        if tensor.numel():
            yield from as_bytes(tensor).split(PIECE)


def on_host(tensors: Iterable[torch.Tensor], after: Any = None) -> Iterator[torch.Tensor]:
    """Yield the bytes of :func:`pieces` in the host's memory; each is valid until the next is requested. Pieces that are
    there already are yielded as they are.

    Args:
        tensors: must not change meanwhile.
        after: event after which the device holds their values. Default: what the calling thread has queued until now.

    Raises ``RuntimeError``.
    """
    copiers = _Copiers()
    waiting: deque[tuple[torch.Tensor, _Copier | None, Any]] = deque()

    def first() -> torch.Tensor:
        piece, copier, event = waiting.popleft()
        if copier is not None:
            copier.end(event)
        return piece

    for piece in pieces(tensors):
        if (port := port_of(piece)) is None:
            waiting.append((piece, None, None))
        else:
            room = port.pinned(len(piece))
            waiting.append((room, copiers[port], copiers[port].begin(room, piece, after)))
        if len(waiting) == _AHEAD:
            yield first()
    while waiting:
        yield first()


def rooms(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The inverse of :func:`on_host`: yield host memory to be filled with the bytes of each of :func:`pieces`. What was
    filled goes on to its contiguous tensor when the next is requested. Once there is no next one, all copies have ended.

    Raises ``RuntimeError``.
    """
    copiers = _Copiers()
    moving: deque[tuple[_Copier, Any]] = deque()
    for piece in pieces(tensors):
        if (port := port_of(piece)) is None:
            yield piece
            continue
        room = port.pinned(len(piece))
        yield room
        moving.append((copiers[port], copiers[port].begin(piece, room)))
        if len(moving) == _AHEAD:
            copier, event = moving.popleft()
            copier.end(event)
    for copier, event in moving:
        copier.end(event)


def fill(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], after: Any = None) -> None:
    """Copy tensors into contiguous tensors of the same shapes and types, wherever they are; return when all are there.

    ``after``: see :func:`on_host`. Raises ``RuntimeError``.
    """
    for room, piece in zip(rooms(targets), on_host(sources, after), strict=True):
        room.copy_(piece)


def to_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return contiguous copies in the host's memory, which is not pinned."""
    copies = [
        tensor.clone(memory_format=torch.contiguous_format)
        if port_of(tensor) is None
        else torch.empty(tensor.shape, dtype=tensor.dtype)
        for tensor in tensors
    ]
    moved = [which for which, tensor in enumerate(tensors) if port_of(tensor) is not None]
    fill([copies[which] for which in moved], [tensors[which] for which in moved])
    return copies
