"""The run record's ``history.jsonl`` (docs/run-record.md): exactly one line per step, whoever of the groups dies.

Every group keeps the last lines it *would* have written; only the lowest living group writes them. When that group
dies, the next lowest reads what is in the file and adds what is missing. Several processes append, whole lines with one
``write``. A writer killed inside that call can leave a torn line; nobody truncates (that could cut off another process's
line), the next append starts on a new line and readers skip what is not JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

FILE = "history.jsonl"
_IDENTITY = {
    "begin": "event",
    "view": "epoch",
    "recovery": "epoch",
    "step": "step",
    "stragglers": "step",
    "survivor": "group",
    "end": "event",
}
"""Which field makes a second line of an event the same line again."""
_REMEMBERED = 64
"""Lines a group remembers without writing. Live groups are at most one step apart, so few are ever missing."""
_TAIL_BYTES = 2**20
"""How far back a new writer looks for what is there already: a month's record is not read in the middle of a step."""


class Tail:
    """What is added to a run's history, as it is written. The file need not exist yet, and may be replaced by another run's.

    A last line without its newline is waited for; one that is not JSON is skipped.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path, self._file, self._offset, self._rest = run_dir / FILE, -1, 0, b""

    def new(self) -> list[dict[str, Any]]:
        """The lines since the last call."""
        try:
            with self._path.open("rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                if inode != self._file:
                    self._file, self._offset, self._rest = inode, 0, b""
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [event for event in map(parse, lines) if event is not None]


def append(run_dir: Path, event: str, **fields: Any) -> None:
    """Append one line; used directly by whoever owns an event alone (agent, injector)."""
    line = json.dumps({"t": round(time.time(), 6), "event": event, **fields}) + "\n"
    fd = _open(run_dir / FILE)
    try:
        _write(fd, line.encode())
    finally:
        os.close(fd)


def _open(path: str | Path) -> int:
    return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)


def _write(fd: int, line: bytes) -> tuple[int, int]:
    """Append; returns the file's size before and after, which tell whether another process has written meanwhile."""
    size = os.fstat(fd).st_size
    if size and os.pread(fd, 1, size - 1) != b"\n":
        line = b"\n" + line
    written = os.write(fd, line)
    if written != len(line):
        raise OSError(f"only {written} of {len(line)} bytes could be written to the history")
    return size, os.fstat(fd).st_size


def read(run_dir: Path) -> list[dict[str, Any]]:
    """All whole lines of a run's history, oldest first; empty when there is none yet."""
    try:
        data = (run_dir / FILE).read_bytes()
    except FileNotFoundError:
        return []
    return [line for line in map(parse, data[: data.rfind(b"\n") + 1].splitlines()) if line is not None]


def parse(line: bytes) -> dict[str, Any] | None:
    """One line as an object; None for a torn or empty one."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) and "event" in value else None


class History:
    """One group's access to the shared history.

    A history that cannot be written (disk full, file system gone) never stops training: the lines are kept and
    tried again with the next one.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = os.fspath(run_dir / FILE)
        self._fd: int | None = None  # kept: on a busy file system to open a file takes longer than all else here
        self._writer = False
        self._remembered: deque[dict[str, Any]] = deque(maxlen=_REMEMBERED)
        self._pending: list[dict[str, Any]] = []
        self._own: list[dict[str, Any]] = []
        self._present: deque[tuple[str, Any]] = deque(maxlen=8 * _REMEMBERED)
        self._seen_bytes = 0
        self._warned = False

    def note(self, event: str, **fields: Any) -> None:
        """Write an event that this group alone knows of, whoever the writer is."""
        self._own.append({"t": round(time.time(), 6), "event": event, **fields})
        self._flush()

    def record(self, event: str, *, later: bool = False, **fields: Any) -> None:
        """Take in an event every group knows of; it reaches the file through the group that is the writer.

        ``later``: with the next event, or with :meth:`write`.
        """
        line = {"t": round(time.time(), 6), "event": event, **fields}
        (self._pending if self._writer else self._remembered).append(line)
        if not later:
            self.write()

    def write(self) -> None:
        """What is not in the file yet."""
        if self._pending or self._own:
            self._flush()

    def set_writer(self, writer: bool) -> None:
        """Say whether this group is the lowest living one. On becoming it, add what its predecessor left out."""
        if writer and not self._writer:
            self._pending = list(self._remembered)
            self._flush()
        self._writer = writer

    def _flush(self) -> None:
        """Write what is pending and not there yet.

        It may be there: a predecessor wrote the line of a step that its survivors then had to finish without it, or
        this group was frozen for minutes, the others went on without it, and its own line comes late.
        """
        try:
            size = self._size()
            while self._own:  # one by one: nothing would find out which of them a full disk has taken
                self._put(self._own[:1])
                del self._own[0]
                size = None
            if self._pending:
                self._look(self._size() if size is None else size)
                self._pending = [line for line in self._pending if _key(line) not in self._present]
                self._put(self._pending)
                self._pending = []
        except OSError as error:
            self._close()  # a file system that is back may not know the old descriptor any more
            if not self._warned:
                print(f"megatron_ft: history not written, training goes on: {error}", file=sys.stderr, flush=True)
            self._warned = True

    def _close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            with contextlib.suppress(OSError):
                os.close(fd)

    def _put(self, lines: list[dict[str, Any]]) -> None:
        data = "".join(json.dumps(line) + "\n" for line in lines).encode()
        before, after = _write(self._fd, data)
        if before == self._seen_bytes and after == before + len(data):  # nobody else writes: it need not be read again
            self._seen_bytes = after
            self._present.extend(map(_key, lines))

    def _size(self) -> int:
        """The file's, which is open after that."""
        status = None if self._fd is None else os.fstat(self._fd)
        if status is None or status.st_nlink == 0:  # somebody has removed the file
            self._close()
            self._fd = _open(self._path)
            self._seen_bytes, status = 0, os.fstat(self._fd)
        return status.st_size

    def _look(self, size: int) -> None:
        """Take in the lines that were added since the last look, ours and others'; nearly always few or none."""
        if size == self._seen_bytes:
            return
        self._seen_bytes = max(self._seen_bytes, size - _TAIL_BYTES)
        data = os.pread(self._fd, size - self._seen_bytes, self._seen_bytes)
        whole = data[: data.rfind(b"\n") + 1]
        self._seen_bytes += len(whole)
        self._present.extend(_key(line) for line in map(parse, whole.splitlines()) if line is not None)


def _key(line: dict[str, Any]) -> tuple[str, Any]:
    return line["event"], line.get(_IDENTITY.get(line["event"], "t"))
