"""A rank's pulse: a few counters in a small shared file, written by the rank and read by its agent.

Writing costs a fraction of a microsecond and cannot block, so it can be done between any two actions. A thread beats in
it too: when that stops while the process runs, something holds the GIL. The agent makes the file, in memory where the
machine has a place for that (a network file system would make every write of the training thread one on the network).

Failures it assumes: either side may die at any time; the other goes on, a reader sees the counters as they were.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import threading
from pathlib import Path

from megatron_ft.core.health import Phase

BEAT_S = 0.1
VARIABLE = "MEGATRON_FT_PULSE"
_FIELDS = struct.Struct("=QQQ")  # beats, progress, phase; each is written by one thread
_PHASES: tuple[Phase, ...] = ("outside", "working", "waiting")


class Pulse:
    """One rank's counters. The rank constructs it from the file that its agent made."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _FIELDS.size)
        self._beats = self._progress = 0

    @classmethod
    def from_env(cls) -> Pulse:
        """The one that the launcher made."""
        return cls(Path(os.environ[VARIABLE]))

    def enter(self, phase: Phase) -> None:
        """Training thread: what it does from here on."""
        struct.pack_into("=Q", self._memory, 16, _PHASES.index(phase))

    def advance(self) -> None:
        """Training thread: something is finished."""
        self._progress += 1
        struct.pack_into("=Q", self._memory, 8, self._progress)

    def beat(self) -> None:
        self._beats += 1
        struct.pack_into("=Q", self._memory, 0, self._beats)

    def start(self) -> None:
        """Beat from a thread until the process ends."""
        threading.Thread(target=self._beat_on, name="megatron_ft-pulse", daemon=True).start()

    def _beat_on(self) -> None:
        pause = threading.Event()
        while not pause.wait(BEAT_S):
            self.beat()


def directory() -> Path:
    """A new place for the pulses of one agent's ranks, in memory if possible."""
    shared = Path("/dev/shm")
    usable = shared.is_dir() and os.access(shared, os.W_OK)
    return Path(tempfile.mkdtemp(prefix="megatron_ft-", dir=shared if usable else None))


def create(path: Path) -> None:
    """Agent: an empty pulse. Raises ``OSError``."""
    path.write_bytes(bytes(_FIELDS.size))


def read(path: Path) -> tuple[int, int, Phase]:
    """Agent: beats, progress and phase."""
    beats, progress, phase = _FIELDS.unpack(path.read_bytes()[: _FIELDS.size])
    return beats, progress, _PHASES[phase]
