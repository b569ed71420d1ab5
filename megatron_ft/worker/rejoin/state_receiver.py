"""One rank of a group that comes back: it takes its state from ranks of equal position, and makes their steps after them.

Each donor sends its share of the state and, step by step, its share of the gradients that the optimizer took
(``runtime.donor``). Threads receive, the training thread puts in place: what it has is always the state of one step, whole.
Nothing here touches other groups' training, nor the control store but to look up where donors are.

Failures it assumes: any donor may vanish, stop, be slow, or be one step short of what is needed. Then this attempt is over
(:class:`Gone`), and another one may begin.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from megatron_ft.engines.base import Engine, StepResult
from megatron_ft.runtime import transfer, wire

_LOOK_S = 0.05


class Gone(Exception):
    """This attempt to follow is over, with the reason. An event: another one begins, or this process ends."""


class Donor(NamedTuple):
    """One whom this rank can follow: at ``address`` and ``port``; ``step``, ``epoch``: where it stands."""

    group: int
    incarnation: int
    address: str
    port: int
    step: int = -1
    epoch: int | None = None


def look_up(donor: Donor, run_id: str, position: int, who: str) -> tuple[Donor, socket.socket] | None:
    """Call it and hear where it stands; None if nobody answers there, or somebody else does."""
    try:
        end = wire.call(donor.address, donor.port, run_id, {"position": position, "who": who})
        said = wire.hear(end)
    except (OSError, ValueError):
        return None
    if said["incarnation"] != donor.incarnation:
        end.close()
        return None
    return donor._replace(step=said["step"], epoch=said["epoch"]), end


class _Stream:
    """What one donor sends; its thread puts the gradients of each step into ``steps``."""

    def __init__(self, group: int, end: socket.socket, part: int, parts: int) -> None:
        self.group, self.end, self.part, self.parts = group, end, part, parts
        self.words: dict[str, Any] | None = None
        self.steps: dict[int, tuple[dict[str, Any], torch.Tensor]] = {}
        self.error = ""


class Guest:
    """One attempt to follow ``donors`` from the state of step ``at``. ``stands`` is the step whose state the engine has,
    ``received`` how many bytes have come. Raises :class:`Gone`."""

    def __init__(
        self, engine: Engine, run_id: str, position: int, who: str, donors: Sequence[Donor], at: int
    ) -> None:
        self._engine, self.stands, self.at = engine, -1, at
        self.received = 0
        self.carried: Mapping[str, Any] = {}
        self.result: StepResult | None = None
        self._changed = threading.Condition()
        self._tensors: list[torch.Tensor] = []
        self._skeleton: Any = None
        self._streams: list[_Stream] = []
        for part, donor in enumerate(donors):
            found = look_up(donor, run_id, position, who)
            if found is None:
                self.close()
                raise Gone(f"group {donor.group} cannot be reached")
            stream = _Stream(donor.group, found[1], part, len(donors))
            self._streams.append(stream)
            try:
                wire.say(stream.end, {"at": at, "part": part, "parts": len(donors)})
                stream.end.settimeout(None)
            except OSError as error:
                self.close()
                raise Gone(f"group {donor.group}: {error}") from None
        for stream in self._streams:
            threading.Thread(target=self._receive, args=(stream,), name="megatron_ft-guest", daemon=True).start()

    # --- receiving, a thread for each donor ---------------------------------------------------------------------------

    def _receive(self, stream: _Stream) -> None:
        try:
            while True:
                words = wire.hear(stream.end)
                if "state" in words:
                    self._receive_state(stream, words)
                else:
                    self._receive_step(stream, words)
        except (OSError, ValueError, KeyError, Gone) as error:
            self._fail(stream, f"group {stream.group}: {error}")

    def _receive_state(self, stream: _Stream, words: dict[str, Any]) -> None:
        with self._changed:
            if self._skeleton is None:
                self._skeleton, self._tensors = words["skeleton"], _room_for(words["skeleton"])
            elif self._skeleton != words["skeleton"]:
                raise Gone("donors describe their states differently")
        parts = wire.shares_of([wire.as_bytes(tensor) for tensor in self._tensors], stream.part, stream.parts)
        wire.receive(stream.end, parts)
        with self._changed:
            self.received += sum(map(len, parts))
            stream.words = words
            self._changed.notify_all()

    def _receive_step(self, stream: _Stream, words: dict[str, Any]) -> None:
        room = [torch.empty(len(part), dtype=part.dtype) for part in self._own_share(stream)]
        parts = [wire.as_bytes(part) for part in room]
        wire.receive(stream.end, parts)
        with self._changed:
            self.received += sum(map(len, parts))
            stream.steps[words["step"]] = (words, room)
            self._changed.notify_all()

    def _fail(self, stream: _Stream, why: str) -> None:
        with self._changed:
            stream.error = stream.error or why
            self._changed.notify_all()

    def give_up(self, group: int, why: str) -> None:
        """Any thread: nothing more will come of that donor, whatever its connection looks like."""
        for stream in self._streams:
            if stream.group == group:
                self._fail(stream, why)

    @property
    def broken(self) -> str:
        """Why nothing more comes of a donor; empty while all are well."""
        return next((stream.error for stream in self._streams if stream.error), "")

    def _own_share(self, stream: _Stream) -> list[torch.Tensor]:
        """Of the engine's reduced buckets, what this donor sends the values of."""
        buckets = [self._engine.reduced(bucket) for bucket in range(self._engine.num_buckets)]
        return wire.shares_of(buckets, stream.part, stream.parts)

    # --- putting in place, the training thread ------------------------------------------------------------------------

    def await_state(self, interrupted: Callable[[], bool]) -> bool:
        """Until all of the state is there; False when ``interrupted`` became true first. Raises ``Gone``."""
        return self._await(lambda stream: stream.words is not None, interrupted)

    def take_state(self) -> None:
        """Make it the engine's."""
        tensors = iter(self._tensors)
        state = transfer.unflatten(self._skeleton, lambda dtype, shape, device: next(tensors).to(device))
        self._engine.load_state(state)
        self._tensors, self._skeleton = [], None
        self.carried = self._streams[0].words["carried"]
        self.stands = self.at

    def ready(self) -> bool:
        """Whether the next step has come, from all donors."""
        with self._changed:
            return all(self.stands in stream.steps for stream in self._streams)

    def await_step(self, interrupted: Callable[[], bool]) -> bool:
        """Until the next step is there; False when ``interrupted`` became true first. Raises ``Gone``."""
        return self._await(lambda stream: self.stands in stream.steps, interrupted)

    def make_step(self) -> None:
        """Make it, as the donors have."""
        step = self.stands
        for stream in self._streams:
            words, room = stream.steps.pop(step)
            for own, values in zip(self._own_share(stream), room, strict=True):
                own.copy_(values)
        self.result = StepResult(*words["result"])
        self.carried = words["carried"]
        self._engine.repeat(self.result)
        self.stands = step + 1

    def _await(self, there: Callable[[_Stream], bool], interrupted: Callable[[], bool]) -> bool:
        with self._changed:
            while not all(map(there, self._streams)):
                broken = [stream.error for stream in self._streams if stream.error and not there(stream)]
                if broken:
                    raise Gone(broken[0])
                if interrupted():
                    return False
                self._changed.wait(_LOOK_S)
        return True

    def close(self) -> None:
        """Nothing more is needed of the donors."""
        for stream in self._streams:
            with contextlib.suppress(OSError):
                wire.hang_up(stream.end)


def _room_for(skeleton: Any) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []

    def make(dtype: torch.dtype, shape: list[int], device: str) -> torch.Tensor:
        tensors.append(torch.empty(shape, dtype=dtype))
        return tensors[-1]

    transfer.unflatten(skeleton, make)
    return tensors
