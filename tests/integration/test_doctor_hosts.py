"""``megatron-ft doctor`` on three hosts, each an address of loopback: missing, frozen and different hosts are named."""

from __future__ import annotations

import json
import os
import signal

import pytest

from tests.doctors import FEWER, FREEZE, Doctors
from tests.stores import held_port

HOSTS = 3
ANY_SPEED = ["--factor", 1e9]
"""No host is slow in these tests, but one may seem slow on a busy machine."""


class OnLoopback(Doctors):
    def __init__(self) -> None:
        super().__init__()
        self._held = held_port()
        self.port = self._held.getsockname()[1]

    def come(self, *hosts: int, extra=(), **changed) -> None:
        """Start these hosts; ``changed``: further lines of Python for one host (``h2``)."""
        for host in hosts:
            where = ["--hosts", HOSTS, "--host-rank", host, "--store", f"127.0.0.1:{self.port}"]
            own = ["--address", f"127.0.0.{host + 1}", *ANY_SPEED, *extra]
            self.start(host, [*where, *own], changed.get(f"h{host}", ""))

    def kill(self) -> None:
        super().kill()
        self._held.close()


@pytest.fixture
def doctors():
    doctors = OnLoopback()
    yield doctors
    doctors.kill()


def last(said: str) -> str:
    return said.strip().splitlines()[-1]


def test_healthy_hosts_that_meet_by_a_file_are_ready(doctors, tmp_path):
    """The launcher's environment numbers the hosts, as in Slurm; the directory is tested, too."""
    for host in range(HOSTS):
        told = {"TORCHELASTIC_RUN_ID": "7", "GROUP_WORLD_SIZE": str(HOSTS), "GROUP_RANK": str(host)}
        told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "LOCAL_WORLD_SIZE": "1"}
        doctors.start(host, ["--directory", tmp_path, "--json", *ANY_SPEED], **told)
    said, codes = doctors.ended()
    assert codes == [0, 0, 0], said
    report = json.loads(said[said.index("{") : said.rindex("}") + 1])
    assert report["ready"] and report["verdict"] == "all 3 hosts are ready"
    states = {row["check"]: row["state"] for row in report["findings"]}
    assert set(states.values()) == {"ok"}
    assert {"present", "own", "same", "clock", "disk", "bandwidth"} == set(states)
    assert len(report["bandwidth"]) == 6 and all(way["bytes_s"] > 0 for way in report["bandwidth"])
    assert (
        report["disks"]["2"]["seen"] and report["disks"]["2"]["no_links"] == "" and report["clocks"]["2"]["error_s"] > 0
    )
    assert os.listdir(tmp_path) == [], "nothing is left in the directory"


@pytest.mark.long
def test_a_host_that_never_connects_is_named(doctors):
    doctors.come(0, 1, h0=FEWER.format(there=2))
    said, codes = doctors.ended()
    assert codes == [1, 1]
    assert last(said) == "do not start on: host 2 (present: has not connected within 60 s)"
    assert "start doctor there with --host-rank 2" in said


@pytest.mark.long
def test_host_0_is_named_when_no_other_host_connects(doctors):
    doctors.come(0, h0=FEWER.format(there=1))
    said, codes = doctors.ended()
    words = "host 0 itself (present: none of the other 2 hosts has connected within 60 s)"
    assert codes == [1] and words in last(said)
    assert "127.0.0.1 is reachable from this machine only: check --store and /etc/hosts" in said


@pytest.mark.long
def test_a_host_that_freezes_is_named_and_the_others_end(doctors):
    doctors.come(
        *range(HOSTS), h0="bandwidth.MAX_S = 4.0", h2=f"bandwidth.send_rate = lambda *_: exec({FREEZE!r}) or 0.0"
    )
    first = doctors.said(0)
    assert doctors.processes[0].returncode == 1
    assert "(127.0.0.3) (present: no answer within 8 s (order: send): it is frozen or cut off)" in last(first)
    assert "(127.0.0.2) (" not in last(first), "no other host is named"
    assert last(first) in doctors.said(1) and doctors.processes[1].returncode == 1
    doctors.processes[2].send_signal(signal.SIGCONT)
    assert "host 0 has continued without this host: no answer within 8 s" in doctors.said(2)
    assert doctors.processes[2].returncode == 1


def test_a_host_that_dies_is_named(doctors):
    doctors.come(*range(HOSTS), h1="bandwidth.send_rate = lambda *_: __import__('os')._exit(9)")
    said, codes = doctors.ended()
    assert codes == [1, 9, 1] and "(127.0.0.2) (present: its doctor has ended (order: send))" in last(said)


@pytest.mark.long
def test_the_others_report_a_frozen_host_0(doctors):
    soon = "hosts_check._ORDER_S = 5.0"
    doctors.come(*range(HOSTS), h0=f"hosts_check._bandwidth = lambda *_: exec({FREEZE!r})", h1=soon, h2=soon)
    for host in (1, 2):
        assert "host 0 (127.0.0.1) has been silent for 5 s" in doctors.said(host)
        assert doctors.processes[host].returncode == 1


@pytest.mark.long
def test_hosts_that_differ_are_named_with_both_values(doctors, tmp_path):
    """Another torch, a package that is missing on the others, a clock that is three seconds off, another directory."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    torch = "versions.extras.version = lambda name: '2.0' if name == 'torch' else '1'\n"
    own = "local.examine = lambda: [local.Finding('python', 'ok', '3.11', needed=True), local.Finding('apex', 'ok', '1')]\n"
    clock = "import types, time as real\nhosts_check.time = types.SimpleNamespace(time=lambda: real.time() + 3)\n"
    other = f"import pathlib\ndisk.marker = lambda *_: pathlib.Path({str(elsewhere)!r}) / 'mark'\n"
    same = "versions.extras.version = lambda name: '1'\n"
    doctors.come(*range(HOSTS), extra=["--directory", tmp_path], h0=same, h1=torch + own, h2=same + clock + other)
    said, codes = doctors.ended()
    assert codes == [1, 1, 1]
    assert "(127.0.0.2) (same torch: it has 2.0, the others have 1)" in last(said)
    assert f"(127.0.0.3) (disk: {tmp_path} is not the directory of host 0" in last(said)
    assert "+3.0" in said and "s from the other hosts" in said
    assert "own: apex" in said and "missing on this host, but not on all" in said


def test_a_link_that_is_cut_is_named_with_both_hosts(doctors):
    """Hosts 1 and 2 cannot connect to each other; both can connect to host 0."""
    cut = """
send_rate = bandwidth.send_rate
def refused(address, *rest):
    if address == {other!r}:
        raise ConnectionRefusedError(111, "Connection refused")
    return send_rate(address, *rest)
bandwidth.send_rate = refused
"""
    doctors.come(*range(HOSTS), h1=cut.format(other="127.0.0.3"), h2=cut.format(other="127.0.0.2"))
    said, codes = doctors.ended()
    assert codes == [1, 1, 1]
    assert "(127.0.0.2) or " in last(said) and "(127.0.0.3) (" in last(said) and "(127.0.0.1)" not in last(said)
    assert "cannot connect to" in last(said) and "(Connection refused); and 1 more)" in last(said)


@pytest.mark.long
def test_hosts_with_different_options_are_refused(doctors):
    """Host 0 waits for host 1, which starts after the refused host has ended."""
    doctors.come(0, h0=FEWER.format(there=2))
    doctors.start(2, ["--hosts", 4, "--host-rank", 2, "--store", f"127.0.0.1:{doctors.port}"])
    assert "--hosts is 4 on this host and 3 on host 0" in doctors.said(2) and doctors.processes[2].returncode == 2
    doctors.come(1)
    said, codes = doctors.ended(0, 1)
    assert codes == [1, 1] and "host 2 (present: has not connected" in last(said)


@pytest.mark.long
def test_a_host_without_host_0_ends(doctors):
    doctors.come(1, extra=["--patience-s", 0.5])
    assert "host 0 is not reached within 0.5 s (127.0.0.1:" in doctors.said(1)
    assert doctors.processes[1].returncode == 1


def test_wrong_options_get_one_line(doctors):
    taken = doctors.start(0, ["--hosts", 2, "--host-rank", 0, "--store", "192.0.2.77:29400"])
    said = doctors.said(0)
    assert taken.returncode == 2 and len(said.strip().splitlines()) == 1, said
    assert "192.0.2.77 is not an address of this host" in said
