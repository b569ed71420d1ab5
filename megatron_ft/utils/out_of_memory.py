"""The kernel's counts of processes that it has killed for lack of memory; SIGKILL itself does not tell its cause."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path

from megatron_ft.utils import cgroups

_TOGETHER_S = 5.0
"""Processes that are killed for one lack of memory end within this time."""
_GB = 1e9
_NO_LIMIT = 1 << 60
_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


@dataclass(frozen=True)
class Counter:
    """A count of processes that were killed.

    Attributes:
        where: name for people.
        file: has a line ``oom_kill N``.
        limit: has the limit in bytes; None for the host.
    """

    where: str
    file: Path
    limit: Path | None = None

    def read(self) -> int | None:
        """Return the count; None where the kernel does not tell."""
        try:
            found = _COUNT.search(self.file.read_text(encoding="utf-8"))
        except OSError:
            return None
        return None if found is None else int(found[1])

    def said(self) -> str:
        """Return what has happened, in words."""
        try:
            limit = int((self.limit or self.file).read_text(encoding="utf-8"))
        except (OSError, ValueError):  # "max": no limit
            limit = _NO_LIMIT
        bound = f" (limit {limit / _GB:.3g} GB)" if limit < _NO_LIMIT else ""
        return f"out of memory: the kernel has killed a process of {self.where}{bound} for it; dmesg says more"


def counters(
    mounted: Path = cgroups.MOUNTED, own: Path = cgroups.OWN, vmstat: Path = Path("/proc/vmstat")
) -> list[Counter]:
    """Return the counts that can be read: of this process's groups, the innermost first, then of the host."""
    found = []
    for group, version in cgroups.around("memory", mounted, own):
        file, limit = (
            ("memory.events", "memory.max") if version == 2 else ("memory.oom_control", "memory.limit_in_bytes")
        )
        found.append(Counter(f"cgroup {group}", group / file, group / limit))
    found.append(Counter("this host", vmstat))
    return [counter for counter in found if counter.read() is not None]


class Watch:
    """Remembers the counts of the last look."""

    def __init__(self, watched: list[Counter] | None = None) -> None:
        self._seen = {counter: counter.read() or 0 for counter in (counters() if watched is None else watched)}
        self._said, self._until = "", 0.0

    def reason(self) -> str:
        """Return why a process that ended with SIGKILL just now was killed, if it was for lack of memory; else ""."""
        now = time.monotonic()
        grown = []
        for counter, seen in self._seen.items():
            count = counter.read()
            if count is not None and count > seen:
                grown.append(counter)
                self._seen[counter] = count
        if grown:
            self._said, self._until = grown[0].said(), now + _TOGETHER_S
        return self._said if now < self._until else ""
