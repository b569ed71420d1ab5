"""The line between host 0 and another host: JSON objects, one a line, and a beat twice a second either way.

What is asked and answered may take minutes; the beats tell a host that is at work from one that is frozen or cut off.

Failures it assumes: the other end vanishes, freezes, or is a stranger who talks something else.
"""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

from megatron_ft.core import links

SILENCE_S = 10.0
"""Who is silent for longer is frozen, or cut off."""
_BEAT_S = 0.5
_SEND_S = 5.0
_LONGEST = 1 << 24

Message = dict[str, Any]


class Line:
    """One end. What arrives is given to :attr:`take`, by another thread, with the time (``arrived``); None: the line has
    ended. Until somebody else wants it, it waits for :meth:`next`."""

    def __init__(self, end: socket.socket) -> None:
        end.settimeout(None)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A send blocks when the other end is frozen and its buffers are full. Receiving has no limit: beats say who lives.
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(_SEND_S))
        self.address, self.peer = end.getsockname()[0], end.getpeername()[0]
        self._waiting: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self.take: Callable[[Message | None], None] = self._waiting.put
        self.stopped: Any = None
        """The number of the order that the other end wants no more."""
        self._end, self._lock = end, threading.Lock()
        self._beats, self._looked = 0, links.Peer()
        for what in (self._read, self._beat):
            threading.Thread(target=what, name="megatron_ft-doctor-line", daemon=True).start()

    def send(self, message: Message) -> bool:
        """False where nobody can be told anything any more."""
        data = json.dumps(message).encode() + b"\n"
        try:
            with self._lock:
                self._end.sendall(data)
        except OSError:
            self.close()  # half a message may be out: nothing after it would be understood
            return False
        return True

    def silent(self) -> bool:
        """Whether nothing was heard for too long. To be asked every tenth of a second or so; other time does not count."""
        self._looked = links.listen(self._looked, self._beats, time.monotonic(), SILENCE_S)
        return self._looked.lost

    def next(self, timeout_s: float) -> Message | None:
        """The next message; None where the line has ended. Raises ``queue.Empty``."""
        return self._waiting.get(timeout=timeout_s)

    def close(self) -> None:
        """Any thread, any number of times."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)

    def _beat(self) -> None:
        while self.send({"beat": True}):
            time.sleep(_BEAT_S)

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError), self._end, self._end.makefile("rb") as lines:
            while (data := lines.readline(_LONGEST)).endswith(b"\n"):
                arrived, message = time.time(), json.loads(data)
                if not isinstance(message, dict):
                    break
                self._beats += 1
                if "stop" in message:
                    self.stopped = message["stop"]
                elif "beat" not in message:
                    self.take({**message, "arrived": arrived})
        self.take(None)


def _timeval(seconds: float) -> bytes:
    return struct.pack("@ll", int(seconds), 0)
