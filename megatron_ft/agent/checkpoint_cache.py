"""Copies of checkpoints in the memory of this host, from its agent's side: passed on to another host, and handed out.

Every rank that writes a part leaves a copy on its own host. The agent passes it on to one other host, of another failure
domain if there is one, so the loss of a host loses no copy; and it gives copies to ranks of other hosts that start. Ranks
ask their own host first, then the others, then the disk.

Failures it assumes: the other host, or anything on the way, is gone or slow. Then there is one copy less.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from megatron_ft.config import RunConfig
from megatron_ft.launch.hosts import Hosts
from megatron_ft.runtime import wire
from megatron_ft.runtime.checkpoint.memory import GB, Shelf
from megatron_ft.runtime.copies import Address, receive_into

_LOOK_S = 1.0
_TIMEOUT_S = 60.0


class Copies:
    """One host's. ``partner``: where a copy is passed on to, just now; None: nowhere."""

    def __init__(self, shelf: Shelf, address: str, run_id: str) -> None:
        self._shelf, self._run_id = shelf, run_id
        self._token = wire.token(run_id)
        self._socket = wire.listen(address)
        self._stop = threading.Event()
        self._passed: dict[str, Address] = {}
        self._received: set[str] = set()
        self.partner: Callable[[], Address | None] = lambda: None
        for work in (self._serve, self._mirror):
            threading.Thread(target=work, name="megatron_ft-copies", daemon=True).start()

    @property
    def port(self) -> int:
        return self._socket.getsockname()[1]

    def close(self, over: bool) -> None:
        """This host leaves; ``over``: nobody will go on from these checkpoints."""
        self._stop.set()
        wire.hang_up(self._socket)
        if over:
            self._shelf.clear()

    # --- handing out and taking in ------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._stop.is_set():
            try:
                end, _ = self._socket.accept()
            except OSError:
                if self._stop.is_set():
                    return
                self._stop.wait(_LOOK_S)  # no file descriptor left, say
                continue
            threading.Thread(target=self._answer, args=(end,), name="megatron_ft-copy", daemon=True).start()

    def _answer(self, end: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RuntimeError), end:
            end.settimeout(_TIMEOUT_S)
            words = wire.hear(end)
            if words["token"] != self._token:
                return
            digest, size = str(words["sha256"]), int(words["bytes"])
            if words["what"] == "want":
                path = self._shelf.find(digest, size)
                wire.say(end, {"there": path is not None})
                if path is not None:
                    wire.send(end, [_content(path, size)], lambda _: None)
            elif words["what"] == "give":
                there = self._shelf.find(digest, size) is not None
                wire.say(end, {"there": there})
                if not there:
                    self._received.add(digest)
                    receive_into(end, self._shelf, digest, size)

    # --- passing on ---------------------------------------------------------------------------------------------------

    def _mirror(self) -> None:
        while not self._stop.wait(_LOOK_S):
            partner = self.partner()
            here = {path.name: path for path in self._shelf.listed()}
            self._passed = {digest: where for digest, where in self._passed.items() if digest in here}
            for digest, path in here.items():
                if partner is not None and digest not in self._received and self._passed.get(digest) != partner:
                    with contextlib.suppress(OSError, ValueError, KeyError, RuntimeError):
                        self._give(path, digest, partner)
                        self._passed[digest] = partner

    def _give(self, path: Path, digest: str, partner: Address) -> None:
        size = path.stat().st_size
        words = {"what": "give", "sha256": digest, "bytes": size}
        with wire.call(*partner, self._run_id, words) as end:
            end.settimeout(_TIMEOUT_S)
            if not wire.hear(end)["there"]:
                wire.send(end, [_content(path, size)], lambda _: None)


def prepare(config: RunConfig, hosts: Hosts) -> Copies | None:
    """What this host does, if the run wants copies at all."""
    settings = config.fault_tolerance.checkpoint
    if not settings.directory or not settings.memory_gb:
        return None
    made = Copies(Shelf(settings.directory, settings.memory_gb * GB), hosts.place.address, hosts.run_id)
    hosts.copies_port, made.partner = made.port, hosts.copies_partner
    return made


def _content(path: Path, size: int) -> torch.Tensor:
    return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
