"""A device whose copies complete late, in any order that streams allow, or never.

Its tensors are ordinary ones that are registered here. A copy does nothing until it completes; until then its target holds
garbage if it is host memory. Copies of one stream complete in order, those of several in any, and none before the event that
it was told to wait for. Each question for an event may complete some copies, as a seed decides.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Sequence

import torch

from megatron_ft.run.collectives import device_copies
from megatron_ft.run.collectives.device_copies import Port

GARBAGE = 0x5A


class Event:
    def __init__(self) -> None:
        self.done = False


class FakeDevice(Port):
    """One device.

    Args:
        seed: decides which copies complete when.
        pace: probability that a question for an event completes a copy.
        stuck_after: number of copies that complete; the others never do. Default: no limit.

    ``copied``: number of copies that have completed.
    """

    def __init__(self, seed: int = 0, pace: float = 1.0, stuck_after: int | None = None) -> None:
        self.pace, self.stuck_after = pace, stuck_after
        self.copied = 0
        self._random, self._lock = random.Random(seed), threading.Lock()
        self._streams: list[deque[tuple[torch.Tensor, torch.Tensor, Event, Event]]] = []
        self._computing: list[Event] = []
        self._memory: dict[int, torch.Tensor] = {}

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._memory

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Declare that a tensor is on this device."""
        self._memory[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def port_of(self, tensor: torch.Tensor) -> Port | None:
        return self if self.holds(tensor) else None

    def compute(self) -> Event:
        """Queue a computation, which is done when the returned event is set to be so; what comes after it waits for it."""
        event = Event()
        self._computing.append(event)
        return event

    def stream(self) -> deque:
        stream: deque = deque()
        with self._lock:
            self._streams.append(stream)
        return stream

    def now(self) -> Event:
        running = [event for event in self._computing if not event.done]
        if running:
            return running[-1]  # computations end in order
        event = Event()
        event.done = True
        return event

    def copy_async(self, target: torch.Tensor, source: torch.Tensor, stream: deque, after: Event) -> Event:
        assert self.holds(target) != self.holds(source), "a copy is between the device and the host"
        assert target.numel() == source.numel() and target.dtype == source.dtype
        if not self.holds(target):
            target.view(-1).view(torch.uint8).fill_(GARBAGE)
        event = Event()
        with self._lock:
            stream.append((target, source, after, event))
        return event

    def event_query(self, event: Event) -> bool:
        with self._lock:
            if self._random.random() < self.pace:
                self._complete_one()
            return event.done

    def _complete_one(self) -> None:
        ready = [stream for stream in self._streams if stream and stream[0][2].done]
        if ready and (self.stuck_after is None or self.copied < self.stuck_after):
            target, source, _, event = self._random.choice(ready).popleft()
            target.copy_(source)
            event.done = True
            self.copied += 1

    def complete_all(self) -> None:
        """Complete every copy and computation, also where the device was stuck."""
        with self._lock:
            self.stuck_after = None
            for event in self._computing:
                event.done = True
            while any(self._streams):
                self._complete_one()

    def pinned(self, size: int) -> torch.Tensor:
        return torch.full((size,), GARBAGE, dtype=torch.uint8)

    def install(self, monkeypatch) -> FakeDevice:
        """Make ``device_copies`` see this device as the rank's only one, of the kind "cuda"."""
        monkeypatch.setattr(device_copies, "port_of", self.port_of)
        monkeypatch.setattr(device_copies, "kind_of", lambda tensor: "cuda" if self.holds(tensor) else "cpu")
        monkeypatch.setattr(device_copies, "empty", self._empty)
        return self

    def _empty(self, shape: Sequence[int], dtype: torch.dtype, kind: str) -> torch.Tensor:
        made = torch.empty(shape, dtype=dtype)
        return self.put(made) if kind == "cuda" and made.numel() else made
