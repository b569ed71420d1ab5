"""Waiting for a file descriptor in a process that may have thousands.

``select.select`` cannot take a descriptor of 1,024 or more, so it is not used anywhere in the package.
"""

from __future__ import annotations

import math
import select
import socket


def readable(what: int | socket.socket, timeout_s: float | None) -> bool:
    """Wait until ``what`` can be read or its other end is closed. Returns False after ``timeout_s`` seconds; None: no
    limit.

    Raises ``ValueError`` when ``what`` itself is closed.
    """
    poll = select.poll()
    poll.register(what, select.POLLIN)
    # Rounded up: with less than 1 ms left, a loop over this function would spin.
    return bool(poll.poll(None if timeout_s is None else math.ceil(max(0.0, timeout_s) * 1000)))
