"""The directory that all hosts share: room, whether it is the same one everywhere, and how fast it takes and gives.

Failures it assumes: the directory is missing, full, read-only, or a dead server's, which no call returns from. Then the
thread that asked is left behind.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
import uuid
from pathlib import Path
from typing import Any

MOST_S = 30.0
_SIZE, _ATTEMPTS = 8 << 20, 3
_SEEN_S = 5.0
"""So long a file may take to be seen by another host: file systems of a network remember for seconds what was not there."""
_LOOK_S = 0.1
PREFIX = ".megatron_ft-doctor"


def marker(directory: Path, token: str) -> Path:
    """The file by which the others see that it is the same directory."""
    return directory / f"{PREFIX}.{token}.here"


def try_out(directory: Path, token: str | None = None) -> dict[str, Any]:
    """``free_bytes``, ``write_bytes_s``, ``read_bytes_s``, ``seen`` (the marker of that ``token``); or ``trouble``."""
    said: dict[str, Any] = {}
    thread = threading.Thread(target=_try_out, args=(directory, token, said), name="megatron_ft-doctor-disk", daemon=True)
    thread.start()
    thread.join(MOST_S)
    return {"trouble": f"no answer within {MOST_S:g} s"} if thread.is_alive() else said


def _try_out(directory: Path, token: str | None, said: dict[str, Any]) -> None:
    try:
        said["free_bytes"] = shutil.disk_usage(directory).free
        said |= _speed(directory / f"{PREFIX}.{uuid.uuid4().hex}")
        if token is None:
            return
        end = time.monotonic() + _SEEN_S
        while not (seen := _exists(marker(directory, token))) and time.monotonic() < end:
            time.sleep(_LOOK_S)
        said["seen"] = seen
    except OSError as error:
        said["trouble"] = error.strerror or str(error)


def _exists(path: Path) -> bool:
    """Asked by opening it, which asks the server; and the listing, which makes some file systems look again."""
    try:
        path.open("rb").close()
        return True
    except OSError:
        with contextlib.suppress(OSError):
            os.listdir(path.parent)
        return False


def _speed(path: Path) -> dict[str, float]:
    """The best of some attempts: others use the disk as well."""
    found = [_attempt(path) for _ in range(_ATTEMPTS)]
    return {name: max(attempt[name] for attempt in found) for name in found[0]}


def _attempt(path: Path) -> dict[str, float]:
    content = os.urandom(_SIZE)
    try:
        begun = time.perf_counter()
        with path.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        written = time.perf_counter()
        with path.open("rb") as file:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # else it comes from memory
            opened = time.perf_counter()
            same = file.read() == content
        read = time.perf_counter()
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
    if not same:
        raise OSError("what was written there is read differently")
    return {"write_bytes_s": _SIZE / (written - begun), "read_bytes_s": _SIZE / (read - opened)}
