"""The embedded store: torch's TCPStore in one process, and a client whose calls always end.

A TCPStore client ignores its timeouts while the server is frozen, and does not report a ``set`` that reached no server.
So every call runs under a :class:`.call_guard.Guard`, a ``set`` is confirmed by a question on the same connection, and
a client that was given up has its socket shut down, which ends its thread.

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
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch.distributed as dist

from megatron_ft.errors import LaunchError
from megatron_ft.run.store.base import RETRY_PAUSE_S, StoreGone, StoreSilent, Verify, decode, encode
from megatron_ft.run.store.call_guard import Guard, Overdue
from megatron_ft.run.store.claim_log import Locator
from megatron_ft.utils import net, socket_tracker
from megatron_ft.utils.log import first_line

Answer = TypeVar("Answer")

_DELETE_AT_ONCE = 1000
_ABSENT = uuid.uuid4().hex
"""No value equals it, because no other process knows it; torch returns the expected value for a key that is not there."""
_PROBE_EVERY_S = 0.5
_MOVED = "it has moved to another address"
_OWN_S = 5.0
"""Seconds for a connection of this host to itself."""
_JITTER = random.SystemRandom()  # not the global generator: the user's code may be drawing from it
_CONNECTING = threading.Lock()
"""Only one client is made at a time: the socket that appears meanwhile is that client's."""


class TcpStore:
    """The port over a TCPStore. ``timeout_s`` bounds the store's silence in every call.

    Large because it has a method for each operation of the port; all share one connection and its repair.

    Connecting counts, and torch asks the name server for the name of a numeric address: below 10 s a slow name server
    can look like a silent store, which passes with the next attempt.

    A call on a connection that broke meanwhile is made again, once, on a new one. While the store is away, connecting
    is tried with growing pauses; calls between two attempts fail at once with the last attempt's error.

    With a ``Locator`` in place of an address, the client connects to the store of the newest claim.
    """

    def __init__(self, address: tuple[str, int] | Locator, timeout_s: float, verify: Verify | None = None) -> None:
        self._where, self.timeout_s = address, timeout_s
        self._verify = verify
        self._guard = self._new_guard()
        self._pause_s = RETRY_PAUSE_S[0]
        self._not_before = 0.0
        self._last: StoreGone | StoreSilent | None = None
        self._is_cut = False
        self._moves = 0
        if isinstance(address, Locator):
            address.attach(self)

    @property
    def address(self) -> tuple[str, int]:
        return self._where.address if isinstance(self._where, Locator) else self._where

    @property
    def name(self) -> str:
        return "{}:{}".format(*self.address)

    def moved(self) -> None:
        """Use the store's new address from now on. Any thread may call it; a waiting call is repeated there."""
        self._pause_s, self._not_before = RETRY_PAUSE_S[0], 0.0
        self._moves += 1
        self._guard.cut(0.0)

    def set(self, key: str, value: str) -> None:
        def confirmed(client: _Client) -> None:
            client.store.set(key, value)
            client.store.check([key])  # set alone would not notice a dead store

        self._call(confirmed)

    def get(self, key: str) -> str | None:
        return self._call(lambda client: client.get(key))

    def create(self, key: str, value: str) -> str:
        return cast(str, self.swap(key, "", value))

    def add(self, collection: str, member: str, value: str) -> None:
        """Append to the one key of the collection, a line for each member."""
        line = f"{member}\t{value}\n"

        def confirmed(client: _Client) -> None:
            client.store.append(collection, line)
            client.store.check([collection])  # append alone would not notice a dead store

        self._call(confirmed)

    def members(self, collection: str) -> list[tuple[str, str]]:
        text = self._call(lambda client: client.get(collection)) or ""
        lines = (line.partition("\t") for line in text.split("\n") if line)
        return [(member, value) for member, _, value in lines]

    def swap(self, key: str, old: str | None, new: str) -> str | None:
        """Swap; torch returns ``old`` when there is no value and one was expected."""

        def swapped(client: _Client) -> str | None:
            standing = decode(client.store.compare_set(key, encode(old or ""), new))
            return standing if standing != (old or "") else client.get(key)

        return self._call(swapped)

    def keys(self, prefix: str) -> list[str]:
        return self._call(lambda client: [key for key in client.listed() if key.startswith(prefix)])

    def delete(self, keys: Sequence[str]) -> None:
        for first in range(0, len(keys), _DELETE_AT_ONCE):  # each call has its own time limit
            some = keys[first : first + _DELETE_AT_ONCE]

            def gone(client: _Client, some: Sequence[str] = some) -> None:
                for key in some:
                    client.store.delete_key(key)

            self._call(gone)

    def wait(self, key: str, timeout_s: float) -> str | None:
        deadline = time.monotonic() + timeout_s
        return self._call(lambda client: client.wait(key, deadline), timeout_s)

    def rendezvous(self, prefix: str) -> Any:
        guard, begun = self._new_guard(), time.monotonic()
        try:
            return dist.PrefixStore(prefix, guard.call(lambda client: client.store, self.timeout_s))
        except (Overdue, RuntimeError, OSError) as error:
            raise self._away(error, begun, self.timeout_s) from None

    def clone(self) -> TcpStore:
        return TcpStore(self._where, self.timeout_s, self._verify)

    def close(self) -> None:
        self._guard.drop()

    def cut(self) -> None:
        self._is_cut = True
        self._guard.cut(self.timeout_s)

    def _new_guard(self) -> Guard[_Client]:
        timeout_s, verify = self.timeout_s, self._verify
        where = self._where  # not self: the guard's thread would keep this object alive

        def connect(announce: Callable[[_Client], None]) -> _Client:
            if not isinstance(where, Locator):
                return _connect(where, timeout_s, verify, announce)
            address = where.address
            return _connect(address, timeout_s, verify, announce, lambda: where.address == address)

        return Guard(connect)

    def _call(self, operation: Callable[[_Client], Answer], waits_s: float = 0.0) -> Answer:
        """Carry out a call. ``waits_s``: how long the store may rightly take before its silence begins."""
        bound_s = waits_s + self.timeout_s
        begun, moves = time.monotonic(), self._moves
        old = self._guard.connected
        if not old and self._last and begun < self._not_before:
            raise type(self._last)(*self._last.args)
        for again in (old, False):
            if self._is_cut:
                raise self._gone(OSError("this process needs it no more"))
            left_s = bound_s - (time.monotonic() - begun)
            if left_s <= 0:
                break  # the store moved while the old one used up the time
            try:
                answer = self._guard.call(operation, left_s)
            except (Overdue, RuntimeError, OSError) as error:
                away = self._away(error, begun, bound_s)
                if not isinstance(error, Overdue):
                    self._guard.drop()
                if self._moves == moves and (isinstance(away, StoreSilent) or not again):
                    raise self._failed(away) from None
                moves = self._moves
            else:
                self._pause_s, self._not_before = RETRY_PAUSE_S[0], 0.0
                return answer
        raise self._failed(self._gone(OSError(_MOVED)))

    def _failed(self, error: StoreGone | StoreSilent) -> StoreGone | StoreSilent:
        self._last = error
        self._not_before = time.monotonic() + self._pause_s * (0.5 + _JITTER.random() / 2)
        self._pause_s = min(2 * self._pause_s, RETRY_PAUSE_S[1])
        return error

    def _away(self, error: Exception, begun: float, bound_s: float) -> StoreGone | StoreSilent:
        """Return what that end of a call means. torch's own time limits end at about the same time as the guard's."""
        if isinstance(error, Overdue) or time.monotonic() - begun >= bound_s:
            return StoreSilent(
                f"control store {self.name} has been silent for {bound_s:g} s; its process is stopped, its host overloaded "
                f"or the network to it is cut. What needs it goes on when it answers again"
            )
        return self._gone(error)

    def _gone(self, error: BaseException) -> StoreGone:
        return StoreGone(
            f"control store {self.name} is gone ({first_line(error)}); its process has ended or the network to it is "
            f"cut. What needs it goes on when a store answers there again"
        )


class _Client:
    """A TCPStore client and the sockets that appeared while it was made."""

    def __init__(self, peer: tuple[str, int]) -> None:
        self.store: Any = None
        self._peer = peer
        self._before = socket_tracker.connected_to(peer)
        self._own: socket_tracker.Sockets | None = None

    def connect(self, host: str, port: int, timeout_s: float, still: Callable[[], bool]) -> None:
        self.store = _made(host, port, timeout_s, still)
        self._own = self._appeared()

    def get(self, key: str) -> str | None:
        """Read in one request, because the key may be deleted between two: torch's ``get`` waits for a key that is not
        there, or answers with nothing."""
        value = decode(self.store.compare_set(key, _ABSENT, _ABSENT))
        return None if value == _ABSENT else value

    def listed(self) -> list[str]:
        """Return all keys; none with a torch that cannot list them, where nothing is ever deleted then."""
        listed = getattr(self.store, "list_keys", list)
        try:
            return [key if isinstance(key, str) else decode(key) for key in listed()]
        except UnicodeDecodeError:  # a stranger's key; torch cannot list the others beside it
            return []

    def wait(self, key: str, deadline: float) -> str | None:
        # Not 0, which means "no timeout" to torch.
        left = timedelta(seconds=max(0.001, deadline - time.monotonic()))
        try:
            self.store.wait([key], left)
        except dist.DistStoreError as error:
            if "imeout" in first_line(error):
                return None
            raise
        return self.get(key)  # it was deleted meanwhile, and a plain get would wait for it

    def cut(self) -> None:
        """Shut the sockets down: the blocked call of an abandoned thread returns, and the thread ends."""
        socket_tracker.shut_down(self._appeared() if self._own is None else self._own)

    def _appeared(self) -> socket_tracker.Sockets:
        return {
            fd: inode for fd, inode in socket_tracker.connected_to(self._peer).items() if self._before.get(fd) != inode
        }


def _connect(
    address: tuple[str, int],
    timeout_s: float,
    verify: Verify | None,
    announce: Callable[[_Client], None],
    still: Callable[[], bool] = lambda: True,
) -> _Client:
    """Connect, in the guard's thread. A plain socket tries a dead host first: torch would go on trying for ``timeout_s``.

    ``still``: returns whether the store is at that address; an attempt is given up when it has moved.
    """
    with socket.create_connection(address, timeout=timeout_s) as probe:
        peer = probe.getpeername()[:2]
    if not _CONNECTING.acquire(timeout=timeout_s):
        raise OSError("another connection to it is still being made")
    try:
        client = _Client(peer)
        announce(client)
        client.connect(*address, timeout_s, still)
    finally:
        _CONNECTING.release()
    if not still():  # it moved before there was a connection to be cut
        raise OSError(_MOVED)
    if verify is not None:
        verify(client.get)
    return client


def _made(host: str, port: int, timeout_s: float, still: Callable[[], bool]) -> Any:
    """Return torch's client. Raises ``ConnectionRefusedError`` as soon as no process listens there any more, and
    ``OSError`` when the store has moved.

    torch goes on trying for ``timeout_s`` and longer where it is refused, and cannot be stopped. A shorter timeout is
    no remedy: it would also count the answers of a slow name server. So while it tries, a plain socket asks whether
    there is a store, and an attempt without one is left behind; it ends by itself.
    """
    made: Future[Any] = Future()

    def make() -> None:
        try:
            timeout = timedelta(seconds=timeout_s)
            made.set_result(dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout))
        except Exception as error:  # the waiting thread raises it
            made.set_exception(error.with_traceback(None))

    threading.Thread(target=make, name="megatron_ft-connect-store", daemon=True).start()
    # no limit: torch's attempt has a timeout; it is left before when no process listens there, or the store has moved
    while not futures.wait([made], _PROBE_EVERY_S).done:
        if not still():
            raise OSError(_MOVED)
        try:
            socket.create_connection((host, port), timeout=_PROBE_EVERY_S).close()
        except ConnectionRefusedError:
            if not made.done():
                raise
        except OSError:
            continue  # silent, or out of reach for a moment: the store may still come
    return made.result(0)


def host(bind: str, port: int) -> tuple[Any, int]:
    """Start a store server in this process; returns (server, port). ``port`` 0 takes a free one.

    Raises ``LaunchError`` when the port is in use. The server lives in a thread of torch's, until the object is dropped.
    """
    listener = listen(bind, port)
    return serve_on(listener), listener.getsockname()[1]


def listen(bind: str, port: int) -> socket.socket:
    """Return a socket for :func:`serve_on`. Its owner keeps the port, also while no server answers there.

    It is an IPv4 socket where possible: torch's server asks the name server for every new client's name, and serves no
    client until it has the answer. On a socket of torch's own, clients are ``::ffff:a.b.c.d``, which no ``/etc/hosts``
    knows.
    """
    try:
        family = socket.AF_INET6 if ":" in bind else socket.AF_INET
        listener = socket.create_server((bind, port), family=family, backlog=1024)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise LaunchError(
                f"port {port} is in use by another program; give another --port, or leave it out to take a free one"
            ) from None
        raise LaunchError(f"the control store cannot listen on {bind}:{port}: {error.strerror or error}") from None
    here = (_reachable(bind), listener.getsockname()[1])
    try:
        with socket.create_connection(
            here, timeout=_OWN_S
        ):  # torch's server tries it for 30 s, and its clients for longer
            # no limit: it does not block: the connection was made just before
            listener.accept()[0].close()
    except OSError as error:
        listener.close()
        raise LaunchError(
            f"the control store cannot be reached on this host at {net.joined(*here)}: {error.strerror or error}; see that "
            f"the interface with that address is up (ip addr; for loopback: ip link set lo up), or give another --address"
        ) from None
    return listener


def serve_on(listener: socket.socket, timeout: timedelta = timedelta(seconds=30)) -> Any:
    """Start a store server in this process, empty, on a copy of that socket. ``timeout``: of the returned object's calls.

    A server that torch is left to bind itself listens on all interfaces, whatever address it is given.
    """
    bind, port = listener.getsockname()[:2]
    try:
        return dist.TCPStore(
            _reachable(bind),
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=os.dup(listener.fileno()),
        )
    except RuntimeError as error:
        raise LaunchError(f"the control store cannot listen on {bind}:{port}: {first_line(error)}") from None


def _reachable(bind: str) -> str:
    """Return the address by which torch's server can connect to itself."""
    return {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(bind, bind)
