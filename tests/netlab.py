"""Hosts for a test, in network namespaces whose links can be cut (``tools/netlab.py``)."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess

import pytest

from tools import proc
from tools.netlab import Network, ip, missing


def require() -> None:
    """Skip the calling test where there can be no namespaces."""
    why = missing()
    if why:
        pytest.skip(why)


class Lab(Network):
    """``hosts`` namespaces 10.99.0.1, 10.99.0.2, ... behind one switch. The switch and all interfaces belong to this
    lab alone."""

    def __init__(self, hosts: int) -> None:
        super().__init__(f"mft{os.getpid()}", "10.99.0", hosts)
        self.up()

    def pids(self, host: int) -> list[int]:
        """Return the pids of all processes that run there."""
        return [int(pid) for pid in ip("netns", "pids", self.namespace(host)).split()]

    def deafen(self, host: int, to: int) -> None:
        """Drop what ``to`` sends to ``host``: one way of one link, at once."""
        ip("-n", self.namespace(to), "route", "add", "blackhole", f"{self.address(host)}/32")

    def heal(self, host: int, to: int) -> None:
        """Undo :meth:`deafen`, at once. (A link that was unplugged takes the kernel about a second.)"""
        ip("-n", self.namespace(to), "route", "del", "blackhole", f"{self.address(host)}/32")

    def slow(self, host: int, mbit: int) -> None:
        """Limit the rate at which that host sends. Skips the calling test where the kernel has no such queue."""
        queue = ["root", "tbf", "rate", f"{mbit}mbit", "burst", "32kbit", "latency", "50ms"]
        command = self.inside(host, ["tc", "qdisc", "add", "dev", "eth0", *queue])
        if shutil.which("tc") is None or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("slow links need tc and the kernel's tbf")

    def filter(self, host: int, chain: str, rule: str) -> None:
        """Add a rule to that host's firewall; ``chain``: input or output. Skips the calling test without nft."""
        table = f"add table inet t; add chain inet t {chain} {{ type filter hook {chain} priority 0; }}"
        command = self.inside(host, ["nft", f"{table}; add rule inet t {chain} {rule}"])
        if shutil.which("nft") is None or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("firewalls need nft")

    def add_ipv6(self) -> None:
        """Give host k the address fd99::k+1, too. Skips the calling test where there is no IPv6."""
        for host in self.hosts:
            own = ["addr", "add", f"{self.address6(host)}/64", "dev", "eth0", "nodad"]
            if subprocess.run(["ip", "-n", self.namespace(host), *own], capture_output=True).returncode:
                pytest.skip("this machine has no IPv6")

    def address6(self, host: int) -> str:
        return f"fd99::{host + 1}"

    def add_interface(self, host: int, name: str) -> None:
        """Add an interface that leads nowhere."""
        ip("-n", self.namespace(host), "link", "add", name, "type", "veth", "peer", "name", f"{name}x")
        ip("-n", self.namespace(host), "addr", "add", "10.98.0.1/24", "dev", name)
        for end in (name, f"{name}x"):
            ip("-n", self.namespace(host), "link", "set", end, "up")

    def add_network(self) -> None:
        """Give every host a second interface, eth1, on a switch of its own: 10.97.0.1, 10.97.0.2, ..."""
        ip("-n", self.switch, "link", "add", "br1", "type", "bridge")
        ip("-n", self.switch, "link", "set", "br1", "up")
        for host in self.hosts:
            name = self.namespace(host)
            ip("-n", self.switch, "link", "add", f"q{host}", "type", "veth", "peer", "name", "eth1", "netns", name)
            ip("-n", self.switch, "link", "set", f"q{host}", "master", "br1", "up")
            ip("-n", name, "addr", "add", f"{self.second_address(host)}/24", "dev", "eth1")
            ip("-n", name, "link", "set", "eth1", "up")

    def second_address(self, host: int) -> str:
        return f"10.97.0.{host + 1}"

    def cut_second(self, host: int) -> None:
        """Unplug the host's eth1."""
        ip("-n", self.switch, "link", "set", f"q{host}", "down")

    def processes(self, host: int) -> set[int]:
        """Return all processes that run on that host."""
        namespace = proc.identity(f"/run/netns/{self.namespace(host)}")
        return {pid for pid in proc.pids() if proc.identity(f"/proc/{pid}/ns/net") == namespace}

    def freeze(self, host: int) -> None:
        """Send SIGSTOP to all processes of the host: none of them dies, none of them answers."""
        proc.send(self.processes(host), signal.SIGSTOP)

    def thaw(self, host: int) -> None:
        proc.send(self.processes(host), signal.SIGCONT)

    def kill_all(self, host: int) -> None:
        """Kill all processes of the host; return when nothing runs there any more."""
        while left := self.processes(host):
            proc.send(left, signal.SIGKILL)

    def power_off(self, host: int) -> None:
        """Kill the host as a power cut does: its connections are not closed, and none of its processes sees another
        one die."""
        self.cut(host)
        self.freeze(host)
        self.kill_all(host)

    def close(self) -> None:
        self.down()
