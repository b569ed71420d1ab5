"""etcd's v3 JSON gateway over plain HTTP, from any of several nodes: ask one, and another when it does not answer.

Every request here may be repeated: reads, puts of one value, and transactions whose comparison fails the second time.

Failures it assumes: any node is killed (refused, reset), frozen or cut off (silent), or has no leader (etcd says so, or is
silent while one is elected). While a majority lives, a call is answered within a few seconds.
"""

from __future__ import annotations

import base64
import http.client
import json
import math
import random
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable
from typing import Any

from megatron_ft.errors import StoreError
from megatron_ft.runtime.store.port import RETRY_PAUSE_S, StoreGone, StoreSilent

Endpoints = tuple[tuple[str, int], ...]

Verifier = Callable[[Callable[[str, dict[str, Any]], dict[str, Any]]], None]

_TRANSIENT = frozenset({1, 4, 8, 10, 13, 14})
"""gRPC's cancelled, deadline exceeded, exhausted, aborted, internal, unavailable: another node or moment may do better."""
_ATTEMPT_S = 2.0
"""A node that has not answered for this long is left for another one; an election takes 1 to 2 s."""
_AWAY_S = 3.0
"""A node that was found away is asked last for so long."""
_LEARN_S = 10.0
"""So old what is known of the nodes may be, where they change: two of three would have to be replaced in that time."""


class Refused(StoreError):
    """etcd understood the request and will not carry it out."""


class _Nodes:
    """Where the nodes are, when (monotonic) one of them has said so, and when each of them was last found away."""

    def __init__(self, endpoints: Endpoints) -> None:
        self.endpoints, self.learned = endpoints, -math.inf
        self.away: dict[tuple[str, int], float] = {}

    def is_away(self, node: tuple[str, int] | None) -> bool:
        return time.monotonic() - self.away.get(node, -math.inf) < _AWAY_S

    def others(self) -> Endpoints:
        """Those that nobody here has found away just now; all of them if there are none."""
        endpoints = self.endpoints
        return tuple(node for node in endpoints if not self.is_away(node)) or endpoints


_KNOWN: dict[tuple[Endpoints, bool], _Nodes] = {}
"""By where they were at first, and whether they may change. All clients of a process share it: what one has met the others
need not wait for."""


class Gateway:
    """One client with one open connection, for any thread. ``timeout_s`` bounds a call over all nodes together.

    ``learns``: the nodes may be replaced by others, so they are asked now and then who they are.
    """

    def __init__(
        self, endpoints: Endpoints, timeout_s: float, verify: Verifier | None = None, learns: bool = False
    ) -> None:
        self.timeout_s, self.learns = timeout_s, learns
        self.name = "etcd://" + ",".join(f"{host}:{port}" for host, port in endpoints)
        self._first = endpoints
        self._nodes = _KNOWN.setdefault((endpoints, learns), _Nodes(endpoints))
        self._verify = verify
        self._at = random.randrange(len(endpoints))
        self._node: tuple[str, int] | None = None
        self._connection: http.client.HTTPConnection | None = None
        self._lock = threading.Lock()

    @property
    def endpoints(self) -> Endpoints:
        """Those that are known now."""
        return self._nodes.endpoints

    def learn(self) -> None:
        """Ask who the nodes are. Raises what :meth:`call` raises."""
        self._nodes.learned = -math.inf
        self.call("/v3/cluster/member/list", {})

    def call(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """One request, to whichever node answers it. Raises ``StoreGone`` when all refuse, else ``StoreSilent``."""
        begun = time.monotonic()
        if not self._lock.acquire(timeout=self.timeout_s):
            raise self._silent(self.timeout_s, "another call")
        try:
            return self._call(path, body, begun)
        finally:
            self._lock.release()

    def _call(self, path: str, body: dict[str, Any], begun: float) -> dict[str, Any]:
        deadline, pause_s = begun + self.timeout_s, RETRY_PAUSE_S[0]
        # However short the bound, every node has its turn.
        patience_s = min(_ATTEMPT_S, self.timeout_s / (len(self.endpoints) + 1))
        while True:
            refused, last = set(), "no answer"
            for _ in self.endpoints:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise self._silent(time.monotonic() - begun, last)
                try:
                    return self._ask(path, body, min(patience_s, left_s))
                except (OSError, http.client.HTTPException, _Transient) as error:
                    if isinstance(error, ConnectionRefusedError):
                        refused.add(self._node)
                    if isinstance(error, OSError):
                        self._nodes.away[self._node] = time.monotonic()
                    last = f"{self._where()}: {error or type(error).__name__}"
                    self._next()
            if refused >= set(self.endpoints):
                raise StoreGone(
                    f"control store {self.name} is gone ({last}); no node of it listens. What needs it goes on when a "
                    f"majority of its nodes runs again"
                )
            time.sleep(max(0.0, min(pause_s, deadline - time.monotonic())))
            pause_s = min(2 * pause_s, RETRY_PAUSE_S[1])

    def watch(self, key: str, revision: int, timeout_s: float) -> None:
        """Return when ``key`` was written at or after ``revision``, after ``timeout_s``, or when the node is lost.

        On a connection of its own; who asks looks at the key itself afterwards.
        """
        deadline, answered = time.monotonic() + timeout_s, False
        node = self._here()
        stream = http.client.HTTPConnection(*node, timeout=min(_ATTEMPT_S, timeout_s))
        wanted = {"key": encoded(key), "start_revision": str(revision), "filters": ["NODELETE"]}
        try:
            stream.request("POST", "/v3/watch", json.dumps({"create_request": wanted}))
            # Kept: getresponse() takes the socket out of a connection that the server means to close.
            sock = stream.sock
            _notice_lost_host(sock)
            response, answered = stream.getresponse(), True
            while (left_s := deadline - time.monotonic()) > 0:
                sock.settimeout(left_s)
                line = response.readline()
                if not line:
                    break
                if json.loads(line).get("result", {}).get("events"):
                    return
        except OSError as error:
            if answered and isinstance(error, TimeoutError) and error.errno is None:
                return  # with an errno it is the kernel's: that host does not answer
            self._leave(node)
        except (http.client.HTTPException, ValueError):
            pass
        finally:
            stream.close()
        time.sleep(min(RETRY_PAUSE_S[0], timeout_s))  # a node that ends every watch at once must not be asked in a loop

    def _leave(self, node: tuple[str, int]) -> None:
        """For longer than it counts as away: to try it again and again would be to hear of everything late."""
        self._nodes.away[node] = time.monotonic()
        self._at += 1

    def clone(self) -> Gateway:
        return Gateway(self._first, self.timeout_s, self._verify, self.learns)

    def close(self) -> None:
        """Of a gateway that only this thread uses."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _ask(self, path: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        if self._connection is not None and self._nodes.is_away(self._node):
            self.close()
        if self._connection is None:
            self._node = self._here()
            connection = http.client.HTTPConnection(*self._node, timeout=timeout_s)
            try:
                connection.connect()
                if self._verify is not None:
                    self._verify(lambda path, body: _post(connection, path, body))
            except (OSError, http.client.HTTPException, StoreError, _Transient):
                connection.close()
                raise
            self._connection = connection
        self._connection.timeout = timeout_s
        if self._connection.sock is not None:
            self._connection.sock.settimeout(timeout_s)
        if self.learns and time.monotonic() - self._nodes.learned > _LEARN_S:
            found = _endpoints(_post(self._connection, "/v3/cluster/member/list", {}))
            self._nodes.endpoints, self._nodes.learned = found or self._nodes.endpoints, time.monotonic()
        return _post(self._connection, path, body)

    def _next(self) -> None:
        """Leave this node: its connection may still hold a late answer to another question."""
        self.close()
        self._at += 1

    def _here(self) -> tuple[str, int]:
        """The node whose turn it is."""
        endpoints = self._nodes.others()
        return endpoints[self._at % len(endpoints)]

    def _where(self) -> str:
        host, port = self._node or self._here()
        return f"{host}:{port}"

    def _silent(self, silent_s: float, last: str) -> StoreSilent:
        return StoreSilent(
            f"control store {self.name} has been silent for {silent_s:.3g} s (last: {last}); fewer than a majority of its "
            f"nodes answer. What needs it goes on when they do again",
            silent_s,
        )


class _Transient(Exception):
    """The node answered that it cannot at the moment."""


def _notice_lost_host(sock: socket.socket) -> None:
    """Waiting for an answer that is not due, nothing else would tell that the host there has lost its power."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT):
        sock.setsockopt(socket.IPPROTO_TCP, option, 1)


def _post(connection: http.client.HTTPConnection, path: str, body: dict[str, Any]) -> dict[str, Any]:
    connection.request("POST", path, json.dumps(body))
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
    raise Refused(f"etcd does not carry out {path}: {message}; is this etcd 3.4 or newer, without authentication?")


def _endpoints(answer: dict[str, Any]) -> Endpoints:
    """Of all nodes that serve: one that has not started says no address, one that only learns answers nobody."""
    serving = [member for member in answer["members"] if not member.get("isLearner")]
    urls = [urllib.parse.urlsplit(url) for member in serving for url in member.get("clientURLs", ())[:1]]
    return tuple((url.hostname, url.port) for url in urls if url.hostname and url.port)


def encoded(text: str | bytes) -> str:
    return base64.b64encode(text.encode() if isinstance(text, str) else text).decode()


def decoded(text: str) -> bytes:
    return base64.b64decode(text)
