"""Hosts on one machine: network namespaces on a bridge, whose links can be cut. Needs root and iproute2."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Sequence

import pytest

_LINK_S = 30.0


def missing() -> str:
    """Why there can be no namespaces here; empty when there can."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "network namespaces need root and iproute2 (ip)"
    probe = f"mft{os.getpid()}probe"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True).returncode:
        return "this machine allows no network namespaces"
    ip("netns", "del", probe)
    return ""


def require() -> None:
    """Skip the calling test where there can be no namespaces."""
    why = missing()
    if why:
        pytest.skip(why)


def ip(*arguments: object) -> None:
    subprocess.run(["ip", *map(str, arguments)], check=True, capture_output=True)


def _output(*arguments: object) -> str:
    return subprocess.run(["ip", *map(str, arguments)], check=True, capture_output=True, text=True).stdout


class Lab:
    """``hosts`` namespaces 10.99.0.1, 10.99.0.2, ... behind one switch. Everything in it is its own."""

    def __init__(self, hosts: int) -> None:
        self._name = f"mft{os.getpid()}"
        self._switch = f"{self._name}sw"
        self.hosts = range(hosts)
        ip("netns", "add", self._switch)
        ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
        ip("-n", self._switch, "link", "set", "br0", "up")
        for host in self.hosts:
            name = self.namespace(host)
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", self._switch, "link", "add", f"p{host}", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("-n", self._switch, "link", "set", f"p{host}", "master", "br0", "up")
            ip("-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")

    def namespace(self, host: int) -> str:
        return f"{self._name}h{host}"

    def address(self, host: int) -> str:
        return f"10.99.0.{host + 1}"

    def inside(self, host: int, command: Sequence[str]) -> list[str]:
        """The command, run on that host."""
        return ["ip", "netns", "exec", self.namespace(host), *command]

    def cut(self, host: int) -> None:
        """Unplug it."""
        ip("-n", self._switch, "link", "set", f"p{host}", "down")

    def plug_in(self, host: int) -> None:
        """Again; returns when packets pass. (The kernel takes up to a second for that.)"""
        ip("-n", self._switch, "link", "set", f"p{host}", "up")
        deadline = time.monotonic() + _LINK_S
        while "state UP" not in _output("-n", self._switch, "link", "show", f"p{host}"):
            assert time.monotonic() < deadline, f"the link of host {host} does not come up"
            time.sleep(0.01)

    def deafen(self, host: int, to: int) -> None:
        """What ``to`` sends does not reach ``host``: one way of one link, at once."""
        ip("-n", self.namespace(to), "route", "add", "blackhole", f"{self.address(host)}/32")

    def heal(self, host: int, to: int) -> None:
        """It does again, at once. (A link that was unplugged takes the kernel about a second.)"""
        ip("-n", self.namespace(to), "route", "del", "blackhole", f"{self.address(host)}/32")

    def slow(self, host: int, mbit: int) -> None:
        """What it sends passes no faster. Skips the calling test where the kernel has no such queue."""
        queue = ["root", "tbf", "rate", f"{mbit}mbit", "burst", "32kbit", "latency", "50ms"]
        command = self.inside(host, ["tc", "qdisc", "add", "dev", "eth0", *queue])
        if shutil.which("tc") is None or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("slow links need tc and the kernel's tbf")

    def filter(self, host: int, chain: str, rule: str) -> None:
        """A rule of that host's firewall; ``chain``: input or output. Skips the calling test without nft."""
        table = f"add table inet t; add chain inet t {chain} {{ type filter hook {chain} priority 0; }}"
        command = self.inside(host, ["nft", f"{table}; add rule inet t {chain} {rule}"])
        if shutil.which("nft") is None or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("firewalls need nft")

    def add_ipv6(self) -> None:
        """Host k gets fd99::k+1, too. Skips the calling test where there is no IPv6."""
        for host in self.hosts:
            own = ["addr", "add", f"{self.address6(host)}/64", "dev", "eth0", "nodad"]
            if subprocess.run(["ip", "-n", self.namespace(host), *own], capture_output=True).returncode:
                pytest.skip("this machine has no IPv6")

    def address6(self, host: int) -> str:
        return f"fd99::{host + 1}"

    def add_interface(self, host: int, name: str) -> None:
        """One more, which leads nowhere."""
        ip("-n", self.namespace(host), "link", "add", name, "type", "veth", "peer", "name", f"{name}x")
        ip("-n", self.namespace(host), "addr", "add", "10.98.0.1/24", "dev", name)
        for end in (name, f"{name}x"):
            ip("-n", self.namespace(host), "link", "set", end, "up")

    def close(self) -> None:
        for name in (*(self.namespace(host) for host in self.hosts), self._switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
