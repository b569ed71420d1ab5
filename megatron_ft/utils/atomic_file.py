"""Replace a file atomically in a directory that processes of several hosts share.

The data goes to a temporary file beside ``path``, which takes the name ``path`` in one system call: a reader sees the
old file or the new one, never a part. The temporary name holds host, process id and a random part, because a process id
is unique on one host only: two containers can both run as process 1.

Failures assumed: a process is killed at any instant (a temporary file is left behind and is never read); the disk is
full (``OSError``, the old file stays).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = False, mode: int = 0o666) -> Iterator[int]:
    """Yield the descriptor of a new file, which replaces ``path`` when the block ends without an exception.

    Args:
        durable: sync the data before the rename. The caller syncs the directory.
        mode: permissions of the new file, before the umask.

    Raises:
        OSError: the file could not be written or renamed; ``path`` is unchanged.
    """
    with _beside(path, durable, mode) as (temporary, fd):
        yield fd
    try:
        os.replace(temporary, path)
    except OSError:
        _remove(temporary)
        raise


def write(path: Path, data: bytes | str, *, durable: bool = False, mode: int = 0o666) -> None:
    """Replace ``path`` by a file with this content; arguments and errors as for :func:`replacing`."""
    with replacing(path, durable=durable, mode=mode) as fd:
        write_all(fd, data.encode() if isinstance(data, str) else data)


def write_json(path: Path, value: Any, *, indent: int | None = 1, mode: int = 0o666) -> None:
    """Replace ``path`` by ``value`` as JSON and a newline; errors as for :func:`replacing`."""
    write(path, json.dumps(value, indent=indent) + "\n", mode=mode)


def read_json(path: Path) -> Any:
    """Return the value in a file; None while it cannot be read, or holds no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def create(path: Path, data: bytes | str) -> bool:
    """Create ``path`` with this content. Returns False, and changes nothing, when ``path`` exists. Raises
    ``OSError``."""
    with _beside(path, False, 0o666) as (temporary, fd):
        write_all(fd, data.encode() if isinstance(data, str) else data)
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        _remove(temporary)
    return True


def write_all(fd: int, data: Any) -> None:
    """Write all bytes of a buffer. Raises ``OSError``."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


@contextlib.contextmanager
def _beside(path: Path, durable: bool, mode: int) -> Iterator[tuple[Path, int]]:
    """Yield a new temporary file and its descriptor. It is closed after the block, and removed when the block fails."""
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        try:
            yield temporary, fd
            if durable:
                os.fsync(fd)
        finally:
            os.close(fd)  # some network file systems report a full disk here
    except BaseException:
        _remove(temporary)
        raise


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
