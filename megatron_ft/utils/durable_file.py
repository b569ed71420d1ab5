"""Durable files, which exist completely or not at all, and remedies for errors of the file system.

A file is written under another name, synced, and renamed: a file with its final name is complete, even after a power
cut.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from megatron_ft.errors import CheckpointError, FTError
from megatron_ft.utils import shared_file

CHUNK_BYTES = 2**24
"""Bytes per call. The interpreter lock is free while a chunk is hashed or written, so the training thread does not
wait."""

_REMEDIES = {
    errno.ENOSPC: "free space there, keep fewer checkpoints (checkpoint.keep), or name a larger {setting}",
    errno.EDQUOT: "your quota is exhausted: raise it, or keep fewer checkpoints (checkpoint.keep)",
    errno.EFBIG: "the limit on the size of files is too low: raise it (ulimit -f), or name another {setting}",
    errno.EROFS: "the file system is read-only: mount it for writing, or name another {setting}",
    errno.EACCES: "this user must be allowed to write there; change the owner or the mode",
    errno.EPERM: "this user must be allowed to write there; change the owner, the mode or its attributes (lsattr)",
    errno.ENOENT: "it was removed or unmounted meanwhile: restore it, or name another {setting}",
    errno.ESTALE: "it was removed or unmounted meanwhile: restore it, or name another {setting}",
    errno.ENOTDIR: "{setting} must be a directory: a part of its path is a file",
    errno.EIO: "the device reports an error: look at the kernel's log (dmesg), or name another directory",
}


@contextlib.contextmanager
def explained(
    what: str, path: str | Path, setting: str = "checkpoint.directory", error_type: type[FTError] = CheckpointError
) -> Iterator[None]:
    """Raise an ``OSError`` inside the block as ``error_type``, with the remedy. ``setting`` names the directory."""
    try:
        yield
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "look at that file system, or name another {setting}")
        # An error of os.replace or of a parent directory names another path than ``path``.
        where = f" ({error.filename})" if error.filename and os.fspath(error.filename) != os.fspath(path) else ""
        why = f"{error.strerror or error}{where}; {remedy.format(setting=setting)}"
        raise error_type(f"{what} {path} failed: {why}") from None


def write(path: Path, pieces: Iterable[Any]) -> dict[str, Any]:
    """Write buffers of bytes as the file ``path``. Returns the length and the sha256 of the buffers."""
    # Two processes may write the same part: one that counts as dead, and its successor. Their contents are equal.
    digest, size = hashlib.sha256(), 0
    with shared_file.replacing(path, durable=True, mode=0o644) as fd:
        for piece in pieces:
            view = memoryview(piece).cast("B")
            for start in range(0, len(view), CHUNK_BYTES):
                chunk = view[start : start + CHUNK_BYTES]
                digest.update(chunk)
                size += len(chunk)
                shared_file.write_all(fd, chunk)
    sync_directory(path.parent)
    return {"bytes": size, "sha256": digest.hexdigest()}


def make_directories(root: Path, *names: str) -> Path:
    """Create ``root/names[0]/names[1]...`` durably. ``root`` must exist, so that an unmounted one is not created
    anew."""
    for name in names:
        made = root / name
        if shared_file.make_directory(made):
            sync_directory(root)
        root = made
    return root


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # the file system does not support or need it
            raise
    finally:
        os.close(fd)
