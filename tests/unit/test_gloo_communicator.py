"""What is gloo's own in its communicators: which sockets an abort cuts, operations that gloo forgets, its errors.

What holds for every communicator is in ``tests/communicator_contract.py``.
"""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_ft.run.collectives import base, framing, gloo_communicator, rendezvous, state_transfer
from megatron_ft.run.collectives.base import Broken, Communicator, Over
from megatron_ft.run.collectives.communicator_choice import Maker
from megatron_ft.run.collectives.gloo_communicator import Collective, GlooCommunicator
from megatron_ft.utils import socket_tracker
from megatron_ft.utils.auth.handshake import Door
from tests.support import SECRET


def build(members: int, prefix: str = "p") -> list[Communicator]:
    """Build communicators of all members, together in threads of this process."""
    store = dist.HashStore()
    with ThreadPoolExecutor(members) as pool:
        futures = [
            pool.submit(GlooCommunicator, dist.PrefixStore(prefix, store), me, range(members), 0, 60.0)
            for me in range(members)
        ]
        return [future.result() for future in futures]


@pytest.mark.parametrize("late", [False, True], ids=["started before", "with more started while it aborts"])
def test_an_abort_ends_everything_that_is_pending_at_all_survivors(late):
    """Many operations at once, of both kinds; the fourth member is silent. Nothing is left, and everything closes."""
    outers = build(4)
    survivors = outers[:3]
    works = [outer.all_reduce(torch.ones(100_000)) for _ in range(8) for outer in survivors]
    works += [outer.receive(torch.ones(10), 3, 7) for outer in survivors]
    gate = threading.Barrier(3)

    def abort(outer):
        gate.wait()
        outer.abort()
        if late:
            with pytest.raises(Broken):
                outer.all_reduce(torch.ones(1))

    def ends(work):
        with pytest.raises(Broken):
            work.wait()
        return True

    with ThreadPoolExecutor(len(works) + 3) as pool:
        endings = [pool.submit(ends, work) for work in works]
        list(pool.map(abort, survivors))
        assert all(ending.result(timeout=30) for ending in endings)
    for outer in outers:
        outer.close()
    base.sweep()
    assert not base._closed


def test_a_close_does_not_wait_for_operations_of_communicators_before_it(monkeypatch):
    class Never:
        def settled(self):
            return False

    stuck = (None, [Never()])
    monkeypatch.setattr(base, "_closed", [stuck])
    monkeypatch.setattr(base.time, "sleep", lambda _: pytest.fail("it waited"))
    GlooCommunicator(None, 0, [0], 0, 60.0).close()
    base.sweep()
    assert base._closed == [stuck]


def test_an_operation_that_never_ends_is_abandoned_after_an_abort():
    """gloo leaves such an operation of a half received payload when the connection breaks: neither success nor
    failure."""

    class Forgotten:
        def wait(self, timeout):
            raise RuntimeError("Operation timed out!")

        def is_completed(self):
            return False

    over = Over()
    work = Collective(Forgotten(), over)
    threading.Timer(0.05, lambda: setattr(over, "aborted", True)).start()
    with pytest.raises(Broken, match="abandoned"):
        work.wait()
    assert not work.settled()


def test_an_operation_that_ends_right_after_its_wait_timed_out_has_succeeded():
    """This was seen once in a failure-free run: the slice's timeout was taken for the end of the operation."""

    class EndsMeanwhile:
        completed = False

        def wait(self, timeout):
            if not self.completed:
                self.completed = True
                raise RuntimeError("Operation timed out!")

        def is_completed(self):
            return self.completed

    Collective(EndsMeanwhile(), Over()).wait()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "[/__w/third_party/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:9: Connection reset by peer",
            "broke",
        ),
        ("[/__w/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:9", "broke"),
        (
            "[/__w/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 99ms for recv",
            "timed out",
        ),
        ("Operation timed out!", "timed out"),
        ("[enforce fail at pair.cc:446] op.preamble.length <= op.nbytes. 8 vs 4", "an operation failed"),
    ],
)
def test_an_operation_that_fails_gives_the_reason_in_plain_words(text, words):
    """The library's own text, without its stack trace, is for the rank's log."""

    class Fails:
        def wait(self, timeout):
            raise RuntimeError(f"{text}\nmore")

        def is_completed(self):
            return True

    with pytest.raises(Broken, match=words) as raised:
        Collective(Fails(), Over()).wait()
    assert "pair.cc" not in str(raised.value) and "gloo" not in str(raised.value)
    assert raised.value.detail == text and raised.value.in_full.endswith(f": {text}")


def test_closing_releases_all_resources():
    for outer in build(3):
        outer.close()
    base.sweep()
    assert not base._closed


def test_an_abort_leaves_other_sockets_of_the_process_alone():
    import socket

    left, right = socket.socketpair()
    server = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(server.getsockname())
    served, _ = server.accept()
    for outer in build(2):
        outer.abort()
    left.sendall(b"a"), client.sendall(b"b")
    assert (right.recv(1), served.recv(1)) == (b"a", b"b")
    for each in (left, right, server, client, served):
        each.close()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's filter of Linux")
def test_a_communicator_that_is_complete_accepts_no_stranger():
    """gloo would keep a descriptor for each connection, and end the process when none is left."""
    before = socket_tracker.listening().keys()
    outers = build(3)
    doors = {fd: address for fd, address in socket_tracker.listening().items() if fd not in before}
    assert len(doors) == len(outers)
    for address in doors.values():
        with pytest.raises(TimeoutError):
            socket.create_connection(address, timeout=0.3)
    tensors = [torch.ones(3) for _ in outers]
    for work in [outer.all_reduce(tensor) for outer, tensor in zip(outers, tensors, strict=True)]:
        work.wait()
    assert tensors[0].tolist() == [3.0] * 3


def test_a_state_travels_whole():
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "none": None, "empty": torch.empty(0)}
    source, target = build(2)
    sender = threading.Thread(target=state_transfer.send_state, args=(source, state, 1))
    sender.start()
    received = state_transfer.receive_state(target, 0)
    sender.join()
    assert torch.equal(received["model"]["weight"], model.weight)
    assert received["none"] is None and received["empty"].shape == (0,)
    twin = torch.optim.AdamW(torch.nn.Linear(3, 2).parameters())
    twin.load_state_dict(received["optimizer"])
    assert torch.equal(twin.state_dict()["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])


def test_an_object_that_cannot_be_sent_is_named():
    from megatron_ft.errors import EngineError

    with pytest.raises(EngineError, match=r"state\.optimizer\.hook is a function"):
        state_transfer.flatten({"optimizer": {"hook": len.__class__ and (lambda: None)}})


def test_an_abort_cuts_no_connection_that_other_ranks_made_while_it_was_built(tmp_path):
    """A rank that follows this one calls after a loss, when the next communicator is being built, too."""
    store = dist.HashStore()
    listener = socket.create_server(("127.0.0.1", 0))
    ours, admitted = framing.listen("127.0.0.1"), queue.Queue()
    door = Door(ours, SECRET, lambda end, hello: admitted.put(end), "test")
    unix = socket.socket(socket.AF_UNIX)
    unix.bind(str(tmp_path / "loader"))
    unix.listen()
    with ThreadPoolExecutor(2) as pool, ExitStack() as ends:
        first = pool.submit(GlooCommunicator, dist.PrefixStore("p", store), 0, range(2), 0, 60.0)
        while not store.num_keys():  # the member looks for the other one
            assert not first.done()
        caller = subprocess.Popen(CALLER, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        ends.callback(caller.kill)
        caller.stdin.write(f"{listener.getsockname()[1]} {tmp_path / 'loader'}\n")
        caller.stdin.flush()
        accepted = [ends.enter_context(end.accept()[0]) for end in (listener, unix)]
        called = ends.enter_context(framing.call("127.0.0.1", ours.getsockname()[1], SECRET, {}))
        accepted.append(ends.enter_context(admitted.get(timeout=60)))
        outers = [GlooCommunicator(dist.PrefixStore("p", store), 1, range(2), 0, 60.0), first.result()]
        for outer in outers:
            outer.abort()
        caller.stdin.write("say\n")
        caller.stdin.flush()
        assert [end.recv(5, socket.MSG_WAITALL) for end in accepted[:2]] == [b"hello", b"hello"]
        called.sendall(b"hello")
        assert accepted[2].recv(5, socket.MSG_WAITALL) == b"hello"
        for outer in outers:
            with pytest.raises(Broken):
                outer.all_reduce(torch.ones(1)).wait()
    for end in (listener, door, unix):
        end.close()


CALLER = [
    sys.executable,
    "-c",
    """
import socket
port, path = input().split()
tcp, unix = socket.create_connection(("127.0.0.1", int(port))), socket.socket(socket.AF_UNIX)
unix.connect(path)
input()
for end in (tcp, unix):
    end.sendall(b"hello")
input()
""",
]
"""Code of another process; the ends that this process accepts belong to another thread."""


class User:
    """A user's client of a server in another process, such as Redis: a thread that opens one connection after the other and
    speaks on all of them. ``broken``: connections that did not answer as they should."""

    _OPEN = 20

    def __init__(self) -> None:
        command = [sys.executable, "-c", ECHO]
        self.server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.port = int(self.server.stdout.readline())
        self.made, self.broken = 0, []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port))

    def speak(self, end: socket.socket) -> None:
        try:
            end.sendall(b"hello")
            if end.recv(5, socket.MSG_WAITALL) != b"hello":
                self.broken.append("the connection ended")
        except OSError as error:
            self.broken.append(str(error))

    def _work(self) -> None:
        ends: list[socket.socket] = []
        while not self._over.is_set():
            ends.append(self.connect())
            self.made += 1
            for end in ends:
                self.speak(end)
            if len(ends) == self._OPEN:
                ends.pop(0).close()
        for end in ends:
            end.close()

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self.server.kill()
        self.server.communicate()


ECHO = """
import socketserver, threading

class Echo(socketserver.BaseRequestHandler):
    def handle(self):
        while data := self.request.recv(4096):
            self.request.sendall(data)

server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo)
server.daemon_threads = True
threading.Thread(target=server.serve_forever, daemon=True).start()
print(server.server_address[1], flush=True)
input()
"""


def test_an_abort_cuts_no_connection_that_a_user_opens_while_communicators_are_built():
    """One is opened in the middle of every build, and the user's own thread opens others all the time."""
    user = User()
    ends = []
    try:
        with ThreadPoolExecutor(2) as pool:
            for number in range(30):
                store = dist.HashStore()
                first = pool.submit(GlooCommunicator, dist.PrefixStore("p", store), 0, range(2), number, 60.0)
                while not store.num_keys():  # the member waits for the other member's address
                    assert not first.done()
                ends.append(user.connect())
                outers = [GlooCommunicator(dist.PrefixStore("p", store), 1, range(2), number, 60.0), first.result()]
                receiving = outers[0].receive(torch.ones(1), 0, 7)
                outers[1].abort()
                with pytest.raises(Broken):  # at the peer, which has not aborted: the connection is cut
                    receiving.wait()
                for end in ends:
                    user.speak(end)
                for outer in outers:
                    outer.close()
    finally:
        user.close()
        for end in ends:
            end.close()
    assert user.made and not user.broken


def test_a_build_without_its_peers_ends_soon(monkeypatch):
    """Its thread and its descriptors are given back, however long an operation may take."""
    monkeypatch.setattr(gloo_communicator, "BUILD_TIMEOUT_S", 0.2)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(RuntimeError):
            GlooCommunicator(dist.PrefixStore("alone", dist.HashStore()), 0, range(2), 0, 1800.0)
    assert len(os.listdir("/proc/self/fd")) <= before + 1


@pytest.mark.parametrize("what", ["sum", "message"])
def test_an_operation_may_take_longer_than_a_build(monkeypatch, what):
    monkeypatch.setattr(gloo_communicator, "BUILD_TIMEOUT_S", 0.5)
    one, other = build(2)
    tensors = torch.ones(3), torch.full((3,), 2.0)
    pending = one.all_reduce(tensors[0]) if what == "sum" else one.receive(tensors[0], 1, 3)
    assert not pending.settles_within(1.0), "it has ended with the time for the build"
    (other.all_reduce(tensors[1]) if what == "sum" else other.send(tensors[1], 0, 3)).wait()
    pending.wait()
    assert tensors[0].tolist() == ([3.0] * 3 if what == "sum" else [2.0] * 3)


def test_a_build_does_not_wait_for_ever_for_a_member_that_is_never_ready():
    """The member lives, so its agent and the other hosts do not report it."""
    build = rendezvous.Build(SimpleNamespace(), "outer", Maker(0, [0, 1], 3, 0.05, "127.0.0.1"), lambda: None)
    build._thread.join(60.0)
    assert build.over()
    with pytest.raises(Broken, match="could not be built because not all of its members came in time"):
        build.result()
