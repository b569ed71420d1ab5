"""Files that are there completely and for good, or not at all; and what a user can do where that fails.

A file is written under another name, synced, and renamed: whoever sees its name sees all of it, also after a power cut.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from megatron_ft.errors import CheckpointError

CHUNK_BYTES = 2**24
"""Bytes per call. Python's lock is free while one is hashed or written, and the training thread waits for none of it."""

_REMEDIES = {
    errno.ENOSPC: "free space there, keep fewer checkpoints (checkpoint.keep), or name a larger checkpoint.directory",
    errno.EDQUOT: "your quota is used up: raise it, or keep fewer checkpoints (checkpoint.keep)",
    errno.EFBIG: "files may not be that large there: raise the limit (ulimit -f), or name another checkpoint.directory",
    errno.EROFS: "the file system is read-only: mount it for writing, or name another checkpoint.directory",
    errno.EACCES: "this user must be allowed to write there; change the owner or the mode",
    errno.EPERM: "this user must be allowed to write there; change the owner, the mode or its attributes (lsattr)",
    errno.ENOENT: "it was removed or unmounted meanwhile: bring it back, or name another checkpoint.directory",
    errno.ESTALE: "it was removed or unmounted meanwhile: bring it back, or name another checkpoint.directory",
    errno.ENOTDIR: "checkpoint.directory must be a directory: something on its way is a file",
    errno.EIO: "the device does not do what it should: look at the kernel's log (dmesg), or name another directory",
}


@contextlib.contextmanager
def explained(what: str, path: str | Path) -> Iterator[None]:
    """Turn what the operating system refuses inside into one ``CheckpointError`` with the remedy."""
    try:
        yield
    except OSError as error:
        remedy = _REMEDIES.get(error.errno, "look at that file system, or name another checkpoint.directory")
        # An error of os.replace or of a parent names another path than the one that was asked for.
        where = f" ({error.filename})" if error.filename and os.fspath(error.filename) != os.fspath(path) else ""
        raise CheckpointError(f"{what} {path} failed: {error.strerror or error}{where}; {remedy}") from None


def write(path: Path, pieces: Iterable[Any]) -> dict[str, Any]:
    """Write buffers of bytes as the file ``path``. Returns how long it is and its sha256, of what was handed over."""
    # Two may write the same part: one that was taken for dead, and its successor. Their contents are the same.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            size, digest = _write(fd, pieces)
            os.fsync(fd)
        finally:
            os.close(fd)  # raises too: some network file systems find out here that the disk is full
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    sync_directory(path.parent)
    return {"bytes": size, "sha256": digest}


def _write(fd: int, pieces: Iterable[Any]) -> tuple[int, str]:
    digest, size = hashlib.sha256(), 0
    for piece in pieces:
        view = memoryview(piece).cast("B")
        for start in range(0, len(view), CHUNK_BYTES):
            chunk = view[start : start + CHUNK_BYTES]
            digest.update(chunk)
            size += len(chunk)
            while chunk:
                chunk = chunk[os.write(fd, chunk) :]
    return size, digest.hexdigest()


def make_directories(root: Path, *names: str) -> Path:
    """``root/names[0]/names[1]...``, durable. ``root`` itself must be there: one that was unmounted is not made anew."""
    for name in names:
        made = root / name
        with contextlib.suppress(FileExistsError):
            os.mkdir(made)
            sync_directory(root)
        root = made
    return root


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # the file system has no such thing, or does it by itself
            raise
    finally:
        os.close(fd)
