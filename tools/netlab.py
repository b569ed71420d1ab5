"""Hosts on one machine: network namespaces on a bridge, whose links can be cut. Needs root and iproute2.

Nothing of it outlives :meth:`Network.down`, whatever has become of it. Everything is found again by its name, so another
process can take over.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Sequence

_LINK_S = 30.0


def missing() -> str:
    """Return why there can be no namespaces here; empty when there can."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "network namespaces need root and iproute2 (ip)"
    probe = f"mft{os.getpid()}probe"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True).returncode:
        return "this machine allows no network namespaces"
    ip("netns", "del", probe)
    return ""


def ip(*arguments: object) -> str:
    return subprocess.run(["ip", *map(str, arguments)], check=True, capture_output=True, text=True).stdout


class Network:
    """``hosts`` namespaces with the addresses 1, 2, ... of ``subnet`` (``"10.99.0"``) behind one switch. The network
    is isolated, unless this machine joins it, as host 254. ``name``: 9 letters at most, as links are called after
    it."""

    def __init__(self, name: str, subnet: str, hosts: int) -> None:
        self._name, self._subnet, self.hosts = name, subnet, range(hosts)
        self.switch = f"{name}sw"

    def up(self) -> None:
        ip("netns", "add", self.switch)
        ip("-n", self.switch, "link", "add", "br0", "type", "bridge")
        ip("-n", self.switch, "link", "set", "br0", "up")
        for host in self.hosts:
            name = self.namespace(host)
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", self.switch, "link", "add", f"p{host}", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("-n", self.switch, "link", "set", f"p{host}", "master", "br0", "up")
            ip("-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")

    @property
    def exists(self) -> bool:
        return os.path.exists(f"/run/netns/{self.switch}")

    @property
    def own_address(self) -> str:
        """The address of this machine, once it has joined."""
        return f"{self._subnet}.254"

    def join(self) -> None:
        """Connect this machine to the switch, too."""
        ip("link", "add", self._name, "type", "veth", "peer", "name", "up0", "netns", self.switch)
        ip("-n", self.switch, "link", "set", "up0", "master", "br0", "up")
        ip("addr", "add", f"{self.own_address}/24", "dev", self._name)
        ip("link", "set", self._name, "up")

    def down(self) -> None:
        """Delete whatever there is of the network. The namespace of a process that is still in it ends with that
        process."""
        subprocess.run(["ip", "link", "del", self._name], capture_output=True)
        for name in (*(self.namespace(host) for host in self.hosts), self.switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def namespace(self, host: int) -> str:
        return f"{self._name}h{host}"

    def inside(self, host: int, command: Sequence[str]) -> list[str]:
        """Return the command line that runs the command on that host."""
        return ["ip", "netns", "exec", self.namespace(host), *command]

    def address(self, host: int) -> str:
        return f"{self._subnet}.{host + 1}"

    def cut(self, host: int) -> None:
        """Unplug the host."""
        ip("-n", self.switch, "link", "set", f"p{host}", "down")

    def plug_in(self, host: int) -> None:
        """Plug the host in again; return when packets pass, for which the kernel takes up to a second."""
        ip("-n", self.switch, "link", "set", f"p{host}", "up")
        deadline = time.monotonic() + _LINK_S
        while "state UP" not in ip("-n", self.switch, "link", "show", f"p{host}"):
            assert time.monotonic() < deadline, f"the link of host {host} does not come up"
            time.sleep(0.01)
