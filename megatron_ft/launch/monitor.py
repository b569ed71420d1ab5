"""The agent's look at its own ranks, ten times a second: process state, processor time, pulse (``core.health`` judges).

A rank that is given up for dead may still live: it is stopped, or stuck. It is not killed here. When it goes on it finds
itself outside of the view and leaves; nothing it does counts any more.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from megatron_ft.config import AUTO, DetectorConfig
from megatron_ft.core import health
from megatron_ft.runtime import pulse

LOOK_EVERY_S = 0.1
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass
class Watched:
    """One rank: its process and its pulse. ``given_up`` is the reason, once there is one."""

    pid: int
    pulse: Path
    health: health.Health = field(default_factory=health.Health)
    given_up: str = ""


class Monitor:
    """Looks at the ranks of one agent. ``clock`` is monotonic, in seconds."""

    def __init__(self, limits: health.Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits, self._clock = limits, clock
        self._looked = clock() - LOOK_EVERY_S

    def look(self, ranks: Iterable[Watched]) -> list[Watched]:
        """Those that are newly given up, if it is time to look again."""
        now = self._clock()
        if now - self._looked < LOOK_EVERY_S:
            return []
        self._looked = now
        found = []
        for rank in ranks:
            sample = None if rank.given_up else _sample(rank)
            if sample is None:
                continue
            rank.health, rank.given_up = health.look(rank.health, sample, now, self._limits)
            if rank.given_up:
                found.append(rank)
        return found


def _sample(rank: Watched) -> health.Sample | None:
    """None when the process has ended: that is for the agent's ``waitpid`` to say."""
    try:
        fields = Path(f"/proc/{rank.pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        beats, progress, phase = pulse.read(rank.pulse)
    except OSError:
        return None
    state, ticks = fields[0], int(fields[11]) + int(fields[12])
    return None if state in "ZX" else health.Sample(state, ticks * _TICK_S, beats, progress, phase)


def limits(settings: DetectorConfig) -> health.Limits:
    hang_s = None if settings.hang_timeout_s == AUTO else float(settings.hang_timeout_s)
    return health.Limits(settings.stopped_timeout_s, hang_s, settings.collective_timeout_s)
