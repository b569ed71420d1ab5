"""Checkpoints: the writers of the parts, the period, their order, those to delete. Decisions only.

A checkpoint is for failures that the groups cannot survive together: a wipe-out, a power cut, the end of the time that
was allotted. Ranks of equal position hold the same state in all groups, so each of ``parts`` groups writes one part of it.

Assumes: any checkpoint on disk may be unfinished, damaged or from another version, and any of its writers may be lost
while it writes; then that checkpoint never becomes complete, and the one before it still counts.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from math import sqrt
from typing import Any

from megatron_ft.types import GroupId

LONGEST_S = 3600.0
"""The longest period in seconds, so that at most an hour is lost. The causes that end whole jobs are often in no MTBF:
operators, quotas, power, a full file system. A save that costs a minute then takes 1.7% of the time, even where no
failure was ever seen and a period ten times longer would do."""
LEAST_SAVES = 10.0
"""A period is at least this multiple of the time that a save costs training: saving takes at most a tenth of the time.

It is the optimum only where the uptime is below 40 saves. There the estimate rests on a few failures in a burst, and the
optimum is flat: at an uptime of 20 saves the limit costs one percentage point of availability.
"""


# --- writing ----------------------------------------------------------------------------------------------------------


def parts(sizes: Sequence[int], count: int) -> tuple[tuple[int, ...], ...]:
    """Divide tensors of these sizes among ``count`` parts, and return the indices of each, ascending.

    Each tensor, the largest first, goes to the smallest part as a whole, so the largest part exceeds the smallest by at
    most one tensor. The same input gives the same parts everywhere; no writer needs to ask another.
    """
    chosen: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, 0, part) for part in range(count)]
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        size, number, part = heap[0]
        chosen[part].append(index)
        heapq.heapreplace(heap, (size + sizes[index], number + 1, part))
    return tuple(tuple(sorted(part)) for part in chosen)


def writers(live: Collection[GroupId], domains: Mapping[GroupId, Hashable], count: int) -> tuple[GroupId, ...]:
    """Return the groups that write, the i-th of them part i: ``count`` of ``live``, or all if there are fewer.

    One group of each failure domain is taken before the second of any: domains are racks or hosts, and each has its own
    way to the storage. A group whose domain is not known counts as a domain of its own.
    """
    members: dict[Hashable, list[GroupId]] = {}
    for group in sorted(live):
        members.setdefault(("known", domains[group]) if group in domains else ("alone", group), []).append(group)
    rounds = chain.from_iterable(zip_longest(*members.values()))
    return tuple([group for group in rounds if group is not None][:count])


def partner(host: int, domains: Mapping[int, Collection[Hashable]]) -> int | None:
    """Return the host that keeps a second copy of the checkpoints in the memory of ``host``; None if there is no other.

    It is the next host, if possible one of other failure domains. ``domains``: host that can keep copies -> the domains
    of its groups, empty if not known.
    """
    others = sorted((other for other in domains if other != host), key=lambda other: (other < host, other))
    own = set(domains.get(host, ()))
    apart = [other for other in others if not own & set(domains[other])]
    return next(iter([*apart, *others]), None)


# --- how often --------------------------------------------------------------------------------------------------------


def checkpoint_period(checkpoint_s: float, uptime_s: float, restart_s: float) -> float:
    """Return T_c* = T_s + sqrt(T_s^2 + 2 T_s (T_f + T_r)), which maximises ``plan.closed_forms.availability`` (SPARe).

    It follows from A' = 0: T_c^2 - 2 T_s T_c - 2 T_s (T_f + T_r) = 0. All times are in seconds.
    """
    return checkpoint_s + sqrt(checkpoint_s**2 + 2 * checkpoint_s * (uptime_s + restart_s))


def expected_uptime_s(ran_s: float, ends: int, prior_s: float) -> float:
    """Return the expected time between two restarts, T_f, in seconds. A masked failure is no restart.

    Args:
        ran_s: time that the job has run.
        ends: number of restarts in that time.
        prior_s: the estimate made beforehand (the planner's uptime, or the MTBF of the nodes). It weighs as much as one
            restart, so without a failure the result is at least ``prior_s``, and grows with ``ran_s``.
    """
    return (prior_s + ran_s) / (1 + ends)


def period_s(save_s: float, uptime_s: float, write_s: float) -> float:
    """Return the period of saves in seconds: :func:`checkpoint_period` within limits, without the time of a restart, which
    is minutes where the uptime is hours.

    Args:
        save_s: time that a save costs *training*, mostly for the copy.
        uptime_s: expected time between two restarts.
        write_s: time for which a save is written in the background; a limit only, because saves do not overlap.
    """
    best_s = checkpoint_period(save_s, uptime_s, 0.0)
    return max(min(best_s, LONGEST_S), LEAST_SAVES * save_s, write_s)


# --- checkpoints on disk ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """A checkpoint on disk, as one look at it shows.

    Attributes:
        path: its directory.
        step: it holds the state that this step starts from.
        complete: its manifest and all its files are there, with the right sizes.
        reason: why it is not complete; empty if it is.
        unfinished: it has no manifest: its save was interrupted, or is going on.
        saved_at: time of the save, in seconds since 1970.
        manifest: contents of its manifest.
    """

    path: str
    step: int
    complete: bool
    reason: str = ""
    unfinished: bool = False
    saved_at: float = 0.0
    manifest: Mapping[str, Any] = field(default_factory=dict)


def newest_first(found: Collection[Found]) -> list[Found]:
    """Return the checkpoints by descending step; if a step was saved twice, the later save comes first."""
    return sorted(found, key=lambda one: (one.step, one.saved_at, one.path), reverse=True)


def to_delete(found: Collection[Found], keep: int) -> tuple[Found, ...]:
    """Return the complete ones beyond the ``keep`` newest, and the unfinished ones of steps before the newest complete.

    The newest complete one and later ones are never deleted, whatever ``keep`` is. Nor is one that has a manifest and
    cannot be read here: it may be whole and of a newer version, or its disk may be away for a while; a person has to decide.
    """
    ordered = newest_first(found)
    complete = [one for one in ordered if one.complete]
    if not complete:
        return ()
    surplus = {one.path for one in complete[max(keep, 1) :]}
    return tuple(one for one in ordered if one.path in surplus or (one.unfinished and one.step < complete[0].step))
