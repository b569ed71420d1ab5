"""Time of the all-reduce between groups, from bytes and bandwidth, where it has not been measured.

The model is that of Thakur, Rabenseifner and Gropp (Optimization of Collective Communication Operations in MPICH, 2005,
sections 2 and 4.5): a message of n bytes takes ``latency_s + n / bandwidth_bytes_s``, a host sends and receives at the
same time at full speed (full duplex), the network between the hosts is never the bottleneck, and adding numbers costs
nothing.

``tools/simgrid_allreduce.py`` exchanges the same messages one by one in SimGrid; ``benchmarks/simgrid.py`` compares.
"""

from __future__ import annotations

from typing import Literal, get_args

from megatron_ft.config.validators import POSITIVE, number, one_of, whole_number
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
    """Return the seconds until all groups hold the sum of the gradients of one position.

    Args:
        groups: N, the number of groups.
        size_bytes: Size of the gradients of one position.
        bandwidth_bytes_s: Bandwidth of a host's own link, in bytes per second in each direction.
        latency_s: Latency from host to host, in seconds.
        algorithm: "ring" suits the large buckets of a training step (NCCL and gloo use it). "tree" is a binomial tree
            that is not pipelined: for small messages and many groups. NCCL's pipelined double tree moves large messages
            about as fast as a ring.
        positions: Number of outer communicators that reduce at the same time over one link of their host, which they
            share equally.
        slowdown: The link of ``slow_group`` has its bandwidth divided by this number, >= 1.
        slow_group: Number of the group with the slow link.

    Raises:
        ConfigError: a value is out of range.
    """
    whole_number(1)("groups", groups)
    whole_number(1)("positions", positions)
    whole_number(0)("slow_group", slow_group)
    number(0)("size_bytes", size_bytes)
    POSITIVE("bandwidth_bytes_s", bandwidth_bytes_s)
    number(0)("latency_s", latency_s)
    number(1)("slowdown", slowdown)
    one_of(*get_args(Algorithm))("algorithm", algorithm)
    if slow_group >= groups:
        raise ConfigError(f"slow_group is {slow_group}, but the {groups} groups are numbered 0 to {groups - 1}")
    if groups == 1:
        return 0.0
    transfer_s = size_bytes * positions / bandwidth_bytes_s
    if algorithm == "ring":
        return _ring_s(groups, transfer_s * slowdown, latency_s)
    return _tree_s(groups, latency_s + transfer_s, latency_s + transfer_s * slowdown, slow_group)


def _ring_s(N: int, transfer_s: float, latency_s: float) -> float:
    """2 (N-1)/N S/B + 2 (N-1) L: reduce-scatter and all-gather, N-1 rounds each, an N-th of the bytes per round.

    Every group sends in every round, so the ring is as slow as its slowest link.
    """
    return 2 * (N - 1) * (transfer_s / N + latency_s)


def _tree_s(N: int, message_s: float, slow_message_s: float, slow_group: int) -> float:
    """2 ceil(log2 N) (L + S/B): reduce to group 0 and broadcast from it, all bytes in every round.

    A slow link lengthens only the rounds its group takes part in: all of them at the root, two at a leaf. Whether these
    are on the longest path depends on the group's place in the tree, so the tree is walked: ``ready[g]`` is when g
    holds the sum of the groups below it. A group receives from one child after the other. The broadcast mirrors the
    reduction.
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
