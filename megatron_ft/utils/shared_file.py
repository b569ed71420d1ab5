"""Open, lock and replace files in directories to which processes of several hosts, and perhaps other users, write.

Every file of a run, checkpoint or data directory and of /dev/shm that this package locks, appends to or writes is opened
here, and so are the files that it believes (secrets, records, claims, pulses, locks). Whoever may create a name in such a
directory must be able neither to redirect a write, nor to block a process, nor to be believed:

- No link is followed, and opening never waits: a FIFO, a device, a socket or a link is refused.
- A file to which this process writes, or whose content decides something, must belong to this user or to root. Records are
  also read if they belong to the owner of their directory: another user may look at a run.
- Nothing is truncated before these checks, and new files have mode 0600: the kernel's locks need read access only.

:func:`replacing` writes to a temporary file beside ``path``, which takes the name ``path`` in one system call: a reader
sees the old file or the new one, never a part. The temporary name holds host, process id and a random part, because a
process id is unique on one host only: two containers can both run as process 1.

Failures assumed: a process is killed at any instant (a temporary file is left behind and is never read); the disk is
full (``OSError``, the old file stays); another user puts files there, or keeps a lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import os
import secrets
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

PRIVATE = 0o600
"""The mode of a new file, unless it is a product for others: a configuration, a checkpoint, an export, data."""
APPENDS = os.O_RDWR | os.O_APPEND | os.O_CREAT
"""Flags of a file to which several processes append; what is there can be read back."""
_ALWAYS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a directory",
    stat.S_IFREG: "a file",
}


class Refused(PermissionError):
    """A file is not opened, because another user may have put it there. The text has its path, the rule and the remedy."""

    def __init__(
        self, path: str | os.PathLike[str], found: str, wanted: str = "a regular file of this user or root"
    ) -> None:
        rule = f"only {wanted} is opened there"
        super().__init__(errno.EPERM, f"{os.fspath(path)} {found}; {rule}. Delete it if no process of yours needs it")

    def __str__(self) -> str:
        return str(self.strerror)


# --- opening ----------------------------------------------------------------------------------------------------------


def open_file(path: str | os.PathLike[str], flags: int) -> int:
    """Return the descriptor of a regular file of this user or root, opened with ``flags`` (``os.O_RDWR | os.O_CREAT``).

    Raises:
        Refused: ``path`` is a link, a FIFO, a device or a socket, or belongs to another user.
        OSError: the file system refuses.
    """
    return _opened(path, flags, _is_own)


def append_to(path: str | os.PathLike[str]) -> BinaryIO:
    """Return the file, unbuffered, for appending; it is made if it does not exist. Errors as for :func:`open_file`."""
    return open(open_file(path, APPENDS), "ab", buffering=0)


def open_record(path: str | os.PathLike[str]) -> BinaryIO:
    """Return the file for reading. It may also belong to the owner of its directory; errors as for :func:`open_file`."""
    return open(_opened(path, os.O_RDONLY, _is_own_or_of_directory), "rb")


def open_regular(path: str | os.PathLike[str]) -> io.BufferedReader:
    """Return a file of any user, or one that a link leads to, for reading: its content is checked, or the user has named it.
    Opening never waits. Raises ``Refused`` for a FIFO, a device or a socket, and ``OSError``."""
    fd = os.open(path, os.O_RDONLY | (_ALWAYS & ~os.O_NOFOLLOW))
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return open(fd, "rb")
    os.close(fd)
    raise Refused(path, f"is {_KINDS.get(stat.S_IFMT(mode), 'no file')}", "a regular file")


def read_record(path: str | os.PathLike[str]) -> bytes:
    """Return the content of a file that :func:`open_record` opens."""
    with open_record(path) as file:
        return file.read()


def read_json(path: str | os.PathLike[str]) -> Any:
    """Return the value in a file that :func:`open_record` opens; None while it cannot be read, or holds no JSON."""
    try:
        return json.loads(read_record(path))
    except (OSError, ValueError):
        return None


def is_record(path: str | os.PathLike[str]) -> bool:
    """Return whether :func:`open_record` opens the file."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and _is_own_or_of_directory(status, os.path.dirname(path) or ".")


def open_directory(path: str | os.PathLike[str]) -> int:
    """Return the descriptor of a directory of this user or root that is no link; errors as for :func:`open_file`."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _ALWAYS)
    except NotADirectoryError:
        raise Refused(path, f"is {_kind(path)}", "a directory of this user or root") from None
    status = os.fstat(fd)
    if _is_own(status, os.path.dirname(os.path.abspath(path))):
        return fd
    os.close(fd)
    raise Refused(path, f"belongs to user {status.st_uid}", "a directory of this user or root")


def make_directory(path: str | os.PathLike[str], mode: int = 0o777) -> bool:
    """Make a directory in one that exists, and return True; return False if :func:`open_directory` opens the one there."""
    try:
        os.mkdir(path, mode)
    except FileExistsError:
        os.close(open_directory(path))
        return False
    return True


def _opened(path: str | os.PathLike[str], flags: int, trusts: Callable[[os.stat_result, str], bool]) -> int:
    made = False
    while True:
        try:
            fd = os.open(path, (flags & ~os.O_CREAT) | _ALWAYS)
            break
        except FileNotFoundError:
            if not flags & os.O_CREAT:
                raise
        except OSError as error:  # ELOOP: a link; ENXIO: a socket, or a FIFO without a reader; EISDIR
            if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.EMLINK):
                raise Refused(path, f"is {_kind(path)}") from None
            raise
        with contextlib.suppress(FileExistsError):  # another process makes it in this moment
            fd, made = os.open(path, flags | os.O_EXCL | _ALWAYS, PRIVATE), True
            break
    status = os.fstat(fd)
    found = ""
    if not stat.S_ISREG(status.st_mode):
        found = f"is {_KINDS.get(stat.S_IFMT(status.st_mode), 'no file')}"
    elif not made and not trusts(status, os.path.dirname(os.path.abspath(path))):
        found = f"belongs to user {status.st_uid}"
    if found:
        os.close(fd)
        raise Refused(path, found)
    return fd


def _kind(path: str | os.PathLike[str]) -> str:
    try:
        return _KINDS.get(stat.S_IFMT(os.lstat(path).st_mode), "no regular file")
    except OSError:
        return "no regular file"


def _is_own(status: os.stat_result, directory: str) -> bool:
    return status.st_uid in (os.geteuid(), 0) or status.st_uid == _uid_in(directory)


def _is_own_or_of_directory(status: os.stat_result, directory: str) -> bool:
    return status.st_uid in (os.geteuid(), 0, os.stat(directory).st_uid) or _is_own(status, directory)


def _uid_in(directory: str) -> int:
    """Return the owner of the files that this process makes in a directory: some file systems have another one than this
    user (an NFS server that maps root to nobody, say). -1 where it can make none."""
    probe = os.path.join(directory, f".owner.{os.getpid()}.{secrets.token_hex(8)}.tmp")
    try:
        fd = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE)
    except OSError:
        return -1
    try:
        return os.fstat(fd).st_uid
    finally:
        os.close(fd)
        _remove(Path(probe))


# --- locking ----------------------------------------------------------------------------------------------------------


def open_to_lock(path: str | os.PathLike[str]) -> int:
    """Return the descriptor of a file to be locked, which no other user can open from now on. Raises ``OSError``."""
    fd = open_file(path, os.O_RDWR | os.O_CREAT)
    if stat.S_IMODE(os.fstat(fd).st_mode) != PRIVATE:
        with contextlib.suppress(OSError):  # a file system without modes, or a file of root
            os.fchmod(fd, PRIVATE)
    return fd


def lock(fd: int, wait: bool = False) -> bool | None:
    """Take the kernel's lock (flock) on an open file or directory, until all copies of the descriptor are closed.

    Args:
        wait: wait while another process holds it.

    Returns:
        Whether this process has it; None on a file system without such locks.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        if error.errno in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL):
            return None
        raise
    return True


def unlock(fd: int) -> None:
    """Give the kernel's lock back, even where another process has a copy of the descriptor. Raises ``OSError``."""
    fcntl.flock(fd, fcntl.LOCK_UN)


def lock_holders(fd: int) -> str:
    """Return the processes of this host that hold a lock on an open file, "" if /proc/locks names none.

    A process of another host, or of another pid namespace, is not named there.
    """
    status, held = os.fstat(fd), []
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    try:
        lines = Path("/proc/locks").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return ""
    for fields in map(str.split, lines):  # "1: FLOCK  ADVISORY  WRITE 4711 fd:01:131 0 EOF"; "1: -> ..." waits for it
        if len(fields) >= 6 and fields[5] == device and int(fields[4]) > 0:
            held.append(_process(int(fields[4])))
    return ", ".join(dict.fromkeys(held))


def _process(pid: int) -> str:
    place = Path(f"/proc/{pid}")
    try:
        command = (place / "cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
        return f"pid {pid} of user {place.stat().st_uid} ({command[:80]!r})"
    except OSError:
        return f"pid {pid}"


# --- replacing --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = False, mode: int = PRIVATE) -> Iterator[int]:
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


def write(path: Path, data: bytes | str, *, durable: bool = False, mode: int = PRIVATE) -> None:
    """Replace ``path`` by a file with this content; arguments and errors as for :func:`replacing`."""
    with replacing(path, durable=durable, mode=mode) as fd:
        write_all(fd, data.encode() if isinstance(data, str) else data)


def write_json(path: Path, value: Any, *, indent: int | None = 1, mode: int = PRIVATE) -> None:
    """Replace ``path`` by ``value`` as JSON and a newline; errors as for :func:`replacing`."""
    write(path, json.dumps(value, indent=indent) + "\n", mode=mode)


def create(path: Path, data: bytes | str) -> bool:
    """Create ``path`` with this content. Returns False, and changes nothing, when ``path`` exists. Raises
    ``OSError``."""
    with _beside(path, False, PRIVATE) as (temporary, fd):
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
