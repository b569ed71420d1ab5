"""Messages between two ranks over a separate connection, outside of all collectives: a header in JSON, then raw bytes.

Bytes are sent in pieces, each with its CRC-32, so that a bit flipped by a network card, a switch or a memory bank is
detected here and not in the loss. Nothing is unpickled.

Failures it assumes: the other end may vanish, stop or send nonsense at any time. Each of these ends in ``OSError``.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from megatron_ft.utils.auth import handshake
from megatron_ft.utils.auth.secret import Key

_HEAD, _SUM = struct.Struct("=4sI"), struct.Struct("=I")
_MAGIC = b"mft1"
_PIECE = 2**20
_LONGEST_HEAD = 2**28
CALL_TIMEOUT_S = 10.0
"""Seconds to reach a rank."""


class Garbled(OSError):
    """The received bytes are not the bytes that were sent."""


def listen(address: str) -> socket.socket:
    """Return a socket that listens on a port that the system chooses."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family)


def call(address: str, port: int, key: Key, hello: Mapping[str, Any]) -> socket.socket:
    """Connect, and introduce this process with ``hello``; the other end is an ``utils.auth.handshake.Door`` with the same
    key.

    Raises ``OSError`` when it cannot be reached, or does not belong to the run.
    """
    end = socket.create_connection((address, port), timeout=CALL_TIMEOUT_S)
    try:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        handshake.greet(end, key, hello)
    except BaseException:
        end.close()
        raise
    return end


def send_message(end: socket.socket, words: Mapping[str, Any]) -> None:
    """Send one message. Raises ``OSError``."""
    text = json.dumps(words).encode()
    end.sendall(_HEAD.pack(_MAGIC, len(text)) + text + _SUM.pack(zlib.crc32(text)))


def receive_message(end: socket.socket, longest: int = _LONGEST_HEAD) -> dict[str, Any]:
    """Return the next message; a message of more than ``longest`` bytes is refused unread. Raises ``OSError``."""
    magic, length = _HEAD.unpack(_exactly(end, _HEAD.size))
    if magic != _MAGIC or length > longest:
        raise Garbled("the other end does not speak this protocol")
    text = _exactly(end, length)
    if _SUM.unpack(_exactly(end, _SUM.size))[0] != zlib.crc32(text):
        raise Garbled("a message was changed on its way")
    return json.loads(text)


def send(end: socket.socket, parts: Iterable[torch.Tensor], sent: Callable[[int], None]) -> None:
    """Send flat CPU tensors of bytes; ``sent`` is called after each piece with the number of its bytes."""
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
    """Return the bytes of a tensor, as a view if the tensor is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def shares_of(tensors: Sequence[torch.Tensor], part: int, parts: int) -> list[torch.Tensor]:
    """Return the ``part``-th of ``parts`` nearly equal shares of tensors of any shape and type, as flat views of bytes.

    Each element is in one share: with bytes of two donors that differ, it would have a value that neither has."""
    flat = [as_bytes(tensor) for tensor in tensors]
    total = sum(map(len, flat))
    begin, end = total * part // parts, total * (part + 1) // parts
    found, offset = [], 0
    for tensor, data in zip(tensors, flat, strict=True):
        unit = tensor.element_size()
        first, last = (min(max(limit - offset, 0), len(data)) // unit * unit for limit in (begin, end))
        if first < last:
            found.append(data[first:last])
        offset += len(data)
    return found


def hang_up(end: socket.socket) -> None:
    """Shut the connection down, which ends all waits on it in any thread."""
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()


def _pieces(parts: Iterable[torch.Tensor]) -> Iterator[memoryview]:
    for part in parts:
        whole = part.numpy().data
        for start in range(0, len(whole), _PIECE):
            yield whole[start : start + _PIECE]


def _exactly(end: socket.socket, length: int) -> bytes:
    data = bytearray(length)
    _fill(end, memoryview(data))
    return bytes(data)


def _fill(end: socket.socket, view: memoryview) -> None:
    while view:
        # no limit: the socket has a timeout: CALL_TIMEOUT_S, _TIMEOUT_S for copies, detector.collective_timeout_s for
        # a group that follows
        count = end.recv_into(view)
        if not count:
            raise ConnectionResetError("the other end has gone")
        view = view[count:]
