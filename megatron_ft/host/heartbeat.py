"""Heartbeats between the agents of a run: one small datagram to the other hosts, twenty times a second
(``core.detection.heartbeats`` judges them, ``core.detection.link_detector`` chooses the receivers where hosts are many).

An agent has nothing else to do, so its heartbeat shows that its host and the way from it work, however busy the ranks are.
One thread sends and receives; it never touches the control store, which may block.

A heartbeat also carries the newest claim that its host knows, whether that host reaches the control store
(``core.lifecycle.store_failover``), and the hosts that it doubts; when these change, a heartbeat is sent at once. Every
heartbeat carries a counter and an HMAC with the run's secret, over all that and the numbers of both hosts. A heartbeat that
another process sends, or repeats, is dropped. While all hosts are heard, the kernel drops what comes from elsewhere than
their last heartbeats: a flood of datagrams would fill the socket's buffer.

Failures it assumes: datagrams are lost, doubled, late, replayed or forged, and come from other addresses than before.
"""

from __future__ import annotations

import hmac
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from megatron_ft.core.detection.heartbeats import DOUBTS, Change, Listener, Said
from megatron_ft.utils import file_descriptors, socket_tracker
from megatron_ft.utils.auth.secret import MAC_BYTES, Key
from megatron_ft.utils.vital_thread import VitalThread

BEAT_S = 0.05
_SIGNED = struct.Struct(f"!4sIIQi?{DOUBTS}i")
_MAGIC = b"mft4"
_NOBODY = -1
MESSAGE_BYTES = _SIGNED.size + MAC_BYTES
_LEAST_S = 0.001
_BURST = 1000


class HeartbeatService(Listener):
    """This host's side of the heartbeats. ``address``: the one by which the other hosts reach it; it sends heartbeats from
    the first :meth:`add` on. ``key``: of the run.
    """

    def __init__(self, address: str, rank: int, key: Key, least_s: float) -> None:
        super().__init__(least_s)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        self._socket.bind((address, 0))
        self._socket.setblocking(False)
        self._rank, self._key = rank, key.of("heartbeat")
        self.says = Said()
        """The content of this host's heartbeats; may be replaced at any time."""
        self.changed: Callable[[], None] = lambda: None
        """Called by the thread when a host is silent or heard again."""
        self._count = 0
        self._addresses: dict[int, tuple[str, int]] = {}
        self._sources: dict[int, tuple[str, int]] = {}
        """Where the heartbeats of each host come from: on some networks another address than they are sent to."""
        self._passed: frozenset[tuple[str, int]] | None = None
        """The sources whose datagrams the kernel passes on; None: all."""
        self._changes: queue.SimpleQueue[Change] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._failed: list[BaseException] = []
        self._thread = VitalThread(self._run_on, "megatron_ft-heartbeats", failed=self._failed.append)

    @property
    def port(self) -> int:
        return self._socket.getsockname()[1]

    def add(self, peers: Mapping[int, tuple[str, int]]) -> None:
        """Send heartbeats to these hosts, too, and listen to them. Known hosts, and this one, are skipped."""
        new = {rank: address for rank, address in peers.items() if rank not in (self._rank, *self._addresses)}
        self._addresses = {**self._addresses, **new}  # replaced, not changed: the thread may be using the old one
        self.listen_to(new)
        if new and not self._thread.is_alive():
            self._thread.start()

    def changes(self) -> list[Change]:
        """Return the changes since the last call. Raises the exception that has ended the thread: without it this host
        is lost to all others."""
        if self._failed:
            raise self._failed[0]
        found = []
        while not self._changes.empty():
            # no limit: it does not block: there is an entry, and only this thread takes any
            found.append(self._changes.get())
        return found

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            # no limit: the thread looks at its stop every BEAT_S
            self._thread.join()
        self._socket.close()

    def _run_on(self) -> None:
        due = look = now = time.monotonic()
        said: tuple[int, ...] = ()
        # no limit: a thread of its own; whoever has started it tells it to stop
        while not self._stop.is_set():
            if now >= due or said != self.doubts:
                self._send()
                said, due = self.doubts, min(max(due, now - BEAT_S), now) + BEAT_S
            if file_descriptors.readable(self._socket, min(due, look) - now):
                self._receive()
            now = time.monotonic()
            if said or now >= min(due, look):  # where a host is doubted, each heartbeat may decide
                for change in self.look(now):
                    self._changes.put(change)
                    self.changed()
                look = now + max(self.rest_s, _LEAST_S)
                self._filter()

    def _send(self) -> None:
        self._count += 1
        says = replace(self.says, doubts=self.doubts)
        for rank, address in self._addresses.items():
            try:
                self._socket.sendto(self._message(self._rank, rank, self._count, says), address)
            except OSError:
                continue  # no route, no buffer, refused: the receiver will miss the heartbeat

    def _receive(self) -> None:
        for _ in range(_BURST):
            try:
                # no limit: it does not block: the socket is non-blocking
                data, source = self._socket.recvfrom(MESSAGE_BYTES + 1)
            except BlockingIOError:
                return
            except OSError:
                continue  # an earlier heartbeat was refused: no process listens there any more
            if len(data) == MESSAGE_BYTES:
                self._take(source[:2], data)

    def _take(self, source: tuple[str, int], data: bytes) -> None:
        """Hear a heartbeat, unless it is forged."""
        signed, mac = data[: _SIGNED.size], data[_SIGNED.size :]
        magic, sender, receiver, count, newest, reaching, *doubts = _SIGNED.unpack(signed)
        sent = (magic, receiver) == (_MAGIC, self._rank)
        if sent and hmac.compare_digest(mac, self._mac(signed)):
            said = Said(newest, reaching, tuple(host for host in doubts if host != _NOBODY))
            if self.hear(sender, count, said, time.monotonic()):
                self._sources[sender] = source

    def _filter(self) -> None:
        """Let the kernel drop other datagrams than those of the hosts, as long as all are heard: one that is not may have
        got another address."""
        all_heard = self._sources.keys() == self.known() and not self.silent()
        passed = frozenset(self._sources.values()) if all_heard else None
        if passed != self._passed:
            self._passed = passed
            socket_tracker.accept_only(self._socket, passed)

    def _message(self, sender: int, receiver: int, count: int, said: Said) -> bytes:
        doubts = (*said.doubts, *[_NOBODY] * DOUBTS)[:DOUBTS]
        signed = _SIGNED.pack(_MAGIC, sender, receiver, count, said.newest, said.reaching, *doubts)
        return signed + self._mac(signed)

    def _mac(self, signed: bytes) -> bytes:
        return self._key.mac(signed)[:MAC_BYTES]
