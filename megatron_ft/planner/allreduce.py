"""What the outer all-reduce takes, from bytes and bandwidth, for who has not measured its seconds.

The model is the usual one: a message of n bytes takes ``latency_s + n / bandwidth_bytes_s``, a host sends and receives at
the same time at full speed (full duplex), the network between the hosts is never the bottleneck, and adding numbers costs
nothing (Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH, 2005, sections 2, 4.5).

``tools/simgrid_allreduce.py`` exchanges the same messages one by one in SimGrid; ``benchmarks/simgrid.py`` compares.
"""

from __future__ import annotations

from math import isfinite
from typing import Literal, get_args

from megatron_ft.errors import ConfigError

Algorithm = Literal["ring", "tree"]


def allreduce_s(
    groups: int,
    size_bytes: float,
    bandwidth_bytes_s: float,
    latency_s: float,
    algorithm: Algorithm = "ring",
    *,
    positions: int = 1,
    slowdown: float = 1.0,
    slow_group: int = 0,
) -> float:
    """Seconds until every one of N ``groups`` holds the sum of ``size_bytes`` bytes of gradients (those of one position).

    ``bandwidth_bytes_s`` is that of a host's own link, bytes per second in each direction, ``latency_s`` that of the whole
    way from host to host. ``positions``: so many outer communicators reduce at the same time over the same link of their
    host, and share it equally. ``slowdown``: the link of ``slow_group`` has only a ``slowdown``-th of its bandwidth.

    *ring* is right for the large buckets of a training step (NCCL and gloo do it so). *tree* is a binomial tree that is
    not pipelined: for small messages and many groups. NCCL's pipelined double tree moves large ones about as fast as a
    ring does. Raises ``ConfigError`` for what cannot be.
    """
    _check(groups, positions, slow_group, algorithm)
    for name, value, least in (
        ("size_bytes", size_bytes, 0.0),
        ("bandwidth_bytes_s", bandwidth_bytes_s, None),
        ("latency_s", latency_s, 0.0),
        ("slowdown", slowdown, 1.0),
    ):
        _number(name, value, least)
    if groups == 1:
        return 0.0
    transfer_s = size_bytes * positions / bandwidth_bytes_s
    if algorithm == "ring":
        return _ring_s(groups, transfer_s * slowdown, latency_s)
    return _tree_s(groups, latency_s + transfer_s, latency_s + transfer_s * slowdown, slow_group)


def _ring_s(N: int, transfer_s: float, latency_s: float) -> float:
    """2 (N-1)/N S/B + 2 (N-1) L: reduce-scatter and all-gather, N-1 rounds each, an N-th of the bytes per round.

    Everybody sends in every round, so the ring is as slow as its slowest link, wherever that is.
    """
    return 2 * (N - 1) * (transfer_s / N + latency_s)


def _tree_s(N: int, message_s: float, slow_message_s: float, slow_group: int) -> float:
    """2 ceil(log2 N) (L + S/B): reduce to group 0 and broadcast from it, all bytes in every round.

    A slow link lengthens only the rounds its group takes part in: all of them at the root, two at a leaf. Whether that
    is on the longest way depends on the place, so the ways are walked: ``ready[g]`` is when g holds the sum of those
    below it. A group receives from one child after the other. The broadcast is the same in reverse and takes as long.
    """
    ready = [0.0] * N
    distance = 1
    while distance < N:
        for receiver in range(0, N - distance, 2 * distance):
            sender = receiver + distance
            takes = slow_message_s if slow_group in (receiver, sender) else message_s
            ready[receiver] = max(ready[receiver], ready[sender]) + takes
        distance *= 2
    return 2 * ready[0]


def _check(groups: int, positions: int, slow_group: int, algorithm: str) -> None:
    for name, value, least in (("groups", groups, 1), ("positions", positions, 1), ("slow_group", slow_group, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"{name} is {value!r}; it must be a whole number >= {least}")
    if slow_group >= groups:
        raise ConfigError(f"slow_group is {slow_group}, but the {groups} groups are numbered 0 to {groups - 1}")
    if algorithm not in get_args(Algorithm):
        raise ConfigError(f"algorithm is {algorithm!r}; it can be: {', '.join(get_args(Algorithm))}")


def _number(name: str, value: object, least: float | None) -> None:
    """At least ``least``; None: more than 0."""
    number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    if not number or (value <= 0 if least is None else value < least):
        raise ConfigError(f"{name} is {value!r}; it must be a number {'> 0' if least is None else f'>= {least:g}'}")
