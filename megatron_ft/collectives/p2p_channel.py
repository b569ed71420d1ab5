"""Lines: short messages between two ranks of a group while they compute one flush of a pipeline together.

What a stage does next depends on what the stage before it has begun, and that on what the leader has heard of other groups
(``core.pipeline``). The words for it travel here, beside the tensors, so that a stage can look whether one has come without
waiting for it. They are a few numbers each; sockets buffer them, and telling one never blocks.

Failures it assumes: the other end may vanish or stop at any time; :meth:`Lines.abort` ends every wait with ``Lost``.
"""

from __future__ import annotations

import contextlib
import hashlib
import select
import socket
import struct
import time
from collections.abc import Callable, Iterable, Sequence

from megatron_ft.runtime import sockets
from megatron_ft.runtime.agreement import Agreement
from megatron_ft.runtime.connect import wait_for
from megatron_ft.runtime.environment import RankEnvironment
from megatron_ft.runtime.inner import Lost

_WORDS = 8
_MESSAGE = struct.Struct(f"={_WORDS}q")
_HELLO = struct.Struct("=32sq")
_CONNECT_TIMEOUT_S = 30.0
_LOOK_S = 0.05


class Lines:
    """One rank's ends of all its lines; all methods but :meth:`abort` are the training thread's."""

    def __init__(self, ends: dict[int, socket.socket]) -> None:
        self._ends = ends
        self._received = {position: bytearray() for position in ends}

    @classmethod
    def build(
        cls, env: RankEnvironment, agreement: Agreement, peers: Iterable[int], interrupted: Callable[[], bool]
    ) -> Lines:
        """Meet ``peers``, positions of this group that name this one as well. All ranks of the group call it.

        Raises ``Lost`` when ``interrupted`` became true first, or somebody could not be reached.
        """
        peers = sorted(set(peers))
        token = hashlib.sha256(f"{env.run_id}/{env.seat}".encode()).digest()
        ends: dict[int, socket.socket] = {}
        family = socket.AF_INET6 if ":" in env.address else socket.AF_INET
        try:
            with socket.create_server((env.address, 0), family=family) as listener:
                agreement.say(f"line/{env.seat}/{env.position}", [env.address, listener.getsockname()[1]])
                for peer in (peer for peer in peers if peer < env.position):
                    end = ends[peer] = _call(agreement, env, peer, interrupted)
                    end.sendall(_HELLO.pack(token, env.position))
                expected = {peer for peer in peers if peer > env.position}
                while expected:
                    end, caller = _accept(listener, token, expected, interrupted)
                    ends[caller] = end
                    expected.discard(caller)
        except OSError as error:
            for end in ends.values():
                end.close()
            raise Lost(f"no line to another rank of the group: {error}") from None
        for end in ends.values():
            end.settimeout(None)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return cls(ends)

    def tell(self, position: int, words: Sequence[int]) -> None:
        """At most eight whole numbers."""
        try:
            self._ends[position].sendall(_MESSAGE.pack(*words, *(0,) * (_WORDS - len(words))))
        except OSError as error:
            raise Lost(f"rank {position} of this group cannot be told anything: {error}") from None

    def heard(self, position: int) -> tuple[int, ...] | None:
        """The next message, if one is there."""
        end, received = self._ends[position], self._received[position]
        while len(received) < _MESSAGE.size:
            if not select.select([end], [], [], 0)[0]:
                return None
            self._receive(position)
        return self._take(position)

    def hear(self, position: int) -> tuple[int, ...]:
        """The next message; waits for it."""
        while len(self._received[position]) < _MESSAGE.size:
            self._receive(position)
        return self._take(position)

    def abort(self) -> None:
        """Make every pending and future wait raise ``Lost``, here and at the other ends. Any thread."""
        for end in self._ends.values():
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _receive(self, position: int) -> None:
        try:
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


def _call(agreement: Agreement, env: RankEnvironment, peer: int, interrupted: Callable[[], bool]) -> socket.socket:
    """Connect to a rank that has said where it listens."""
    name = f"line/{env.seat}/{peer}"
    if not wait_for(lambda: agreement.get(name) is not None, interrupted):
        raise Lost(f"rank {peer} of this group was gone before it could be reached")
    address, port = agreement.get(name)
    return sockets.keep(socket.create_connection((address, port), timeout=_CONNECT_TIMEOUT_S))


def _accept(
    listener: socket.socket, token: bytes, expected: set[int], interrupted: Callable[[], bool]
) -> tuple[socket.socket, int]:
    """One of ``expected``; whoever else calls is sent away."""
    deadline = time.monotonic() + _CONNECT_TIMEOUT_S
    while time.monotonic() < deadline:
        if interrupted():
            raise Lost(f"ranks {sorted(expected)} of this group were gone before they could be reached")
        if not select.select([listener], [], [], _LOOK_S)[0]:
            continue
        end, _ = listener.accept()
        end.settimeout(_CONNECT_TIMEOUT_S)
        with contextlib.suppress(OSError):
            hello = end.recv(_HELLO.size, socket.MSG_WAITALL)
            if len(hello) == _HELLO.size:
                said, caller = _HELLO.unpack(hello)
                if said == token and caller in expected:
                    return end, caller
        end.close()
    raise TimeoutError(f"ranks {sorted(expected)} of this group did not call within {_CONNECT_TIMEOUT_S:g} s")
