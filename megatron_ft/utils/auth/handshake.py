"""How the two ends of every connection of the project's own prove to each other that they belong to the run.

The listening end sends a nonce. The calling end answers with a nonce of its own, a *hello* (a JSON object of at most 4 KiB)
and an HMAC-SHA256 of all of it; the listening end answers with an HMAC, too. The key never travels, and a recording of a
handshake cannot be used later. The data after the handshake is not authenticated piece by piece (docs/security.md).

Failures it assumes: strangers connect, in any number, and send anything, or nothing, or one byte a second. Such a
connection costs a file descriptor and at most 4 KiB until the one deadline for all of its hello; at most ``PENDING``
are served at a time, and the oldest is closed for the next one. No data of a stranger is parsed.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import logging
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_ft.utils.auth.secret import Key
from megatron_ft.utils.terminal import printable
from megatron_ft.utils.vital_thread import VitalThread

_log = logging.getLogger(__name__)

LONGEST_HELLO = 4096
PENDING = 16
TIMEOUT_S = 10.0
"""Seconds for a whole handshake, at either end."""
_MAGIC = b"mft2"
_NONCE, _MAC = 32, 32
_HEAD = struct.Struct(f"=4s{_NONCE}s{_MAC}sI")
_CHALLENGE = len(_MAGIC) + _NONCE
_PLACE_S = 0.2
"""A connection keeps its place for this long while others wait: members need milliseconds, and may come in crowds."""
_LOOK_S = 1.0
_NO_DESCRIPTOR_S = 0.1

Hello = dict[str, Any]


class Refused(ConnectionError):
    """The other end does not know the secret, or does not speak this protocol."""


def greet(end: socket.socket, key: Key, hello: Mapping[str, Any], timeout_s: float = TIMEOUT_S) -> None:
    """Carry out the calling end's part. Raises ``OSError``; sets the timeout of ``end`` to ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    text = json.dumps(hello).encode()
    if len(text) > LONGEST_HELLO:
        raise ValueError(f"a hello has {len(text)} bytes; {LONGEST_HELLO} are allowed")
    challenge = _receive(end, _CHALLENGE, deadline)
    if not challenge.startswith(_MAGIC):
        raise Refused("the other end does not speak this protocol")
    theirs, mine = challenge[len(_MAGIC) :], os.urandom(_NONCE)
    end.sendall(_HEAD.pack(_MAGIC, mine, key.mac(b"caller", theirs, mine, text), len(text)) + text)
    if not hmac.compare_digest(_receive(end, _MAC, deadline), key.mac(b"listener", mine, theirs)):
        raise Refused("the other end does not know the secret of this run")
    end.settimeout(timeout_s)


def _receive(end: socket.socket, length: int, deadline: float) -> bytes:
    data = bytearray()
    while len(data) < length:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the other end did not introduce itself in time")
        end.settimeout(left_s)
        # no limit: the socket's timeout is what is left of TIMEOUT_S for all of a handshake
        piece = end.recv(length - len(data))
        if not piece:
            raise Refused("the other end has closed the connection; is it of this run?")
        data += piece
    return bytes(data)


@dataclass
class _Pending:
    """A connection that has not introduced itself yet; ``begun`` and ``deadline`` are monotonic times in seconds."""

    end: socket.socket
    begun: float
    deadline: float
    nonce: bytes
    data: bytearray = field(default_factory=bytearray)


class Door:
    """Accepts connections on ``listener`` and passes on those of this run.

    Args:
        listener: a listening socket; :meth:`close` closes it.
        key: the key for this purpose.
        admit: called with the connection (blocking, its timeout is ``TIMEOUT_S``) and the hello, in a thread of its own
            for each; the connection is closed when it raises.
        name: the name of the threads.
        timeout_s: seconds for a whole handshake.
    """

    def __init__(
        self,
        listener: socket.socket,
        key: Key,
        admit: Callable[[socket.socket, Hello], None],
        name: str,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._listener, self._key, self._admit, self._name, self._timeout_s = listener, key, admit, name, timeout_s
        self._pending: dict[int, _Pending] = {}
        self._closed = False
        listener.setblocking(False)
        self._thread = VitalThread(self._serve, name)
        self._thread.start()

    @property
    def pending(self) -> int:
        """The number of connections that have not introduced themselves yet."""
        return len(self._pending)

    def close(self) -> None:
        """Accept no more connections; those that were passed on are left as they are."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * _LOOK_S)
        self._listener.close()

    @property
    def _oldest(self) -> _Pending:
        return next(iter(self._pending.values()))

    def _serve(self) -> None:
        poller = select.poll()  # select.select fails beyond 1,024 descriptors
        listening = self._listener.fileno()
        poller.register(listening, select.POLLIN)
        # no limit: a thread of its own; closing its socket ends it
        while not self._closed:
            now = time.monotonic()
            for late in [one for one in self._pending.values() if one.deadline <= now]:
                self._drop(late, poller)
            next_s = min((one.deadline - now for one in self._pending.values()), default=_LOOK_S)
            full_s = self._oldest.begun + _PLACE_S - now if len(self._pending) >= PENDING else 0.0
            poller.modify(listening, 0 if full_s > 0 else select.POLLIN)  # the others wait in the kernel's queue
            for fd, _ in poller.poll(1000 * min(_LOOK_S, next_s, full_s if full_s > 0 else _LOOK_S)):
                if fd == listening:
                    self._accept(poller)
                elif fd in self._pending:
                    self._read(self._pending[fd], poller)
        for one in list(self._pending.values()):
            self._drop(one, poller)

    def _accept(self, poller: select.poll) -> None:
        try:
            # no limit: it does not block: the listener is readable, and does not block
            end, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM) and not self._closed:
                if self._pending:
                    self._drop(self._oldest, poller)
                time.sleep(_NO_DESCRIPTOR_S)  # otherwise this thread would spin until one is free
            return
        if len(self._pending) >= PENDING:
            self._drop(self._oldest, poller)
        now = time.monotonic()
        one = _Pending(end, now, now + self._timeout_s, os.urandom(_NONCE))
        try:
            end.setblocking(False)
            end.send(_MAGIC + one.nonce)
        except OSError:
            end.close()
            return
        self._pending[end.fileno()] = one
        poller.register(end.fileno(), select.POLLIN)

    def _read(self, one: _Pending, poller: select.poll) -> None:
        wanted = _wanted(one.data)
        try:
            # no limit: it does not block: the connection is readable, and does not block
            piece = one.end.recv(wanted - len(one.data))
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        one.data += piece
        if not piece or (wanted := _wanted(one.data)) == 0:
            self._drop(one, poller)
        elif len(one.data) == wanted and len(one.data) > _HEAD.size:
            self._judge(one, poller)

    def _judge(self, one: _Pending, poller: select.poll) -> None:
        """Check a hello that has arrived completely, and admit or close the connection."""
        _, theirs, mac, _ = _HEAD.unpack_from(one.data)
        text = bytes(one.data[_HEAD.size :])
        if not hmac.compare_digest(mac, self._key.mac(b"caller", one.nonce, theirs, text)):
            self._drop(one, poller)
            return
        try:
            hello = json.loads(text)
            if not isinstance(hello, dict):
                raise TypeError("a hello is an object")
            one.end.send(self._key.mac(b"listener", theirs, one.nonce))
            self._forget(one, poller)
            one.end.settimeout(TIMEOUT_S)
            threading.Thread(target=self._pass_on, args=(one.end, hello), name=self._name, daemon=True).start()
        except (OSError, ValueError, TypeError, RuntimeError):  # the last: no thread available, or nested too deeply
            self._drop(one, poller)

    def _pass_on(self, end: socket.socket, hello: Hello) -> None:
        try:
            self._admit(end, hello)
        except Exception as error:  # a member that sends nonsense, e.g. of another version, ends no thread here
            _log.info(printable(f"{self._name}: connection dropped: {type(error).__name__}: {error}"))
            end.close()

    def _forget(self, one: _Pending, poller: select.poll) -> None:
        if self._pending.pop(one.end.fileno(), None) is not None:
            poller.unregister(one.end.fileno())

    def _drop(self, one: _Pending, poller: select.poll) -> None:
        self._forget(one, poller)
        one.end.close()


def _wanted(data: bytearray) -> int:
    """Return the number of bytes of the hello as far as it is known; 0 for data that is no hello."""
    if not _MAGIC.startswith(bytes(data[: len(_MAGIC)])):
        return 0
    if len(data) < _HEAD.size:
        return _HEAD.size
    length = _HEAD.unpack_from(data)[3]
    return _HEAD.size + length if 2 <= length <= LONGEST_HELLO else 0
