"""Host 0's end of all lines: who has come, who is gone, and one question to many hosts at once.

Failures it assumes: hosts do not come, vanish, freeze or do not answer; strangers and hosts with other options come. None
of them makes a question last longer than its time.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import queue
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from megatron_ft.doctor.line import SILENCE_S, Line, Message
from megatron_ft.doctor.meeting import Meeting

_HELLO_S = 5.0
_LOOK_S = 0.1


class Hub:
    """``cards``: of the hosts that have come. ``gone``: why a host takes no part any more. ``calling``: those that are
    heard by datagram."""

    def __init__(self, listener: socket.socket, meeting: Meeting, token: str) -> None:
        self.cards: dict[int, dict[str, Any]] = {}
        self.gone: dict[int, str] = {}
        self.calling: set[int] = set()
        self._listener, self._meeting, self._token = listener, meeting, token
        self._lines: dict[int, Line] = {}
        self._lock = threading.Lock()
        self._inbox: queue.SimpleQueue[tuple[int, Message | None]] = queue.SimpleQueue()
        self._numbers = itertools.count(1)
        self._open, self._listened = True, 0.0
        threads = [self._accept]
        with contextlib.suppress(OSError):  # another program has the port for datagrams
            self._ear = socket.socket(listener.family, socket.SOCK_DGRAM)
            self._ear.bind(listener.getsockname())
            threads.append(self._hear)
        for what in threads:
            threading.Thread(target=what, name="megatron_ft-doctor-hub", daemon=True).start()

    @property
    def present(self) -> list[int]:
        """Those that have come and are not gone."""
        with self._lock:
            return sorted(self._lines.keys() - self.gone.keys())

    def meet(self, patience_s: float) -> None:
        """Until all are there, or that time is over. Who comes later is sent away."""
        end = time.monotonic() + patience_s
        while len(self._lines) < self._meeting.hosts and time.monotonic() < end:
            time.sleep(_LOOK_S)
        with self._lock:
            self._open = False

    def ask(
        self,
        orders: Mapping[int, Message],
        timeout_s: float,
        what: str,
        enough: Callable[[Message], bool] | None = None,
    ) -> dict[int, Message]:
        """Everybody's answer. Who does not answer in time is gone, and ``what`` it was doing is said.

        ``enough``: after such an answer the others are told to stop, and answer with what they have.
        """
        number = next(self._numbers)
        waiting = set(orders) & set(self.present)
        for rank in sorted(waiting):
            self._lines[rank].send({**orders[rank], "number": number})
        answers: dict[int, Message] = {}
        end = time.monotonic() + timeout_s
        while waiting:
            try:
                rank, message = self._inbox.get(timeout=_LOOK_S)
            except queue.Empty:
                rank, message = -1, {}
            if message is None:
                self._lose(rank, f"its doctor has ended ({what})")
            elif message.get("number") == number and rank in waiting:
                answers[rank] = message
                waiting.discard(rank)
                if enough is not None and enough(message):
                    enough = None
                    for other in waiting:
                        self._lines[other].send({"stop": number})
            self._listen(what)
            waiting -= self.gone.keys()
            if time.monotonic() > end:
                for other in waiting:
                    self._lose(other, f"no answer within {timeout_s:g} s ({what})")
                waiting.clear()
        return answers

    def end(self, code: int, line: str) -> None:
        """Tell everybody how it ends."""
        for rank in self.present:
            self._lines[rank].send({"end": code, "line": line})

    def close(self) -> None:
        self._listener.close()
        for line in list(self._lines.values()):
            line.close()

    def _listen(self, what: str) -> None:
        """Whether everybody is still heard."""
        if time.monotonic() < self._listened + _LOOK_S:
            return
        self._listened = time.monotonic()
        for rank in self.present:
            if self._lines[rank].silent():
                self._lose(rank, f"silent for {SILENCE_S:g} s ({what}): frozen, or cut off")

    def _lose(self, rank: int, why: str) -> None:
        if rank not in self.gone:
            self.gone[rank] = why
            self._lines[rank].send({"end": 1, "line": f"host 0 has gone on without this host: {why}"})
            self._lines[rank].close()

    def _accept(self) -> None:
        while True:
            try:
                end, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._welcome, args=(end,), name="megatron_ft-doctor-hub", daemon=True).start()

    def _welcome(self, end: socket.socket) -> None:
        try:
            line = Line(end)
            hello = line.next(_HELLO_S)
        except (OSError, queue.Empty):
            end.close()
            return
        if hello is None or "hello" not in hello:
            line.close()
            return
        with self._lock:
            rank = hello["hello"]
            why = self._unwanted(rank, hello)
            if not why:
                self._lines[rank], self.cards[rank] = line, hello.get("card", {})
                line.take = partial(self._arrived, rank)
        line.send({"no": why} if why else {"welcome": True, "token": self._token})
        if why:
            line.close()

    def _arrived(self, rank: int, message: Message | None) -> None:
        self._inbox.put((rank, message))

    def _unwanted(self, rank: int, hello: Message) -> str:
        """Why it cannot take part; empty if it can."""
        hosts = self._meeting.hosts
        if hello.get("job") != self._meeting.job:
            return f"this host's --job-id is {hello.get('job')}, host 0's is {self._meeting.job}; give all hosts the same"
        if hello.get("hosts") != hosts or rank not in range(hosts):
            return f"this host has --hosts {hello.get('hosts')}, host 0 has {hosts}; give all hosts the same"
        if rank in self._lines:
            card = self.cards[rank]
            return f"host {rank} is there already: {card['name']} ({card['address']}); give each its own --host-rank"
        return "" if self._open else "it comes too late, host 0 has begun without it; start it on all hosts at once"

    def _hear(self) -> None:
        while self._listener.fileno() >= 0:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                said = json.loads(self._ear.recv(2048))
                if said["job"] == self._meeting.job:
                    self.calling.add(int(said["rank"]))


def to_all(hosts: Collection[int], order: Message) -> dict[int, Message]:
    """The same order for all."""
    return dict.fromkeys(hosts, order)
