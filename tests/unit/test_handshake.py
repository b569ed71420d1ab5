"""A connection is passed on only when both ends have the key, and attempts of strangers cost next to nothing."""

from __future__ import annotations

import contextlib
import queue
import socket
import struct
import threading

import pytest

from megatron_ft.utils.auth import handshake
from megatron_ft.utils.auth.handshake import Door, Refused, greet
from megatron_ft.utils.auth.secret import Secret
from tests.stores import await_
from tests.support import SECRET

KEY = SECRET.of("test")


class Listener:
    """A door, and the connections that have come through it."""

    def __init__(self, timeout_s: float = 60.0) -> None:
        self.came: queue.Queue[tuple[socket.socket, dict]] = queue.Queue()
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = listener.getsockname()
        self.door = Door(listener, KEY, lambda *caller: self.came.put(caller), "test-door", timeout_s)

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=60)

    def admits(self) -> bool:
        with self.connect() as end:
            greet(end, KEY, {"n": 1})
            came, hello = self.came.get(timeout=60)
            came.close()
            return hello == {"n": 1}


@pytest.fixture
def listener():
    made = Listener()
    yield made
    made.door.close()


def closed(end: socket.socket) -> bool:
    """Return whether the other end has closed the connection; data before the end is skipped."""
    with contextlib.suppress(ConnectionResetError):
        while end.recv(4096):
            pass
    return True


def test_both_ends_prove_that_they_have_the_key(listener):
    with listener.connect() as end:
        greet(end, KEY, {"who": "a test", "position": 3})
        came, hello = listener.came.get(timeout=60)
        with came:
            assert hello == {"who": "a test", "position": 3}
            came.sendall(b"hello")
            assert end.recv(5, socket.MSG_WAITALL) == b"hello"


@pytest.mark.parametrize("key", [SECRET, SECRET.of("another purpose"), Secret("z" * 64).of("test")])
def test_another_key_is_refused(listener, key):
    with listener.connect() as end, pytest.raises(Refused):
        greet(end, key, {"n": 1})
    assert listener.admits() and listener.came.empty()


def test_a_listener_without_the_key_is_refused():
    """A process that has taken the port of a dead rank learns nothing, and is not trusted."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as end:
        impostor, _ = server.accept()
        with impostor:
            impostor.sendall(b"mft2" + bytes(32) + bytes(32))
            with pytest.raises(Refused, match="does not know the secret"):
                greet(end, KEY, {})
            said = impostor.recv(4096)
    assert SECRET.text.encode() not in said


def test_a_recorded_handshake_is_worthless(listener):
    recorded = []
    with listener.connect() as end:
        greet(_Recording(end, recorded), KEY, {"n": 1})
        listener.came.get(timeout=60)[0].close()
    with listener.connect() as end:
        end.sendall(recorded[0])
        assert closed(end)
    assert listener.admits() and listener.came.empty()


class _Recording:
    """A socket that records the sent data."""

    def __init__(self, end: socket.socket, sent: list[bytes]) -> None:
        self._end, self._sent = end, sent

    def sendall(self, data: bytes) -> None:
        self._sent.append(data)
        self._end.sendall(data)

    def __getattr__(self, name: str):
        return getattr(self._end, name)


def test_a_hello_has_one_deadline_however_slowly_it_comes():
    slow = Listener(timeout_s=0.3)
    with slow.connect() as end:
        end.settimeout(0.02)
        with pytest.raises(ConnectionError):  # one byte at a time, each in time
            while True:
                end.send(b"m" if slow.door.pending else b"")
                with contextlib.suppress(TimeoutError):
                    if not end.recv(64):
                        raise ConnectionResetError
    assert slow.came.empty()
    slow.door.close()


@pytest.mark.parametrize("length", [handshake.LONGEST_HELLO + 1, 2**31, 0, 1])
def test_a_hello_that_is_too_long_is_not_read(listener, length):
    with listener.connect() as end:
        end.sendall(struct.pack("=4s32s32sI", b"mft2", bytes(32), bytes(32), length))
        assert closed(end)
    with pytest.raises(ValueError, match="4096 are allowed"), listener.connect() as end:
        greet(end, KEY, {"n": "x" * 5000})


def test_no_more_than_sixteen_wait_and_a_member_comes_through(listener):
    with contextlib.ExitStack() as silent:
        for _ in range(50):
            silent.enter_context(listener.connect())
        threads = threading.active_count()
        assert listener.admits()
        assert listener.door.pending <= handshake.PENDING and threading.active_count() <= threads + 1
    await_(lambda: listener.door.pending == 0, "those that have gone are forgotten")


@pytest.mark.parametrize("text", [b"[1]", b"null", b"{", b"\xff\xff", b"[" * 4096])
def test_a_hello_of_a_wrong_kind_ends_no_thread(listener, text):
    """The hello comes from a process that has the key, so that it is parsed at all."""
    with listener.connect() as end:
        nonce, mine = end.recv(36, socket.MSG_WAITALL)[4:], bytes(32)
        mac = KEY.mac(b"caller", nonce, mine, text)
        end.sendall(struct.pack("=4s32s32sI", b"mft2", mine, mac, len(text)) + text)
        assert closed(end)
    assert listener.admits()


def test_a_connection_whose_handler_raises_is_dropped_and_the_next_is_served():
    def admit(end: socket.socket, hello: dict) -> None:
        hello["missing"].append(1)

    listener = socket.create_server(("127.0.0.1", 0))
    door = Door(listener, KEY, admit, "test-door")
    for _ in range(3):
        with socket.create_connection(listener.getsockname(), timeout=60) as end:
            greet(end, KEY, {"n": 1})
            assert closed(end)
    door.close()
    with pytest.raises(OSError):
        listener.getsockname()
