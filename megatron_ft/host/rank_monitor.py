"""The agent's regular look at its own ranks, ten times a second: process state, processor time, pulse
(``core.detection.rank_health`` judges).

A rank that stops is seen at once, because the kernel tells its parent. The look that gives it up is made when its time
is over, not up to a tenth of a second later.

A rank that is given up for dead may still live: it is stopped, or stuck. The monitor does not kill it. When it goes on
it finds itself outside of the view and leaves; its work does not count any more.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from megatron_ft.config.schema import AUTO, DetectorConfig
from megatron_ft.core.detection import rank_health
from megatron_ft.run import progress_counters
from megatron_ft.utils.process_status import process_status

LOOK_EVERY_S = 0.1
_LEAST_S = 0.005
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass
class Watched(rank_health.Watched):
    """One watched rank: its process and its pulse."""

    pid: int
    pulse: Path


class Monitor:
    """Watches the ranks of one agent. ``clock`` is monotonic, in seconds."""

    def __init__(self, limits: rank_health.Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits, self._clock = limits, clock
        self._due = clock()

    @property
    def pause_s(self) -> float:
        """Seconds until the next look is due."""
        return max(self._due - self._clock(), 0.0)

    def stir(self) -> None:
        """Make a look due now: a child has changed its state (SIGCHLD), and may have been stopped."""
        self._due = self._clock()

    def poll_ranks(self, ranks: Iterable[Watched], is_outage: Callable[[], bool] = lambda: False) -> list[Watched]:
        """Return the ranks that are newly given up, if a look is due. ``is_outage``: see ``rank_health.look``."""
        now = self._clock()
        if now < self._due:
            return []
        looked = [(rank, sample) for rank in ranks if not rank.given_up and (sample := _sample(rank)) is not None]
        due_s = rank_health.look(looked, now, self._limits, is_outage)
        self._due = now + min(LOOK_EVERY_S, max(due_s, _LEAST_S))
        return [rank for rank, _ in looked if rank.given_up]


def _sample(rank: Watched) -> rank_health.Sample | None:
    """Return None when the process has ended: the agent's ``waitpid`` reports that."""
    try:
        status = process_status(rank.pid)
        heartbeats, progress, phase, dataset = progress_counters.read(rank.pulse)
    except OSError:
        return None
    cpu_s = status.cpu_ticks * _TICK_S
    return None if status.ended else rank_health.Sample(status.state, cpu_s, heartbeats, progress, phase, dataset)


def limits(settings: DetectorConfig) -> rank_health.Limits:
    """Return the config's limits, in seconds."""
    first_s = settings.longest_collective_s
    return rank_health.Limits(
        stopped_s=settings.stopped_timeout_s,
        hang_s=None if settings.hang_timeout_s == AUTO else float(settings.hang_timeout_s),
        first_s=first_s,
        outside_s=first_s if settings.outside_timeout_s == AUTO else float(settings.outside_timeout_s),
        storage_s=first_s if settings.storage_timeout_s == AUTO else float(settings.storage_timeout_s),
    )
