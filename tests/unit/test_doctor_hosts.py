"""Doctor on several hosts: its options, its measurements, and its report."""

from __future__ import annotations

import argparse
import errno
import json
import os
import socket
import threading
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft import cli
from megatron_ft.cluster.doctor import bandwidth, disk, hosts_check, meeting
from megatron_ft.cluster.doctor.doctor_report import Report
from megatron_ft.cluster.doctor.outliers import FACTOR
from megatron_ft.errors import LaunchError
from megatron_ft.utils import net
from tests.support import SECRET

KEY = SECRET.of("doctor sends")
NAMES = {0: "n0", 1: "n1", 2: "n2"}


# --- options ----------------------------------------------------------------------------------------------------------


def asked(**changed) -> argparse.Namespace:
    names = ("hosts", "host_rank", "store", "hostfile", "directory", "job_id", "address", "target")
    return argparse.Namespace(**{**dict.fromkeys(names), "port": 0, "patience_s": 60.0, "factor": FACTOR, **changed})


@pytest.mark.parametrize("changed", [{}, {"hosts": 1}, {"hosts": 1, "host_rank": 0}])
def test_one_host_alone_gets_the_local_check(changed):
    assert meeting.find(asked(**changed)) is None


def test_several_hosts_meet_at_a_store_or_by_a_file(tmp_path):
    where = meeting.find(asked(hosts=3, host_rank=2, store="[fe80::7]:29400"))
    assert where.store == ("fe80::7", 29400) and where.rank == 2 and where.name(1) == "host 1"
    where = meeting.find(asked(hosts=3, host_rank=0, directory=tmp_path, job_id="7/a.0"))
    assert where.store is None and where.file == tmp_path / ".megatron_ft-doctor.7_a.0.json"


def test_a_hostfile_numbers_the_hosts(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("n0.invalid slots=4\nn1.invalid slots=4\n")
    where = meeting.find(asked(hostfile=path, host_rank=1, port=29400))
    assert (where.hosts, where.rank, where.store, where.name(0)) == (2, 1, ("n0.invalid", 29400), "n0.invalid")
    with pytest.raises(LaunchError, match="--port is missing; give a free port of n0.invalid"):
        meeting.find(asked(hostfile=path, host_rank=1))
    path.write_text("n0.invalid slots=4\n")
    assert meeting.find(asked(hostfile=path, host_rank=0)) is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--hosts", "3"], "--host-rank is missing"),
        (["--host-rank", "1"], "--hosts is missing"),
        (["--hosts", "3", "--host-rank", "1"], "--store is None and must be HOST:PORT"),
        (["--hosts", "3", "--host-rank", "1", "--store", "n0"], "--store is 'n0' and must be HOST:PORT"),
        (
            ["--hosts", "3", "--host-rank", "1", "--store", "n0:0"],
            "or give a new --job-id, the same on all hosts, and --directory",
        ),
        (["--hosts", "3", "--host-rank", "1", "--job-id", "a"], "--directory is missing; without --store"),
        (
            ["--hosts", "3", "--host-rank", "3", "--store", "n0:1"],
            "--host-rank is 3 and must be from 0 to 2, as --hosts is 3",
        ),
        (
            ["--hosts", "2", "--host-rank", "0", "--job-id", "a", "--directory", "/no/such"],
            "/no/such is not a directory on this host",
        ),
        (
            ["--hosts", "2", "--host-rank", "0", "--store", "no.such.invalid:9"],
            "the name no.such.invalid has no address on this host",
        ),
        (["--hosts", "2", "--host-rank", "0", "--store", "192.0.2.77:9"], "192.0.2.77 is not an address of this host"),
        (
            ["--hosts", "2", "--host-rank", "0", "--store", "127.0.0.1:9", "--factor", "1"],
            "--factor is 1 and must be greater than 1",
        ),
        (["--hosts", "2", "--host-rank", "0", "--store", "127.0.0.1:9", "--patience-s", "-1"], "--patience-s is -1"),
        (["--hostfile", "/no/such/file"], "--hostfile /no/such/file cannot be read"),
        (["--hostfile", "x", "--store", "n0:1"], "--hosts and --store cannot be combined with --hostfile"),
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
    assert "another program uses port" in capsys.readouterr().err


@pytest.mark.parametrize(("host", "port"), [("n0", 1), ("10.0.0.1", 29400), ("fe80::1%eth0", 65535), ("::1", 2)])
def test_an_address_is_written_and_read(host, port):
    assert net.split(net.joined(host, port)) == (host, port)


@settings(max_examples=30)
@given(st.text(max_size=12))
def test_any_text_is_an_address_or_refused(text):
    found = net.split(text)
    assert found is None or (found[0] and 0 <= found[1] <= 65535)


def test_a_damaged_file_is_read_again_until_the_time_is_up(tmp_path):
    where = meeting.Meeting(2, 1, None, "a", tmp_path, patience_s=0.0)
    where.file.write_text("{")
    assert "host 0 is not reached within 0 s" in meeting.reach(where)


# --- bandwidth --------------------------------------------------------------------------------------------------------


@pytest.fixture
def receiver(monkeypatch):
    """A receiver with a long limit. On a busy machine a thread may wait longer for a processor than a host waits for
    another one."""
    monkeypatch.setattr(bandwidth, "_HANDSHAKE_S", 60.0)
    monkeypatch.setattr(bandwidth, "_BLOCK_TIMEOUT_S", 60.0)
    receiver = bandwidth.Receiver("127.0.0.2", KEY)
    yield receiver
    receiver.close()


def test_the_rate_to_another_host_is_that_of_the_fastest_block(receiver, monkeypatch):
    """By a clock that says how long each block takes: none is fast enough for a larger one, and the third is the
    fastest."""
    block_s, total_s = bandwidth._BLOCK_S, bandwidth._TOTAL_S
    ticks = iter(tick for seconds in (4, 3, 2, 4, 4) for tick in (0.0, seconds * block_s))
    clock = SimpleNamespace(perf_counter=lambda: next(ticks), monotonic=iter(range(100)).__next__)
    monkeypatch.setattr(bandwidth, "_MIN_S", 0.0)
    monkeypatch.setattr(bandwidth, "_TOTAL_S", 1000 * total_s)
    monkeypatch.setattr(bandwidth, "time", clock)
    assert bandwidth.send_rate("127.0.0.2", receiver.port, KEY) == bandwidth._SMALLEST / (2 * block_s)


def test_a_block_that_does_not_arrive_in_time_gives_a_low_rate(receiver, monkeypatch):
    monkeypatch.setattr(bandwidth, "_BLOCK_TIMEOUT_S", 0.05)
    stuck = threading.Event()
    fill = bandwidth._fill
    monkeypatch.setattr(
        bandwidth, "_fill", lambda end, view: fill(end, view) if len(view) < bandwidth._SMALLEST else stuck.wait()
    )
    try:
        assert 0 < bandwidth.send_rate("127.0.0.2", receiver.port, KEY) < bandwidth._SMALLEST / 0.05
    finally:
        stuck.set()


def test_a_port_without_a_receiver_raises():
    with socket.create_server(("127.0.0.2", 0)) as gone:
        port = gone.getsockname()[1]
    with pytest.raises(ConnectionRefusedError):
        bandwidth.send_rate("127.0.0.2", port, KEY)


def test_a_sender_without_the_secret_is_refused(receiver):
    with pytest.raises(OSError, match="closed the connection"):
        bandwidth.send_rate("127.0.0.2", receiver.port, SECRET.of("another check"))


# --- disks ------------------------------------------------------------------------------------------------------------


def test_a_directory_is_tested_and_left_clean(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "_VISIBLE_S", 0.0)
    found = disk.try_out(tmp_path, "token")
    assert found["write_bytes_s"] > 0 and found["read_bytes_s"] > 0 and found["free_bytes"] > 0 and not found["seen"]
    disk.marker(tmp_path, "token").write_text("")
    assert disk.try_out(tmp_path, "token")["seen"] and len(list(tmp_path.iterdir())) == 1
    assert "No such file" in disk.try_out(tmp_path / "nothing", "token")["error"]


def no_links(*_):
    raise OSError(errno.EPERM, "Operation not permitted")


def test_a_directory_without_hard_links_is_a_warning_with_the_remedy(tmp_path, monkeypatch):
    """The claims of the embedded store are made by links, so that no host takes it over there."""
    assert disk.try_out(tmp_path)["no_links"] == ""
    monkeypatch.setattr(os, "link", no_links)
    answer = disk.try_out(tmp_path)
    assert answer["no_links"] == "Operation not permitted" and "error" not in answer and not list(tmp_path.iterdir())
    report = Report(NAMES)
    hub = SimpleNamespace(ask_all=lambda *_: {rank: answer | {"seen": True} for rank in range(2)})
    hosts_check._disks(report, hub, SimpleNamespace(directory=tmp_path))
    row = next(row for row in report.rows if row.state == "warn")
    assert row.hosts == (0, 1) and row.details == f"{tmp_path} has no hard links: Operation not permitted"
    assert "no host takes over the embedded store" in row.remedy and report.verdict().endswith("are ready")


def test_a_directory_that_does_not_respond_is_reported(tmp_path, monkeypatch):
    stuck = threading.Event()
    monkeypatch.setattr(disk, "MAX_S", 0.1)
    monkeypatch.setattr(disk, "_speed", lambda path: stuck.wait() and (1.0, 1.0))
    try:
        assert disk.try_out(tmp_path, "token") == {"error": "no response within 0.1 s"}
    finally:
        stuck.set()


# --- report -----------------------------------------------------------------------------------------------------------


def test_the_verdict_names_hosts_and_links_and_host_0():
    report = Report(NAMES)
    report.ok("present", "all")
    report.warn("clock", 2, "late")
    assert report.ready and report.verdict() == "all 3 hosts are ready"
    report.bad("link", [1, 2], "no connection", either=True)
    assert report.verdict() == "do not start on: n1 or n2 (no connection)"
    report.bad("disk", [0], "is full")
    report.bad("same torch", [0], "it has 1")
    said = report.verdict()
    assert said == "do not start on: n0, host 0 itself (disk: is full; and 1 more), n1 or n2 (no connection)"
    report.bad("bandwidth", [2], "is slow")
    assert "n1 or n2" not in report.verdict() and not report.ready


def test_hosts_with_the_same_finding_share_a_row():
    report = Report(NAMES)
    for host in NAMES:
        report.warn("interface", host, "several")
    report.warn("clock", 1, "late")
    assert [row.hosts for row in report.rows] == [(0, 1, 2), (1,)]
    assert json.loads(json.dumps(report.to_json()))["findings"][1]["hosts"] == ["n1"]
