"""What a living rank does for one of equal position in a group that comes back: hand over its state, and then every step.

All of it happens beside training. At the boundary that was agreed on, a thread begins to send this rank's share of the
state (it is spread over several donors), while the next step is computed; from then on, at each boundary, its share of the
gradients the optimizer has just taken: with these the other rank makes the same step. Neither is copied as a whole:
parameters do not change before the next update, nor reduced gradients before the next reduction. What has not been sent when
that comes the training thread copies first (:meth:`Donor.settle`). Nothing is copied while nobody follows.

Failures it assumes: who follows may vanish, stop or be slow at any time: nobody waits for it, and one that does not take
what is sent to it is dropped. Whatever goes wrong here concerns the one who follows alone.
"""

from __future__ import annotations

import contextlib
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from megatron_ft.engines.base import Engine, StepResult
from megatron_ft.runtime import transfer, wire
from megatron_ft.runtime.environment import RankEnvironment

_MOST_WAITING = 8
"""Steps that are kept for one who follows; each is a copy of this rank's share of the gradients."""
_SEND_S = 60.0
"""So long one who follows may take nothing."""
_STATE_PACE, _STEP_PACE, _LONGEST_S = 0.5, 0.25, 10.0
"""A share of the state is sent over half the time of a step, one of a step's gradients over a quarter of it, neither over
more than these seconds: the machine belongs to training, but at the entry others wait for the gradients."""
_PIECE = 2**20
"""What ``wire`` sends at a time, too. Smaller tensors are copied at once: a model's buffers may change in a forward pass."""


class _Parcel:
    """Flat tensors of bytes to be sent, read where they are until they are settled. ``state``: an update changes them;
    else a reduction does."""

    def __init__(self, words: dict[str, Any], parts: list[torch.Tensor], pace_s: float, state: bool) -> None:
        self.words, self.pace_s, self.state = words, pace_s, state
        self.bytes = sum(map(len, parts))
        self._lock = threading.Lock()
        self._pieces = [piece for part in parts for piece in part.split(_PIECE)]
        self._live = [len(piece) == _PIECE and piece.device.type == "cpu" for piece in self._pieces]
        self._next = 0
        for number, live in enumerate(self._live):
            if not live:
                self._pieces[number] = self._pieces[number].to("cpu", copy=True)

    def settle(self) -> None:
        """What is still to be sent may change from now on."""
        with self._lock:
            for number in range(self._next, len(self._pieces)):
                if self._live[number]:
                    self._pieces[number], self._live[number] = self._pieces[number].clone(), False

    def pieces(self) -> Iterator[torch.Tensor]:
        """In order; each is good until the next is asked for."""
        room = torch.empty(_PIECE, dtype=torch.uint8)
        for number in range(len(self._pieces)):
            with self._lock:
                piece, self._next = self._pieces[number], number + 1
                if self._live[number]:
                    piece = room.copy_(piece)
            yield piece
            self._pieces[number] = room  # sent: not held any longer


class _Follower:
    """One connection. ``part`` of ``parts`` is what this rank sends; ``at``: the step whose state comes first."""

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
        """Training thread: what a reduction changes is about to change, and with ``state`` what an update does, too."""
        for parcel in self._unsettled:
            if not self.gone and (state or not parcel.state):
                parcel.settle()
        self._unsettled = [parcel for parcel in self._unsettled if parcel.state and not state]

    def drop(self) -> None:
        if not self.gone:
            self.gone = True
            wire.hang_up(self.end)
            self.queue.put(None)  # in case it is waited for

    def serve(self) -> None:
        """Thread: send what is put, in order, each over ``pace_s``, until the other end has gone."""
        try:
            while not self.gone:
                self._send(self.queue.get())  # what was sent is not held while the next is waited for
        except OSError:
            pass  # it will ask somebody else, or its agent starts it again
        finally:
            self.drop()

    def _send(self, parcel: _Parcel | None) -> None:
        if parcel is not None and not self.gone:
            wire.say(self.end, parcel.words)
            wire.send(self.end, parcel.pieces(), _Pace(parcel.bytes, parcel.pace_s))


class _Pace:
    """Sleeps between pieces, so that all of them take a given time."""

    def __init__(self, total: int, pace_s: float) -> None:
        self._total, self._pace_s = max(total, 1), pace_s
        self._sent, self._began = 0, time.monotonic()

    def __call__(self, count: int) -> None:
        self._sent += count
        ahead = self._began + self._pace_s * self._sent / self._total - time.monotonic()
        if ahead > 0:
            time.sleep(ahead)


class Donor:
    """One rank's. ``epoch`` is the present one, or None while this rank has no state to give; any thread asks.

    ``where`` is told once, with the address, the port and the incarnation, by which the others find this rank.
    """

    def __init__(
        self,
        env: RankEnvironment,
        engine: Engine,
        epoch: Callable[[], int | None],
        where: Callable[[list[Any]], None],
    ) -> None:
        self._env, self._engine, self._epoch = env, engine, epoch
        self._step = -1
        self._lock = threading.Lock()
        self._followers: list[_Follower] = []
        self._began, self._step_s = time.monotonic(), 0.0
        self._listener = wire.listen(env.address)
        where([env.address, self._listener.getsockname()[1], env.incarnation])
        threading.Thread(target=self._accept, name="megatron_ft-donor", daemon=True).start()

    # --- training thread ----------------------------------------------------------------------------------------------

    def boundary(self, step: int, result: StepResult | None, carried: Callable[[], Mapping[str, Any]]) -> None:
        """``step`` is about to begin; the reduced buffers hold the means of the one before.

        Args:
            result: of the step before, if this rank has taken it with these gradients; else who follows misses something.
            carried: what the leader of the group hands over with the state.
        """
        now = time.monotonic()
        self._step_s, self._began = now - self._began, now
        self._step = step  # first: who comes too late for this boundary sees it
        if not self._followers:
            return
        with self._lock:
            followers = self._followers = [follower for follower in self._followers if not follower.gone]
        for follower in followers:
            if follower.at == step:
                self._hand_over(follower, step, carried())
            elif follower.at < step:
                self._go_on(follower, step, result, carried())

    def _hand_over(self, follower: _Follower, step: int, carried: Mapping[str, Any]) -> None:
        skeleton, tensors = transfer.flatten(self._engine.state())
        flat = [wire.as_bytes(tensor) for tensor in tensors]
        mine = wire.shares_of(flat, follower.part, follower.parts)
        words = {"state": step, "skeleton": skeleton, "carried": carried}
        follower.put(words, mine, self._pace_s(_STATE_PACE), state=True)

    def _go_on(self, follower: _Follower, step: int, result: StepResult | None, carried: Mapping[str, Any]) -> None:
        if result is None or result.step != step - 1 or follower.queue.qsize() >= _MOST_WAITING:
            follower.drop()
            return
        buckets = [self._engine.reduced(bucket) for bucket in range(self._engine.num_buckets)]
        shares = wire.shares_of(buckets, follower.part, follower.parts)
        mine = [wire.as_bytes(piece) for piece in shares]
        words = {"step": step - 1, "result": result.to_json(), "carried": carried}
        follower.put(words, mine, self._pace_s(_STEP_PACE), state=False)
        if any(self._engine.reduced(bucket) is self._engine.local(bucket) for bucket in range(self._engine.num_buckets)):
            follower.settle(state=False)  # of a single live group: the next microbatch adds to them

    def settle(self, state: bool) -> None:
        """Reduced gradients are about to change; with ``state``, parameters and the optimizer's state are, too."""
        for follower in self._followers:
            follower.settle(state)

    def _pace_s(self, share: float) -> float:
        return min(share * self._step_s, _LONGEST_S)

    # --- other threads ------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                end, _ = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._answer, args=(end,), name="megatron_ft-donor", daemon=True).start()

    def _answer(self, end: socket.socket) -> None:
        """Who calls says who it is and is told where this rank stands; then it may follow."""
        try:
            end.settimeout(wire.CALL_TIMEOUT_S)
            hello = wire.hear(end)
            if hello.get("token") != wire.token(self._env.run_id) or hello.get("position") != self._env.position:
                end.close()
                return
            wire.say(end, {"incarnation": self._env.incarnation, "step": self._step, "epoch": self._epoch()})
            asked = wire.hear(end)
            end.settimeout(_SEND_S)
            follower = _Follower(end, hello["who"], asked["part"], asked["parts"], asked["at"])
        except (OSError, ValueError, KeyError):
            end.close()
            return
        with self._lock:
            self._followers.append(follower)
        if self._step >= follower.at:  # this boundary has passed
            follower.drop()
            return
        print(f"megatron_ft: group {self._env.group}: {follower.who} follows from step {follower.at}", flush=True)
        threading.Thread(target=self._watch, args=(follower,), name="megatron_ft-donor", daemon=True).start()
        follower.serve()

    @staticmethod
    def _watch(follower: _Follower) -> None:
        """Nothing is said on the connection any more: if something can be read, its other end has gone."""
        with contextlib.suppress(OSError, ValueError):
            select.select([follower.end], [], [])
        follower.drop()

    def close(self) -> None:
        wire.hang_up(self._listener)
        with self._lock:
            for follower in self._followers:
                follower.drop()

