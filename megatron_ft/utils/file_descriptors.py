"""File descriptors of a process that may have thousands: their limit, and waiting for one.

``select.select`` cannot take a descriptor of 1,024 or more, so it is not used anywhere in the package.
"""

from __future__ import annotations

import math
import resource
import select
import socket

_MOST = 2**20
"""Largest limit. Containers may allow 10^9, for which programs that iterate over all possible descriptors take
minutes."""


def raise_descriptors() -> None:
    """Raise the limit of this process and its children to the system's, at most ``_MOST``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def readable(what: int | socket.socket, timeout_s: float | None) -> bool:
    """Wait until ``what`` can be read or its other end is closed. Returns False after ``timeout_s`` seconds; None: no
    limit.

    Raises ``ValueError`` when ``what`` itself is closed.
    """
    poll = select.poll()
    poll.register(what, select.POLLIN)
    # Rounded up: with less than 1 ms left, a loop over this function would spin.
    # no limit: its callers give the timeout
    return bool(poll.poll(None if timeout_s is None else math.ceil(max(0.0, timeout_s) * 1000)))
