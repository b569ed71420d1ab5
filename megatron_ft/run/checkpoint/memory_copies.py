"""Copies of checkpoint files in the memory of hosts, so that the next start does not wait for a file system.

The name of a copy is the sha256 of its content, which the manifest has, and the content is checked while it is read. So
a copy cannot belong to another checkpoint, and a missing or damaged one costs only a read from disk. Copies are in
shared memory (``/dev/shm``), which outlives the processes of a job, but not the host.

Failures assumed: memory is short, other processes write and delete at the same time, a kill cuts a copy short.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from megatron_ft.utils import shared_file
from megatron_ft.utils.durable_file import CHUNK_BYTES

_MEMORY = Path("/dev/shm")
_NAME = re.compile(r"[0-9a-f]{64}")
GB = 1e9

Locate = Callable[[str, int], Path | None]
"""A function from sha256 and length to the path of a copy, or None."""


class ReplicaCache:
    """This host's copies of the files in one checkpoint directory, at most ``budget`` bytes. The oldest are replaced
    first."""

    def __init__(self, directory: str | Path, budget: float, memory: Path = _MEMORY) -> None:
        name = hashlib.sha256(os.path.realpath(directory).encode()).hexdigest()[:16]
        self.place = memory / f"megatron_ft-{os.getuid()}" / name
        self._budget = budget if memory.is_dir() else 0

    def find(self, digest: str, size: int) -> Path | None:
        """Return the copy of a file with this sha256, or None. Its content is not checked."""
        path = self.place / digest
        try:
            return path if path.stat().st_size == size else None
        except OSError:
            return None

    def take(self, path: Path, digest: str, size: int) -> bool:
        """Copy a file. Returns False where that fails, or where the file has another content."""
        if self.find(digest, size) is not None:
            return True
        try:
            with path.open("rb") as file:
                return self.put(iter(lambda: file.read(CHUNK_BYTES), b""), digest, size)
        except OSError:
            return False

    def put(self, pieces: Iterable[Any], digest: str, size: int) -> bool:
        """Store buffers of bytes as a copy; the result is that of :meth:`take`."""
        if not _NAME.fullmatch(digest) or not self._make_room(size):
            return False
        found = hashlib.sha256()
        try:
            with shared_file.replacing(self.place / digest) as fd:
                for piece in pieces:
                    found.update(piece)
                    shared_file.write_all(fd, piece)
                if found.hexdigest() != digest:
                    raise ValueError("the bytes have another sha256")
        except (OSError, ValueError):
            return False  # memory is full, for example; a copy is optional
        return True

    def listed(self) -> list[Path]:
        """Return all copies, the oldest first."""
        found = []
        with contextlib.suppress(OSError):
            for entry in os.scandir(self.place):
                if _NAME.fullmatch(entry.name):
                    with contextlib.suppress(OSError):
                        found.append((entry.stat().st_mtime, entry.path))
        return [Path(path) for _, path in sorted(found)]

    def clear(self) -> None:
        """Delete all copies."""
        shutil.rmtree(self.place, ignore_errors=True)

    def _make_room(self, size: int) -> bool:
        if size > self._budget:
            return False
        try:
            for place in (self.place.parent, self.place):  # one of another user is refused: he could read the copies
                shared_file.make_directory(place, mode=0o700)
            sizes = {path: path.stat().st_size for path in self.listed()}
        except OSError:
            return False
        for path in list(sizes):
            if sum(sizes.values()) + size <= self._budget:
                break
            path.unlink(missing_ok=True)
            del sizes[path]
        return True


def nowhere(digest: str, size: int) -> Path | None:
    """Return None: there are no copies."""
    return None
