"""Time of the all-reduce between groups, from bytes and bandwidth: what SimGrid's is compared with.

The model is that of Thakur, Rabenseifner and Gropp (Optimization of Collective Communication Operations in MPICH, 2005,
sections 2 and 4.5): a message of n bytes takes ``latency_s + n / bandwidth_bytes_s``, a host sends and receives at the
same time at full speed (full duplex), the network between the hosts is never the bottleneck, and adding numbers costs
nothing.

``tools/simgrid_allreduce.py`` exchanges the same messages one by one in SimGrid; ``benchmarks/simgrid.py`` compares.
"""

from __future__ import annotations

from math import ceil, log2
from typing import Literal

Algorithm = Literal["ring", "tree"]


def allreduce_s(
    groups: int, size_bytes: float, bandwidth_bytes_s: float, latency_s: float, algorithm: Algorithm = "ring"
) -> float:
    """Return the seconds until all groups hold the sum of the gradients of one position.

    A ring takes 2 (N-1)/N S/B + 2 (N-1) L: reduce-scatter and all-gather, N-1 rounds each, an N-th of the bytes per round.
    A tree takes 2 ceil(log2 N) (L + S/B): reduce to group 0 and broadcast from it, all bytes in every round.

    Args:
        groups: N, the number of groups.
        size_bytes: S, the size of the gradients of one position.
        bandwidth_bytes_s: B, the bandwidth of a host's own link, in bytes per second in each direction.
        latency_s: L, the latency from host to host, in seconds.
        algorithm: "ring" suits the large buckets of a training step (NCCL and gloo use it). "tree" is a binomial tree
            that is not pipelined: for small messages and many groups. NCCL's pipelined double tree moves large messages
            about as fast as a ring.
    """
    transfer_s = size_bytes / bandwidth_bytes_s
    if algorithm == "ring":
        return 2 * (groups - 1) * (transfer_s / groups + latency_s)
    return 2 * ceil(log2(groups)) * (transfer_s + latency_s)
