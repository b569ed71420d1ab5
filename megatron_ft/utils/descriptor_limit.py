"""The limit on the number of file descriptors of a process."""

from __future__ import annotations

import resource

_MOST = 2**20
"""Largest limit. Containers may allow 10^9, for which programs that iterate over all possible descriptors take
minutes."""


def raise_descriptors() -> None:
    """Raise the limit of this process and its children to the system's, at most ``_MOST``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
