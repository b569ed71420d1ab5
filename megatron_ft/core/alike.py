"""Hosts of one run are alike: who differs from the others, and who spoils what all do together.

Intuition. Nobody knows which version, clock or disk is the right one; what most hosts have is. Where two are as frequent,
or as near to the middle, host 0's is taken, so that some host is named rather than none.

Assumes: each host tells the truth about itself. Who has said nothing is not in what is compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from statistics import median


def different(values: Mapping[int, str]) -> tuple[str, dict[int, str]]:
    """What most hosts have, and what each of the others has instead."""
    if not values:
        return "", {}
    count = Counter(values.values())
    usual = max(sorted(values), key=lambda host: (count[values[host]], -host))
    return values[usual], {host: value for host, value in sorted(values.items()) if value != values[usual]}


def astray(values: Mapping[int, float], limit: float) -> dict[int, float]:
    """Who is further than ``limit`` from the middle of all, and by how much. Of two middles the one nearer to host 0's."""
    if not values:
        return {}
    ordered = sorted(values.values())
    middles = {ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]}
    middle = min(middles, key=lambda value: abs(value - values.get(0, 0.0)))
    return {host: value - middle for host, value in sorted(values.items()) if abs(value - middle) > limit}


def slower(rates: Mapping[int, float], factor: float) -> tuple[float, dict[int, float]]:
    """The median of all, and who does less than a ``factor``-th of it. Nobody where two are compared: either may be odd."""
    if len(rates) < 3:
        return median(rates.values()) if rates else 0.0, {}
    middle = median(rates.values())
    return middle, {host: value for host, value in sorted(rates.items()) if value * factor < middle}


def to_blame(
    stages: Mapping[int, int], failed: Collection[int], alone: Collection[int], suspected: Collection[int]
) -> tuple[int, ...]:
    """Who spoils what all do together; nobody where it cannot be told.

    Args:
        stages: how far each has come.
        failed: who has ended by itself, the others only waited.
        alone: of these who met something that concerns no other host.
        suspected: who is known to do something differently. If any of them takes part, it is they: the others, which do not
            reach them, fail as well, and often first.
    """
    if not failed:
        return ()
    known = set(suspected) & set(stages)
    furthest = max(stages.values())
    return tuple(sorted(known or {host for host in failed if host in alone or stages[host] < furthest}))


def to_blame_for_absence(hosts: int, came: Collection[int]) -> tuple[int, ...]:
    """Who has not come to host 0; host 0 itself, where of several others nobody has."""
    absent = [host for host in range(hosts) if host not in came and host != 0]
    return (0,) if hosts > 2 and len(absent) == hosts - 1 else tuple(absent)
