"""What the driver says about a GPU that has failed, for the reason of a lost rank: XID lines of the kernel's log, and NVML.

They are hints. A line tells what the driver saw, not why a rank was lost, and a log may be unreadable for this user.

Failures it assumes: there is no GPU, no driver, no permission to read the log, or NVML (the optional package nvidia-ml-py)
is missing or does not answer.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_ft.utils import deadline

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
_NVML_S = 0.2
"""A loss is announced after NVML was asked, and it may hang where a GPU has failed."""
_RECENT_S = 60.0
_THROTTLED = 0x08 | 0x20 | 0x40 | 0x80
"""Clock reasons of NVML: hardware slowdown, software and hardware thermal slowdown, hardware power brake."""


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
        nvml: returns the hints of NVML, or None if it does not answer; it is not asked again then.
    """

    def __init__(
        self,
        kmsg: Path = Path("/dev/kmsg"),
        logs: Iterable[Path] = _LOGS,
        nvml: Callable[[], list[str] | None] | None = None,
    ) -> None:
        self._kmsg: int | None = None
        self._sizes: dict[Path, int] = {}
        self._nvml = nvml or nvml_hints
        self._answers = self._gpus()
        self._errors: list[tuple[float, str]] = []
        with suppress(OSError):
            self._kmsg = os.open(kmsg, os.O_RDONLY | os.O_NONBLOCK)
            os.lseek(self._kmsg, 0, os.SEEK_END)
        if self._kmsg is None:
            for log in logs:
                with suppress(OSError):
                    self._sizes[log] = log.stat().st_size
        self._before = set(self._ask())

    def hints(self, pid: int | None = None) -> str:
        """Return what the driver has said in the last minute, since the watch began; "" if nothing, or unknown."""
        now = time.monotonic()
        self._errors += [(now, line) for line in self._new_lines() if _LINE.search(line)]
        self._errors = [(at, line) for at, line in self._errors if now - at < _RECENT_S]
        said = xid_lines((line for _, line in self._errors), pid)
        return "; ".join([*said, *(hint for hint in self._ask() if hint not in self._before)])

    def _ask(self) -> list[str]:
        said = self._nvml() if self._answers else []
        self._answers = self._answers and said is not None
        return said or []

    @staticmethod
    def _gpus() -> bool:
        return Path("/dev/nvidiactl").exists()

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


def nvml_hints() -> list[str] | None:
    """Return what NVML says about this host's GPUs, for people; empty without nvidia-ml-py, None if it does not answer."""
    outcome = deadline.Call("megatron_ft-nvml", _ask_nvml).within(_NVML_S)
    return None if outcome.abandoned else outcome.value or []


def _ask_nvml() -> list[str]:
    try:
        import pynvml
    except ImportError:
        return []
    found: list[str] = []
    pynvml.nvmlInit()
    try:
        for number in range(pynvml.nvmlDeviceGetCount()):
            found += of_device(pynvml, number)
    finally:
        pynvml.nvmlShutdown()
    return found


def of_device(nvml: Any, number: int) -> list[str]:
    """Return the hints about one GPU. Raises no error of NVML: a GPU that does not answer is a hint itself."""
    found: list[str] = []
    try:
        device = nvml.nvmlDeviceGetHandleByIndex(number)
    except nvml.NVMLError as error:
        return [f"GPU {number}: {error}"]
    with suppress(nvml.NVMLError):  # not all GPUs have ECC
        uncorrected = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
        errors = nvml.nvmlDeviceGetTotalEccErrors(device, uncorrected, nvml.NVML_VOLATILE_ECC)
        if errors:
            found.append(f"GPU {number}: {errors} uncorrected ECC errors since the driver was loaded")
    with suppress(nvml.NVMLError):
        if nvml.nvmlDeviceGetCurrentClocksThrottleReasons(device) & _THROTTLED:
            degrees = nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU)
            found.append(f"GPU {number}: slowed down by heat or power, {degrees} degrees C")
    return found
