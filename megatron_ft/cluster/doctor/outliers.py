"""Comparison of hosts with each other: versions, clocks, and rates between hosts. Pure functions.

No version, clock or rate is right by itself; the value that most hosts have serves as the reference. A tie is decided
in favour of host 0, so that some host is named. Each host is assumed to report truthfully; hosts without a report are
absent from the arguments.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median_high

FACTOR = 3.0
"""A rate is an outlier when it is lower than the usual rate by more than this factor."""
MAX_SHIFTS = 15

Way = tuple[int, int]
"""Sender and receiver."""


def different(values: Mapping[int, str]) -> tuple[str, dict[int, str]]:
    """Returns the most frequent value, and the values of the hosts that have another one."""
    if not values:
        return "", {}
    count = Counter(values.values())
    usual = max(sorted(values), key=lambda host: (count[values[host]], -host))
    return values[usual], {host: value for host, value in sorted(values.items()) if value != values[usual]}


def astray(values: Mapping[int, float], limit: float) -> dict[int, float]:
    """Returns the distance from the median for each host that is further than ``limit`` from it.

    Of the two medians of an even number of hosts the one nearer to host 0's value is taken.
    """
    if not values:
        return {}
    ordered = sorted(values.values())
    medians = {ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]}
    middle = min(medians, key=lambda value: abs(value - values.get(0, 0.0)))
    return {host: value - middle for host, value in sorted(values.items()) if abs(value - middle) > limit}


def rounds(hosts: list[int]) -> list[dict[int, int]]:
    """Returns the rounds of a measurement; a round maps each host to the host that it sends to.

    In a round each host sends once and receives once. All ways are covered for up to 16 hosts; with more hosts each
    host sends to ``MAX_SHIFTS`` others.
    """
    count = len(hosts)
    shifts = min(count - 1, MAX_SHIFTS)
    chosen = [1 + number * (count - 1) // shifts for number in range(shifts)]
    return [{host: hosts[(place + shift) % count] for place, host in enumerate(hosts)} for shift in chosen]


@dataclass(frozen=True)
class Bandwidth:
    """Outliers of the measured rates (bytes per second, 0 for no connection).

    Attributes:
        usual: the reference rate.
        senders: best rate of each host that sends too slowly to all others.
        receivers: best rate of each host that receives too slowly from all others.
        links: rates of the other slow ways, between hosts that are fast with some third host.
    """

    usual: float
    senders: Mapping[int, float]
    receivers: Mapping[int, float]
    links: Mapping[Way, float]


def slow(rates: Mapping[Way, float], factor: float = FACTOR) -> Bandwidth:
    """Attributes low rates to hosts where possible, otherwise to links.

    A slow host is slow with every partner, while a healthy one has at least one fast partner. A host is therefore
    judged by its best rate, and the median of these best rates is the reference. Two hosts alone cannot be told apart.
    """
    best_out: dict[int, float] = {}
    best_in: dict[int, float] = {}
    for (sender, receiver), rate in rates.items():
        best_out[sender] = max(best_out.get(sender, 0.0), rate)
        best_in[receiver] = max(best_in.get(receiver, 0.0), rate)
    if len(best_out) > 2:
        usual = median_high(best_out.values())
        senders, receivers = (
            {host: rate for host, rate in sorted(best.items()) if is_slow(rate, usual, factor)}
            for best in (best_out, best_in)
        )
    else:
        usual, senders, receivers = max(rates.values(), default=0.0), {}, {}
    named = senders.keys() | receivers.keys()
    links = {way: rate for way, rate in sorted(rates.items()) if not named & set(way) and is_slow(rate, usual, factor)}
    return Bandwidth(usual, senders, receivers, links)


def is_slow(rate: float, usual: float, factor: float) -> bool:
    """Returns True for a missing connection and for a rate below a ``factor``-th of the usual one."""
    return rate == 0.0 or rate * factor < usual
