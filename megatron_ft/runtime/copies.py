"""How a rank gets copies of checkpoint files out of the memory of hosts (``launch.copies`` hands them out).

Failures it assumes: a host is gone, or sends something else. Then another one is asked, and in the end the disk.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from megatron_ft.runtime import wire
from megatron_ft.runtime.checkpoint.memory import GB, Locate, Shelf, nowhere
from megatron_ft.runtime.environment import RankEnvironment

Address = tuple[str, int]


def of(env: RankEnvironment) -> Locate:
    """Where this rank finds copies."""
    settings = env.config.fault_tolerance.checkpoint
    if not settings.memory_gb:
        return nowhere
    shelf = Shelf(settings.directory, settings.memory_gb * GB)
    return partial(fetch, shelf, env.copies, env.run_id)


def fetch(shelf: Shelf, others: Sequence[Address], run_id: str, digest: str, size: int) -> Path | None:
    """A copy from this host's memory, or, by way of it, from another's; None where there is none."""
    for address, port in others if shelf.find(digest, size) is None else ():
        if _ask(address, port, shelf, run_id, digest, size):
            break
    return shelf.find(digest, size)


def _ask(address: str, port: int, shelf: Shelf, run_id: str, digest: str, size: int) -> bool:
    try:
        with wire.call(address, port, run_id, {"what": "want", "sha256": digest, "bytes": size}) as end:
            return wire.hear(end)["there"] and receive_into(end, shelf, digest, size)
    except (OSError, ValueError, KeyError, RuntimeError):
        return False


def receive_into(end: socket.socket, shelf: Shelf, digest: str, size: int) -> bool:
    content = torch.empty(size, dtype=torch.uint8)
    wire.receive(end, [content])
    return shelf.put([memoryview(content.numpy())], digest, size)
