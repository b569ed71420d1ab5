"""The embedded store: torch's TCPStore in one process, and a client whose calls always end.

A TCPStore client ignores its timeouts while the server is frozen, and does not say when what it set reached nobody. So
every call runs under a :class:`.guard.Guard`, a ``set`` is confirmed by a question on the same connection, and a client
that was given up has its socket shut down, which ends its thread.

Failures it assumes: the server is killed (refused or reset at once), frozen, cut off, restarted with or without memory.
"""

from __future__ import annotations

import errno
import os
import random
import socket
import threading
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from megatron_ft.errors import LaunchError
from megatron_ft.runtime import sockets
from megatron_ft.runtime.store.guard import Guard, Overdue
from megatron_ft.runtime.store.port import RETRY_PAUSE_S, StoreGone, StoreSilent, Verify

Answer = TypeVar("Answer")

_CONNECTING = threading.Lock()
"""One client at a time: which socket belongs to a client is told by which one appeared while it was made."""


class TcpStore:
    """The port over a TCPStore. ``timeout_s`` bounds the store's silence in every call.

    Connecting counts, and torch asks the name server for the name of a numeric address: below 10 s a slow name server can
    look like a silent store, which passes with the next attempt.

    A call on a connection that broke meanwhile is made again, once, on a new one. While the store is away, connecting is
    tried with growing pauses; calls between two attempts fail at once with what the last attempt met.
    """

    def __init__(self, address: tuple[str, int], timeout_s: float, verify: Verify | None = None) -> None:
        self.address, self.timeout_s = address, timeout_s
        self.name = f"{address[0]}:{address[1]}"
        self._verify = verify
        self._guard = Guard(lambda announce: _connect(address, timeout_s, verify, announce))
        self._pause_s = RETRY_PAUSE_S[0]
        self._not_before = 0.0
        self._last: StoreGone | StoreSilent | None = None
        self._beats: dict[str, int] = {}
        self._heard: dict[str, tuple[str, float]] = {}
        self._id = uuid.uuid4().hex
        self._is_cut = False

    def set(self, key: str, value: str) -> None:
        def confirmed(client: _Client) -> None:
            client.store.set(key, value)
            client.store.check([key])  # set alone would tell nothing of a dead store

        self._call(confirmed)

    def get(self, key: str) -> str | None:
        return self._call(lambda client: client.get(key))

    def create(self, key: str, value: str) -> str:
        return self._call(lambda client: client.store.compare_set(key, "", value)).decode()

    def add(self, collection: str, member: str, value: str) -> None:
        """One key has them all, a line each."""
        line = f"{member}\t{value}\n"

        def confirmed(client: _Client) -> None:
            client.store.append(collection, line)
            client.store.check([collection])  # append alone would tell nothing of a dead store

        self._call(confirmed)

    def members(self, collection: str) -> dict[str, str]:
        text = self._call(lambda client: client.get(collection)) or ""
        return dict(line.split("\t", 1) for line in text.splitlines())

    def wait(self, key: str, timeout_s: float) -> str | None:
        deadline = time.monotonic() + timeout_s
        return self._call(lambda client: client.wait(key, deadline), timeout_s)

    def beat(self, key: str, ttl_s: float) -> None:
        """A TCPStore forgets nothing, so the value moves, and readers watch it move on their own clocks."""
        self._beats[key] = self._beats.get(key, 0) + 1
        self.set(key, f"{self._id} {self._beats[key]} {ttl_s}")

    def beating(self, key: str) -> bool:
        """A reader's first look counts as a sign of life."""
        value, now = self.get(key), time.monotonic()
        if value is None:
            return False
        if self._heard.get(key, ("", 0.0))[0] != value:
            self._heard[key] = (value, now)
        return now - self._heard[key][1] <= float(value.split()[-1])

    def rendezvous(self, prefix: str) -> Any:
        guard = Guard(lambda announce: _connect(self.address, self.timeout_s, self._verify, announce))
        try:
            return dist.PrefixStore(prefix, guard.call(lambda client: client.store, self.timeout_s))
        except Overdue:
            raise self._silent(self.timeout_s) from None
        except (RuntimeError, OSError) as error:
            raise self._gone(error) from None

    def clone(self) -> TcpStore:
        return TcpStore(self.address, self.timeout_s, self._verify)

    def close(self) -> None:
        self._guard.drop()

    def cut(self) -> None:
        self._is_cut = True
        self._guard.cut(self.timeout_s)

    def _call(self, operation: Callable[[_Client], Answer], waits_s: float = 0.0) -> Answer:
        """``waits_s``: how long the store may rightly take before its silence begins."""
        bound_s = waits_s + self.timeout_s
        begun = time.monotonic()
        old = self._guard.connected
        if not old and begun < self._not_before:
            raise self._last.__class__(*self._last.args, *_extra(self._last))
        for again in (old, False):
            if self._is_cut:
                raise self._gone(OSError("this process needs it no more"))
            try:
                answer = self._guard.call(operation, bound_s - (time.monotonic() - begun))
            except Overdue:
                raise self._failed(self._silent(bound_s)) from None
            except (RuntimeError, OSError) as error:
                self._guard.drop()
                if not again:
                    raise self._failed(self._gone(error)) from None
            else:
                self._pause_s, self._not_before = RETRY_PAUSE_S[0], 0.0
                return answer
        raise AssertionError("the second attempt returns or raises")

    def _failed(self, error: StoreGone | StoreSilent) -> StoreGone | StoreSilent:
        self._last = error
        self._not_before = time.monotonic() + self._pause_s * (0.5 + random.random() / 2)
        self._pause_s = min(2 * self._pause_s, RETRY_PAUSE_S[1])
        return error

    def _gone(self, error: BaseException) -> StoreGone:
        return StoreGone(
            f"control store {self.name} is gone ({_first_line(error)}); its process has ended or the network to it is "
            f"cut. What needs it goes on when a store answers there again"
        )

    def _silent(self, silent_s: float) -> StoreSilent:
        return StoreSilent(
            f"control store {self.name} has been silent for {silent_s:g} s; its process is stopped, its host overloaded or "
            f"the network to it is cut. What needs it goes on when it answers again",
            silent_s,
        )


def _extra(error: StoreGone | StoreSilent) -> tuple[float, ...]:
    return (error.silent_s,) if isinstance(error, StoreSilent) else ()


class _Client:
    """A TCPStore client and the sockets that appeared while it was made."""

    def __init__(self, peer: tuple[str, int]) -> None:
        self.store: Any = None
        self._peer = peer
        self._before = sockets.connected_to(peer)
        self._own: sockets.Sockets | None = None

    def connect(self, host: str, port: int, timeout_s: float) -> None:
        timeout = timedelta(seconds=timeout_s)
        self.store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        self._own = self._appeared()
        sockets.keep(self, self._own)

    def get(self, key: str) -> str | None:
        return self.store.get(key).decode() if self.store.check([key]) else None

    def wait(self, key: str, deadline: float) -> str | None:
        # Not 0, which means "no timeout" to torch.
        left = timedelta(seconds=max(0.001, deadline - time.monotonic()))
        try:
            self.store.wait([key], left)
        except dist.DistStoreError as error:
            if "imeout" in _first_line(error):
                return None
            raise
        return self.store.get(key).decode()

    def cut(self) -> None:
        """Shut the sockets down: the blocked call of an abandoned thread returns, and the thread ends."""
        sockets.shut_down(self._appeared() if self._own is None else self._own)

    def _appeared(self) -> sockets.Sockets:
        return {fd: inode for fd, inode in sockets.connected_to(self._peer).items() if self._before.get(fd) != inode}


def _connect(
    address: tuple[str, int], timeout_s: float, verify: Verify | None, announce: Callable[[_Client], None]
) -> _Client:
    """In the guard's thread. A dead host is asked with a plain socket first: torch would go on trying for ``timeout_s``."""
    with socket.create_connection(address, timeout=timeout_s) as probe:
        peer = probe.getpeername()[:2]
    if not _CONNECTING.acquire(timeout=timeout_s):
        raise OSError("another connection to it is still being made")
    try:
        client = _Client(peer)
        announce(client)
        client.connect(*address, timeout_s)
    finally:
        _CONNECTING.release()
    if verify is not None:
        verify(client.get)
    return client


def host(bind: str, port: int) -> tuple[Any, int]:
    """Start a store server in this process; returns (server, port). ``port`` 0 takes a free one.

    Raises ``LaunchError`` when the port is in use. The server lives in a thread of torch's, until the object is dropped.
    """
    listener = listen(bind, port)
    return serve_on(listener), listener.getsockname()[1]


def listen(bind: str, port: int) -> socket.socket:
    """A socket for :func:`serve_on`. Whoever keeps it open owns the port, also while no server answers there.

    An IPv4 one where it can be: torch's server asks the name server who every new client is, and serves nobody until it has
    the answer. On a socket of torch's own, clients are ``::ffff:a.b.c.d``, which no ``/etc/hosts`` knows.
    """
    try:
        return socket.create_server((bind, port), family=_family(bind), backlog=1024)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise LaunchError(
                f"port {port} is in use by another program; give another --port, or leave it out to take a free one"
            ) from None
        raise LaunchError(f"the control store cannot listen on {bind}:{port}: {error.strerror or error}") from None


def serve_on(listener: socket.socket) -> Any:
    """Start a store server in this process, empty, on a copy of that socket."""
    bind, port = listener.getsockname()[:2]
    options = {"is_master": True, "wait_for_workers": False, "timeout": timedelta(seconds=30)}
    try:
        return dist.TCPStore(_reachable(bind), port, master_listen_fd=os.dup(listener.fileno()), **options)
    except RuntimeError as error:
        raise LaunchError(f"the control store cannot listen on {bind}:{port}: {_first_line(error)}") from None


def _family(bind: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in bind else socket.AF_INET


def _reachable(bind: str) -> str:
    """torch's server connects to itself."""
    return {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(bind, bind)


def _first_line(error: BaseException) -> str:
    """torch appends a C++ stack to its messages; only the first line is for people."""
    return (str(error).splitlines() or [type(error).__name__])[0]
