"""A lock on a directory of checkpoints or of a run: it refuses a second job while the first one lives.

The lock is a file that names the run and holds a heartbeat, a number that the run's leader increases regularly. On one host
the kernel's lock on that file (flock) tells at once whether its holder lives. A process that finds the file decides as
follows:

- The file names its own run: the process takes the lock over. Takeovers are numbered; the lock does not decide which
  process leads a run.
- The kernel's lock is held by another process, on this host or through a server that keeps such locks: that run lives.
- The kernel's lock is free, and the file was written on this host since its last boot: that run is dead. If other hosts
  can continue it without this host, the heartbeat decides instead.
- The file was written on another host: the process observes the heartbeat for some time. It compares no clocks, and no pids,
  which have no meaning in another container.

Failures assumed: a holder is killed, frozen, or loses the file system. A holder that was frozen and finds another run
in its file has lost the lock. Where two jobs start at the same time on a file system without flock, both may hold the
lock for one heartbeat. No checkpoint depends on the lock: two runs never write into the same directory of an attempt.
"""

from __future__ import annotations

import calendar
import contextlib
import json
import os
import secrets
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ft.errors import CheckpointError, FTError, LaunchError
from megatron_ft.utils import durable_file, shared_file
from megatron_ft.utils.durations import duration
from megatron_ft.utils.vital_thread import described


@dataclass(frozen=True)
class Kind:
    """A kind of directory that is locked.

    Attributes:
        what: The directory, for errors.
        file: Name of the lock file in it.
        setting: The setting that names the directory, for errors.
        error: Type of the error when a live run holds the lock.
    """

    what: str
    file: str
    setting: str
    error: type[FTError]


CHECKPOINTS = Kind("checkpoint directory", "lock", "checkpoint.directory", CheckpointError)
RUN = Kind("run directory", "run.lock", "--run-dir", LaunchError)
BEAT_S = 5.0
PATIENCE_S = 30.0
"""Time for which the heartbeat is observed: six heartbeats. Only a start on another host, after a run that was killed,
waits for it."""
DYING_S = 2.0
"""Time for which a killed holder may keep the kernel's lock: until it, and the processes that inherited the file,
ended."""
_RELEASE_S = 2 * BEAT_S
"""Time for which a release waits for a heartbeat that is being written, at most."""
_POLL_S = 0.05
THREAD = "directory-lock"
"""Name of the thread of the heartbeat. It holds nothing that a process forked meanwhile would need."""
_TIME = "%Y-%m-%dT%H:%M:%SZ"
_BYTES = 1024
"""Length to which the record is padded, so that one write always replaces it."""


class Lock:
    """A lock that is held for one run until :meth:`release`. A thread of it writes its heartbeat after :meth:`begin`.

    Attributes:
        usurped: Why another run has the directory now, or "".
        removed: The file is gone; the run may make it again, and is refused if another run has.
        former: Id of the run that held the lock before, and has ended, or "".
    """

    def __init__(self, path: Path, fd: int, record: dict[str, Any], flocked: bool, kind: Kind) -> None:
        self._kind, self._path, self._fd = kind, path, fd
        self._record, self._flocked = record, flocked
        self._lost = self.usurped = self.former = ""
        self.removed = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep, name=THREAD, daemon=True)
        os.register_at_fork(after_in_child=self._forked)

    def begin(self) -> None:
        """Start to heartbeat. A process that still forks others can delay this for some seconds, see ``BEAT_S``."""
        self._thread.start()

    def _forked(self) -> None:
        """Close the file in a forked child, which must not keep the kernel's lock after this process has ended."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            with contextlib.suppress(OSError):
                os.close(fd)

    def check(self) -> None:
        """Raise the kind's error if the lock was lost. It is called before a manifest is written."""
        if self._lost:
            raise self._kind.error(self._lost)

    def release(self) -> None:
        """Release the directory at once. It never raises, because a lock without heartbeats expires."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(_RELEASE_S)  # the thread may hang in a file system that does not answer
        if self._thread.is_alive() or self._fd < 0:
            return
        try:
            if self._still_ours():
                _write(self._fd, self._record | {"released": True})
        except OSError:
            pass
        finally:
            with contextlib.suppress(OSError):  # frees the lock even where a child has not closed its copy yet
                shared_file.unlock(self._fd)
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _keep(self) -> None:
        # no limit: a thread of its own; whoever has started it tells it to stop
        while not self._stop.wait(BEAT_S) and not self._lost:
            try:
                if self._still_ours():
                    # After a takeover from a frozen leader of the same run, the kernel's lock is free when that leader ends.
                    self._flocked = self._flocked or shared_file.lock(self._fd) is True
                    self._record["heartbeat"] += 1
                    _write(self._fd, self._record)
            except OSError:
                continue  # the file system does not answer; the file is read again when it does
            except Exception as error:  # a bug: a lock without heartbeats expires, and this run must not write any more
                self._lost = f"the lock of {self._named} is not kept any more: its thread {described(error)}"

    @property
    def _named(self) -> str:
        return f"{self._kind.what} {self._path.parent}"

    def _still_ours(self) -> bool:
        if self._lost:
            return False
        found = _read(self._path)
        if found is None:
            self.removed = True
            self._lost = f"{self._path} was removed or overwritten while this run held it; start the run again"
        elif found["run_id"] != self._record["run_id"]:
            self._lost = f"{self._named} was taken over by {_holder(found)}; only one job may write there"
            self.usurped = self._lost
        elif _turn(found) > _turn(self._record):  # an earlier turn is the last heartbeat of the former leader
            self._lost = f"{self._named} was taken over by another process of this run, which now leads it"
        return not self._lost


def lock(directory: Path, run_id: str, kind: Kind = CHECKPOINTS, **options: Any) -> Lock:
    """Call :func:`take`, and raise an ``OSError`` as ``kind.error`` with the remedy."""
    with durable_file.explained("taking the lock", Path(directory) / kind.file, kind.setting, kind.error):
        return take(directory, run_id, kind, **options)


def take(
    directory: Path,
    run_id: str,
    kind: Kind = CHECKPOINTS,
    *,
    others: bool = False,
    heartbeats: bool = True,
    dead: str = "",
) -> Lock:
    """Lock a directory for a run. The run's leader calls this function. It waits only where the holder's state is
    unknown.

    Args:
        directory: The directory. It is created if it does not exist.
        run_id: Id of the run.
        kind: The kind of the directory, with its lock file and its error.
        others: Other hosts can continue the run when this one is lost, so that the end of this process tells nothing.
        heartbeats: Begin to heartbeat at once; otherwise the caller calls :meth:`Lock.begin` within ``BEAT_S``.
        dead: Id of a run that is known to have ended, whose heartbeat is not observed.

    Raises:
        FTError: a live run holds the lock; the type is ``kind.error``.
        OSError: the file system refuses.
    """
    path = Path(directory) / kind.file
    os.makedirs(directory, exist_ok=True)
    fd = shared_file.open_to_lock(path)
    try:
        before = _read(path)
        over = before is not None and before["run_id"] == dead
        flocked = _refuse_if_alive(path, fd, run_id, kind, 0.0 if over else PATIENCE_S)
        record = {
            "run_id": run_id,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "boot": _boot(),
            "taken": time.strftime(_TIME, time.gmtime()),
            "turn": before["turn"] + 1 if before is not None and before["run_id"] == run_id else 0,
            "token": secrets.token_hex(8),
            "heartbeat": 0,
            "released": False,
            "others": others,
        }
        _write(fd, record)
    except BaseException:
        os.close(fd)
        raise
    held = Lock(path, fd, record, flocked is True, kind)
    held.former = "" if before is None else before["run_id"]
    if heartbeats:
        held.begin()
    return held


def check_free(directory: Path, kind: Kind = CHECKPOINTS, *, patience_s: float = PATIENCE_S) -> None:
    """Raise ``kind.error`` when a live run holds the lock. The lock is not taken; the wait is that of :func:`take`."""
    path = Path(directory) / kind.file
    with durable_file.explained("looking at the lock", path, kind.setting, kind.error):
        try:
            fd = shared_file.open_file(path, os.O_RDWR)
        except FileNotFoundError:
            return
        try:
            _refuse_if_alive(path, fd, "", kind, patience_s)
        finally:
            os.close(fd)


def lives(directory: Path, kind: Kind = CHECKPOINTS) -> bool | None:
    """Return whether a run holds the lock of a directory; None where only its heartbeat could tell, or another user's
    run."""
    path = Path(directory) / kind.file
    try:
        with open(shared_file.open_file(path, os.O_RDWR), "rb") as opened:
            flocked, found = shared_file.lock(opened.fileno()), _read(path)
    except OSError:
        return None
    if flocked is False or found is None:
        return True if flocked is False else None
    return False if _is_over(found, flocked) else None


def _is_over(found: dict[str, Any], flocked: bool | None) -> bool:
    """Return whether a holder, which does not have the kernel's lock, has certainly ended."""
    return found["released"] or bool(flocked and found["boot"] == _boot() and not found.get("others"))


def _refuse_if_alive(path: Path, fd: int, run_id: str, kind: Kind, patience_s: float) -> bool | None:
    """Return ``shared_file.lock`` of the file. Raises ``kind.error`` when a live run holds the lock."""
    named = f"{kind.what} {path.parent}"
    flocked, found = shared_file.lock(fd), _read(path)
    if found is not None and found["run_id"] == run_id:
        return flocked
    until = time.monotonic() + DYING_S
    while flocked is False and time.monotonic() < until:
        time.sleep(_POLL_S)
        flocked, found = shared_file.lock(fd), _read(path)
    if flocked is False:
        holders = shared_file.lock_holders(fd) or "one of its processes"
        why = f"the kernel's lock on {path} is held by {holders}"
        if found is not None and found["released"]:  # a process that is none of a run's
            raise kind.error(
                f"{named} is in use by no run, but {why}; end that process, or give this job another {kind.setting}"
            )
    elif found is None or _is_over(found, flocked):
        return flocked
    elif _heartbeats(path, found, patience_s):
        why = "its heartbeat goes on"
    else:
        return flocked
    raise kind.error(
        f"{named} is in use by {_holder(found) if found else 'a job that is just starting'}: {why}; wait for it to "
        f"end, or give this job another {kind.setting}. If you know that it is dead, remove {path}"
    )


def _heartbeats(path: Path, found: dict[str, Any], patience_s: float) -> bool:
    """Return whether the record changes within ``patience_s``."""
    until = time.monotonic() + patience_s
    while time.monotonic() < until:
        time.sleep(min(patience_s / 30, 1.0))
        if _read(path) != found:
            return True
    return False


def _read(path: Path) -> dict[str, Any] | None:
    """Return the record, or None. The file is opened anew each time, because only that asks the server (NFS)."""
    try:
        record = json.loads(shared_file.read_record(path))
    except (FileNotFoundError, ValueError):
        return None
    fields = ("run_id", "host", "pid", "boot", "taken", "turn", "token", "heartbeat", "released")
    return record if isinstance(record, dict) and all(field in record for field in fields) else None


def _write(fd: int, record: dict[str, Any]) -> None:
    data = json.dumps(record).encode()
    os.pwrite(fd, data + b" " * (_BYTES - len(data) - 1) + b"\n", 0)
    os.fsync(fd)


def _turn(record: dict[str, Any]) -> tuple[int, str]:
    return record["turn"], record["token"]


def _holder(record: dict[str, Any]) -> str:
    since = record["taken"]
    with contextlib.suppress(ValueError, OverflowError):  # the clocks of two hosts may differ
        age_s = max(0.0, time.time() - calendar.timegm(time.strptime(since, _TIME)))
        since = f"{since}, for {duration(age_s)}"
    return f"run {record['run_id']} (pid {record['pid']} on {record['host']}, since {since})"


def _boot() -> str:
    """Return the id of this boot of the kernel, which does not depend on the host name that a container has."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
