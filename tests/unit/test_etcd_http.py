"""The node of an etcd that a client asks: nodes that answer, and nodes that do not."""

from __future__ import annotations

import http.server
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from megatron_ft.run.store import etcd_http as gateway_module
from megatron_ft.run.store.base import StoreGone
from megatron_ft.run.store.etcd_http import Gateway

PATIENT_S = 60.0


class Node(http.server.ThreadingHTTPServer):
    """A node that answers everything with its name."""

    daemon_threads = True

    def __init__(self, host: str = "127.0.0.1", answers_from: int = 1) -> None:
        super().__init__((host, 0), Answer)
        self.asked = 0
        self.answers = threading.Event()
        self.answers_from = answers_from
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def where(self) -> tuple[str, int]:
        return self.server_address

    def end(self) -> None:
        self.shutdown()
        self.server_close()


class Answer(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked += 1
        if self.server.asked >= self.server.answers_from:
            self.server.answers.set()
        self.server.answers.wait(PATIENT_S)
        text = json.dumps({"by": self.server.where[1]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def silent_node() -> Iterator[socket.socket]:
    """A node that takes connections, as a frozen one does, and never answers."""
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
    """A long limit: a node that lives is waited for, however busy this machine is."""
    monkeypatch.setattr(gateway_module, "_ATTEMPTS_S", (PATIENT_S, PATIENT_S))


def in_vain(monkeypatch, silent: socket.socket) -> None:
    """A short limit for connections to that node."""
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


def test_a_node_that_one_client_has_found_away_is_not_waited_for_by_the_others(nodes, monkeypatch):
    monkeypatch.setattr(gateway_module, "_AWAY_S", 1000.0)
    with silent_node() as silent:
        in_vain(monkeypatch, silent)
        endpoints = (silent.getsockname(), nodes[0].where)
        first = [Gateway(endpoints, 3 * PATIENT_S) for _ in range(64)]
        while not connections(silent):  # each client begins at a random node
            assert asked(first.pop()) == nodes[0].where[1]
        for _ in range(8):
            assert asked(Gateway(endpoints, 3 * PATIENT_S)) == nodes[0].where[1]
        assert not connections(silent)


def test_a_node_that_does_not_answer_a_watch_is_not_asked_for_the_next_one(nodes, monkeypatch):
    """The node does not count as away any more."""
    monkeypatch.setattr(gateway_module, "_AWAY_S", 0.0)
    monkeypatch.setattr(gateway_module.secrets, "randbelow", lambda _: 0)
    with silent_node() as silent:
        gateway = Gateway((silent.getsockname(), nodes[0].where), 3 * PATIENT_S)
        gateway.watch("any", 1, 0.1)
        for _ in range(3):
            gateway.watch("any", 1, PATIENT_S)
        assert connections(silent) == 1 and nodes[0].asked == 3


def test_the_node_of_this_host_is_asked_first_and_another_one_when_it_is_gone(nodes, monkeypatch):
    """The clients of three hosts with a node each do not wait for another host that is lost."""
    monkeypatch.setattr(gateway_module, "_is_here", lambda host: host == "127.0.0.2")
    own = Node("127.0.0.2")
    endpoints = (nodes[0].where, own.where, nodes[1].where)
    gateways = [Gateway(endpoints, 3 * PATIENT_S) for _ in range(16)]
    assert {asked(gateway) for gateway in gateways} == {own.where[1]}
    own.end()
    assert asked(Gateway(endpoints, 3 * PATIENT_S)) in {node.where[1] for node in nodes}


def test_an_address_of_this_host_is_known():
    assert gateway_module._is_here("127.0.0.1") and not gateway_module._is_here("192.0.2.1")


def test_a_host_that_acknowledges_nothing_is_left_soon_and_a_slow_etcd_is_not(nodes, monkeypatch):
    found = []

    def create(address, **options):
        found.append((options["timeout"], socket.create_connection(address, **options)))
        return found[-1][1]

    monkeypatch.setattr(gateway_module, "socket", SimpleNamespace(**{**vars(socket), "create_connection": create}))
    connection = Gateway((nodes[0].where,), 3 * PATIENT_S)._connection_to(nodes[0].where, PATIENT_S)
    connection.connect()
    ((timeout_s, sock),) = found
    assert timeout_s == gateway_module._UNHEARD_S and sock.gettimeout() == PATIENT_S
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000 * gateway_module._UNHEARD_S
    connection.close()


def test_only_in_the_first_round_a_node_is_left_soon(monkeypatch):
    """A slow node is waited for when no other one has answered."""
    monkeypatch.setattr(gateway_module, "_ATTEMPTS_S", (0.05, PATIENT_S))
    slow = Node(answers_from=2)
    assert asked(Gateway((slow.where,), 3 * PATIENT_S)) == slow.where[1] and slow.asked == 2
    slow.end()


def test_a_node_that_stays_away_is_asked_less_and_less_often(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(gateway_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    nodes, one = gateway_module._Nodes((("a", 1), ("b", 1))), ("a", 1)
    for for_s in (3.0, 6.0, 12.0, 24.0, 48.0, 60.0, 60.0):
        nodes.leave(one)
        nodes.leave(one)  # another client in the same outage
        now[0] += for_s - 0.1
        assert nodes.others() == (("b", 1),)
        now[0] += 0.2
        assert nodes.others() == nodes.endpoints
    nodes.answered(one)
    nodes.leave(one)
    now[0] += 3.1
    assert nodes.others() == nodes.endpoints


def test_only_if_every_node_refuses_is_the_store_gone(nodes):
    gone = []
    for _ in range(3):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            gone.append(listener.getsockname())
    with pytest.raises(StoreGone, match="no node of it listens"):
        Gateway(tuple(gone), 3 * PATIENT_S).call("/any", {})
    assert asked(Gateway((*gone, nodes[0].where), 3 * PATIENT_S)) == nodes[0].where[1]
