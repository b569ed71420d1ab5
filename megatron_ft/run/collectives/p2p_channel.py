"""Lines: short messages between two ranks of a group while they compute one flush of a pipeline together.

The next pass of a stage depends on the pass that the stage before it has begun, and that on the leader's news of other
groups (``core.scheduling.pipeline_1f1b``). The messages about it use this channel, beside the tensors, so that a stage
can check for one without waiting. They are a few numbers each; sockets buffer them, and sending one never blocks.

Failures it assumes: the other end may vanish or stop at any time; :meth:`P2PChannels.abort` ends every wait with ``Lost``.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import struct
import time
from collections.abc import Callable, Iterable, Sequence

from megatron_ft.config.rank_env import RankEnvironment
from megatron_ft.run.collectives import framing
from megatron_ft.run.collectives.intra_group import IntraGroup, Lost
from megatron_ft.utils import file_descriptors
from megatron_ft.utils.auth.handshake import Door, Hello

_WORDS = 8
_MESSAGE = struct.Struct(f"={_WORDS}q")
_Caller = tuple[socket.socket, Hello]
_CONNECT_TIMEOUT_S = 30.0
_LOOK_S = 0.05


class P2PChannels:
    """One rank's ends of all its lines. Only the training thread calls its methods, except for :meth:`abort`."""

    def __init__(self, ends: dict[int, socket.socket]) -> None:
        self._ends = ends
        self._received = {position: bytearray() for position in ends}

    @classmethod
    def build(
        cls, env: RankEnvironment, inner: IntraGroup | None, peers: Iterable[int], interrupted: Callable[[], bool]
    ) -> P2PChannels:
        """Connect to ``peers``, positions of this group that name this one as well. All ranks of the group call it.
        ``inner``: their communicator; None: there is one rank.

        Raises ``Lost`` if ``interrupted`` became true first, or if a peer could not be reached.
        """
        peers = sorted(set(peers))
        ends: dict[int, socket.socket] = {}
        callers: queue.SimpleQueue[_Caller] = queue.SimpleQueue()
        try:
            listener = framing.listen(env.address)
            port = listener.getsockname()[1]
            key = env.key.of("line", env.seat)
            door = Door(listener, key, lambda *caller: callers.put(caller), "megatron_ft-lines")
            try:
                places = [] if inner is None else inner.gather([env.address, port])
                for peer in (peer for peer in peers if peer < env.position):
                    address, there = places[peer]
                    ends[peer] = framing.call(address, there, key, {"position": env.position})
                expected = {peer for peer in peers if peer > env.position}
                while expected:
                    end, caller = _accept(callers, expected, interrupted)
                    ends[caller] = end
                    expected.discard(caller)
            finally:
                door.close()
        except OSError as error:
            for end in ends.values():
                end.close()
            raise Lost(f"no line to another rank of the group: {error}") from None
        for end in ends.values():
            # no limit: as long as the group's ranks live, of which agents judge; an abort ends it when one is lost
            end.settimeout(None)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return cls(ends)

    def send_words(self, position: int, words: Sequence[int]) -> None:
        """Send at most eight integers without blocking."""
        try:
            self._ends[position].sendall(_MESSAGE.pack(*words, *(0,) * (_WORDS - len(words))))
        except OSError as error:
            raise Lost(f"rank {position} of this group cannot be told anything: {error}") from None

    def heard(self, position: int) -> tuple[int, ...] | None:
        """Return the next message, or None if none has arrived."""
        end, received = self._ends[position], self._received[position]
        # no limit: it does not block: it reads what is there
        while len(received) < _MESSAGE.size:
            if not file_descriptors.readable(end, 0):
                return None
            self._receive(position)
        return self._take(position)

    def receive_words(self, position: int) -> tuple[int, ...]:
        """Wait for the next message and return it."""
        while len(self._received[position]) < _MESSAGE.size:
            self._receive(position)
        return self._take(position)

    def abort(self) -> None:
        """Make every pending and future wait raise ``Lost``, here and at the other ends. Callable from any thread."""
        for end in self._ends.values():
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _receive(self, position: int) -> None:
        try:
            # no limit: as long as the group's ranks live, of which agents judge; an abort ends it when one is lost
            data = self._ends[position].recv(4096)
        except OSError as error:
            raise Lost(f"rank {position} of this group is not heard: {error}") from None
        if not data:
            raise Lost(f"rank {position} of this group has gone")
        self._received[position] += data

    def _take(self, position: int) -> tuple[int, ...]:
        received = self._received[position]
        message = _MESSAGE.unpack_from(received)
        del received[: _MESSAGE.size]
        return message


def _accept(
    callers: queue.SimpleQueue[_Caller], expected: set[int], interrupted: Callable[[], bool]
) -> tuple[socket.socket, int]:
    """Accept one of ``expected``; any other caller is refused."""
    deadline = time.monotonic() + _CONNECT_TIMEOUT_S
    while time.monotonic() < deadline:
        if interrupted():
            raise Lost(f"ranks {sorted(expected)} of this group were gone before they could be reached")
        try:
            end, hello = callers.get(timeout=_LOOK_S)
        except queue.Empty:
            continue
        caller = hello.get("position")
        if isinstance(caller, int) and caller in expected:
            return end, caller
        end.close()
    raise TimeoutError(f"ranks {sorted(expected)} of this group did not call within {_CONNECT_TIMEOUT_S:g} s")
