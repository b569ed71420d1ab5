"""The donor's side of a group's return: a living rank sends its state, and then every step, to one of equal position.

All of it happens beside training. At the agreed boundary, a thread begins to send this rank's share of the state
(several donors divide it), while the next step is computed. From then on, at each boundary, it sends its share of the
gradients that the optimizer has just taken; with these the follower makes the same step. Neither is copied as a whole:
parameters do not change before the next update, nor reduced gradients before the next reduction. The training thread
copies first what has not been sent by then (:meth:`StateSender.settle`). Nothing is copied without a follower.

With its share of the state a donor sends a checksum of its whole state, so that the returning group does not combine
parts of different states.

Failures it assumes: a follower may vanish, stop or be slow at any time. No rank waits for it, and a follower that does
not take the data is dropped. Every failure here concerns the follower alone.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from megatron_ft.config.rank_env import RankEnvironment
from megatron_ft.run import registered_state
from megatron_ft.run.collectives import device_copies, framing, state_transfer
from megatron_ft.run.engines.port import Engine, StepResult
from megatron_ft.run.registered_state import Registered
from megatron_ft.run.rejoin.state_receiver import DONOR
from megatron_ft.run.state_checksum import StateCheck
from megatron_ft.utils import file_descriptors
from megatron_ft.utils.auth.handshake import LONGEST_HELLO, Door, Hello

_log = logging.getLogger(__name__)

_MOST_WAITING = 8
"""Number of steps that are kept for a follower; each is a copy of this rank's share of the gradients."""
_SEND_S = 60.0
"""Seconds after which a follower that takes nothing is dropped."""
_STATE_PACE, _STEP_PACE, _LONGEST_S = 0.5, 0.25, 10.0
"""A share of the state is sent over half the time of a step, one of a step's gradients over a quarter of it, neither
over more than this number of seconds: training has priority, but at the entry other groups wait for the gradients."""
_PIECE = 2**20
"""Bytes per piece, as in ``run.collectives.framing``. Smaller tensors are copied at once: forward may change buffers. One
on a device is copied through pinned memory, by the thread that sends it or when it is settled: there is no other copy of it
on the device."""


class _Parcel:
    """Flat tensors of bytes to be sent, read in place until they are settled. ``state``: an update changes them,
    otherwise a reduction does. The training thread makes it; what it has queued on a device by then are the values."""

    def __init__(self, words: dict[str, Any], parts: list[torch.Tensor], pace_s: float, state: bool) -> None:
        self.words, self.pace_s, self.state = words, pace_s, state
        self.bytes = sum(map(len, parts))
        self._lock = threading.Lock()
        self._pieces = [piece for part in parts for piece in part.split(_PIECE)]
        self._live = [len(piece) == _PIECE for piece in self._pieces]
        self._next = 0
        ports = {device_copies.port_of(part) for part in parts}
        self._after = {port: port and port.now() for port in ports}
        self._copy([number for number, live in enumerate(self._live) if not live])

    def _copy(self, numbers: list[int]) -> None:
        for number, copy in zip(numbers, device_copies.to_host([self._pieces[n] for n in numbers]), strict=True):
            self._pieces[number], self._live[number] = copy, False

    def settle(self) -> None:
        """Copy the unsent rest, which may change from now on."""
        with self._lock:
            self._copy([number for number in range(self._next, len(self._pieces)) if self._live[number]])

    def pieces(self) -> Iterator[torch.Tensor]:
        """Yield the pieces in order; each is valid until the next is requested."""
        room = torch.empty(_PIECE, dtype=torch.uint8)
        for number in range(len(self._pieces)):
            with self._lock:  # a piece that is being copied is not settled, so nothing changes it meanwhile
                piece, self._next = self._pieces[number], number + 1
                if self._live[number]:
                    device_copies.fill([room], [piece], self._after[device_copies.port_of(piece)])
                    piece = room
            yield piece
            self._pieces[number] = room  # sent: no longer held


class _Follower:
    """One connection. This rank sends share ``part`` of ``parts``; ``at``: the step whose state comes first."""

    def __init__(self, end: socket.socket, who: str, part: int, parts: int, at: int) -> None:
        self.end, self.who, self.part, self.parts, self.at = end, who, part, parts, at
        self.gone = False
        self.queue: queue.Queue[_Parcel | None] = queue.Queue()
        self._unsettled: list[_Parcel] = []

    def put(self, words: dict[str, Any], parts: list[torch.Tensor], pace_s: float, state: bool) -> None:
        parcel = _Parcel(words, parts, pace_s, state)
        self._unsettled.append(parcel)
        self.queue.put(parcel)

    def settle(self, state: bool) -> None:
        """Training thread: copy what a reduction, or with ``state`` an update, is about to change."""
        for parcel in self._unsettled:
            if not self.gone and (state or not parcel.state):
                parcel.settle()
        self._unsettled = [parcel for parcel in self._unsettled if parcel.state and not state]

    def drop(self) -> None:
        if not self.gone:
            self.gone = True
            framing.hang_up(self.end)
            self.queue.put(None)  # wakes a thread that waits for it

    def serve(self) -> None:
        """Thread: send the queued parcels in order, each over ``pace_s``, until the other end has gone."""
        try:
            while not self.gone:
                # no limit: a thread of its own; dropping the follower wakes it
                self._send(self.queue.get())  # a sent parcel is not held during the next wait
        except (OSError, RuntimeError, MemoryError):
            pass  # the follower will choose another donor, or its agent starts it again
        finally:
            self.drop()

    def _send(self, parcel: _Parcel | None) -> None:
        if parcel is not None and not self.gone:
            framing.send_message(self.end, parcel.words)
            framing.send(self.end, parcel.pieces(), _Pace(parcel.bytes, parcel.pace_s))


class _Pace:
    """Sleeps between pieces, so that sending all of them takes a given time."""

    def __init__(self, total: int, pace_s: float) -> None:
        self._total, self._pace_s = max(total, 1), pace_s
        self._sent, self._began = 0, time.monotonic()

    def __call__(self, count: int) -> None:
        self._sent += count
        ahead = self._began + self._pace_s * self._sent / self._total - time.monotonic()
        if ahead > 0:
            time.sleep(ahead)


class StateSender:
    """One rank's donor side. ``epoch`` is the present one, or None while this rank has no state to give; any thread
    asks.

    ``where`` is called once, with the address, the port and the incarnation by which the other ranks find this one.
    """

    def __init__(
        self,
        env: RankEnvironment,
        engine: Engine,
        states: StateCheck,
        registered: Registered,
        epoch: Callable[[], int | None],
        where: Callable[[list[Any]], None],
    ) -> None:
        self._env, self._engine, self._states, self._epoch = env, engine, states, epoch
        self._registered = registered
        self._step = -1
        self._lock = threading.Lock()
        self._followers: list[_Follower] = []
        self._began, self._step_s = time.monotonic(), 0.0
        listener = framing.listen(env.address)
        port = listener.getsockname()[1]
        self._door = Door(listener, env.key.of(DONOR), self._answer, "megatron_ft-donor")
        where([env.address, port, env.incarnation])

    # --- training thread ----------------------------------------------------------------------------------------------

    def boundary(self, step: int, result: StepResult | None, carried: Callable[[], Mapping[str, Any]]) -> None:
        """Begin ``step``; the reduced buffers hold the means of the step before.

        Args:
            result: result of the step before, if this rank has made it with these gradients; otherwise a follower lacks
                a step.
            carried: returns the values that the group's leader sends with the state.
        """
        now = time.monotonic()
        self._step_s, self._began = now - self._began, now
        self._step = step  # first: a follower that is too late for this boundary sees it
        if not self._followers:
            return
        with self._lock:
            followers = self._followers = [follower for follower in self._followers if not follower.gone]
        for follower in followers:
            if follower.at == step:
                self._hand_over(follower, step, result, carried())
            elif follower.at < step:
                self._go_on(follower, step, result, carried())

    def _hand_over(self, follower: _Follower, step: int, result: StepResult | None, carried: Mapping[str, Any]) -> None:
        skeleton, tensors = state_transfer.flatten(self._engine.state())
        mine = framing.shares_of(tensors, follower.part, follower.parts)
        words = {"state": step, "skeleton": skeleton, "carried": carried}
        words |= {"epoch": self._epoch(), "checksum": self._states.whole(step)}
        words |= {"hyperparameters": self._engine.hyperparameters.read()}
        words |= {"result": result.to_json() if result is not None and result.step == step - 1 else None}
        self._put(follower, words, mine, self._pace_s(_STATE_PACE), state=True)

    def _go_on(self, follower: _Follower, step: int, result: StepResult | None, carried: Mapping[str, Any]) -> None:
        if result is None or result.step != step - 1 or follower.queue.qsize() >= _MOST_WAITING:
            follower.drop()
            return
        buckets = [self._engine.reduced(bucket) for bucket in range(self._engine.num_buckets)]
        mine = framing.shares_of(buckets, follower.part, follower.parts)
        values = self._engine.hyperparameters
        words = {"step": step - 1, "result": result.to_json(), "carried": carried}
        words |= {"made": values.made, "hyperparameters": values.read()}
        self._put(follower, words, mine, self._pace_s(_STEP_PACE), state=False)
        if any(reduced is self._engine.local(bucket) for bucket, reduced in enumerate(buckets)):
            follower.settle(state=False)  # of a single live group: the next microbatch adds to them

    def _put(
        self, follower: _Follower, words: dict[str, Any], mine: list[torch.Tensor], pace_s: float, state: bool
    ) -> None:
        """Send it with the script's registered state, which comes from one donor only; the script changes it after the
        step, when everything is settled."""
        if self._registered and not follower.part:
            words[registered_state.KEY], tensors = state_transfer.flatten(self._registered.state(), devices=False)
            mine = [*mine, *map(framing.as_bytes, tensors)]
        follower.put(words, mine, pace_s, state)

    def settle(self, state: bool) -> None:
        """Copy unsent data before reduced gradients change; with ``state``, parameters and optimizer state, too."""
        for follower in self._followers:
            follower.settle(state)

    def _pace_s(self, share: float) -> float:
        return min(share * self._step_s, _LONGEST_S)

    # --- other threads ------------------------------------------------------------------------------------------------

    def _answer(self, end: socket.socket, hello: Hello) -> None:
        """Tell the caller, a rank of this run, where this rank stands; then it may follow."""
        try:
            if hello.get("position") != self._env.position:
                end.close()
                return
            framing.send_message(
                end, {"incarnation": self._env.incarnation, "step": self._step, "epoch": self._epoch()}
            )
            asked = framing.receive_message(end, LONGEST_HELLO)
            end.settimeout(_SEND_S)
            part, parts, at = int(asked["part"]), int(asked["parts"]), int(asked["at"])
            if not 0 <= part < parts:
                raise ValueError(f"part {part} of {parts} was asked for")
            follower = _Follower(end, str(hello["who"]), part, parts, at)
        except (OSError, ValueError, KeyError, TypeError):
            end.close()
            return
        with self._lock:  # a boundary may be far away: gone followers are not kept until then
            self._followers = [*(other for other in self._followers if not other.gone), follower]
        if self._step >= follower.at:  # this boundary has passed
            with contextlib.suppress(OSError):
                framing.send_message(end, {"late": self._step})
            follower.drop()
            return
        _log.info(f"group {self._env.group}: {follower.who} follows from step {follower.at}")
        with contextlib.suppress(RuntimeError):  # without a thread for it, a send finds out that the other end has gone
            threading.Thread(target=self._watch, args=(follower,), name="megatron_ft-donor", daemon=True).start()
        follower.serve()

    @staticmethod
    def _watch(follower: _Follower) -> None:
        """Wait for the other end to go: it sends nothing any more, so a readable connection has ended."""
        with contextlib.suppress(OSError, ValueError):
            # no limit: a thread of its own; closing its socket ends it
            file_descriptors.readable(follower.end, None)  # its end is shut down when it is dropped
        follower.drop()

    def close(self) -> None:
        self._door.close()
        with self._lock:
            for follower in self._followers:
                follower.drop()
