"""Beats between the agents of a run: one small datagram to the other hosts, ten times a second (``core.links`` judges, and
says to which where they are many).

An agent has nothing else to do, so its beat says that its host and the way from it are there, however busy the ranks are.
One thread sends and receives; it never touches the control store, which may block.

Failures it assumes: datagrams are lost, doubled, late, or somebody else's (those of another run are dropped).
"""

from __future__ import annotations

import queue
import select
import socket
import struct
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_ft.core import links

BEAT_S = 0.1
_MESSAGE = struct.Struct("!4s12sI")
_MAGIC = b"mft1"
_BURST = 1000


@dataclass(frozen=True)
class Change:
    """Host ``rank`` is silent for ``silent_s``, or is heard again (``heard``)."""

    rank: int
    silent_s: float
    heard: bool


class Beats:
    """This host's side of it. ``address``: the one the other hosts reach it by; it beats from the first :meth:`add` on.

    ``least_s`` may be changed at any time: silences shorter than that never count.
    """

    def __init__(self, address: str, rank: int, run_id: str, least_s: float) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        self._socket.bind((address, 0))
        self._socket.setblocking(False)
        self._rank, self.least_s = rank, least_s
        self._run = run_id.encode("ascii")
        self._message = _MESSAGE.pack(_MAGIC, self._run, rank)
        self._addresses: dict[int, tuple[str, int]] = {}
        self._heard: dict[int, int] = {}
        self._peers: dict[int, links.Peer] = {}
        self._changes: queue.SimpleQueue[Change] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run_on, name="megatron_ft-beats", daemon=True)

    @property
    def port(self) -> int:
        return self._socket.getsockname()[1]

    def add(self, peers: Mapping[int, tuple[str, int]]) -> None:
        """Beat to these hosts, too, and listen to them. Those that are known already, and this one, are left as they are."""
        new = {rank: address for rank, address in peers.items() if rank != self._rank and rank not in self._peers}
        # Replaced, not changed: the thread may be at work with the old ones.
        self._heard = {**self._heard, **dict.fromkeys(new, 0)}
        self._peers = {**self._peers, **{rank: links.Peer() for rank in new}}
        self._addresses = {**self._addresses, **new}
        if new and not self._thread.is_alive():
            self._thread.start()

    @property
    def begun(self) -> bool:
        """Whether there is, or was, another host."""
        return bool(self._peers)

    def changes(self) -> list[Change]:
        """What has changed since the last call."""
        found = []
        while not self._changes.empty():
            found.append(self._changes.get())
        return found

    def anybody_heard(self) -> bool:
        """Whether any other host is heard just now."""
        return any(not peer.lost for peer in self._peers.values())

    def known(self) -> set[int]:
        """The hosts that are listened to."""
        return set(self._peers)

    def silent(self) -> set[int]:
        """The hosts that are not heard just now."""
        return {rank for rank, peer in self._peers.items() if peer.lost}

    def silences(self) -> list[Change]:
        """For how long each of them has not been heard, as :meth:`changes` would say it now."""
        return [Change(rank, peer.silent_s, heard=False) for rank, peer in self._peers.items() if peer.lost]

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self._socket.close()

    def _run_on(self) -> None:
        due = time.monotonic()
        while not self._stop.is_set():
            self._send()
            due = max(due + BEAT_S, time.monotonic())
            while (rest := due - time.monotonic()) > 0:
                if select.select([self._socket], [], [], rest)[0]:
                    self._receive()
            self._receive()
            self._judge(time.monotonic())

    def _send(self) -> None:
        for address in self._addresses.values():
            try:
                self._socket.sendto(self._message, address)
            except OSError:
                continue  # no route, no buffer, refused: the other side will miss it

    def _receive(self) -> None:
        for _ in range(_BURST):
            try:
                data = self._socket.recv(64)
            except BlockingIOError:
                return
            except OSError:
                continue  # an earlier beat was refused: nobody listens there any more
            if len(data) == _MESSAGE.size:
                magic, run, rank = _MESSAGE.unpack(data)
                if magic == _MAGIC and run == self._run and rank in self._heard:
                    self._heard[rank] += 1

    def _judge(self, now: float) -> None:
        for rank, before in self._peers.items():
            after = links.listen(before, self._heard[rank], now, self.least_s)
            self._peers[rank] = after
            if after.lost != before.lost:
                silent_s = before.silent_s if before.lost else after.silent_s
                self._changes.put(Change(rank, silent_s, heard=before.lost))
