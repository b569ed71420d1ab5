"""The rate at which one host sends to another over one TCP connection.

A :class:`Receiver` runs on every host during the check and takes data from any host that knows the secret. The sender
measures. Failures assumed: the receiver is gone, frozen or unreachable, or the connection is very slow;
:func:`send_rate` returns or raises within ``MAX_S``.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time

from megatron_ft.types import given
from megatron_ft.utils.auth import handshake
from megatron_ft.utils.auth.handshake import Door, Hello
from megatron_ft.utils.auth.secret import Key

MAX_S = 15.0
_CONNECT_S = 2.0
_HANDSHAKE_S = 3.0
_BLOCK_TIMEOUT_S = 3.0
_IDLE_S = 20.0
_SMALLEST, _LARGEST = 1 << 16, 1 << 22
_BLOCK_S = 0.05
"""The block size doubles until one block takes this long, or has the largest size."""
_BLOCKS, _MIN_S, _TOTAL_S = 3, 0.1, 1.0
"""Then at least 3 blocks are sent, for at least 0.1 s; the whole measurement ends after 1 s."""
_SIZE = struct.Struct("!I")
_RECEIVED = b"+"


class Receiver:
    """Accepts connections on a free port of ``address`` and acknowledges every block that it receives."""

    def __init__(self, address: str, key: Key) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family, backlog=64)
        self.port: int = listener.getsockname()[1]
        self._door = Door(listener, key, self._receive, "megatron_ft-doctor-receiver")

    def close(self) -> None:
        """Stops accepting connections."""
        self._door.close()

    def _receive(self, connection: socket.socket, _: Hello) -> None:
        buffer = memoryview(bytearray(_LARGEST))
        with connection, contextlib.suppress(OSError):
            connection.settimeout(_IDLE_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while True:
                _fill(connection, buffer[: _SIZE.size])
                (size,) = _SIZE.unpack(buffer[: _SIZE.size])
                _fill(connection, buffer[: min(size, _LARGEST)])
                connection.sendall(_RECEIVED)


def send_rate(address: str, port: int, key: Key) -> float:
    """Returns the rate of the fastest block in bytes per second; a busy processor only makes blocks slower.

    A block that is not acknowledged within 3 s ends the measurement; the rate is then that of the block so far. Raises
    ``OSError`` when no connection is made.
    """
    with socket.create_connection((address, port), timeout=_CONNECT_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        handshake.greet(connection, key, {}, _HANDSHAKE_S)
        connection.settimeout(_BLOCK_TIMEOUT_S)
        size, rates, started = _SMALLEST, [], time.monotonic()
        while True:
            begun = time.perf_counter()
            try:
                connection.sendall(_SIZE.pack(size) + bytes(size))
                _fill(connection, memoryview(bytearray(len(_RECEIVED))))
            except TimeoutError:
                return size / (time.perf_counter() - begun)
            block_s = max(time.perf_counter() - begun, 1e-9)
            rates.append(size / block_s)
            total_s = time.monotonic() - started
            if total_s > _TOTAL_S:
                return max(rates)
            if block_s < _BLOCK_S and size < _LARGEST:
                size, rates = 2 * size, []
            elif len(rates) >= _BLOCKS and total_s > _MIN_S:
                return max(rates)


def _fill(connection: socket.socket, view: memoryview) -> None:
    """Receives ``len(view)`` bytes. Raises ``TimeoutError`` when the whole of it exceeds the socket's timeout."""
    timeout_s = given(connection.gettimeout())
    end = time.monotonic() + timeout_s
    while view:
        if time.monotonic() > end:
            raise TimeoutError(f"no answer within {timeout_s:g} s")
        # no limit: the socket has a timeout, and all of it must come within that
        received = connection.recv_into(view)
        if not received:
            raise ConnectionError("the connection was closed")
        view = view[received:]
