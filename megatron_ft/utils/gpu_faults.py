"""What the driver says in the kernel's log about a GPU that has failed, for the reason of a lost rank: XID lines.

They are hints. A line tells what the driver saw, not why a rank was lost.

Failures it assumes: there is no GPU, no driver, or no permission to read the log.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

XIDS: Mapping[int, str] = {
    13: "graphics engine exception: usually the program, such as an index out of bounds",
    31: "memory page fault: usually the program, an illegal address",
    43: "the GPU stopped processing: usually the program",
    48: "double-bit ECC error: the memory of the GPU",
    62: "internal micro-controller halt",
    63: "a memory page or row is retired or remapped; reset the GPU when possible",
    64: "a memory page or row could not be retired or remapped: take the GPU out",
    74: "NVLink error: the link or its peer",
    79: "the GPU has fallen off the bus: power, PCIe or heat; reboot the host",
    92: "high rate of single-bit ECC errors",
    94: "contained ECC error: only the program that used the memory is affected",
    95: "uncontained ECC error: reset the GPU",
    119: "the GSP of the GPU does not answer: reset the GPU",
    120: "error of the GSP of the GPU",
    140: "unrecovered ECC error",
}
"""Meaning of the XID errors that matter here, from NVIDIA's catalogue."""
_LINE = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+)(?:, pid='?(\d+))?")
_LOGS = (Path("/var/log/kern.log"), Path("/var/log/syslog"), Path("/var/log/messages"))
_TAIL_BYTES = 1 << 18
_RECENT_S = 60.0


def xid_lines(lines: Iterable[str], pid: int | None = None) -> list[str]:
    """Return, for people, the XID errors in lines of the kernel's log, each once, in their order.

    ``pid``: only errors of this process, and those that name none.
    """
    found: dict[str, None] = {}
    for line in lines:
        if (match := _LINE.search(line)) is None:
            continue
        device, number, whose = match[1], int(match[2]), match[3]
        if pid is None or whose is None or int(whose) == pid:
            found[f"XID {number} on {device} ({XIDS.get(number, 'see the catalogue of XID errors')})"] = None
    return list(found)


class Watch:
    """Remembers how much of the kernel's log was there, so that only what comes later counts.

    Args:
        kmsg: the kernel's log; ``logs``: files to which it may be copied, used where ``kmsg`` cannot be read.
    """

    def __init__(self, kmsg: Path = Path("/dev/kmsg"), logs: Iterable[Path] = _LOGS) -> None:
        self._kmsg: int | None = None
        self._sizes: dict[Path, int] = {}
        self._errors: list[tuple[float, str]] = []
        with suppress(OSError):
            self._kmsg = os.open(kmsg, os.O_RDONLY | os.O_NONBLOCK)
            os.lseek(self._kmsg, 0, os.SEEK_END)
        if self._kmsg is None:
            for log in logs:
                with suppress(OSError):
                    self._sizes[log] = log.stat().st_size

    def hints(self, pid: int | None = None) -> str:
        """Return what the driver has said in the last minute, since the watch began; "" if nothing, or unknown."""
        now = time.monotonic()
        self._errors += [(now, line) for line in self._new_lines() if _LINE.search(line)]
        self._errors = [(at, line) for at, line in self._errors if now - at < _RECENT_S]
        return "; ".join(xid_lines((line for _, line in self._errors), pid))

    def _new_lines(self) -> list[str]:
        if self._kmsg is not None:
            return self._of_kmsg(self._kmsg)
        lines: list[str] = []
        for log, size in self._sizes.items():
            with suppress(OSError), log.open("rb") as file:
                end = os.fstat(file.fileno()).st_size
                file.seek(max(size if end >= size else 0, end - _TAIL_BYTES))  # a shorter one has been rotated
                lines += file.read(_TAIL_BYTES).decode(errors="replace").splitlines()
                self._sizes[log] = end
        return lines

    @staticmethod
    def _of_kmsg(fd: int) -> list[str]:
        """Each read returns one line; it fails with EPIPE where lines were overwritten, and the next one goes on."""
        lines: list[str] = []
        while True:
            try:
                raw = os.read(fd, 8192)
            except BrokenPipeError:
                continue
            except OSError:  # BlockingIOError: no further line
                return lines
            if not raw:
                return lines
            lines.append(raw.decode(errors="replace"))
