"""Hostfiles: parsing, the number of this host, and whether the run fits onto the hosts."""

from __future__ import annotations

import argparse
import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.cluster.launchers import host_place, hostfile
from megatron_ft.config import schema
from megatron_ft.errors import LaunchError
from megatron_ft.host import peers
from megatron_ft.utils import net


def written(tmp_path, text: str):
    path = tmp_path / "hosts"
    path.write_text(text)
    return path


def test_this_host_is_found_by_its_name(tmp_path):
    path = written(tmp_path, f"# two of them\nelsewhere.invalid slots=4\n\n{socket.gethostname()}  slots=4  # here\n")
    found = hostfile.read(path)
    assert [host.slots for host in found] == [4, 4] and found[0].name == "elsewhere.invalid"
    assert hostfile.own_rank(path, found) == 1


@pytest.mark.parametrize(
    ("text", "groups", "ranks", "words"),
    [
        ("", 1, 1, ["names no host", "slots="]),
        ("a slots=4\nb 4\n", 2, 4, ["line 2", "'b 4'", "NAME slots=RANKS"]),
        ("a slots=4\na slots=4\n", 2, 4, ["names a twice"]),
        ("NODE1 slots=4\nnode1 slots=4\n", 2, 4, ["NODE1 and node1, which are one host"]),
        ("node1.x slots=4\nnode1 slots=4\n", 2, 4, ["node1.x and node1, which are one host"]),
        ("fd00::1 slots=4\n[fd00:0::1]:4\n", 2, 4, ["fd00::1 and fd00:0::1, which are one host (fd00::1)"]),
        ("n[1-3]\nn2\n", 2, 4, ["names n2 twice"]),
        ("a:2222 slots=4\n", 1, 4, ["line 1", ":2222 after a name is the number of its ranks", "port=2222"]),
        ("[a:b]x slots=4\n", 1, 4, ["line 1", "'[a:b]x'"]),
        ("[1-2] slots=4\n", 1, 4, ["line 1", "not the name or the address"]),
        ("n[1-2 slots=4\n", 1, 4, ["line 1", "not a list of hosts"]),
        ("n[1-2] address=10.0.0.1\n", 1, 4, ["line 1", "address=10.0.0.1 must be the IP address of one host"]),
        ("@a slots=4\n", 1, 4, ["line 1", "not the name"]),
        ("a slots=4\nb slots=4\n", 3, 4, ["8 slots on 2 hosts", "3 groups of 4 ranks need 12", "add the missing"]),
        ("a slots=4 cores=2\n", 1, 4, ["line 1", "'a slots=4 cores=2'"]),
        ("a slots=4 slots=4\n", 1, 4, ["line 1"]),
        ("-oProxyCommand=x slots=4\n", 1, 4, ["line 1"]),
        ("a port=70000\n", 1, 4, ["line 1"]),
        ("a address=b\n", 1, 4, ["line 1"]),
        ("a\nb slots=4\n", 2, 4, ["a has no slots and other hosts have"]),
        ("a slots=6\nb slots=2\n", 1, 8, ["a has slots=6", "need 4 there"]),
    ],
)
def test_a_hostfile_that_does_not_fit_the_run_is_refused(tmp_path, text, groups, ranks, words):
    path, run = written(tmp_path, text), schema.resolve({}, groups=groups, ranks_per_group=ranks)
    with pytest.raises(LaunchError) as error:
        hostfile.check(path, hostfile.read(path), run)
    for word in words:
        assert word in str(error.value)


def test_a_line_may_contain_user_port_and_address(tmp_path):
    text = "me@a.b slots=2 port=2222\nfd99::1 address=fd98::1 slots=2 # x\nc  slots=2"
    found = hostfile.read(written(tmp_path, text))
    assert found[0] == hostfile.Host("a.b", 2, "me", 2222) and found[0].login == "me@a.b"
    assert found[1:] == [hostfile.Host("fd99::1", 2, address="fd98::1"), hostfile.Host("c", 2)]


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1 slots=4 max_slots=8\nn2 slots=4 max-slots=8\n", [("n1", 4), ("n2", 4)]),
        ("n1:4\nn2:4\n", [("n1", 4), ("n2", 4)]),
        ("\ufeffn1 slots=4\r\n# n3\r\nn2 slots=4\r\n", [("n1", 4), ("n2", 4)]),
        ("gpu-[08-10] slots=8\n", [("gpu-08", 8), ("gpu-09", 8), ("gpu-10", 8)]),
        ("a[1-2],b:2\n", [("a1", 2), ("a2", 2), ("b", 2)]),
        ("[fd99::1]:4\n[fd99::2] slots=4\nfd99::3 slots=4\n", [("fd99::1", 4), ("fd99::2", 4), ("fd99::3", 4)]),
        ("node1.a\nnode1.b\n10.0.0.1\n", [("node1.a", None), ("node1.b", None), ("10.0.0.1", None)]),
    ],
)
def test_the_forms_of_other_launchers_are_read(tmp_path, text, hosts):
    (tmp_path / "hosts").write_bytes(text.encode())
    assert [(host.name, host.slots) for host in hostfile.read(tmp_path / "hosts")] == hosts


def test_a_name_and_its_address_are_one_host_unless_they_have_different_sshds(tmp_path, monkeypatch):
    monkeypatch.setattr(net, "of", lambda name: ["10.0.0.7"] if name in ("n7", "10.0.0.7") else [])
    with pytest.raises(LaunchError, match=r"names n7 and 10.0.0.7, which are one host \(10.0.0.7\)"):
        hostfile.read(written(tmp_path, "n6\nn7\n10.0.0.7\n"))
    assert len(hostfile.read(written(tmp_path, "n7 port=2201\n10.0.0.7 port=2202\n"))) == 2


def test_names_that_the_name_server_does_not_resolve_in_time_are_not_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(hostfile, "_RESOLVE_S", 0.01)
    released = threading.Event()
    monkeypatch.setattr(net, "of", lambda name: released.wait() and [])
    try:
        assert len(hostfile.read(written(tmp_path, "n1\nn2\n"))) == 2
    finally:
        released.set()


def test_this_host_is_found_without_its_domain(tmp_path, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "Node1")
    monkeypatch.setattr(socket, "getfqdn", lambda: "localhost")
    monkeypatch.setattr(net, "of", lambda name: [])
    path = written(tmp_path, "node0.x\nnode1.x\n")
    assert hostfile.own_rank(path, hostfile.read(path)) == 1


def test_hosts_without_slots_get_equal_parts(tmp_path):
    path = written(tmp_path, "a\nb\nc\n")
    hostfile.check(path, hostfile.read(path), schema.resolve({}, groups=4, ranks_per_group=1), spares=1)


@pytest.mark.parametrize(
    ("text", "spares", "words"),
    [
        ("a slots=2\nb slots=2\nc slots=2\n", 0, "6 slots on 3 hosts, and 2 groups of 2 ranks need 4"),
        ("a slots=2\nb slots=2\nc slots=1\n", 1, "the spare host c has slots=1"),
        ("a slots=2\nb slots=2\n", 2, "--spare-hosts is 2 and"),
        ("a slots=2\nb slots=2\n", 1, "2 slots on 1 hosts without the 1 spare"),
    ],
)
def test_spare_hosts_are_last_and_can_take_over_the_ranks_of_any_host(tmp_path, text, spares, words):
    path, run = written(tmp_path, text), schema.resolve({}, groups=2, ranks_per_group=2)
    with pytest.raises(LaunchError, match=words):
        hostfile.check(path, hostfile.read(path), run, spares)
    path = written(tmp_path, "a slots=2\nb slots=2\nc slots=3\n")
    hostfile.check(path, hostfile.read(path), run, 1)


def test_hosts_may_have_different_numbers_of_groups(tmp_path):
    path = written(tmp_path, "a slots=4\nb slots=8\n")
    hostfile.check(path, hostfile.read(path), schema.resolve({}, groups=3, ranks_per_group=4))


def test_a_host_that_is_not_listed_is_refused(tmp_path):
    path = written(tmp_path, "elsewhere.invalid slots=1\n")
    with pytest.raises(LaunchError, match=f"no entry for this host, {socket.gethostname()}; it has elsewhere.invalid"):
        hostfile.own_rank(path, hostfile.read(path))


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 4), st.integers(1, 4))
def test_every_rank_is_on_one_host(groups, count, across, share):
    """Whole groups per host, or a group across hosts: every rank occurs once, in order."""
    if count > groups:
        count = groups * across
    per_group = across * share if count > groups else share
    placed = [rank for host in range(count) for rank in peers.ranks_of(host, count, groups, per_group)]
    assert placed == [(group, position) for group in range(groups) for position in range(per_group)]
    assert all(peers.ranks_of(host, count, groups, per_group) for host in range(count))


def test_a_hostfile_has_the_address_of_host_0_or_the_hosts_meet_by_a_file(tmp_path):
    path = written(tmp_path, "n0.invalid address=192.0.2.1\nn1.invalid address=192.0.2.2\n")

    def asked(port: int = 0, **changed) -> argparse.Namespace:
        empty = dict.fromkeys(("hosts", "store", "address", "target"))
        options = argparse.Namespace(**empty, hostfile=path, host_rank=1, port=port)
        assert [host.name for host in host_place.from_hostfile(options, **changed)] == ["n0.invalid", "n1.invalid"]
        assert (options.hosts, options.address, options.target) == (2, "192.0.2.2", "192.0.2.1")
        return options

    assert asked(29400).store == asked(29400, by_file=True).store == "192.0.2.1:29400"
    assert asked(by_file=True).store is asked(29400, embedded=False).store is None
    with pytest.raises(LaunchError, match="--port is missing; give a free port of n0.invalid, where the hosts meet"):
        asked()
