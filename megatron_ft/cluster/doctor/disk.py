"""Test of a directory: free space, speed, and whether all hosts see the same directory.

Failures assumed: the directory is missing, full or read-only, or its file server does not respond. System calls on a
dead file server never return, so the test runs in a thread, which is abandoned after ``MAX_S``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
import uuid
from pathlib import Path
from typing import Any

from megatron_ft.utils import shared_file
from megatron_ft.utils.deadline import Call

MAX_S = 30.0
PREFIX = ".megatron_ft-doctor"
_SIZE, _ATTEMPTS = 8 << 20, 3
_VISIBLE_S = 5.0
"""Network file systems cache the absence of a file for seconds."""
_POLL_S = 0.1
LINKS = "use a run directory with hard links (NFS, Lustre), or etcd; without one no host takes over the embedded store"
"""The remedy where a directory has no hard links."""


def marker(directory: Path, token: str) -> Path:
    """Returns the path of the file that host 0 creates for the other hosts to find."""
    return directory / f"{PREFIX}.{token}.here"


def try_out(directory: Path, token: str | None = None) -> dict[str, Any]:
    """Writes and reads a file of 8 MiB three times.

    Returns ``free_bytes``, ``write_bytes_s`` and ``read_bytes_s``, ``no_links`` (why a hard link cannot be made, "" if one
    can), with ``token`` also ``seen`` (the marker file exists); on an error only ``error``.
    """
    found = Call("megatron_ft-doctor-disk", lambda: _try_out(directory, token)).within(MAX_S)
    return {"error": f"no response within {MAX_S:g} s"} if found.abandoned else found.value


def _try_out(directory: Path, token: str | None) -> dict[str, Any]:
    try:
        free_bytes = shutil.disk_usage(directory).free
        speeds = [_speed(directory / f"{PREFIX}.{uuid.uuid4().hex}") for _ in range(_ATTEMPTS)]
        # The best ones, because other jobs use the disk, too.
        write_bytes_s, read_bytes_s = (max(column) for column in zip(*speeds, strict=True))
        result = {"free_bytes": free_bytes, "write_bytes_s": write_bytes_s, "read_bytes_s": read_bytes_s}
        result["no_links"] = _no_links(directory / f"{PREFIX}.{uuid.uuid4().hex}")
        if token is not None:
            end = time.monotonic() + _VISIBLE_S
            while not (seen := _exists(marker(directory, token))) and time.monotonic() < end:
                time.sleep(_POLL_S)
            result["seen"] = seen
        return result
    except OSError as error:
        return {"error": error.strerror or str(error)}


def _no_links(path: Path) -> str:
    """Return why no file can be made by a hard link, as claims of the control store are; "" if one can."""
    try:
        made = [shared_file.create(path, b"") for _ in range(2)]
    except OSError as error:
        return error.strerror or str(error)
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
    return "" if made == [True, False] else "a link can replace a file"


def _exists(path: Path) -> bool:
    """Opens the file, which asks the file server; listing the directory makes some file systems refresh their cache."""
    try:
        shared_file.open_record(path).close()
        return True
    except OSError:
        with contextlib.suppress(OSError):
            os.listdir(path.parent)
        return False


def _speed(path: Path) -> tuple[float, float]:
    """Returns the rates of writing and reading in bytes per second."""
    content = os.urandom(_SIZE)
    try:
        begun = time.perf_counter()
        with open(shared_file.open_file(path, os.O_WRONLY | os.O_CREAT), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        written = time.perf_counter()
        with shared_file.open_record(path) as file:
            if hasattr(os, "posix_fadvise"):  # read from the disk, not from the page cache
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            opened = time.perf_counter()
            same = file.read() == content
        read = time.perf_counter()
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
    if not same:
        raise OSError("the data read differ from the data written")
    return _SIZE / (written - begun), _SIZE / (read - opened)
