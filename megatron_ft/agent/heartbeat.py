"""Beats between the agents of a run: one small datagram to the other hosts, ten times a second
(``core.detection.link_detector`` judges, and chooses the receivers where hosts are many).

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
from dataclasses import dataclass

from megatron_ft.auth.secret import MAC_BYTES, Key
from megatron_ft.core.detection import link_detector
from megatron_ft.utils import file_descriptors, socket_tracker
from megatron_ft.utils.vital_thread import VitalThread

BEAT_S = 0.1
_MESSAGE = struct.Struct(f"!4sIQi?{MAC_BYTES}s")
_SIGNED = struct.Struct("!IIQi?")
_MAGIC = b"mft3"
_BURST = 1000


@dataclass(frozen=True)
class Said:
    """The content of a beat: the number of the newest claim known to the sender (-1: none), and whether the sender
    hears the control store's host, or is answered by the store."""

    newest: int = -1
    reaching: bool = False


@dataclass(frozen=True)
class Change:
    """Host ``rank`` is silent for ``silent_s``, or is heard again (``heard``)."""

    rank: int
    silent_s: float
    heard: bool


@dataclass
class _Other:
    """Another host as the thread knows it.

    Attributes:
        address: where beats are sent to; on some networks beats come from another one, ``source``.
        count: the highest counter that was received from it.
        beats: the number of its beats that counted.
        said: the content of the last one.
        peer: what is concluded from them.
    """

    address: tuple[str, int]
    source: tuple[str, int] | None = None
    count: int = 0
    beats: int = 0
    said: Said | None = None
    peer: link_detector.Peer = link_detector.Peer()


class HeartbeatService:
    """This host's side of the beats. ``address``: the one by which the other hosts reach it; it beats from the first
    :meth:`add` on.

    ``least_s`` may be changed at any time: silences shorter than that never count. ``key``: of the run.
    """

    def __init__(self, address: str, rank: int, key: Key, least_s: float) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        self._socket.bind((address, 0))
        self._socket.setblocking(False)
        self._rank, self.least_s = rank, least_s
        self._key = key.of("beat")
        self.says = Said()
        """The content of this host's beats; may be replaced at any time."""
        self._count = 0
        self._others: dict[int, _Other] = {}
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
        new = {rank: _Other(address) for rank, address in peers.items() if rank not in (self._rank, *self._others)}
        self._others = {**self._others, **new}  # replaced, not changed: the thread may be using the old one
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

    def known(self) -> set[int]:
        """Return the hosts that are, or were, listened to."""
        return set(self._others)

    def silent(self) -> set[int]:
        """Return the hosts that are not heard now."""
        return {rank for rank, other in self._others.items() if other.peer.lost}

    def said(self) -> dict[int, Said]:
        """Return the content of the newest beats of the hosts that are heard now; hosts never heard are left out."""
        return {rank: one.said for rank, one in self._others.items() if one.said is not None and not one.peer.lost}

    def silences(self) -> list[Change]:
        """Return for how long each silent host has not been heard, as :meth:`changes` would give it now."""
        silent = {rank: other.peer for rank, other in self._others.items() if other.peer.lost}
        return [Change(rank, peer.silent_s, heard=False) for rank, peer in silent.items()]

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
            self._judge(time.monotonic())
            self._filter()

    def _send(self) -> None:
        self._count += 1
        says = self.says
        for rank, other in self._others.items():
            mac = self._mac(self._rank, rank, self._count, says)
            message = _MESSAGE.pack(_MAGIC, self._rank, self._count, says.newest, says.reaching, mac)
            try:
                self._socket.sendto(message, other.address)
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
        """Count a beat, unless it is forged, or not newer than the last one of that host."""
        said, other = Said(newest, reaching), self._others.get(rank)
        if magic != _MAGIC or other is None or count <= other.count:
            return
        if hmac.compare_digest(mac, self._mac(rank, self._rank, count, said)):
            other.count, other.said, other.source = count, said, source
            other.beats += 1

    def _filter(self) -> None:
        """Let the kernel drop other datagrams than those of the hosts, as long as all are heard: one that is not may have
        got another address."""
        sources = [other.source for other in self._others.values() if other.source is not None]
        passed = frozenset(sources) if len(sources) == len(self._others) and not self.silent() else None
        if passed != self._passed:
            self._passed = passed
            socket_tracker.accept_only(self._socket, passed)

    def _mac(self, sender: int, receiver: int, count: int, said: Said) -> bytes:
        return self._key.mac(_SIGNED.pack(sender, receiver, count, said.newest, said.reaching))[:MAC_BYTES]

    def _judge(self, now: float) -> None:
        for rank, other in self._others.items():
            before = other.peer
            after = other.peer = link_detector.listen(before, other.beats, now, self.least_s)
            if after.lost != before.lost:
                silent_s = before.silent_s if before.lost else after.silent_s
                self._changes.put(Change(rank, silent_s, heard=before.lost))
