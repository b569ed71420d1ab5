"""The run record's ``history.jsonl`` (docs/run-record.md): exactly one line per step, whichever groups die.

Every group keeps the last lines it *would* have written; only the lowest living group writes them. When that group
dies, the next lowest reads the file and adds the missing lines. The processes of one host append to one file, whole
lines with one ``write``; with several hosts each has its own file, and readers merge them. A writer killed inside that
call can leave a torn line. No process truncates the file (that could cut off another process's line): the next append
starts on a new line and readers skip what is not JSON.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from megatron_ft.types import given, groups_of, spans
from megatron_ft.utils import shared_file, steady_clock

_log = logging.getLogger(__name__)

FILE = "history.jsonl"
_OTHERS = "history.*.jsonl"
VARIABLE = "MEGATRON_FT_RECORD"
"""Environment variable that names the writer, for an agent and all its processes; "" writes :data:`FILE`."""
_IDENTITY = {
    "begin": "event",
    "view": "epoch",
    "recovery": "epoch",
    "step": "step",
    "stragglers": "step",
    "log": "step",
    "verified": "step",
    "discarded": "step attempt",
    "survivor": "group",
    "end": "event",
}
"""The field or fields that identify a line of an event: a second line with the same values is a copy."""
_AGAIN_S = 0.1
_REMEMBERED = 64
"""Lines that a group remembers without writing. Live groups are at most one step apart, so few are ever missing."""
_TAIL_BYTES = 2**20
"""Bytes that a new writer reads back for lines that are there already: a month's record is not read within a step."""

_CHUNK_BYTES = 2**20
_FEW_GROUPS = 16
_NUMBERED = ("view", "step")
_HEADS = ("begin", "view")
"""The events whose newest line says how long a run is and who takes part."""
_HELD, _HELD_S = 1024, 5.0
"""Lines and seconds to wait for a view or a step that another file must have."""
_RECALLED = 65536
"""Lines of several files of which a reader recognises copies: those of the longest time that writers may be apart."""


class Tail:
    """The lines that are added to a run's history. The files need not exist yet, and another run may replace them.

    A last line without its newline is waited for; one that is not JSON is skipped. Of several files the lines of each
    stay in their order; :class:`_Order` merges them.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir, self._order = run_dir, _Order()
        self._parts: dict[Path, _Part] = {}

    def new(self) -> list[dict[str, Any]]:
        """Return the lines since the last call."""
        return list(self.each())

    def each(self, last: bool = False) -> Iterator[dict[str, Any]]:
        """Yield the lines since the last call, one by one: the first call on a long record needs no memory for all of
        it. ``last``: do not wait for lines that are still missing."""
        for path in files(self._run_dir):
            self._parts.setdefault(path, _Part(path))
        if any(part.is_another() for part in self._parts.values()):
            self._order = _Order()
        merged = heapq.merge(*(part.new() for part in self._parts.values()), key=lambda line: line.get("t", 0.0))
        several = len(self._parts) > 1
        for line in merged:
            yield from self._order.take(line, several)
        yield from self._order.overdue(last)


class _Part:
    """One file of a history."""

    def __init__(self, path: Path) -> None:
        self._path, self._inode, self._offset, self._rest = path, -1, 0, b""

    def is_another(self) -> bool:
        """Return True if the file was replaced since the last read; it is then read from its beginning."""
        try:
            inode = self._path.stat().st_ino
        except FileNotFoundError:
            return False
        before, self._inode = self._inode, inode
        if before != inode:
            self._offset, self._rest = 0, b""
        return before not in (-1, inode)

    def new(self) -> Iterator[dict[str, Any]]:
        try:
            with shared_file.open_record(self._path) as file:
                inode = os.fstat(file.fileno()).st_ino
                if inode != self._inode:
                    self._inode, self._offset, self._rest = inode, 0, b""
                size = os.fstat(file.fileno()).st_size
                if size < self._offset:  # it was shortened from outside; its writer adds what is missing at its end
                    self._offset, self._rest = size, b""
                file.seek(self._offset)
                while data := file.read(_CHUNK_BYTES):
                    self._offset += len(data)
                    *lines, self._rest = (self._rest + data).split(b"\n")
                    yield from filter(None, map(parse, lines))
        except FileNotFoundError:
            return


class _Order:
    """Merges the lines of several files by ``t``, from clocks that may differ; views and steps are sorted by their
    number.

    Groups on several hosts may write the same line; the first counts. A step or a view that comes too early is held
    back until those before it have come, unless they are so late that they must be missing.
    """

    def __init__(self) -> None:
        self._newest: dict[str, int] = {}
        self._seen: dict[tuple[str, Any], None] = {}
        self._held: list[dict[str, Any]] = []
        self._since = 0.0

    def take(self, line: dict[str, Any], several: bool) -> Iterator[dict[str, Any]]:
        """Yield the lines that are due after ``line`` has come. ``several``: there is more than one file."""
        if several and not self._is_new(line):
            return
        if several and self._is_early(line):
            self._since = self._since if self._held else time.monotonic()
            self._held.append(line)
            if len(self._held) > _HELD:
                yield from self._release()
            return
        yield self._noted(line)
        while ready := [held for held in self._held if not self._is_early(held)]:
            self._held = [held for held in self._held if self._is_early(held)]
            yield from self._in_order(ready)

    def overdue(self, all_of_them: bool) -> Iterator[dict[str, Any]]:
        """Yield the lines that were held back long enough."""
        if self._held and (all_of_them or time.monotonic() - self._since > _HELD_S):
            yield from self._release()

    def _release(self) -> Iterator[dict[str, Any]]:
        held, self._held = self._held, []
        yield from self._in_order(held)

    def _in_order(self, lines: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for line in sorted(lines, key=_number):
            if self._is_new(line):
                yield self._noted(line)

    def _is_new(self, line: dict[str, Any]) -> bool:
        event = line["event"]
        if event in _NUMBERED:
            return line.get(_IDENTITY[event], 0) > self._newest.get(event, -1)
        return event not in _IDENTITY or _key(line) not in self._seen

    def _is_early(self, line: dict[str, Any]) -> bool:
        event = line["event"]
        return event in _NUMBERED and line.get(_IDENTITY[event], 0) > self._newest.get(event, -1) + 1

    def _noted(self, line: dict[str, Any]) -> dict[str, Any]:
        """Return the line, which is yielded now."""
        event = line["event"]
        if event in _NUMBERED:
            self._newest[event] = max(line.get(_IDENTITY[event], 0), self._newest.get(event, -1))
        elif event == "resume":
            self._newest.setdefault("step", line.get("step", 0) - 1)
        elif event in _IDENTITY:
            self._seen[_key(line)] = None
            if len(self._seen) > _RECALLED:  # a script may log in every step
                del self._seen[next(iter(self._seen))]
        return line


def _number(line: Mapping[str, Any]) -> tuple[int, bool, int]:
    """The sort key of views and steps: the view of an epoch, then its steps."""
    return line.get("epoch", 0), line["event"] == "step", line.get("step", 0)


def files(run_dir: Path) -> list[Path]:
    """Return the files of a run's record; :data:`FILE` comes first, even if it does not exist."""
    return [run_dir / FILE, *sorted(filter(shared_file.is_record, run_dir.glob(_OTHERS)))]


def write_as(host: int) -> None:
    """Make this process the agent of host ``host``: it and the processes it starts write a file of their own.

    Several hosts must not append to one file: on NFS the lines of one host would overwrite those of another.
    """
    os.environ[VARIABLE] = f"host{host}" if host else ""


def own_file(run_dir: Path) -> Path:
    """Return the file that this process writes: that of :func:`write_as` for agents and ranks. A tool has a file of its
    own, if processes of other hosts write, too."""
    name = os.environ.get(VARIABLE)
    if name is None and _other_hosts_write(run_dir):
        name = f"{socket.gethostname()}-{os.getpid()}"
    return run_dir / (f"history.{name}.jsonl" if name else FILE)


def _other_hosts_write(run_dir: Path) -> bool:
    """Whether the run has several hosts, or one that is not this one."""
    here = socket.gethostname()
    config = shared_file.read_json(run_dir / "config.json")
    if config is None:
        return False
    return config.get("hosts", 1) > 1 or config.get("host", here) != here or len(files(run_dir)) > 1


def append(run_dir: Path, event: str, **fields: Any) -> None:
    """Append one line, for an event that a single process owns (agent, injector)."""
    with shared_file.append_to(own_file(run_dir)) as file:
        _write(file.fileno(), _encoded({"t": round(steady_clock.now(), 6), "event": event, **fields}))


def _write(fd: int, line: bytes) -> tuple[int, int]:
    """Append ``line``. Return the file's size before and after, which tell if another process has written."""
    size = os.fstat(fd).st_size
    if size and os.pread(fd, 1, size - 1) != b"\n":
        line = b"\n" + line
    written = os.write(fd, line)
    if written != len(line):
        raise OSError(f"only {written} of {len(line)} bytes could be written to the history")
    return size, os.fstat(fd).st_size


def lines(run_dir: Path) -> Iterator[dict[str, Any]]:
    """Yield all whole lines of a run's history, oldest first; none when there is no history yet."""
    return Tail(run_dir).each(last=True)


def read(run_dir: Path) -> list[dict[str, Any]]:
    """Return :func:`lines` as a list, for short records: 100,000 steps take over 100 MB."""
    return list(lines(run_dir))


def parse(line: bytes) -> dict[str, Any] | None:
    """Return one line as an object; None for a torn or empty one. Groups that are written as spans become a list, which
    lines may share: it must not be changed."""
    try:
        value = json.loads(line)
        if not isinstance(value, dict) or "event" not in value:
            return None
        if isinstance(value.get("live"), str):
            value["live"] = _listed(value["live"])
    except ValueError:
        return None
    return value


@lru_cache(maxsize=64)
def _listed(live: str) -> list[int]:
    return list(groups_of(live))


def _encoded(line: Mapping[str, Any]) -> bytes:
    """Encode a step's line, which has to be short for any number of groups: there may be millions of them."""
    if line["event"] == "step" and len(line.get("live", ())) > _FEW_GROUPS:
        line = {**line, "live": spans(line["live"])}
    return (json.dumps(line) + "\n").encode()


class History:
    """One group's access to the shared history.

    A history that cannot be written (disk full, file system gone) never stops training: the lines are kept and
    tried again with the next one. When the file is removed or shortened from outside, the writer adds the newest lines,
    and those that a record cannot be read without, again.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = os.fspath(own_file(run_dir))
        self._fd: int | None = None  # kept: on a busy file system, opening a file takes longer than all else here
        self._writer = False
        self._remembered: deque[dict[str, Any]] = deque(maxlen=_REMEMBERED)
        self._heads: dict[str, dict[str, Any]] = {}
        self._pending: list[dict[str, Any]] = []
        self._own: list[dict[str, Any]] = []
        self._present: deque[tuple[str, Any]] = deque(maxlen=8 * _REMEMBERED)
        self._seen_bytes = 0
        self._warned = False
        self._lacks = False

    def note(self, event: str, **fields: Any) -> None:
        """Write an event that only this group knows, whichever group is the writer."""
        self._own.append({"t": round(steady_clock.now(), 6), "event": event, **fields})
        self._flush()

    def record(self, event: str, *, later: bool = False, **fields: Any) -> None:
        """Take in an event that every group knows; the group that is the writer puts it into the file.

        ``later``: write it with the next event, or at :meth:`write`.
        """
        line = {"t": round(steady_clock.now(), 6), "event": event, **fields}
        self._remembered.append(line)
        if event in _HEADS:
            self._heads[event] = line
        if self._writer:
            self._pending.append(line)
        if not later:
            self.write()

    def write(self) -> None:
        """Write all lines that are not in the file yet."""
        if self._pending or self._own:
            self._flush()

    def write_last(self, within_s: float) -> None:
        """Write what is left, and try again for ``within_s`` seconds where it cannot be written: no later line will."""
        self.write()
        deadline = time.monotonic() + within_s
        while (self._pending or self._own) and time.monotonic() < deadline:
            time.sleep(_AGAIN_S)
            self.write()

    def set_writer(self, writer: bool) -> None:
        """Set whether this group is the lowest living one. A new writer adds the lines its predecessor left out."""
        if writer and not self._writer:
            self._recall()
            self._flush()
        self._writer = writer

    def _flush(self) -> None:
        """Write the pending lines that are not in the file.

        A line may be in it already: a predecessor wrote the line of a step that its survivors then had to finish
        without it, or this group was frozen for minutes, the others went on without it, and its own line comes late.
        """
        try:
            self._size()
            while self._own:  # one by one: nothing would tell which of them a full disk has lost
                self._put(self._own[:1])
                del self._own[0]
            if self._pending:
                self._poll(self._size())
                self._pending = [line for line in self._pending if _key(line) not in self._present]
                self._put(self._pending)
                self._pending = []
        except OSError as error:
            self._close()  # after an outage of the file system the old descriptor may be invalid
            if not self._warned:
                _log.warning(f"{self._path} not written, training goes on: {error.strerror or error}")
            self._warned = True

    def _close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            with contextlib.suppress(OSError):
                os.close(fd)

    def _put(self, lines: list[dict[str, Any]]) -> None:
        data = b"".join(map(_encoded, lines))
        assert self._fd is not None, "`_size` has opened it"
        before, after = _write(self._fd, data)
        if before == self._seen_bytes and after == before + len(data):  # no other writer: not read again
            self._seen_bytes = after
            self._present.extend(map(_key, lines))

    def _size(self) -> int:
        """Return the size of the file, which is open after the call."""
        status = None if self._fd is None else os.fstat(self._fd)
        if status is None or status.st_nlink == 0:  # not open yet, or the file was removed
            self._lacks = self._lacks or status is not None
            self._close()
            self._fd = shared_file.open_file(self._path, shared_file.APPENDS)
            status, before, self._seen_bytes = os.fstat(self._fd), self._seen_bytes, 0
        else:
            before = self._seen_bytes
        if self._lacks or status.st_size < before:
            self._lacks, self._seen_bytes = False, 0
            self._present.clear()
            if self._writer:
                self._recall(heads=status.st_size <= _TAIL_BYTES)  # all of the file is read: they are not repeated
                # Only the newline may be gone: that line is whole, and is not repeated.
                return _write(given(self._fd), b"")[1]
        return status.st_size

    def _recall(self, heads: bool = False) -> None:
        """Make all remembered lines pending; those that are found in the file are left out when they are written."""
        known = {id(line) for line in self._pending}
        lines = {id(line): line for line in (*(self._heads.values() if heads else ()), *self._remembered)}
        self._pending = [*(line for key, line in lines.items() if key not in known), *self._pending]

    def _poll(self, size: int) -> None:
        """Take in the lines added since the last look, by this and other processes; nearly always few or none."""
        if size == self._seen_bytes:
            return
        self._seen_bytes = max(self._seen_bytes, size - _TAIL_BYTES)
        assert self._fd is not None, "`_size` has opened it"
        data = os.pread(self._fd, size - self._seen_bytes, self._seen_bytes)
        whole = data[: data.rfind(b"\n") + 1]
        self._seen_bytes += len(whole)
        self._present.extend(_key(line) for line in map(parse, whole.splitlines()) if line is not None)


def _key(line: dict[str, Any]) -> tuple[str, Any]:
    names = _IDENTITY.get(line["event"], "t").split()
    return line["event"], line.get(names[0]) if len(names) == 1 else tuple(map(line.get, names))
