"""A rank's pulse: a few counters in a small shared file, written by the rank and read by its agent.

A write costs a fraction of a microsecond and cannot block, so it can be done between any two actions. A thread counts
heartbeats in the file too: when they stop while the process runs, something holds the GIL. The agent makes the file, in
memory if the machine has a place for that (on a network file system every write of the training thread would use the
network).

Failures it assumes: either side may die at any time; the other goes on, and a reader sees the last counters.
"""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import tempfile
import threading
import time
from pathlib import Path

from megatron_ft.core.detection.collective_stalls import Training
from megatron_ft.core.detection.rank_health import Phase
from megatron_ft.utils import shared_file

BEAT_S = 0.1
VARIABLE = "MEGATRON_FT_PULSE"
_FIELDS = struct.Struct(
    "=QQQQQQ"
)  # heartbeats, progress, phase, dataset, seat, state; no two threads write one at a time
_PHASES: tuple[Phase, ...] = ("outside", "working", "waiting", "ended")
_NAME = "megatron_ft-pulses-"
_ROOM_BYTES = 2**20
"""Free memory that ``/dev/shm`` needs: more than the pulses of a host's ranks and files of a page each take."""


class ProgressCounters:
    """One rank's counters. The rank constructs it from the file that its agent made."""

    def __init__(self, path: Path) -> None:
        with open(shared_file.open_file(path, os.O_RDWR), "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _FIELDS.size)
        self._heartbeats = self._progress = self._dataset = self._engine = 0
        self._phase: Phase = "outside"

    @classmethod
    def from_env(cls) -> ProgressCounters:
        """Return the pulse that the launcher made."""
        return cls(Path(os.environ[VARIABLE]))

    def enter(self, phase: Phase) -> None:
        """Training thread: set the present phase."""
        self._phase = phase
        struct.pack_into("=Q", self._memory, 16, _PHASES.index(phase))

    def advance(self) -> None:
        """Training thread: count a finished action."""
        self._progress += 1
        struct.pack_into("=Q", self._memory, 8, self._progress)

    def engine(self) -> None:
        """Training thread: count the beginning or the end of an operation in which the engine waits for ranks of the group
        only; these never overlap."""
        self._engine += 1

    def training(self) -> Training:
        """Any thread: return the state of the training thread."""
        phase, engine = self._phase, self._engine
        excuse = "inside the dataset" if self._dataset % 2 else "between two steps" if phase == "outside" else ""
        return Training((self._progress, phase, engine), engine % 2 == 1 and phase != "outside", engine // 2, excuse)

    def dataset(self) -> None:
        """Count the beginning or the end of a dataset call, in the calling thread; calls never overlap."""
        self._dataset += 1
        struct.pack_into("=Q", self._memory, 24, self._dataset)

    def take_seat(self) -> None:
        """Training thread: this rank's group is a member of the run from now on."""
        struct.pack_into("=Q", self._memory, 32, 1)

    def take_state(self) -> None:
        """Training thread: this rank, which has followed others, holds a complete state from now on."""
        struct.pack_into("=Q", self._memory, 40, 1)

    def heartbeat(self) -> None:
        self._heartbeats += 1
        struct.pack_into("=Q", self._memory, 0, self._heartbeats)

    def start(self) -> None:
        """Count heartbeats in a thread until the process ends."""
        threading.Thread(target=self._heartbeat_on, name="megatron_ft-pulse", daemon=True).start()

    def _heartbeat_on(self) -> None:
        # no limit: the thread of the heartbeat, until the process ends
        while True:
            time.sleep(BEAT_S)
            self.heartbeat()


def directory(shared: Path = Path("/dev/shm")) -> Path:
    """Return a new place for the pulses of one agent's ranks, in memory if possible, else in TMPDIR. Removes those of killed
    agents."""
    usable = shared.is_dir() and os.access(shared, os.W_OK) and shutil.disk_usage(shared).free >= _ROOM_BYTES
    for _ in range(3):  # without locks, no place is removed either
        place = Path(tempfile.mkdtemp(prefix=_NAME, dir=shared if usable else None))
        if _hold(place) is not None and place.exists():
            break  # else another agent has removed it as an abandoned one
    for other in place.parent.glob(f"{_NAME}*"):
        held = _hold(other)
        if held is not None:
            shutil.rmtree(other, ignore_errors=True)
            os.close(held)
    return place


def _hold(place: Path) -> int | None:
    """Lock a place until the returned descriptor is closed, or this process ends. Return None if another process holds
    it, or it is no directory of this user."""
    try:
        fd = shared_file.open_directory(place)
    except OSError:
        return None
    if not shared_file.lock(fd):
        os.close(fd)
        return None
    return fd


def create(path: Path) -> None:
    """Agent: make an empty pulse. Raises ``OSError`` with the path."""
    try:
        shared_file.write(path, bytes(_FIELDS.size))
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def read(path: Path) -> tuple[int, int, Phase, int]:
    """Agent: return heartbeats, progress, phase, and the count of beginnings and ends of dataset calls."""
    heartbeats, progress, phase, dataset, *_ = _FIELDS.unpack(shared_file.read_record(path)[: _FIELDS.size])
    return heartbeats, progress, _PHASES[phase], dataset


def has_seat(path: Path) -> bool:
    """Agent: return whether the rank has entered a view. False if the counters are gone."""
    return _is_set(path, 4)


def has_state(path: Path) -> bool:
    """Agent: return whether the rank, which comes back, holds a complete state. False if the counters are gone."""
    return _is_set(path, 5)


def _is_set(path: Path, field: int) -> bool:
    try:
        return bool(_FIELDS.unpack(shared_file.read_record(path)[: _FIELDS.size])[field])
    except OSError:
        return False
