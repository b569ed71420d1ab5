"""Messages between two ranks over a connection of their own, beside all collectives: words in JSON, then raw bytes.

Bytes travel in pieces, each with its CRC-32: a bit that a network card, a switch or a tired memory bank turns is found here
and not in next week's loss. Nothing is unpickled.

Failures it assumes: the other end may vanish, stop or send nonsense at any time. All of it ends in ``OSError``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from megatron_ft.runtime import sockets

_HEAD, _SUM = struct.Struct("=4sI"), struct.Struct("=I")
_MAGIC = b"mft1"
_PIECE = 2**20
_LONGEST_HEAD = 2**28
CALL_TIMEOUT_S = 10.0
"""To reach a rank, and for it to say who it is."""


class Garbled(OSError):
    """What came is not what was sent."""


def token(run_id: str) -> str:
    """Who does not know it is not of this run: sent away before anything else is read."""
    return hashlib.sha256(f"megatron_ft {run_id}".encode()).hexdigest()


def listen(address: str) -> socket.socket:
    """On a port that the system chooses."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return sockets.keep(socket.create_server((address, 0), family=family))


def call(address: str, port: int, run_id: str, words: Mapping[str, Any]) -> socket.socket:
    """Connect and introduce this rank."""
    end = sockets.keep(socket.create_connection((address, port), timeout=CALL_TIMEOUT_S))
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    say(end, {"token": token(run_id), **words})
    return end


def say(end: socket.socket, words: Mapping[str, Any]) -> None:
    text = json.dumps(words).encode()
    end.sendall(_HEAD.pack(_MAGIC, len(text)) + text + _SUM.pack(zlib.crc32(text)))


def hear(end: socket.socket) -> dict[str, Any]:
    magic, length = _HEAD.unpack(_exactly(end, _HEAD.size))
    if magic != _MAGIC or length > _LONGEST_HEAD:
        raise Garbled("the other end does not speak this protocol")
    text = _exactly(end, length)
    if _SUM.unpack(_exactly(end, _SUM.size))[0] != zlib.crc32(text):
        raise Garbled("a message was changed on its way")
    return json.loads(text)


def send(end: socket.socket, parts: Iterable[torch.Tensor], sent: Callable[[int], None]) -> None:
    """Flat CPU tensors of bytes; ``sent`` is told how many of them after each piece."""
    for piece in _pieces(parts):
        end.sendall(piece)
        end.sendall(_SUM.pack(zlib.crc32(piece)))
        sent(len(piece))


def receive(end: socket.socket, parts: Sequence[torch.Tensor]) -> None:
    """Fill flat CPU tensors of bytes, of the sizes that were sent."""
    for piece in _pieces(parts):
        _fill(end, piece)
        if _SUM.unpack(_exactly(end, _SUM.size))[0] != zlib.crc32(piece):
            raise Garbled("a piece of the state was changed on its way")


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A view where the tensor is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def share(sizes: Sequence[int], part: int, parts: int) -> Iterator[tuple[int, int, int]]:
    """The ``part``-th of ``parts`` equal shares of things laid end to end: (which, from, to), each in its own units."""
    total = sum(sizes)
    begin, end = total * part // parts, total * (part + 1) // parts
    offset = 0
    for which, size in enumerate(sizes):
        first, last = max(begin - offset, 0), min(end - offset, size)
        if first < last:
            yield which, first, last
        offset += size


def shares_of(tensors: Sequence[torch.Tensor], part: int, parts: int) -> list[torch.Tensor]:
    """That share of flat tensors, as views of them."""
    sizes = [len(tensor) for tensor in tensors]
    return [tensors[which][first:last] for which, first, last in share(sizes, part, parts)]


def hang_up(end: socket.socket) -> None:
    """Whoever waits on it, in any thread, waits no longer."""
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()


def _pieces(parts: Iterable[torch.Tensor]) -> Iterator[memoryview]:
    for part in parts:
        whole = memoryview(part.numpy())
        for start in range(0, len(whole), _PIECE):
            yield whole[start : start + _PIECE]


def _exactly(end: socket.socket, length: int) -> bytes:
    data = bytearray(length)
    _fill(end, memoryview(data))
    return bytes(data)


def _fill(end: socket.socket, view: memoryview) -> None:
    while view:
        count = end.recv_into(view)
        if not count:
            raise ConnectionResetError("the other end has gone")
        view = view[count:]
