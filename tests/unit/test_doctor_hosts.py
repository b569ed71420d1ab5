"""Doctor on several hosts: what its options mean, which interface is the right one, and how what was found is told."""

from __future__ import annotations

import argparse
import json
import socket
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft import cli
from megatron_ft.core.pairs import FACTOR
from megatron_ft.doctor import disk, interfaces, measure, meeting
from megatron_ft.doctor.measure import Peer, Service
from megatron_ft.doctor.report import Report
from megatron_ft.errors import LaunchError
from megatron_ft.launch import addresses

NAMES = {0: "n0", 1: "n1", 2: "n2"}


# --- options ----------------------------------------------------------------------------------------------------------


def asked(**changed) -> argparse.Namespace:
    names = ("hosts", "host_rank", "store", "hostfile", "directory", "job_id", "address", "target")
    return argparse.Namespace(**{**dict.fromkeys(names), "port": 0, "patience_s": 60.0, "factor": FACTOR, **changed})


@pytest.mark.parametrize("changed", [{}, {"hosts": 1}, {"hosts": 1, "host_rank": 0}])
def test_one_host_alone_is_examined_as_ever(changed):
    assert meeting.find(asked(**changed)) is None


def test_several_hosts_meet_at_a_store_or_by_a_file(tmp_path):
    where = meeting.find(asked(hosts=3, host_rank=2, store="[fe80::7]:29400"))
    assert where.store == ("fe80::7", 29400) and where.rank == 2 and where.name(1) == "host 1"
    where = meeting.find(asked(hosts=3, host_rank=0, directory=tmp_path, job_id="7/a.0"))
    assert where.store is None and where.file == tmp_path / ".megatron_ft-doctor.7_a.0.json"


def test_a_hostfile_says_who_they_are(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("n0.invalid slots=4\nn1.invalid slots=4\n")
    where = meeting.find(asked(hostfile=path, host_rank=1, port=29400))
    assert (where.hosts, where.rank, where.store, where.name(0)) == (2, 1, ("n0.invalid", 29400), "n0.invalid")
    with pytest.raises(LaunchError, match="--port is missing; it is a free port of n0.invalid"):
        meeting.find(asked(hostfile=path, host_rank=1))
    path.write_text("n0.invalid slots=4\n")
    assert meeting.find(asked(hostfile=path, host_rank=0)) is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--hosts", "3"], "--host-rank is missing"),
        (["--host-rank", "1"], "--hosts is missing"),
        (["--hosts", "3", "--host-rank", "1"], "--store is None; all hosts need HOST:PORT"),
        (["--hosts", "3", "--host-rank", "1", "--store", "n0"], "--store is 'n0'; all hosts need HOST:PORT"),
        (["--hosts", "3", "--host-rank", "1", "--store", "n0:0"], "or the same new --job-id, and --directory"),
        (["--hosts", "3", "--host-rank", "1", "--job-id", "a"], "--directory is missing; without --store"),
        (["--hosts", "3", "--host-rank", "3", "--store", "n0:1"], "--host-rank is 3 and --hosts is 3"),
        (["--hosts", "2", "--host-rank", "0", "--job-id", "a", "--directory", "/no/such"], "/no/such is no directory here"),
        (["--hosts", "2", "--host-rank", "0", "--store", "no.such.invalid:9"], "no.such.invalid stands for no address"),
        (["--hosts", "2", "--host-rank", "0", "--store", "192.0.2.77:9"], "192.0.2.77 is no address of this host"),
        (["--hosts", "2", "--host-rank", "0", "--store", "127.0.0.1:9", "--factor", "1"], "--factor is 1"),
        (["--hosts", "2", "--host-rank", "0", "--store", "127.0.0.1:9", "--patience-s", "-1"], "--patience-s is -1"),
        (["--hostfile", "/no/such/file"], "--hostfile /no/such/file cannot be read"),
        (["--hostfile", "x", "--store", "n0:1"], "--hostfile says what --hosts and --store say"),
    ],
)
def test_wrong_options_get_one_line(capsys, arguments, words):
    assert cli.main(["doctor", *arguments]) == 2
    said = capsys.readouterr().err
    assert words in said and len(said.strip().splitlines()) == 1, said


def test_a_port_in_use_gets_one_line(capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        where = f"127.0.0.1:{other.getsockname()[1]}"
        assert cli.main(["doctor", "--hosts", "2", "--host-rank", "0", "--store", where]) == 2
    assert "is in use by another program" in capsys.readouterr().err


@pytest.mark.parametrize(("host", "port"), [("n0", 1), ("10.0.0.1", 29400), ("fe80::1%eth0", 65535), ("::1", 2)])
def test_an_address_is_written_and_read(host, port):
    assert addresses.split(addresses.joined(host, port)) == (host, port)


@settings(max_examples=30)
@given(st.text(max_size=12))
def test_whatever_is_given_for_an_address_is_told_apart(text):
    found = addresses.split(text)
    assert found is None or (found[0] and 0 <= found[1] <= 65535)


def test_an_old_file_is_no_meeting(tmp_path):
    """What stands there leads nowhere; it is read again until somebody answers, or the time is over."""
    where = meeting.Meeting(2, 1, None, "a", tmp_path, patience_s=0.0)
    where.file.write_text("{")
    assert "host 0 is not reached within 0 s" in meeting.reach(where, lambda own: {})


# --- interfaces -------------------------------------------------------------------------------------------------------


@pytest.fixture
def wires(monkeypatch):
    """Two that lead somewhere, one that is down, one without an address, and loopback."""
    there = {"lo": ["127.0.0.1"], "eth0": ["10.0.0.1", "fd00::1"], "ib0": ["10.1.0.1"], "eth7": ["10.7.0.1"], "bare": []}
    monkeypatch.setattr(interfaces.socket, "if_nameindex", lambda: list(enumerate(there)))
    monkeypatch.setattr(interfaces.sockets, "addresses_of", there.__getitem__)
    monkeypatch.setattr(interfaces, "_is_up", lambda name: name != "eth7")
    monkeypatch.setattr(interfaces, "_CARDS", Path("/no/such"))


@pytest.mark.parametrize(
    ("environ", "state", "words"),
    [
        ({"NCCL_SOCKET_IFNAME": "eth0"}, "ok", "eth0 leads to the others"),
        ({"NCCL_SOCKET_IFNAME": "=eth0", "GLOO_SOCKET_IFNAME": "eth0"}, "ok", "eth0"),
        ({"NCCL_SOCKET_IFNAME": "^ib,eth7"}, "ok", "eth0"),
        ({}, "warn", "eth0, ib0 are up, NCCL_SOCKET_IFNAME is not set"),
        ({"NCCL_SOCKET_IFNAME": "ib"}, "warn", "NCCL_SOCKET_IFNAME=ib, and it is eth0 that leads to the other hosts"),
        ({"NCCL_SOCKET_IFNAME": "ens"}, "broken", "it means no interface here; there are bare, eth0"),
        ({"NCCL_SOCKET_IFNAME": "eth7"}, "broken", "eth7 is down"),
        ({"NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "ib0"}, "warn", "it is eth0 that leads"),
        ({"NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "eth"}, "broken", "this host has no eth; it has bare, eth0"),
        ({"NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "lo"}, "broken", "lo leads to no other host"),
        ({"NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "bare"}, "broken", "bare has no address"),
        ({"NCCL_SOCKET_IFNAME": "eth0", "NCCL_IB_HCA": "mlx5"}, "broken", "no InfiniBand card here is meant"),
    ],
)
@pytest.mark.parametrize("address", ["10.0.0.1", "fd00::1"])
def test_the_interface_that_leads_to_the_others(wires, environ, state, words, address):
    (finding,) = interfaces.examine(address, nccl=True, environ=environ)
    assert finding.state == state and words in finding.details, finding
    assert state == "ok" or "eth0" in finding.remedy or "NCCL_IB_HCA" in finding.remedy


def test_what_is_wrong_for_nccl_keeps_no_host_without_a_gpu(wires):
    (finding,) = interfaces.examine("10.0.0.1", nccl=False, environ={"NCCL_SOCKET_IFNAME": "ens"})
    assert finding.state == "warn" and not finding.needed


def test_an_address_of_nobody(wires):
    (finding,) = interfaces.examine("10.9.9.9", nccl=False, environ={})
    assert finding.state == "warn" and "no interface here has the address 10.9.9.9" in finding.details


# --- measuring --------------------------------------------------------------------------------------------------------


@pytest.fixture
def services(monkeypatch):
    """On a busy machine a thread may stand still for longer than another host would be waited for."""
    monkeypatch.setattr(measure, "_ANSWER_S", 60.0)
    monkeypatch.setattr(measure, "_PINGS_S", 60.0)
    made = [Service(address, rank) for rank, address in enumerate(("127.0.0.1", "127.0.0.2"))]
    for service in made:
        service.token = b"t" * 32
    yield made
    for service in made:
        service.close()


def peer(service: Service, address: str) -> Peer:
    return Peer(service.rank, address, *service.ports)


def test_a_pair_is_measured_both_ways(services):
    found = services[0].measure(peer(services[1], "127.0.0.2"), 1, fully=True)
    assert found.opens and len(found.rtts_s) > 1 and found.out_bytes_s > 0 and found.in_bytes_s > 0
    assert measure.Measured.from_json(json.loads(json.dumps(found.to_json()))) == found
    back = services[1].measure(peer(services[0], "127.0.0.1"), 1, fully=False)
    assert back.opens and len(back.rtts_s) == 1 and back.out_bytes_s is None


def test_who_takes_no_connection_may_be_heard(services, monkeypatch):
    """A port that nobody answers on; the datagram tells that the way there is open."""
    monkeypatch.setattr(measure, "_HEARD_S", 60.0)
    with socket.create_server(("127.0.0.2", 0)) as gone:
        port = gone.getsockname()[1]
    closed = Peer(1, "127.0.0.2", port, services[1].ports[1])
    back = threading.Thread(target=services[1].measure, args=(peer(services[0], "127.0.0.1"), 5, False))
    back.start()
    found = services[0].measure(closed, 5, fully=True)
    back.join()
    assert not found.opens and "refused" in found.why and found.heard


def test_who_does_not_know_the_word_gets_nothing(services):
    services[0].token = b"x" * 32
    assert not services[0].measure(peer(services[1], "127.0.0.2"), 1, fully=True).opens


# --- disks ------------------------------------------------------------------------------------------------------------


def test_a_directory_is_tried_and_left_clean(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "_SEEN_S", 0.0)
    found = disk.try_out(tmp_path, "token")
    assert found["write_bytes_s"] > 0 and found["read_bytes_s"] > 0 and found["free_bytes"] > 0 and not found["seen"]
    disk.marker(tmp_path, "token").write_text("")
    assert disk.try_out(tmp_path, "token")["seen"] and len(list(tmp_path.iterdir())) == 1
    assert "No such file" in disk.try_out(tmp_path / "nothing", "token")["trouble"]


def test_a_directory_that_never_answers_is_told(tmp_path, monkeypatch):
    stuck = threading.Event()
    monkeypatch.setattr(disk, "MOST_S", 0.1)
    monkeypatch.setattr(disk, "_speed", lambda path: stuck.wait() and {})
    try:
        assert disk.try_out(tmp_path, "token") == {"trouble": "no answer within 0.1 s"}
    finally:
        stuck.set()


# --- what is told -----------------------------------------------------------------------------------------------------


def test_the_verdict_names_hosts_and_links_and_host_0():
    report = Report(NAMES)
    report.ok("there", "all")
    report.warn("clock", [2], "late")
    assert report.ready and report.verdict() == "all 3 hosts are ready"
    report.bad("link", [1, 2], "nothing passes", either=True)
    assert report.verdict() == "do not start on: n1 or n2 (nothing passes)" and report.startable == {0, 1}
    report.bad("disk", [0], "is full")
    report.bad("same torch", [0], "it has 1")
    said = report.verdict()
    assert said == "do not start on: n0, host 0 itself (disk: is full; and 1 more), n1 or n2 (nothing passes)"
    assert report.startable == {1} and not report.ready
    report.bad("pairs", [2], "is slow")
    assert "n1 or n2" not in report.verdict() and report.startable == {1}


def test_hosts_of_which_the_same_is_said_share_a_row():
    report = Report(NAMES)
    for host in NAMES:
        report.warn("interface", [host], "several")
    report.warn("clock", [1], "late")
    assert [row.hosts for row in report.rows] == [(0, 1, 2), (1,)]
    assert json.loads(json.dumps(report.to_json()))["findings"][1]["hosts"] == ["n1"]
