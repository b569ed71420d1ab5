"""Which node of an etcd a client asks: nodes that answer, that do not, and that say who the others are."""

from __future__ import annotations

import http.server
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from megatron_ft.runtime.store import gateway as gateway_module
from megatron_ft.runtime.store.gateway import Gateway
from megatron_ft.runtime.store.port import StoreGone

PATIENT_S = 60.0


class Node(http.server.ThreadingHTTPServer):
    """It answers everything with its name, and says who the members are."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.members: list[dict] = []
        self.asked = 0
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def where(self) -> tuple[str, int]:
        return self.server_address

    def as_member(self, **more) -> dict:
        return {"clientURLs": [f"http://127.0.0.1:{self.where[1]}"], **more}

    def end(self) -> None:
        self.shutdown()
        self.server_close()


class Answer(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked += 1
        listing = self.path == "/v3/cluster/member/list"
        text = json.dumps({"members": self.server.members} if listing else {"by": self.server.where[1]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def silent_node() -> Iterator[socket.socket]:
    """It takes connections, as a frozen one does, and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        yield listener


def connections(listener: socket.socket) -> int:
    found = 0
    try:
        while True:
            listener.accept()[0].close()
            found += 1
    except BlockingIOError:
        return found


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """However busy this machine is, a node that lives is waited for."""
    monkeypatch.setattr(gateway_module, "_ATTEMPT_S", PATIENT_S)


def in_vain(monkeypatch, silent: socket.socket) -> None:
    """Who connects to that one waits for a moment only."""
    ask, where = Gateway._ask, silent.getsockname()

    def patched(self, path: str, body: dict, timeout_s: float) -> dict:
        connects = self._connection is None or self._nodes.is_away(self._node)
        return ask(self, path, body, 0.1 if connects and self._here() == where else timeout_s)

    monkeypatch.setattr(Gateway, "_ask", patched)


@pytest.fixture
def nodes():
    made = [Node(), Node()]
    yield made
    for node in made:
        node.end()


def asked(gateway: Gateway) -> int:
    return gateway.call("/any", {})["by"]


def test_what_one_client_has_found_away_the_others_do_not_wait_for(nodes, monkeypatch):
    monkeypatch.setattr(gateway_module, "_AWAY_S", 1000.0)
    with silent_node() as silent:
        in_vain(monkeypatch, silent)
        endpoints = (silent.getsockname(), nodes[0].where)
        first = [Gateway(endpoints, 3 * PATIENT_S) for _ in range(64)]
        while not connections(silent):  # each begins at one of them at random
            assert asked(first.pop()) == nodes[0].where[1]
        for _ in range(8):
            assert asked(Gateway(endpoints, 3 * PATIENT_S)) == nodes[0].where[1]
        assert not connections(silent)


def test_a_node_that_does_not_answer_a_watch_is_not_asked_for_the_next_one(nodes, monkeypatch):
    """Although it does not count as away any more."""
    monkeypatch.setattr(gateway_module, "_AWAY_S", 0.0)
    monkeypatch.setattr(gateway_module.random, "randrange", lambda _: 0)
    with silent_node() as silent:
        gateway = Gateway((silent.getsockname(), nodes[0].where), 3 * PATIENT_S)
        gateway.watch("any", 1, 0.1)
        for _ in range(3):
            gateway.watch("any", 1, PATIENT_S)
        assert connections(silent) == 1 and nodes[0].asked == 3


def test_nodes_that_may_be_replaced_are_asked_who_they_are(nodes):
    old, new = nodes
    learner = {"clientURLs": ["http://127.0.0.1:1"], "isLearner": True}
    old.members = [new.as_member(), learner, {"peerURLs": ["http://127.0.0.1:2"]}]
    new.members = [new.as_member()]
    gateway = Gateway((old.where,), 3 * PATIENT_S, learns=True)
    assert asked(gateway) == old.where[1]
    assert gateway.endpoints == (new.where,)
    assert asked(gateway.clone()) == new.where[1], "what one has heard its clones know"
    assert asked(Gateway((old.where,), 3 * PATIENT_S)) == old.where[1], "who was told that they stay"


def test_a_users_etcd_is_never_asked_who_it_is(nodes):
    gateway = Gateway((nodes[0].where,), 3 * PATIENT_S)
    assert asked(gateway) == nodes[0].where[1] and nodes[0].asked == 1
    assert gateway.endpoints == (nodes[0].where,)


def test_only_if_every_node_refuses_nobody_listens(nodes):
    gone = []
    for _ in range(3):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            gone.append(listener.getsockname())
    with pytest.raises(StoreGone, match="no node of it listens"):
        Gateway(tuple(gone), 3 * PATIENT_S).call("/any", {})
    assert asked(Gateway((*gone, nodes[0].where), 3 * PATIENT_S)) == nodes[0].where[1]
