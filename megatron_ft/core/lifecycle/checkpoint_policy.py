"""Checkpoints: who writes which part, how often, which one to go on from and which to delete. Decisions only.

A checkpoint is for what the groups cannot survive together: a wipe-out, a power cut, the end of the time that was
allotted. Ranks of equal position hold the same state in all groups, so each of ``parts`` groups writes one part of it.

Assumes: any checkpoint on disk may be unfinished, damaged or from another version, and any of its writers may be lost
while it writes; then that checkpoint never becomes complete, and the one before it still counts.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from math import isinf, sqrt
from typing import Any

from megatron_ft.types import GroupId

LONGEST_S = 3600.0
"""At most an hour is lost. What ends whole jobs is often in no MTBF: operators, quotas, power, a full file system. A save
that costs a minute then takes 1.7% of the time, even where no failure was ever seen and ten times less would do."""
LEAST_SAVES = 10.0
"""A period is at least ten times what a save costs training: saving never takes more than a tenth of the time.

It is the optimum only where the uptime is below 40 saves. There the estimate rests on a few failures in a burst, and the
optimum is flat: at an uptime of 20 saves the limit costs one percentage point of availability.
"""


# --- writing ----------------------------------------------------------------------------------------------------------


def parts(sizes: Sequence[int], count: int) -> tuple[tuple[int, ...], ...]:
    """Divide tensors of these sizes among ``count`` parts: the indices of each, ascending. Largest first, to the smallest.

    Whole tensors only, so the largest part exceeds the smallest by at most one tensor. The same input gives the same
    parts everywhere; no writer needs to ask another.
    """
    chosen: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, 0, part) for part in range(count)]
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        size, number, part = heap[0]
        chosen[part].append(index)
        heapq.heapreplace(heap, (size + sizes[index], number + 1, part))
    return tuple(tuple(sorted(part)) for part in chosen)


def writers(live: Collection[GroupId], domains: Mapping[GroupId, Hashable], count: int) -> tuple[GroupId, ...]:
    """The groups that write, the i-th of them part i: ``count`` of the living, or all where there are fewer.

    One from each failure domain before the second from any: domains are racks or hosts, and each has its own way to the
    storage. A group whose domain is not known counts as one of its own.
    """
    members: dict[Hashable, list[GroupId]] = {}
    for group in sorted(live):
        members.setdefault(("known", domains[group]) if group in domains else ("alone", group), []).append(group)
    rounds = chain.from_iterable(zip_longest(*members.values()))
    return tuple([group for group in rounds if group is not None][:count])


def partner(host: int, domains: Mapping[int, Collection[Hashable]]) -> int | None:
    """The host that keeps a second copy of what ``host`` has in memory: the next one, of other failure domains if there is
    one. ``domains``: of each host that could, those of its groups; not known: none. None where there is no other host."""
    others = sorted((other for other in domains if other != host), key=lambda other: (other < host, other))
    own = set(domains.get(host, ()))
    apart = [other for other in others if not own & set(domains[other])]
    return next(iter([*apart, *others]), None)


# --- how often --------------------------------------------------------------------------------------------------------


def checkpoint_period(checkpoint_s: float, uptime_s: float, restart_s: float) -> float:
    """T_c* = T_s + sqrt(T_s^2 + 2 T_s (T_f + T_r)): the maximiser of ``planner.closed_forms.availability`` (SPARe).

    From A' = 0: T_c^2 - 2 T_s T_c - 2 T_s (T_f + T_r) = 0.
    """
    return checkpoint_s + sqrt(checkpoint_s**2 + 2 * checkpoint_s * (uptime_s + restart_s))


def expected_uptime_s(ran_s: float, ends: int, prior_s: float) -> float:
    """The time between two restarts, T_f, from ``ends`` of them in ``ran_s``; what masked failures ended is none.

    ``prior_s`` is what one believes beforehand (the planner's uptime, or the MTBF of the nodes) and weighs as much as one
    end that was seen. So no failure yet means at least as long as believed, and longer the longer it lasts; never for ever.
    """
    return (prior_s + ran_s) / (1 + ends)


def period_s(
    save_s: float, uptime_s: float, restart_s: float, *, write_s: float = 0.0, longest_s: float = LONGEST_S
) -> float:
    """How often to save: :func:`checkpoint_period` within limits.

    ``save_s`` is what a save costs *training*, the copy mostly; ``write_s``, how long it is written in the background, is
    a limit only: one save at a time. ``restart_s`` is all the time from the end to the next step, loading included.
    """
    best_s = longest_s if isinf(uptime_s) else checkpoint_period(save_s, uptime_s, restart_s)
    return max(min(best_s, longest_s), LEAST_SAVES * save_s, write_s)


def due(since_s: float, period_s: float, step_s: float = 0.0) -> bool:
    """Whether to save at this step boundary: the one nearest to the period's end, with steps of ``step_s``."""
    return since_s + step_s / 2 >= period_s


# --- what is there ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """A checkpoint on disk, as far as a look at it tells: the state that ``step`` starts from.

    ``complete``: its manifest and all its files are there, with their sizes. If not, ``reason`` says what is wrong, and
    ``unfinished`` that it has no manifest: its save was interrupted, or is going on.
    """

    path: str
    step: int
    complete: bool
    reason: str = ""
    unfinished: bool = False
    saved_at: float = 0.0
    manifest: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Choice:
    """The checkpoint to go on from, or None, and every later one with the reason why it is not that."""

    found: Found | None
    skipped: tuple[tuple[Found, str], ...]


def newest_first(found: Collection[Found]) -> list[Found]:
    """By step; of one step that was saved twice, the later save first."""
    return sorted(found, key=lambda one: (one.step, one.saved_at, one.path), reverse=True)


def choose(found: Collection[Found], damaged: Mapping[str, str] | None = None) -> Choice:
    """The newest that can be loaded. ``damaged``: path -> reason, of those that a closer look has found wanting."""
    skipped, damaged = [], damaged or {}
    for one in newest_first(found):
        if one.complete and one.path not in damaged:
            return Choice(one, tuple(skipped))
        skipped.append((one, damaged.get(one.path, one.reason)))
    return Choice(None, tuple(skipped))


def to_delete(found: Collection[Found], keep: int) -> tuple[Found, ...]:
    """The complete ones beyond the ``keep`` newest, and the unfinished ones of steps before the newest complete.

    Never the newest complete one, whatever ``keep`` says, and nothing later. Never one that has a manifest and cannot be
    read here: it may be whole and of a newer version, or its disk away for a while; whoever looks at it decides.
    """
    ordered = newest_first(found)
    complete = [one for one in ordered if one.complete]
    if not complete:
        return ()
    surplus = {one.path for one in complete[max(keep, 1) :]}
    return tuple(one for one in ordered if one.path in surplus or (one.unfinished and one.step < complete[0].step))
