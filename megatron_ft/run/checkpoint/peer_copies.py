"""Fetch copies of checkpoint files from the memory of hosts, which ``host.checkpoint_cache`` serves.

Failures assumed: a host is gone, or sends other bytes. Then the next host is asked, and finally the file is read from
disk.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from megatron_ft.config.rank_env import RankEnvironment
from megatron_ft.run.checkpoint.memory_copies import GB, Locate, ReplicaCache, nowhere
from megatron_ft.run.collectives import framing
from megatron_ft.utils.auth.secret import Key

Address = tuple[str, int]
COPIES = "copies"
"""Purpose of the key that both ends of these connections derive."""


def of(env: RankEnvironment) -> Locate:
    """Return the function with which this rank finds copies."""
    settings = env.config.fault_tolerance.checkpoint
    if not settings.memory_gb:
        return nowhere
    shelf = ReplicaCache(settings.directory, settings.memory_gb * GB)
    return partial(fetch, shelf, env.copies, env.key)


def fetch(shelf: ReplicaCache, others: Sequence[Address], key: Key, digest: str, size: int) -> Path | None:
    """Return the path of a copy in this host's memory, fetched from another host if need be; None if there is none."""
    for address, port in others if shelf.find(digest, size) is None else ():
        if _ask(address, port, shelf, key, digest, size):
            break
    return shelf.find(digest, size)


def _ask(address: str, port: int, shelf: ReplicaCache, key: Key, digest: str, size: int) -> bool:
    try:
        with framing.call(address, port, key.of(COPIES), {"what": "want", "sha256": digest, "bytes": size}) as end:
            return framing.receive_message(end)["there"] and receive_into(end, shelf, digest, size)
    except (OSError, ValueError, KeyError, RuntimeError):
        return False


def receive_into(end: socket.socket, shelf: ReplicaCache, digest: str, size: int) -> bool:
    """Receive ``size`` bytes, and store them as a copy. Returns whether they have the sha256 ``digest``."""
    content = torch.empty(size, dtype=torch.uint8)
    framing.receive(end, [content])
    return shelf.put([content.numpy().data], digest, size)
