"""The address by which the other hosts reach this one."""

from __future__ import annotations

import socket

import pytest

from megatron_ft.errors import LaunchError
from megatron_ft.utils import net


@pytest.fixture
def host(monkeypatch):
    """A machine with these addresses, whose own name stands for ``names``; ``ways``: host -> the address on the way."""

    class Machine:
        names = ("127.0.1.1",)
        interfaces = ("10.0.0.1",)
        ways: dict[str, str] = {}

        def towards(self, target: str) -> str:
            if target not in self.ways:
                raise OSError("no route")
            return self.ways[target]

    machine = Machine()
    monkeypatch.setattr(socket, "gethostname", lambda: "node0")
    monkeypatch.setattr(net, "of", lambda name: list(machine.names) if name == "node0" else [])
    monkeypatch.setattr(net, "binds", lambda address: address in (*machine.interfaces, *machine.names, "127.0.0.1"))
    monkeypatch.setattr(net, "interface_addresses", lambda: list(machine.interfaces))
    monkeypatch.setattr(net, "_towards", machine.towards)
    return machine


def test_the_way_to_another_host_decides(host):
    host.ways = {"node1": "10.0.0.2"}
    assert net.own_address("node1") == "10.0.0.2"
    with pytest.raises(LaunchError, match="no route to node2, another host,.*--address"):
        net.own_address("node2")


def test_a_name_that_stands_for_loopback_is_no_address_for_others(host):
    assert net.own_address(None) == "10.0.0.1", "the only interface"
    host.names = ("127.0.1.1", "10.0.0.1")
    host.interfaces = ("10.9.0.1", "10.0.0.1")
    assert net.own_address(None) == "10.0.0.1", "the name has another address"
    host.names, host.ways = ("127.0.1.1",), {net._FAR[0]: "10.9.0.1"}
    assert net.own_address(None) == "10.9.0.1", "the way to the rest of the network"
    host.ways = {}
    with pytest.raises(
        LaunchError, match=r"node0 resolves to 127.0.1.1, and the host has 10.9.0.1, 10.0.0.1; give --addr"
    ):
        net.own_address(None)
    host.interfaces = ()
    assert net.own_address(None) == "127.0.0.1", "all hosts are on this machine"


def test_host_0_listens_where_others_reach_it_and_no_other_host_asks_itself(host):
    host.ways = {"node0": "127.0.1.1", "127.0.0.1": "127.0.0.1", "localhost": "127.0.0.1", "far": "10.0.0.1"}
    assert net.address_for("node0", 0) == "10.0.0.1"
    assert net.address_for("far", 1) == "10.0.0.1"
    with pytest.raises(
        LaunchError, match="resolves node0, the name of host 0, to 127.0.1.1, which is this host itself"
    ):
        net.address_for("node0", 1)
    for written in ("127.0.0.1", "localhost"):
        assert [net.address_for(written, rank) for rank in (0, 1)] == ["127.0.0.1"] * 2, "all hosts on one machine"


def test_loopback_is_that_of_ipv6_where_there_is_no_other(monkeypatch):
    monkeypatch.setattr(net, "binds", lambda address: address == "::1")
    assert net.loopback() == "::1"
    monkeypatch.setattr(net, "binds", lambda address: False)
    with pytest.raises(LaunchError, match="neither 127.0.0.1 nor ::1.*--address"):
        net.loopback()


def test_addresses_of_interfaces_can_be_bound():
    assert all(net.binds(address) and not net.is_loopback(address) for address in net.interface_addresses())
