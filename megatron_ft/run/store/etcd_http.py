"""etcd's v3 JSON gateway over HTTP or HTTPS, from any of several nodes: ask one, and another when it does not answer.

Every request here may be repeated: reads, puts of one value, and transactions whose comparison fails the second time.

Failures it assumes: any node is killed (refused, reset), frozen or cut off (silent), or has no leader (etcd says so, or
is silent while one is elected). While a majority lives, a call is answered within a few seconds.

The cost of a lost node, in rising order: nothing, when the node was on this client's own host, which is asked first; a
node whose host does not acknowledge what was sent is left after ``_UNHEARD_S``; one that acknowledges and does not
answer, after the first of ``_ATTEMPTS_S``. A node that was found away is asked last, and for longer each time.
"""

from __future__ import annotations

import base64
import functools
import http.client
import json
import math
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from megatron_ft.config.store_address import EtcdAddress
from megatron_ft.errors import StoreError
from megatron_ft.run.store.base import RETRY_PAUSE_S, StoreGone, StoreSilent
from megatron_ft.run.store.etcd_access import Access, Refused, refusal

Endpoints = tuple[tuple[str, int], ...]

Verifier = Callable[[Callable[[str, dict[str, Any]], dict[str, Any]]], None]

_NO_HEADER: Mapping[str, str] = {}
_TRANSIENT = frozenset({1, 4, 8, 10, 13, 14})
"""gRPC's cancelled, deadline exceeded, exhausted, aborted, internal, unavailable: another node or moment may do better."""
_ATTEMPTS_S = (0.5, 2.0)
"""A node that has not answered for this long is left for another one: in a call's first round over all nodes, and
later. So a frozen node is left soon, and a store that is slow, or elects a leader, is not asked repeatedly."""
_UNHEARD_S = 0.5
"""A host whose kernel does not acknowledge a connection, or what was sent, for this long is away. etcd takes no part in
that, so a slow one is not mistaken for a lost one."""
_AWAY_S, _AWAY_MOST_S = 3.0, 60.0
"""For this long a node that was found away is asked last; twice as long each time it is still away, up to the second."""


class _Nodes:
    """The addresses of the nodes, and which of them were found away."""

    def __init__(self, endpoints: Endpoints) -> None:
        self.endpoints = endpoints
        self._away: dict[tuple[str, int] | None, tuple[float, float]] = {}
        """node -> (since when, for how long) it is asked last"""

    def is_away(self, node: tuple[str, int] | None) -> bool:
        since, for_s = self._away.get(node, (-math.inf, 0.0))
        return time.monotonic() - since < for_s

    def leave(self, node: tuple[str, int] | None) -> None:
        """Note that the node was found away. Reports of several clients in one outage count once."""
        _, for_s = self._away.get(node, (0.0, _AWAY_S / 2))
        self._away[node] = time.monotonic(), for_s if self.is_away(node) else min(2 * for_s, _AWAY_MOST_S)

    def answered(self, node: tuple[str, int] | None) -> None:
        self._away.pop(node, None)

    def others(self) -> Endpoints:
        """Return the nodes that no client here has found away just now; all of them if there are none."""
        endpoints = self.endpoints
        return tuple(node for node in endpoints if not self.is_away(node)) or endpoints


_KNOWN: dict[Endpoints, _Nodes] = {}
"""The nodes by their addresses. All clients of a process share them, so that only one has to wait for a lost node."""


class Gateway:
    """One client with one open connection, for any thread. ``timeout_s`` bounds a call over all nodes together.

    ``access``: TLS and user to get access to the nodes; by default there is neither.
    """

    def __init__(
        self,
        endpoints: Endpoints,
        timeout_s: float,
        verify: Verifier | None = None,
        access: Access | None = None,
    ) -> None:
        self.timeout_s, self.endpoints = timeout_s, endpoints
        self._access = access or Access(EtcdAddress(endpoints))
        scheme = "etcds" if self._access.address.tls else "etcd"
        self.name = f"{scheme}://" + ",".join(f"{host}:{port}" for host, port in endpoints)
        self._nodes = _KNOWN.setdefault(endpoints, _Nodes(endpoints))
        self._verify = verify
        self._turn, self._at = secrets.randbelow(len(endpoints)), 0
        self._node: tuple[str, int] | None = None
        self._connection: http.client.HTTPConnection | None = None
        self._lock = threading.Lock()

    def call(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Make a request to the first node that answers it. Raises ``StoreGone`` when all refuse, else ``StoreSilent``."""
        begun = time.monotonic()
        if not self._lock.acquire(timeout=self.timeout_s):
            raise self._silent(self.timeout_s, "another call")
        try:
            return self._call(path, body, begun)
        finally:
            self._lock.release()

    def _call(self, path: str, body: dict[str, Any], begun: float) -> dict[str, Any]:
        deadline, pause_s = begun + self.timeout_s, RETRY_PAUSE_S[0]
        fair_s = self.timeout_s / (len(self.endpoints) + 1)  # every node has its turn, however short the bound
        patience_s, unusable = min(_ATTEMPTS_S[0], fair_s), set()
        # no limit: each attempt looks at what is left of the call's timeout first
        while True:
            refused, last = set(), "no answer"
            for _ in self.endpoints:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise self._silent(time.monotonic() - begun, last)
                try:
                    return self._ask(path, body, min(patience_s, left_s))
                except (OSError, http.client.HTTPException, _Transient, _Unusable) as error:
                    if isinstance(error, ssl.SSLError) and not isinstance(error, _BROKEN):
                        error = _Unusable(refusal(error, self._access.address))
                    elif isinstance(error, _CLOSED) and (
                        why := self._wrong_scheme(self._node or self._here(), min(patience_s, left_s))
                    ):
                        error = _Unusable(why)
                    if isinstance(error, _Unusable):
                        unusable.add(self._node)
                        self._nodes.leave(self._node)
                    if isinstance(error, ConnectionRefusedError):
                        refused.add(self._node)
                    if isinstance(error, OSError):
                        self._nodes.leave(self._node)
                    host, port = self._node or self._here()
                    last = f"{host}:{port}: {error or type(error).__name__}"
                    self.close()  # the connection may still hold a late answer to another question
                    self._at += 1
            if unusable and unusable | refused >= set(self.endpoints):
                # Settings that worked before may work again, when the certificates have been renewed.
                raise (StoreGone if self._access.worked else Refused)(
                    f"control store {self.name} cannot be used: {last}"
                )
            if refused >= set(self.endpoints):
                raise StoreGone(
                    f"control store {self.name} is gone ({last}); no node of it listens. What needs it goes on when a "
                    f"majority of its nodes runs again"
                )
            time.sleep(max(0.0, min(pause_s, deadline - time.monotonic())))
            pause_s, patience_s = min(2 * pause_s, RETRY_PAUSE_S[1]), min(_ATTEMPTS_S[-1], fair_s)

    def watch(self, key: str, revision: int, timeout_s: float) -> bool:
        """Return when ``key`` was written at or after ``revision`` (True), after ``timeout_s``, or when the node is lost.

        It uses a connection of its own; the caller reads the key itself afterwards.
        """
        deadline, answered = time.monotonic() + timeout_s, False
        node = self._here()
        stream = self._connection_to(node, min(_ATTEMPTS_S[-1], timeout_s))
        wanted = {"key": encoded(key), "start_revision": str(revision), "filters": ["NODELETE"]}
        try:
            stream.request("POST", "/v3/watch", json.dumps({"create_request": wanted}), self._access.header)
            # Kept: getresponse() takes the socket out of a connection that the server means to close.
            sock = stream.sock
            _notice_lost_host(sock)
            response, answered = stream.getresponse(), True
            while (left_s := deadline - time.monotonic()) > 0:
                sock.settimeout(left_s)
                # no limit: the socket has a timeout: what is left of the call's
                line = response.readline()
                if not line:
                    break
                said = json.loads(line).get("result", {})
                if said.get("events"):
                    return True
                if said.get("canceled"):  # e.g. this node does not accept the token; the next call gets another
                    break
        except OSError as error:
            if answered and isinstance(error, TimeoutError) and error.errno is None:
                return False  # with an errno it comes from the kernel: that host does not answer
            self._nodes.leave(node)
            self._at += 1  # for longer than it counts as away: to try it repeatedly would delay all news
        except (http.client.HTTPException, ValueError):
            pass
        finally:
            stream.close()
        time.sleep(min(RETRY_PAUSE_S[0], timeout_s))  # a node that ends every watch at once must not be asked in a loop
        return False

    def clone(self) -> Gateway:
        return Gateway(self.endpoints, self.timeout_s, self._verify, self._access)

    def close(self) -> None:
        """Close a gateway that only this thread uses."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _ask(self, path: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        if self._connection is not None and self._nodes.is_away(self._node):
            self.close()
        if self._connection is None:
            self._node = self._here()
            connection = self._connection_to(self._node, timeout_s)
            try:
                # no limit: the connection has a timeout, the attempt's
                connection.connect()
                if self._verify is not None:
                    self._verify(lambda path, body: self._post(connection, path, body))
            except (OSError, http.client.HTTPException, StoreError, _Transient, _Unusable):
                connection.close()
                raise
            self._connection = connection
        self._connection.timeout = timeout_s
        if self._connection.sock is not None:
            self._connection.sock.settimeout(timeout_s)
        answer = self._post(self._connection, path, body)
        self._access.worked = True
        self._nodes.answered(self._node)
        return answer

    def _wrong_scheme(self, node: tuple[str, int], timeout_s: float) -> str:
        """Return why a node that ends connections without an answer does so, if TLS is the reason; else "". Until the
        store has worked once, it is tried with the other scheme."""
        if self._access.worked:
            return ""
        try:
            context = self._access.context()
            if context is not None:
                if why := self._refused_certificate(node, context, timeout_s):
                    return why
                plain = http.client.HTTPConnection(*node, timeout=timeout_s)
                _post(plain, "/v3/maintenance/status", {})
                return "it does not speak TLS; use etcd:// in place of etcds://, or start it with TLS"
            anybody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
            with socket.create_connection(node, timeout=timeout_s) as end, anybody.wrap_socket(end):
                return "it speaks TLS only; use etcds:// in place of etcd://"
        except (OSError, http.client.HTTPException, Refused, _Transient):
            return ""

    def _refused_certificate(self, node: tuple[str, int], context: ssl.SSLContext, timeout_s: float) -> str:
        """Return why the node refuses this client's certificate; "" if it does not. With TLS 1.3 the refusal comes after
        the handshake, and a client that is writing a request by then may see nothing but the end of the connection."""
        try:
            with (
                socket.create_connection(node, timeout=timeout_s) as end,
                context.wrap_socket(end, server_hostname=node[0]) as secured,
            ):
                secured.settimeout(min(timeout_s, _ALERT_S))
                # no limit: the socket has a timeout of a second
                secured.recv(1)
        except ssl.SSLError as error:
            return "" if isinstance(error, _BROKEN) else refusal(error, self._access.address)
        except OSError:
            pass
        return ""

    def _connection_to(self, node: tuple[str, int], timeout_s: float) -> http.client.HTTPConnection:
        context = self._access.context()
        connection: Any
        if context is None:
            connection = http.client.HTTPConnection(*node, timeout=timeout_s)
        else:
            connection = http.client.HTTPSConnection(*node, timeout=timeout_s, context=context)
        connection._create_connection = _reach  # used by http.client to connect: TLS and etcd get all of the time
        return connection

    def _post(self, connection: http.client.HTTPConnection, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Post with the token of the user, if there is one; a token that etcd no longer knows is replaced."""
        access = self._access
        if access.address.user and not access.header:
            access.log_in(functools.partial(_post, connection))
        try:
            return _post(connection, path, body, access.header)
        except _TokenLost:
            access.log_in(functools.partial(_post, connection))
            try:
                return _post(connection, path, body, access.header)
            except _TokenLost as error:
                raise _Transient(str(error)) from None

    def _here(self) -> tuple[str, int]:
        """Return the node whose turn it is: those of this host first, since its users here are lost with them anyway."""
        nodes = self._nodes.others()
        turn = self._turn % len(nodes)
        ring = sorted((*nodes[turn:], *nodes[:turn]), key=lambda node: not _is_here(node[0]))
        return ring[self._at % len(ring)]

    def _silent(self, silent_s: float, last: str) -> StoreSilent:
        return StoreSilent(
            f"control store {self.name} has been silent for {silent_s:.3g} s (last: {last}); fewer than a majority of its "
            f"nodes answer. What needs it goes on when they do again"
        )


class _Transient(Exception):
    """The node answered that it cannot at the moment."""


class _Unusable(Exception):
    """The node is there, and cannot be used in this way: its certificate, ours, or TLS where there is none."""


class _TokenLost(Exception):
    """The node does not know, or no longer knows, the token that came with the request."""


_BROKEN = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)
"""The connection has ended; that says nothing about TLS."""
_UNAUTHENTICATED = 16
_OLD_TOKEN = "revision of auth store is old"
_ALERT_S = 1.0
"""Seconds to wait for a node's alert after a handshake."""
_CLOSED = (http.client.RemoteDisconnected, ConnectionResetError, ssl.SSLEOFError)


def _reach(address: tuple[str, int], timeout: float, source_address: Any = None) -> socket.socket:
    """Connect like ``socket.create_connection``, to a live host: its kernel answers at once, however busy etcd is."""
    sock = socket.create_connection(address, timeout=min(timeout, _UNHEARD_S), source_address=source_address)
    sock.settimeout(timeout)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * _UNHEARD_S))
    return sock


@functools.cache
def _is_here(host: str) -> bool:
    """Return whether that is an address of this host."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(where)
    except OSError:
        return False
    return True


def _notice_lost_host(sock: socket.socket) -> None:
    """Let the kernel detect a host that has lost its power while this client waits for an answer that is not due."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT):
        sock.setsockopt(socket.IPPROTO_TCP, option, 1)


def _post(
    connection: http.client.HTTPConnection, path: str, body: dict[str, Any], header: Mapping[str, str] = _NO_HEADER
) -> dict[str, Any]:
    connection.request("POST", path, json.dumps(body), header)
    response = connection.getresponse()
    text = response.read()
    try:
        answer = json.loads(text)
    except ValueError:
        raise _Transient(f"HTTP {response.status} {text[:100]!r}") from None
    if response.status == 200:
        return answer
    message = str(answer.get("message") or answer.get("error") or f"HTTP {response.status}")
    if answer.get("code") in _TRANSIENT:
        raise _Transient(message)
    if (answer.get("code") == _UNAUTHENTICATED and header) or _OLD_TOKEN in message:
        raise _TokenLost(message)
    if path == "/v3/auth/authenticate":
        raise Refused(message)
    raise Refused(f"etcd does not carry out {path}: {message}; {_hint(message)}")


def _hint(message: str) -> str:
    if "user name is empty" in message:
        return "this etcd wants a user: etcds://...?user=NAME&password_file=FILE"
    if "permission denied" in message:
        return "its user needs a role that may read and write all keys"
    return "is this etcd 3.4 or newer?"


def encoded(text: str | bytes) -> str:
    """Return ``text`` as etcd's JSON gateway takes keys and values."""
    return base64.b64encode(text.encode(errors="surrogateescape") if isinstance(text, str) else text).decode()


def decoded(text: str) -> bytes:
    """Inverse of :func:`encoded`."""
    return base64.b64decode(text)
