"""Copies of checkpoint files in the memory of hosts, so that the next start need not wait for a file system.

A copy is known by its content: its name is the sha256 that the manifest has, and it is compared while it is read, like the
file itself. So it cannot be of another checkpoint, and one that is missing or damaged costs nothing but a read from disk. It
lies in shared memory (``/dev/shm``), which survives the processes of a job, and not the host.

Failures it assumes: memory is short, others write and delete at the same time, a copy is cut short by a kill.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from megatron_ft.runtime.checkpoint.files import CHUNK_BYTES

_MEMORY = Path("/dev/shm")
_NAME = re.compile(r"[0-9a-f]{64}")
GB = 1e9

Locate = Callable[[str, int], Path | None]
"""(sha256, bytes) -> where a copy is."""


class Shelf:
    """This host's copies of what is in one checkpoint directory, at most ``budget`` bytes of them. The oldest make room."""

    def __init__(self, directory: str | Path, budget: float, memory: Path = _MEMORY) -> None:
        name = hashlib.sha256(os.path.realpath(directory).encode()).hexdigest()[:16]
        self.place = memory / f"megatron_ft-{os.getuid()}" / name
        self._budget = budget if memory.is_dir() else 0

    def find(self, digest: str, size: int) -> Path | None:
        """The copy of a file with that content. It is not read here."""
        path = self.place / digest
        try:
            return path if path.stat().st_size == size else None
        except OSError:
            return None

    def take(self, path: Path, digest: str, size: int) -> bool:
        """Copy a file. False where that cannot be done, or it is not what it should be."""
        if self.find(digest, size) is not None:
            return True
        try:
            with path.open("rb") as file:
                return self.put(iter(lambda: file.read(CHUNK_BYTES), b""), digest, size)
        except OSError:
            return False

    def put(self, pieces: Iterable[Any], digest: str, size: int) -> bool:
        """The same, of bytes."""
        if not _NAME.fullmatch(digest) or not self._make_room(size):
            return False
        temporary = self.place / f".{digest}.{secrets.token_hex(4)}.tmp"
        found = hashlib.sha256()
        try:
            with temporary.open("xb") as file:
                for piece in pieces:
                    found.update(piece)
                    file.write(piece)
            if found.hexdigest() != digest:
                return False
            os.replace(temporary, self.place / digest)
        except OSError:
            return False  # memory is full: a copy is a convenience
        finally:
            temporary.unlink(missing_ok=True)
        return True

    def listed(self) -> list[Path]:
        """All copies, the oldest first."""
        found = []
        with contextlib.suppress(OSError):
            for entry in os.scandir(self.place):
                if _NAME.fullmatch(entry.name):
                    with contextlib.suppress(OSError):
                        found.append((entry.stat().st_mtime, entry.path))
        return [Path(path) for _, path in sorted(found)]

    def clear(self) -> None:
        """Nobody will go on from these any more."""
        shutil.rmtree(self.place, ignore_errors=True)

    def _make_room(self, size: int) -> bool:
        if size > self._budget:
            return False
        try:
            self.place.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self.place.parent.stat().st_uid != os.getuid():
                return False  # somebody else has made it, to read along
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
    """No copies are kept."""
    return None
