"""Stand-ins for groups and agents, thousands in one process: each says to a real control store what a real one says, over as
many connections as a real one has for it (``scale.py`` starts this).

They speak TCPStore's own protocol (as torch 2.13 does), because a torch client needs a thread for each. A group's rank waits
for notices on one connection; on the other its leader reports when a member has died, and reads the view when it is told of
one. An agent waits likewise, and asks for the newest view if a notice is about one, as ``host.agent_client`` does.
Prints a line ``ready``, and for each epoch one with the times at which its groups had the view.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import struct
import sys
import time
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
from megatron_ft import codec
from megatron_ft.core.protocol import signals
from megatron_ft.run.store import NOTICES
from megatron_ft.run.store.client import report_collection
from megatron_ft.types import Report, View
from megatron_ft.utils.auth import secret

_VALIDATE, _GET, _CHECK, _WAIT, _APPEND, _PING = 0, 3, 5, 6, 9, 13
_MAGIC = 0x3C85F7CE
_AT_ONCE = 100
"""The number of stand-ins that connect at a time: the server's queue is not endless."""

Script = Generator[Any, Any, None]
"""A generator that yields (request, reader of the answer), and is sent the answer; it yields None to wait for a
wake-up."""


class Line(asyncio.Protocol):
    """One connection to the store, and the script that talks on it."""

    def __init__(self, run_id: str, script: Script) -> None:
        self._prefix, self._script = f"/{run_id}/", script
        self._buffer, self._wanted = b"", ""
        self._poked, self._parked = False, False
        self.requests = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        transport.write(struct.pack("<BIBI", _VALIDATE, _MAGIC, _PING, 7))
        self._wanted = "ping"

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while self._wanted and (answer := self._answer()) is not None:
            greeted, self._wanted = self._wanted == "ping", ""
            self._go(None if greeted else answer)

    def _answer(self) -> bytes | None:
        """Return the whole answer, once it is there."""
        text = self._wanted == "text"
        if text and len(self._buffer) < 8:
            return None
        size = 8 + struct.unpack_from("<Q", self._buffer)[0] if text else {"ping": 4, "byte": 1}[self._wanted]
        if len(self._buffer) < size:
            return None
        answer, self._buffer = self._buffer[:size], self._buffer[size:]
        return answer[8:] if text else answer

    def poke(self) -> None:
        """Report an event: go on, if the script waits for one; otherwise once it does."""
        self._poked = True
        if self._parked:
            self._go(None)

    def _go(self, answer: bytes | None) -> None:
        """Go on with the script until it waits for an answer, or for an event."""
        self._parked = False
        while True:
            asked, answer = self._script.send(answer), None
            if asked is None and not self._poked:
                self._parked = True
                return
            self._poked = self._poked and asked is not None
            if asked is not None:
                kind, key, *value = asked
                self._transport.write(_request(kind, [self._prefix + key, *value]))
                self.requests += 1
                self._wanted = {_GET: "text", _CHECK: "byte", _WAIT: "byte"}.get(kind, "")
                if self._wanted:
                    return


def _request(kind: int, texts: list[str]) -> bytes:
    head = struct.pack("<B", kind)
    if kind in (_CHECK, _WAIT):
        head += struct.pack("<Q", len(texts))
    return head + b"".join(struct.pack("<Q", len(text)) + text for text in (text.encode() for text in texts))


def _get(key: str) -> Generator[Any, Any, str | None]:
    """Get as ``run.store.tcp_store`` does: a question for a missing key would wait for it."""
    if (yield (_CHECK, key)) != b"\0":
        return None
    return _value((yield (_GET, key)))


def _value(text: bytes) -> Any:
    """Return a value without its HMAC, which a real client verifies in 10 us, on a processor of its own."""
    return json.loads(text.partition(b" ")[2])["value"]


def _notices(heard: Any) -> Script:
    """Read the notice that waits in the store as ``run.store.watcher`` does."""
    index = 0
    while True:
        yield (_WAIT, f"{NOTICES}/{index}")
        raw = _value((yield (_GET, f"{NOTICES}/{index}")))
        index += 1
        heard(signals.from_json(raw))


class Group:
    """One group: the requests of its leader's thread while an epoch changes."""

    def __init__(self, me: int, view: View, crowd: Crowd) -> None:
        self._me, self._view, self._crowd = me, view, crowd
        self._dead, self._broken, self._agreed, self._reported = False, False, 0, -1
        self.leader: Line | None = None

    def on_signal(self, signal: signals.Signal) -> None:
        match signal:
            case signals.RankExited(exit=exit_):
                self._dead |= exit_.group == self._me
                self._broken = True
            case signals.ViewAgreed(epoch=epoch):
                self._agreed = epoch
        if not self._dead:
            self.leader.poke()

    def script(self) -> Script:
        while True:
            yield None
            epoch = self._view.epoch
            if self._broken and self._reported < epoch:
                self._reported, self._broken = epoch, False
                collection, run = report_collection(epoch), self._crowd.run_id
                text = json.dumps({"value": codec.encode(Report(epoch, self._me, self._view.step))})
                mac = self._crowd.key.mac(f"{run}/{collection}/{self._me}".encode(), text.encode())[: secret.MAC_BYTES]
                yield (_APPEND, collection, f"{self._me}\t{mac.hex()} {text}\n")
                yield (_CHECK, report_collection(epoch))
            if self._agreed > epoch:
                raw = yield from _get(f"view/{epoch + 1}")
                # A real one makes a View of it, in 2 ms for 2048 groups, each on a processor of its own.
                self._view = replace(self._view, epoch=raw["epoch"], step=raw["step"])
                self._crowd.has(self._view.epoch)


class Agent:
    """One agent: the requests of a host's agent after every notice about a view."""

    def __init__(self) -> None:
        self._agreed = False
        self.voice: Line | None = None

    def on_signal(self, signal: signals.Signal) -> None:
        if isinstance(signal, signals.ViewAgreed):
            self._agreed = True
            self.voice.poke()

    def script(self) -> Script:
        epoch = 0
        while True:
            yield None
            while self._agreed:
                self._agreed = False
                while (raw := (yield from _get(f"view/{epoch + 1}"))) is not None:
                    epoch = raw["epoch"]


class Crowd:
    """All stand-ins of this process."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._lines = options, []
        self._times: dict[int, list[float]] = {}
        self.run_id, self.key = options.run, secret.here().of("store", options.run)

    def has(self, epoch: int) -> None:
        """Count one more group that knows that view, or one more listener that knows of it."""
        times, options = self._times.setdefault(epoch, []), self._options
        times.append(time.time())
        if len(times) == (options.listeners or options.groups - options.dying * epoch):
            self._say(epoch=epoch, times=times, requests=sum(line.requests for line in self._lines))

    async def run(self) -> None:
        options = self._options
        view = View.from_json(json.loads(options.view))
        lines: list[Line] = []
        for number in range(options.groups):
            group = Group(options.first + number, view, self)
            group.leader = Line(options.run, group.script())
            lines += [group.leader, Line(options.run, _notices(group.on_signal))]
        for _ in range(options.agents):
            agent = Agent()
            agent.voice = Line(options.run, agent.script())
            lines += [agent.voice, Line(options.run, _notices(agent.on_signal))]
        for _ in range(options.listeners):
            lines.append(Line(options.run, _notices(lambda signal: self.has(signal.epoch))))
        self._lines = lines
        host, _, port = options.store.rpartition(":")
        loop = asyncio.get_running_loop()
        for begin in range(0, len(lines), _AT_ONCE):
            some = lines[begin : begin + _AT_ONCE]
            await asyncio.gather(*(loop.create_connection(lambda line=line: line, host, int(port)) for line in some))
        self._say(ready=len(lines))
        await loop.run_in_executor(None, sys.stdin.read)  # until the parent closes the input

    @staticmethod
    def _say(**fields: Any) -> None:
        print(json.dumps(fields), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--store", required=True, help="HOST:PORT")
    parser.add_argument("--run", required=True)
    parser.add_argument("--view", required=True, help="the first one, as JSON")
    parser.add_argument("--first", type=int, default=0, help="number of the first group")
    parser.add_argument("--groups", type=int, default=0)
    parser.add_argument("--dying", type=int, default=0, help="the number of these groups that die in each epoch")
    parser.add_argument("--agents", type=int, default=0)
    parser.add_argument("--listeners", type=int, default=0, help="ranks that do nothing but listen")
    asyncio.run(Crowd(parser.parse_args()).run())


if __name__ == "__main__":
    main()
