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

from megatron_ft.config.schema import RunConfig
from megatron_ft.host.peers import Hosts
from megatron_ft.run.checkpoint.memory_copies import GB, ReplicaCache
from megatron_ft.run.checkpoint.peer_copies import COPIES, Address, receive_into
from megatron_ft.run.collectives import framing
from megatron_ft.utils.auth.handshake import Door, Hello
from megatron_ft.utils.auth.secret import Key
from megatron_ft.utils.console import say
from megatron_ft.utils.vital_thread import described

_LOOK_S = 1.0
_TIMEOUT_S = 60.0


class CheckpointCache:
    """The copies of one host. ``partner``: returns where to pass copies on now, or None; ``key``: the run's."""

    def __init__(self, shelf: ReplicaCache, address: str, key: Key) -> None:
        self._replicas, self._key = shelf, key.of(COPIES)
        listener = framing.listen(address)
        self.port = listener.getsockname()[1]
        self._stop = threading.Event()
        self._passed: dict[str, Address] = {}
        self._received: set[str] = set()
        self.partner: Callable[[], Address | None] = lambda: None
        self._door = Door(listener, self._key, self._answer, "megatron_ft-copy")
        threading.Thread(target=self._mirror, name="megatron_ft-copies", daemon=True).start()

    def close(self, over: bool) -> None:
        """Stop when this host leaves. ``over``: no group will go on from these checkpoints."""
        self._stop.set()
        self._door.close()
        if over:
            self._replicas.clear()

    # --- handing out and taking in ------------------------------------------------------------------------------------

    def _answer(self, end: socket.socket, words: Hello) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RuntimeError), end:
            end.settimeout(_TIMEOUT_S)
            digest, size = str(words["sha256"]), int(words["bytes"])
            if words["what"] == "want":
                path = self._replicas.find(digest, size)
                framing.send_message(end, {"there": path is not None})
                if path is not None:
                    framing.send(end, [_content(path, size)], lambda _: None)
            elif words["what"] == "give":
                there = self._replicas.find(digest, size) is not None
                framing.send_message(end, {"there": there})
                if not there:
                    self._received.add(digest)
                    receive_into(end, self._replicas, digest, size)

    # --- passing on ---------------------------------------------------------------------------------------------------

    def _mirror(self) -> None:
        told = ""
        # no limit: a thread of its own; whoever has started it tells it to stop
        while not self._stop.wait(_LOOK_S):
            try:
                self._pass_on()
            except Exception as error:  # of a bug, too: no other copy would be made
                if (why := described(error)) != told:
                    told = why
                    say(f"passing on copies of checkpoints {why}; it is tried again")

    def _pass_on(self) -> None:
        """Give the partner each copy here that it has not got, unless that came from another host itself."""
        partner = self.partner()
        here = {path.name: path for path in self._replicas.listed()}
        self._passed = {digest: where for digest, where in self._passed.items() if digest in here}
        for digest, path in here.items():
            if partner is not None and digest not in self._received and self._passed.get(digest) != partner:
                with contextlib.suppress(OSError, ValueError, KeyError, RuntimeError):
                    self._give(path, digest, partner)
                    self._passed[digest] = partner

    def _give(self, path: Path, digest: str, partner: Address) -> None:
        size = path.stat().st_size
        words = {"what": "give", "sha256": digest, "bytes": size}
        with framing.call(*partner, self._key, words) as end:
            end.settimeout(_TIMEOUT_S)
            if not framing.receive_message(end)["there"]:
                framing.send(end, [_content(path, size)], lambda _: None)


def prepare(config: RunConfig, hosts: Hosts) -> CheckpointCache | None:
    """Return the copies of this host, or None if the run wants none."""
    settings = config.fault_tolerance.checkpoint
    if not settings.directory or not settings.memory_gb:
        return None
    made = CheckpointCache(ReplicaCache(settings.directory, settings.memory_gb * GB), hosts.place.address, hosts.key)
    hosts.copies_port, made.partner = made.port, hosts.copies_partner
    return made


def _content(path: Path, size: int) -> torch.Tensor:
    return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
