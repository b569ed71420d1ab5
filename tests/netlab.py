"""Hosts for a test, in network namespaces whose links can be cut (``tools/netlab.py``)."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

from tools.netlab import Network, ip, missing


def require() -> None:
    """Skip the calling test where there can be no namespaces."""
    why = missing()
    if why:
        pytest.skip(why)


class Lab(Network):
    """``hosts`` namespaces 10.99.0.1, 10.99.0.2, ... behind one switch. Everything in it is its own."""

    def __init__(self, hosts: int) -> None:
        super().__init__(f"mft{os.getpid()}", "10.99.0", hosts)
        self.up()

    def inside(self, host: int, command: Sequence[str]) -> list[str]:
        """The command, run on that host."""
        return ["ip", "netns", "exec", self.namespace(host), *command]

    def deafen(self, host: int, to: int) -> None:
        """What ``to`` sends does not reach ``host``: one way of one link, at once."""
        ip("-n", self.namespace(to), "route", "add", "blackhole", f"{self.address(host)}/32")

    def heal(self, host: int, to: int) -> None:
        """It does again, at once. (A link that was unplugged takes the kernel about a second.)"""
        ip("-n", self.namespace(to), "route", "del", "blackhole", f"{self.address(host)}/32")

    def close(self) -> None:
        self.down()
