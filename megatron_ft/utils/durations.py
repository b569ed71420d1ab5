"""Durations for people."""

from __future__ import annotations

from math import isfinite


def duration(seconds: float) -> str:
    """Return a duration in words, such as "12 min"; an infinite one is "never"."""
    if not isfinite(seconds):
        return "never"
    for unit, size in (("days", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}" if seconds < 1000 * size else f"{seconds / size:,.0f} {unit}"
    return f"{seconds:.3g} s"
