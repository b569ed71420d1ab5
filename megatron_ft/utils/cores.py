"""The cores that this process may use: those of its CPU affinity, and no more than the quotas of its cgroups allow."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

from megatron_ft.utils import cgroups


def usable(mounted: Path = cgroups.MOUNTED, own: Path = cgroups.OWN) -> int:
    """Return their number, at least 1. Part of a core counts as one. The arguments are those of
    :func:`.cgroups.around`."""
    cores = float(len(os.sched_getaffinity(0)))
    for group, version in cgroups.around("cpu", mounted, own):
        files = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        for quota in _quota(*(group / name for name in files)):
            cores = min(cores, quota)
    return max(1, math.ceil(cores))


def _quota(*files: Path) -> Iterator[float]:
    try:
        words = " ".join(file.read_text(encoding="utf-8") for file in files).split()
        quota, period = map(int, words)
    except (OSError, ValueError):  # "max": no quota
        return
    if quota > 0 and period > 0:
        yield quota / period
