"""Beats between the agents of a run: one small datagram to the other hosts, ten times a second
(``core.detection.heartbeats`` judges them, ``core.detection.link_detector`` chooses the receivers where hosts are many).

An agent has nothing else to do, so its beat shows that its host and the way from it work, however busy the ranks are.
One thread sends and receives; it never touches the control store, which may block.

A beat also carries the newest claim that its host knows, and whether that host reaches the control store
(``core.lifecycle.store_failover``). Every beat carries a counter and an HMAC with the run's secret, over all that and
the numbers of both hosts. A beat that another process sends, or repeats, is dropped. While all hosts are heard, the kernel
drops what comes from elsewhere than their last beats: a flood of datagrams would fill the socket's buffer.

Failures it assumes: datagrams are lost, doubled, late, replayed or forged, and come from other addresses than before.
"""

from __future__ import annotations

import hmac
import queue
import socket
import struct
import threading
import time
from collections.abc import Mapping

from megatron_ft.auth.secret import MAC_BYTES, Key
from megatron_ft.core.detection.heartbeats import Change, Listener, Said
from megatron_ft.utils import file_descriptors, socket_tracker
from megatron_ft.utils.vital_thread import VitalThread

BEAT_S = 0.1
_MESSAGE = struct.Struct(f"!4sIQi?{MAC_BYTES}s")
_SIGNED = struct.Struct("!IIQi?")
_MAGIC = b"mft3"
_BURST = 1000


class HeartbeatService(Listener):
    """This host's side of the beats. ``address``: the one by which the other hosts reach it; it beats from the first
    :meth:`add` on. ``key``: of the run.
    """

    def __init__(self, address: str, rank: int, key: Key, least_s: float) -> None:
        super().__init__(least_s)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        self._socket.bind((address, 0))
        self._socket.setblocking(False)
        self._rank, self._key = rank, key.of("beat")
        self.says = Said()
        """The content of this host's beats; may be replaced at any time."""
        self._count = 0
        self._addresses: dict[int, tuple[str, int]] = {}
        self._sources: dict[int, tuple[str, int]] = {}
        """Where the heartbeats of each host come from: on some networks another address than they are sent to."""
        self._passed: frozenset[tuple[str, int]] | None = None
        """The sources whose datagrams the kernel passes on; None: all."""
        self._changes: queue.SimpleQueue[Change] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._failed: list[BaseException] = []
        self._thread = VitalThread(self._run_on, "megatron_ft-beats", failed=self._failed.append)

    @property
    def port(self) -> int:
        return self._socket.getsockname()[1]

    def add(self, peers: Mapping[int, tuple[str, int]]) -> None:
        """Send beats to these hosts, too, and listen to them. Known hosts, and this one, are skipped."""
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
        due = time.monotonic()
        # no limit: a thread of its own; whoever has started it tells it to stop
        while not self._stop.is_set():
            self._send()
            due = max(due + BEAT_S, time.monotonic())
            while (rest := due - time.monotonic()) > 0:
                if file_descriptors.readable(self._socket, rest):
                    self._receive()
            self._receive()
            for change in self.look(time.monotonic()):
                self._changes.put(change)
            self._filter()

    def _send(self) -> None:
        self._count += 1
        says = self.says
        for rank, address in self._addresses.items():
            mac = self._mac(self._rank, rank, self._count, says)
            message = _MESSAGE.pack(_MAGIC, self._rank, self._count, says.newest, says.reaching, mac)
            try:
                self._socket.sendto(message, address)
            except OSError:
                continue  # no route, no buffer, refused: the receiver will miss the beat

    def _receive(self) -> None:
        for _ in range(_BURST):
            try:
                # no limit: it does not block: the socket is non-blocking
                data, source = self._socket.recvfrom(64)
            except BlockingIOError:
                return
            except OSError:
                continue  # an earlier beat was refused: no process listens there any more
            if len(data) == _MESSAGE.size:
                self._take(source[:2], *_MESSAGE.unpack(data))

    def _take(
        self, source: tuple[str, int], magic: bytes, rank: int, count: int, newest: int, reaching: bool, mac: bytes
    ) -> None:
        """Hear a beat, unless it is forged."""
        said = Said(newest, reaching)
        forged = magic != _MAGIC or not hmac.compare_digest(mac, self._mac(rank, self._rank, count, said))
        if not forged and self.hear(rank, count, said):
            self._sources[rank] = source

    def _filter(self) -> None:
        """Let the kernel drop other datagrams than those of the hosts, as long as all are heard: one that is not may have
        got another address."""
        all_heard = self._sources.keys() == self.known() and not self.silent()
        passed = frozenset(self._sources.values()) if all_heard else None
        if passed != self._passed:
            self._passed = passed
            socket_tracker.accept_only(self._socket, passed)

    def _mac(self, sender: int, receiver: int, count: int, said: Said) -> bytes:
        return self._key.mac(_SIGNED.pack(sender, receiver, count, said.newest, said.reaching))[:MAC_BYTES]
