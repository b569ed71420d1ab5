"""One job to a directory of checkpoints: a second one that lives is told so, a dead one is in nobody's way.

The lock is a file that names the run and carries a beat, a number that its leader raises all the time; on one host the
kernel's lock on that file (flock) tells at once whether its holder lives. So:

- our own run has it: it is taken over, by turns that are numbered; which process leads a run is decided elsewhere;
- the kernel says that another process holds it, on this host or on a server that keeps such locks: that run lives;
- the kernel says that nobody does, and it was taken on this very host since its last boot: that run is dead;
- it was taken elsewhere: whoever comes looks at the beat for a while. No clocks are compared, and no pid is trusted,
  which means nothing in another container.

Assumes: holders are killed, frozen, or lose the file system. A holder that was frozen for long, and finds another run in
its file, has lost the lock. Where two jobs start in the same instant on a file system without flock, both may have it
for one beat. No checkpoint depends on the lock: two runs never write into the same directory of an attempt.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import socket
import threading
import time
from pathlib import Path
from typing import Any

from megatron_ft.errors import CheckpointError
from megatron_ft.runtime.checkpoint import files

FILE = "lock"
BEAT_S = 5.0
PATIENCE_S = 30.0
"""Six beats. Only who restarts on another host, after a run that ended without a word, waits for so long."""
_BYTES = 1024
"""The record is padded to one length, so that it is always replaced by one write."""


class Lock:
    """The directory, held for one run until :meth:`release`. Beats in a thread of its own."""

    def __init__(self, path: Path, fd: int, record: dict[str, Any], flocked: bool, beat_s: float) -> None:
        self._path, self._fd, self._record, self._flocked, self._beat_s = path, fd, record, flocked, beat_s
        self._lost = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="checkpoint-lock", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise ``CheckpointError`` if the lock was lost: before a manifest is written, say."""
        if self._lost:
            raise CheckpointError(self._lost)

    def release(self) -> None:
        """Leave the directory to the next job, at once. Never raises: a lock without beats frees itself."""
        self._stop.set()
        self._thread.join(2 * self._beat_s)  # it may hang in a file system that does not answer
        if self._thread.is_alive():
            return
        try:
            if self._still_ours():
                _write(self._fd, self._record | {"released": True})
        except OSError:
            pass
        finally:
            os.close(self._fd)

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _keep(self) -> None:
        while not self._stop.wait(self._beat_s) and not self._lost:
            try:
                if self._still_ours():
                    # Taken over from a leader of the same run that was frozen: when that is gone the kernel's lock is free.
                    self._flocked = self._flocked or _flock(self._fd) is True
                    self._record["beat"] += 1
                    _write(self._fd, self._record)
            except OSError:
                continue  # the file system is away: whoever holds the lock by then is found out when it is back

    def _still_ours(self) -> bool:
        if self._lost:
            return False
        found = _read(self._path)
        if found is None:
            self._lost = f"{self._path} was removed or overwritten while this run held it; start it again"
        elif found["run_id"] != self._record["run_id"]:
            self._lost = f"{self._path.parent} was taken over by {_holder(found)}; only one job may write checkpoints there"
        elif _turn(found) > _turn(self._record):  # an earlier one is the last beat of whom we have taken it over from
            self._lost = f"{self._path.parent} was taken over by another process of this run, which now leads it"
        return not self._lost


def lock(directory: Path, run_id: str, *, beat_s: float = BEAT_S, patience_s: float = PATIENCE_S) -> Lock:
    """Take ``directory``, which is made if need be, for this run's checkpoints. Called by the run's leader.

    Raises ``CheckpointError`` when a run that lives has it. Waits only where that cannot be known at once.
    """
    path = Path(directory) / FILE
    with files.explained("taking the lock", path):
        os.makedirs(directory, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            flocked = _flock(fd)
            _refuse_if_alive(path, run_id, flocked, patience_s)
            record = {
                "run_id": run_id,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "boot": _boot(),
                "taken": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "turn": _next_turn(path, run_id),
                "token": secrets.token_hex(8),
                "beat": 0,
                "released": False,
            }
            _write(fd, record)
        except BaseException:
            os.close(fd)
            raise
    return Lock(path, fd, record, flocked is True, beat_s)


def _refuse_if_alive(path: Path, run_id: str, flocked: bool | None, patience_s: float) -> None:
    found = _read(path)
    if found is not None and found["run_id"] == run_id:
        return
    if flocked is False:
        why = "a process of it holds the kernel's lock on that file"
    elif found is None or found["released"] or (flocked and found["boot"] == _boot()):
        return
    elif _beats(path, found, patience_s):
        why = "its beat goes on"
    else:
        return
    raise CheckpointError(
        f"{path.parent} is in use by {_holder(found) if found else 'a job that is just starting'}: {why}; wait for it to "
        f"end, or give this job another checkpoint.directory. If you know that it is dead, remove {path}"
    )


def _beats(path: Path, found: dict[str, Any], patience_s: float) -> bool:
    """Whether the record changes while we look."""
    until = time.monotonic() + patience_s
    while time.monotonic() < until:
        time.sleep(min(patience_s / 30, 1.0))
        if _read(path) != found:
            return True
    return False


def _flock(fd: int) -> bool | None:
    """Whether this process has the kernel's lock now; None where the file system has no such locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        if error.errno in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL):
            return None
        raise
    return True


def _read(path: Path) -> dict[str, Any] | None:
    """The record; None where there is none. Opened anew each time: only that asks the server (NFS)."""
    try:
        record = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    fields = ("run_id", "host", "pid", "boot", "taken", "turn", "token", "beat", "released")
    return record if isinstance(record, dict) and all(field in record for field in fields) else None


def _write(fd: int, record: dict[str, Any]) -> None:
    data = json.dumps(record).encode()
    os.pwrite(fd, data + b" " * (_BYTES - len(data) - 1) + b"\n", 0)
    os.fsync(fd)


def _turn(record: dict[str, Any]) -> tuple[int, str]:
    return record["turn"], record["token"]


def _next_turn(path: Path, run_id: str) -> int:
    found = _read(path)
    return found["turn"] + 1 if found is not None and found["run_id"] == run_id else 0


def _holder(record: dict[str, Any]) -> str:
    return f"run {record['run_id']} (pid {record['pid']} on {record['host']}, since {record['taken']})"


def _boot() -> str:
    """One boot of one kernel, whatever a container calls its host."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
