"""One rank of a group that comes back: it takes its state from ranks of equal position, and repeats their steps.

Each donor sends its share of the state and, step by step, its share of the gradients that the optimizer took
(``run.rejoin.state_sender``). Threads receive, and the training thread puts the data in place, so its state is
always that of one complete step. The training of other groups is not affected, and the control store is used only to
look up donors.

Failures it assumes: any donor may vanish, stop, be slow, or be one step short of the needed one. Then this attempt is
over (:class:`Gone`), and another one may begin.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from megatron_ft.run import registered_state
from megatron_ft.run.collectives import device_copies, framing, state_transfer
from megatron_ft.run.engines.hyperparameters import Values
from megatron_ft.run.engines.port import Engine, StepResult
from megatron_ft.types import given
from megatron_ft.utils.auth.handshake import LONGEST_HELLO
from megatron_ft.utils.auth.secret import Key

_LOOK_S = 0.05
DONOR = "donor"
"""The purpose of the key for both ends of these connections."""


class Gone(Exception):
    """This attempt to follow is over, with the reason. An event: another one begins, or this process ends."""


class Peer(NamedTuple):
    """A group that this rank can follow: at ``address`` and ``port``; ``step``, ``epoch``: where it stands."""

    group: int
    incarnation: int
    address: str
    port: int
    step: int = -1
    epoch: int | None = None


def look_up(donor: Peer, key: Key, position: int, who: str) -> tuple[Peer, socket.socket] | None:
    """Connect to a donor and read where it stands; None if it does not answer. ``key``: the run's."""
    end = None
    try:
        end = framing.call(donor.address, donor.port, key.of(DONOR), {"position": position, "who": who})
        said = framing.receive_message(end, LONGEST_HELLO)
        if said["incarnation"] == donor.incarnation:
            return donor._replace(step=said["step"], epoch=said["epoch"]), end
    except (OSError, ValueError, KeyError, TypeError):
        pass
    if end is not None:
        end.close()
    return None


@dataclass(frozen=True)
class Held:
    """What a rank holds beside the state in its engine: that state is the one that ``step`` starts from (-1: none).
    ``result`` is that of the step before, None if the donors had not made it themselves; ``carried``: what their leader
    sends with it; ``hyperparameters``: those with which the donors have begun ``step``; ``registered``: the state of the
    script's objects."""

    step: int = -1
    result: StepResult | None = None
    carried: Mapping[str, Any] = field(default_factory=dict)
    hyperparameters: Values | None = None
    registered: Mapping[str, Any] = field(default_factory=dict)


class _Stream:
    """The data of one donor; its thread puts the gradients of each step into ``steps``."""

    def __init__(self, group: int, end: socket.socket, part: int, parts: int) -> None:
        self.group, self.end, self.part, self.parts = group, end, part, parts
        self.words: dict[str, Any] | None = None
        self.steps: dict[int, tuple[dict[str, Any], list[torch.Tensor], Mapping[str, Any]]] = {}
        self.registered: Mapping[str, Any] = {}
        self.error = ""


class StateReceiver:
    """One attempt to follow ``donors``. ``at`` is the step whose state is asked for (-1: none yet), ``held`` what has been
    put in place, ``received`` how many bytes have come; ``soonest``: the first step that no donor had begun when it
    answered; ``late``: a donor had begun step ``at`` before it was asked; ``patience_s``: seconds after which a donor that
    sends nothing is given up; ``one_version``: each step was made of parts that all donors had committed in one epoch. Else
    a part may be of a step that the others have made again.

    Raises :class:`Gone`."""

    def __init__(
        self, engine: Engine, key: Key, position: int, who: str, donors: Sequence[Peer], patience_s: float = 1800.0
    ) -> None:
        self._engine, self._patience_s = engine, patience_s
        self.at, self.held = -1, Held()
        self.received = self.soonest = 0
        self.late, self.one_version = False, True
        self._changed = threading.Condition()
        self._tensors: list[torch.Tensor] = []
        self._skeleton: Any = None
        self._streams: list[_Stream] = []
        self._threads: list[threading.Thread] = []
        for part, donor in enumerate(donors):
            found = look_up(donor, key, position, who)
            if found is None:
                self.close()
                raise Gone(f"group {donor.group} cannot be reached")
            self._streams.append(_Stream(donor.group, found[1], part, len(donors)))
            self.soonest = max(self.soonest, found[0].step + 1)

    def ask(self, at: int) -> None:
        """Ask all donors for the state of step ``at``, each for its share."""
        self.at = at
        for stream in self._streams:
            try:
                framing.send_message(stream.end, {"at": at, "part": stream.part, "parts": stream.parts})
                stream.end.settimeout(self._patience_s)
            except OSError as error:
                self._fail(stream, f"group {stream.group}: {error}")
                continue
            thread = threading.Thread(target=self._receive, args=(stream,), name="megatron_ft-guest", daemon=True)
            self._threads.append(thread)
            thread.start()

    # --- receiving, a thread for each donor ---------------------------------------------------------------------------

    def _receive(self, stream: _Stream) -> None:
        try:
            while True:
                words = framing.receive_message(stream.end)
                if "late" in words:
                    self.late = True
                    raise Gone(f"step {self.at} was asked for in step {words['late']}")
                if "state" in words:
                    self._receive_state(stream, words)
                else:
                    self._receive_step(stream, words)
        except (
            Exception
        ) as error:  # no memory (MemoryError, torch's RuntimeError), too: else the training thread would wait on
            self._fail(stream, f"group {stream.group}: {str(error) or type(error).__name__}")

    def _receive_state(self, stream: _Stream, words: dict[str, Any]) -> None:
        with self._changed:
            if self._skeleton is None:
                self._skeleton, self._tensors = words["skeleton"], _room_for(words["skeleton"])
            elif self._skeleton != words["skeleton"]:
                raise Gone("donors describe their states differently")
        parts = framing.shares_of(self._tensors, stream.part, stream.parts)
        framing.receive(stream.end, parts)
        registered = self._receive_registered(stream, words)
        with self._changed:
            self.received += sum(map(len, parts))
            stream.words, stream.registered = words, registered
            self._changed.notify_all()

    def _receive_step(self, stream: _Stream, words: dict[str, Any]) -> None:
        room = [torch.empty(len(part), dtype=torch.uint8) for part in self._own_share(stream)]
        framing.receive(stream.end, room)
        registered = self._receive_registered(stream, words)
        with self._changed:
            self.received += sum(map(len, room))
            stream.steps[words["step"]] = (words, room, registered)
            self._changed.notify_all()

    def _receive_registered(self, stream: _Stream, words: dict[str, Any]) -> Mapping[str, Any]:
        """Receive the state of the script's objects at the same boundary; only one donor sends it."""
        if registered_state.KEY not in words:
            return {}
        tensors = _room_for(words[registered_state.KEY])
        parts = [framing.as_bytes(tensor) for tensor in tensors]
        framing.receive(stream.end, parts)
        with self._changed:
            self.received += sum(map(len, parts))
        return _filled(words[registered_state.KEY], tensors)

    def _fail(self, stream: _Stream, why: str) -> None:
        with self._changed:
            stream.error = stream.error or why
            self._changed.notify_all()

    def give_up(self, group: int, why: str) -> None:
        """Give up a donor, whatever its connection looks like. Callable from any thread."""
        for stream in self._streams:
            if stream.group == group:
                self._fail(stream, why)

    @property
    def broken(self) -> str:
        """The reason why nothing more will come of a donor; empty while all are well."""
        return next((stream.error for stream in self._streams if stream.error), "")

    def _own_share(self, stream: _Stream) -> list[torch.Tensor]:
        """Return the parts of the engine's reduced buckets that this donor sends, as bytes."""
        buckets = [self._engine.reduced(bucket) for bucket in range(self._engine.num_buckets)]
        return framing.shares_of(buckets, stream.part, stream.parts)

    # --- putting in place, the training thread ------------------------------------------------------------------------

    def await_state(self, interrupted: Callable[[], bool]) -> bool:
        """Wait for the complete state; False if ``interrupted`` became true first. Raises ``Gone``."""
        return self._await(lambda stream: stream.words is not None, interrupted)

    def take_state(self) -> None:
        """Load the received state into the engine."""
        self._engine.load_state(_filled(self._skeleton, self._tensors))
        self._tensors, self._skeleton = [], None
        words, registered = given(self._streams[0].words), self._streams[0].registered
        result = None if words["result"] is None else StepResult.from_json(words["result"])
        self.held = Held(self.at, result, words["carried"], words["hyperparameters"], registered)

    @property
    def checksums(self) -> dict[int, int]:
        """For each donor's group a checksum of the donor's whole state; valid once the state is there."""
        return {stream.group: given(stream.words)["checksum"] for stream in self._streams}

    @property
    def epochs(self) -> set[int | None]:
        """The epochs in which the donors began the step, once the state is there; in one, their states are equal."""
        return {given(stream.words)["epoch"] for stream in self._streams}

    def await_rest(self, limit_s: float) -> None:
        """Wait until all that lost donors have sent is here: their connections have ended, or that takes too long."""
        deadline = time.monotonic() + limit_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def ready(self) -> bool:
        """True if the next step has come, from all donors."""
        with self._changed:
            return all(self.held.step in stream.steps for stream in self._streams)

    def await_step(self, interrupted: Callable[[], bool]) -> bool:
        """Wait for the next step; False if ``interrupted`` became true first. Raises ``Gone``."""
        return self._await(lambda stream: self.held.step in stream.steps, interrupted)

    def make_step(self) -> None:
        """Make the next step as the donors have made it, and take over what their scripts have set for the one after it."""
        step, epochs, objects = self.held.step, set[int | None](), self.held.registered
        for stream in self._streams:
            words, room, registered = stream.steps.pop(step)
            epochs.add(words["carried"].get("line", {}).get("epoch"))
            objects = registered or objects
            device_copies.fill(self._own_share(stream), room)
        self.one_version &= len(epochs) == 1
        result = StepResult.from_json(words["result"])
        self._engine.repeat(result, words["made"])
        self._engine.hyperparameters.write(words["hyperparameters"])
        self.held = Held(step + 1, result, words["carried"], words["hyperparameters"], objects)

    def _await(self, there: Callable[[_Stream], bool], interrupted: Callable[[], bool]) -> bool:
        with self._changed:
            # no limit: a stream without data for detector.collective_timeout_s is an error; news interrupt it
            while not all(map(there, self._streams)):
                broken = [stream.error for stream in self._streams if stream.error and not there(stream)]
                if broken:
                    raise Gone(broken[0])
                if interrupted():
                    return False
                self._changed.wait(_LOOK_S)
        return True

    def close(self) -> None:
        """Disconnect from the donors."""
        for stream in self._streams:
            with contextlib.suppress(OSError):
                framing.hang_up(stream.end)


def _filled(skeleton: Any, tensors: list[torch.Tensor]) -> Any:
    """Return the state with that skeleton and those tensors, each on this rank's own device of its kind."""
    each, moved = iter(tensors), list[tuple[torch.Tensor, torch.Tensor]]()

    def take(dtype: torch.dtype, shape: list[int], kind: str) -> torch.Tensor:
        found = next(each)
        if kind != "cpu":
            moved.append((device_copies.empty(shape, dtype, kind), found))
        return found if kind == "cpu" else moved[-1][0]

    state = state_transfer.unflatten(skeleton, take)
    device_copies.fill([target for target, _ in moved], [source for _, source in moved])
    return state


def _room_for(skeleton: Any) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []

    def make(dtype: torch.dtype, shape: list[int], kind: str) -> torch.Tensor:
        tensors.append(torch.empty(shape, dtype=dtype))
        return tensors[-1]

    state_transfer.unflatten(skeleton, make)
    return tensors
