"""Stragglers: groups that are slower than the others for several steps in a row, and what everybody knows of it.

Intuition. Every group's seconds per microbatch travel in a slot of their own with the sum of bucket 0, so whoever has
committed a step holds the same numbers, to the bit, as everybody else who has. What is derived from them by a pure
function is therefore the same at all groups and needs no agreement: :class:`Speeds` is part of the committed state, like
the model, and who takes that state from another group takes it along.

Only what was measured changes it. Who is a member does not: views are entered at different steps by groups that stand
one step apart. A group that is gone measures nothing, and is forgotten after a few steps of that.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from megatron_ft.types import GroupId

_DRIFT = 0.25
"""By how much a straggler's slowness must change before its quota does: a plan that differs in every step defeats the
prefetching of samples."""
_DIGITS = 3
"""What is measured counts with so many digits, so a record may hold rounded numbers and still lead to the same plans."""


@dataclass(frozen=True)
class Track:
    """What is remembered of one group.

    ``ratios`` are its times per microbatch in the last steps in which it computed, each relative to the median of the
    others' in that step. ``slowness`` is the ratio its quota is made for, 0 while it is no straggler. ``idle`` counts the
    steps since it last computed anything.
    """

    ratios: tuple[float, ...] = ()
    slowness: float = 0.0
    idle: int = 0


@dataclass(frozen=True)
class Speeds:
    """What the committed steps have shown of the groups' speeds.

    ``longest_s`` is the largest time per microbatch of the last step that was measured, in seconds. ``tracks`` holds
    those groups only that are stragglers, or were slow in the last step: in a run without trouble it is empty.
    """

    longest_s: float = 0.0
    tracks: Mapping[GroupId, Track] = field(default_factory=dict)

    @property
    def slow(self) -> dict[GroupId, float]:
        """The stragglers, with how many times slower than the others they are."""
        return {group: track.slowness for group, track in sorted(self.tracks.items()) if track.slowness}

    def to_json(self) -> dict[str, Any]:
        tracks = {str(group): [list(t.ratios), t.slowness, t.idle] for group, t in sorted(self.tracks.items())}
        return {"longest_s": self.longest_s, "tracks": tracks}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Speeds:
        tracks = {int(group): Track(tuple(ratios), slow, idle) for group, (ratios, slow, idle) in raw["tracks"].items()}
        return cls(raw["longest_s"], tracks)


def observe(speeds: Speeds, measured: Mapping[GroupId, float], factor: float, steps: int) -> Speeds:
    """What is known after a step that was committed with these measurements.

    Args:
        measured: seconds per microbatch of each group; 0, or absent, for who computed nothing.
        factor: slower than so many times the median of the others is slow; 0 or less: nobody ever is.
        steps: so many slow steps in a row make a straggler, and so many others in a row end it.
    """
    seconds = {group: float(f"{s:.{_DIGITS}g}") for group, s in measured.items() if s > 0 and math.isfinite(s)}
    longest_s = max(seconds.values(), default=speeds.longest_s)
    if factor <= 0:
        return Speeds(longest_s)
    ordered = sorted(seconds.values())
    if not speeds.tracks and (len(ordered) < 2 or ordered[-1] <= factor * _median_of_others(ordered, ordered[-1])):
        return Speeds(longest_s)  # nearly always: if the slowest is not slow, nobody is
    tracks: dict[GroupId, Track] = {}
    for group in sorted(seconds.keys() | speeds.tracks.keys()):
        before = speeds.tracks.get(group, Track())
        if group not in seconds:
            after = Track(before.ratios, before.slowness, before.idle + 1)
            keep = after.idle < steps
        elif len(seconds) == 1:
            after, keep = before, bool(before.ratios)  # there is nobody to compare it with
        else:
            after = _after(before, seconds[group] / _median_of_others(ordered, seconds[group]), factor, steps)
            keep = after.slowness > 0 or after.ratios[-1] > factor
        if keep:
            tracks[group] = after
    return Speeds(longest_s, tracks)


def _after(before: Track, ratio: float, factor: float, steps: int) -> Track:
    """One more step in which the group computed."""
    ratios = (*before.ratios, ratio)[-steps:]
    middle, full = median(ratios), len(ratios) == steps
    slowness = before.slowness
    if not full:
        pass
    elif all(some <= factor for some in ratios):
        slowness = 0.0
    elif slowness:
        if abs(middle - slowness) > _DRIFT * slowness:
            slowness = max(middle, factor)
    elif all(some > factor for some in ratios):
        slowness = middle
    return Track(ratios, slowness)


def _median_of_others(ordered: Sequence[float], own: float) -> float:
    """The median of ``ordered`` without one ``own``; at least two are there."""
    place = bisect_left(ordered, own)
    count = len(ordered) - 1
    low, high = (middle + (middle >= place) for middle in ((count - 1) // 2, count // 2))
    return (ordered[low] + ordered[high]) / 2


def weights(speeds: Speeds) -> dict[GroupId, float]:
    """The stragglers' speed relative to the others', which is 1: what ``scheduler.plan_step`` wants to know."""
    return {group: 1 / slowness for group, slowness in speeds.slow.items()}
