"""The time in the run record: Unix seconds that go on evenly when the clock of the host is set.

An agent reads the wall clock once. It, and the ranks that it starts, count on from there by the kernel's clock since the
boot, which no process sets and which goes on while the host is suspended. Durations are then differences of times, also
between processes of one host. A process that no agent has started reads the wall clock once itself.
"""

from __future__ import annotations

import os
import time

VARIABLE = "MEGATRON_FT_CLOCK"
"""Environment variable with the wall clock's reading at the boot, in seconds, for an agent and all its processes."""
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_booted: float | None = None


def begin() -> None:
    """Read the wall clock, for this process and those that it starts from now on."""
    global _booted
    _booted = time.time() - time.clock_gettime(_CLOCK)
    os.environ[VARIABLE] = repr(_booted)


def now() -> float:
    """Return the time in Unix seconds."""
    global _booted
    if _booted is None:
        _booted = float(os.environ.get(VARIABLE) or time.time() - time.clock_gettime(_CLOCK))
    return _booted + time.clock_gettime(_CLOCK)
