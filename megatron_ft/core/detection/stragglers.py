"""Stragglers: groups that are slower than the others for several steps in a row.

Intuition. Every group's seconds per microbatch travel in a slot of their own with the sum of bucket 0, so all groups
that have committed a step hold the same numbers, to the bit. Values that a pure function derives from them are
therefore the same at all groups and need no agreement: :class:`Speeds` is part of the committed state, like the model,
and a group that takes that state from another group receives it, too.

Only measurements change it. The membership does not: groups that are one step apart enter a view at different steps. A
group that is gone measures nothing, and is forgotten after a few such steps.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from megatron_ft.types import GroupId

_DRIFT = 0.25
"""The relative change of a straggler's slowness that changes its quota: a plan that differs in every step defeats the
prefetching of samples."""
_FEW = 16
MOST_NAMED = 32
"""If more groups than this are slow at once, the record names the slowest only, and a replay of that run may differ."""
_DIGITS = 3
"""Measurements are rounded to this number of digits, so that a record of rounded numbers leads to the same plans."""


class Track(NamedTuple):
    """The remembered measurements of one group.

    Attributes:
        ratios: its times per microbatch in the last steps in which it computed, each relative to the median of the
            others' in that step.
        slowness: the ratio that its quota is made for; 0 while it is no straggler.
        idle: number of steps since it last computed.
    """

    ratios: tuple[float, ...] = ()
    slowness: float = 0.0
    idle: int = 0


@dataclass(frozen=True)
class Speeds:
    """The speeds of the groups, from the committed steps.

    Attributes:
        longest_s: the largest time per microbatch of the last step that was measured, in seconds.
        tracks: only those groups that are stragglers, or were slow in the last step: empty in a run without trouble.
    """

    longest_s: float = 0.0
    tracks: Mapping[GroupId, Track] = field(default_factory=dict)

    @property
    def slow(self) -> dict[GroupId, float]:
        """The stragglers, with the ratio of their time per microbatch to that of the others."""
        return {group: track.slowness for group, track in sorted(self.tracks.items()) if track.slowness}


def observe(speeds: Speeds, measured: Mapping[GroupId, float], factor: float, steps: int) -> Speeds:
    """Return the speeds after a step that was committed with these measurements.

    Args:
        measured: seconds per microbatch of each group; 0, or absent, for a group that computed nothing.
        factor: a group is slow if its time exceeds this multiple of the median of the others; 0 or less: none ever is.
        steps: number of slow steps in a row that make a straggler, and of other steps in a row that end it.
    """
    seconds = {group: float(f"{s:.{_DIGITS}g}") for group, s in measured.items() if s > 0 and math.isfinite(s)}
    longest_s = max(seconds.values(), default=speeds.longest_s)
    if factor <= 0:
        return Speeds(longest_s)
    ordered = sorted(seconds.values())
    if not speeds.tracks and (len(ordered) < 2 or _ratio(ordered, ordered[-1]) <= factor):
        return Speeds(longest_s)  # nearly always: if the slowest group is not slow, no group is
    tracks: dict[GroupId, Track] = {}
    for group in sorted(seconds.keys() | speeds.tracks.keys()):
        before = speeds.tracks.get(group, Track())
        if group not in seconds:
            after = Track(before.ratios, before.slowness, before.idle + 1)
            keep = after.idle < steps
        elif len(seconds) == 1:
            after, keep = before, bool(before.ratios)  # there is no group to compare it with
        else:
            after = _after(before, _ratio(ordered, seconds[group]), factor, steps)
            keep = after.slowness > 0 or after.ratios[-1] > factor
        if keep:
            tracks[group] = after
    return Speeds(longest_s, tracks)


def brief(measured: Mapping[GroupId, float], speeds: Speeds, factor: float) -> dict[str, Any]:
    """Return the part of a step's measurements that a run record keeps; its size does not grow with the number of groups.

    Args:
        measured: seconds per microbatch of each group that computed.
        speeds: the speeds before the step.
        factor: as in :func:`observe`.

    Returns:
        ``measured`` names groups: all if they are few; else those that are, or were, slow, and the slowest, at most
        ``MOST_NAMED`` of them. ``measured_rest``: ``[seconds, number of groups]`` for the others, where a time far from
        the median is replaced by a value next to it. :func:`observe` has the same result from :func:`whole` of both.
    """
    seconds = {group: float(f"{s:.{_DIGITS}g}") for group, s in measured.items() if s > 0 and math.isfinite(s)}
    count = len(seconds)
    if count <= _FEW:
        return {"measured": {str(group): s for group, s in seconds.items()}}
    ordered = sorted(seconds.values())
    low, high = ordered[(count - 2) // 2], ordered[(count - 1) // 2 + 1]  # all that a median of others can depend on
    slowest = min(group for group, s in seconds.items() if s == ordered[-1])
    some = factor > 0 and _ratio(ordered, ordered[-1]) > factor  # nearly never
    slow = [
        group
        for group, s in seconds.items()
        if group in speeds.tracks or group == slowest or some and _ratio(ordered, s) > factor
    ]
    named = sorted(slow, key=lambda group: (group not in speeds.tracks, -seconds[group], group))[:MOST_NAMED]
    rest = Counter(min(max(s, low), high) for group, s in seconds.items() if group not in set(named))
    told = {str(group): seconds[group] for group in sorted(named)}
    return {"measured": told, "measured_rest": [[s, number] for s, number in sorted(rest.items())]}


def whole(named: Mapping[GroupId, float], rest: Iterable[tuple[float, int]]) -> dict[GroupId, float]:
    """Return measurements for :func:`observe` from those of :func:`brief`. Groups without a name get numbers below 0."""
    found = dict(named)
    for seconds, number in rest:
        found |= {-1 - len(found) - other: seconds for other in range(number)}
    return found


def _after(before: Track, ratio: float, factor: float, steps: int) -> Track:
    """Return the track after one more step in which the group computed."""
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


def _ratio(ordered: Sequence[float], own: float) -> float:
    """Return ``own`` relative to the median of ``ordered`` without one ``own``; ``ordered`` has at least two entries.

    The same quotient decides everywhere: by rounding, ``own > factor * median`` may differ from it."""
    place = bisect_left(ordered, own)
    count = len(ordered) - 1
    low, high = (middle + (middle >= place) for middle in ((count - 1) // 2, count // 2))
    return own / ((ordered[low] + ordered[high]) / 2)


def weights(speeds: Speeds) -> dict[GroupId, float]:
    """Return the stragglers' speeds relative to those of the others, which are 1, for ``assignment.plan_step``."""
    return {group: 1 / slowness for group, slowness in speeds.slow.items()}
