"""What one host measures of another, over TCP: whether it can be reached, how long a round trip takes, how much passes.

The one that asks does all the work; the other one answers every question from a thread, whatever it is doing itself. So a
measurement needs no agreement between two hosts, and one that does not answer costs the asking one a few seconds only.

Datagrams are sent along. TCP makes no connection when either way is blocked; they tell which one it is.

Failures it assumes: the other host is gone, frozen, or cut off either way; strangers connect; a way is so slow that hardly
anything passes. Every call ends within about ``MOST_S``.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

MOST_S = 15.0
_CONNECT_S = 2.0
_ANSWER_S = 3.0
_PINGS, _PINGS_S = 20, 0.5
_SMALLEST, _LARGEST = 1 << 16, 1 << 22
_BLOCK_S = 0.05
"""Blocks grow until one takes so long: a slow way is not filled for minutes, a fast one is measured with large ones."""
_BLOCKS, _LEAST_S, _WAY_S = 3, 0.1, 1.0
"""Then so many of that size, for so long; and no longer than that in all."""
_DATAGRAMS = 3
_HEARD_S = 1.0
_IDLE_S = 20.0
_HELLO = struct.Struct("!32sI")
_COMMAND = struct.Struct("!cI")
_PING, _TAKE, _GIVE = b"P", b"T", b"G"
_READY = b"+"


@dataclass(frozen=True)
class Measured:
    """What was found: ``out_bytes_s`` from here to there, ``in_bytes_s`` from there to here; None: not measured.

    ``heard``: whether a datagram of the other one has arrived here.
    """

    opens: bool
    why: str = ""
    heard: bool = False
    rtts_s: tuple[float, ...] = ()
    out_bytes_s: float | None = None
    in_bytes_s: float | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Measured:
        return cls(**{**raw, "rtts_s": tuple(raw["rtts_s"])})

    @property
    def rtt_s(self) -> float | None:
        return median(self.rtts_s) if self.rtts_s else None


@dataclass(frozen=True)
class Peer:
    """Where another host answers."""

    rank: int
    address: str
    port: int
    ear: int


class Service:
    """This host's answering side. ``address``: the one by which the other hosts reach it.

    ``token``: who does not know it is a stranger; nobody does until it is set.
    """

    def __init__(self, address: str, rank: int) -> None:
        self.rank = rank
        self.token = b""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=64)
        self._ear = socket.socket(family, socket.SOCK_DGRAM)
        self._ear.bind((address, 0))
        self._heard: set[tuple[int, int]] = set()
        self._news = threading.Condition()
        for what in (self._accept, self._hear):
            threading.Thread(target=what, name="megatron_ft-doctor", daemon=True).start()

    @property
    def ports(self) -> tuple[int, int]:
        """Of connections, and of datagrams."""
        return self._listener.getsockname()[1], self._ear.getsockname()[1]

    def close(self) -> None:
        """Its threads end with the process."""
        self._listener.close()
        self._ear.close()

    def measure(self, peer: Peer, number: int, fully: bool) -> Measured:
        """Ask ``peer``. ``number``: of this measurement, the same on both sides. Not ``fully``: only whether it answers."""
        message = json.dumps({"token": self.token.decode(), "rank": self.rank, "number": number}).encode()
        for _ in range(_DATAGRAMS):
            with contextlib.suppress(OSError):  # no way there: the other one will not hear it
                self._ear.sendto(message, (peer.address, peer.ear))
        out_s = in_s = None
        try:
            with self._call(peer) as line:
                rtts = _round_trips(line, _PINGS if fully else 1)
                if fully:
                    out_s = _bytes_s(lambda size: _send_block(line, size))
            if fully:
                with self._call(peer) as line:
                    in_s = _bytes_s(lambda size: _fetch_block(line, size))
        except OSError as error:
            return Measured(False, _why(error), self._wait_heard(peer.rank, number))
        return Measured(True, "", True, rtts, out_s, in_s)

    def _call(self, peer: Peer) -> socket.socket:
        line = socket.create_connection((peer.address, peer.port), timeout=_CONNECT_S)
        try:
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            line.settimeout(_ANSWER_S)
            line.sendall(_HELLO.pack(self.token, self.rank))
            _expect(line)
        except BaseException:
            line.close()
            raise
        return line

    def _wait_heard(self, rank: int, number: int) -> bool:
        with self._news:
            return self._news.wait_for(lambda: (rank, number) in self._heard, _HEARD_S)

    def _hear(self) -> None:
        while True:
            try:
                data = self._ear.recv(2048)
            except OSError as error:
                if self._ear.fileno() < 0:
                    return
                del error  # what an earlier datagram met
                continue
            with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
                said = json.loads(data)
                if said["token"].encode() == self.token != b"":
                    with self._news:
                        self._heard.add((said["rank"], said["number"]))
                        self._news.notify_all()

    def _accept(self) -> None:
        while True:
            try:
                line, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(line,), name="megatron_ft-doctor", daemon=True).start()

    def _answer(self, line: socket.socket) -> None:
        buffer = bytearray(_LARGEST)
        with line, contextlib.suppress(OSError):
            line.settimeout(_IDLE_S)
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            token, _ = _HELLO.unpack(_receive(line, _HELLO.size))
            if token != self.token:
                return
            line.sendall(_READY)
            while True:
                command, size = _COMMAND.unpack(_receive(line, _COMMAND.size))
                if command == _TAKE:
                    _fill(line, memoryview(buffer)[: min(size, _LARGEST)])
                if command == _GIVE:
                    line.sendall(memoryview(buffer)[: min(size, _LARGEST)])
                else:
                    line.sendall(_READY)


def _round_trips(line: socket.socket, most: int) -> tuple[float, ...]:
    found: list[float] = []
    end = time.monotonic() + _PINGS_S
    while len(found) < most and (not found or time.monotonic() < end):
        begun = time.perf_counter()
        line.sendall(_COMMAND.pack(_PING, 0))
        _expect(line)
        found.append(time.perf_counter() - begun)
    return tuple(found)


def _bytes_s(block: Callable[[int], None]) -> float:
    """What the way can do: that of the fastest block, for a busy processor only makes them slower. Of one that did not pass
    in time at most so much."""
    size, rates, begun_all = _SMALLEST, [], time.monotonic()
    while True:
        begun = time.perf_counter()
        try:
            block(size)
        except TimeoutError:
            return size / (time.perf_counter() - begun)
        took_s = max(time.perf_counter() - begun, 1e-9)
        rates.append(size / took_s)
        so_far_s = time.monotonic() - begun_all
        if so_far_s > _WAY_S:
            return max(rates)
        if took_s < _BLOCK_S and size < _LARGEST:
            size, rates = 2 * size, []
        elif len(rates) >= _BLOCKS and so_far_s > _LEAST_S:
            return max(rates)


def _send_block(line: socket.socket, size: int) -> None:
    line.sendall(_COMMAND.pack(_TAKE, size))
    line.sendall(bytes(size))
    _expect(line)


def _fetch_block(line: socket.socket, size: int) -> None:
    line.sendall(_COMMAND.pack(_GIVE, size))
    _fill(line, memoryview(bytearray(size)))


def _expect(line: socket.socket) -> None:
    _receive(line, len(_READY))


def _receive(line: socket.socket, size: int) -> bytes:
    buffer = bytearray(size)
    _fill(line, memoryview(buffer))
    return bytes(buffer)


def _fill(line: socket.socket, view: memoryview) -> None:
    """All of it within the socket's timeout, however little comes at a time."""
    timeout_s = line.gettimeout()
    end = time.monotonic() + timeout_s
    while view:
        if time.monotonic() > end:
            raise TimeoutError(f"no answer within {timeout_s:g} s")
        got = line.recv_into(view)
        if not got:
            raise ConnectionError("the connection was closed")
        view = view[got:]


def _why(error: OSError) -> str:
    return f"no answer within {_ANSWER_S:g} s" if isinstance(error, TimeoutError) else error.strerror or str(error)
