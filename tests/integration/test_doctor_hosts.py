"""``megatron-ft doctor`` on three hosts, each an address of loopback: who is missing, frozen or different is named."""

from __future__ import annotations

import json
import os
import signal

import pytest

from tests.doctors import FEWER, FREEZE, NO_TORCH, PATIENT, Doctors
from tests.stores import held_port

HOSTS = 3
ANY_SPEED = ["--factor", 1e9]
"""Here no host is slow, but on a busy machine one may look so."""


class OnLoopback(Doctors):
    def __init__(self) -> None:
        super().__init__()
        self._held = held_port()
        self.port = self._held.getsockname()[1]

    def come(self, *hosts: int, extra=(), frozen: int | None = None, **changed) -> None:
        """They start; ``changed``: for one host (``h2``) other lines of Python. ``frozen``: who will be."""
        for host in hosts:
            where = ["--hosts", HOSTS, "--host-rank", host, "--store", f"127.0.0.1:{self.port}"]
            own = ["--address", f"127.0.0.{host + 1}", *ANY_SPEED, *extra]
            change = NO_TORCH + PATIENT.format(frozen=frozen) + changed.get(f"h{host}", "")
            self.start(host, [*where, *own], change)

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


def test_all_are_well_and_meet_by_a_file(doctors, tmp_path):
    """With a real all-reduce. Who has started them says who they are, as in Slurm; the directory is tried, too."""
    for host in range(HOSTS):
        told = {"TORCHELASTIC_RUN_ID": "7", "GROUP_WORLD_SIZE": str(HOSTS), "GROUP_RANK": str(host)}
        told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "LOCAL_WORLD_SIZE": "1"}
        doctors.start(host, ["--directory", tmp_path, "--json", *ANY_SPEED], PATIENT.format(frozen=None), **told)
    said, codes = doctors.ended()
    assert codes == [0, 0, 0], said
    report = json.loads(said[said.index("{") : said.rindex("}") + 1])
    assert report["ready"] and report["verdict"] == "all 3 hosts are ready"
    states = {row["check"]: row["state"] for row in report["findings"]}
    assert set(states.values()) == {"ok"}
    assert {"there", "own", "interface", "same", "clock", "disk", "pairs", "all-reduce, gloo"} == set(states)
    assert len(report["pairs"]) >= 3 and report["disks"]["2"]["seen"] and report["gloo"]["1"]["stage"] == 5
    assert report["clocks"]["2"]["error_s"] > 0 and len(report["pairs"][0]["from_first"]["rtts_s"]) > 1
    assert os.listdir(tmp_path) == [], "nothing is left in the directory"


def test_one_that_never_comes_is_named(doctors):
    doctors.come(0, 1, h0=FEWER.format(there=2))
    said, codes = doctors.ended()
    assert codes == [1, 1]
    assert last(said) == "do not start on: host 2 (there: has not come within 60 s)"
    assert "start doctor there with --host-rank 2" in said


def test_where_nobody_comes_it_is_host_0_itself(doctors):
    doctors.come(0, h0=FEWER.format(there=1))
    said, codes = doctors.ended()
    assert codes == [1] and "host 0 itself (there: none of the other 2 hosts has reached it within 60 s)" in last(said)
    assert "127.0.0.1 is an address of this machine only" in said, "what is to be looked at"


def test_a_host_that_freezes_while_pairs_are_measured_is_named_and_hangs_nobody(doctors):
    doctors.come(0, 1, 2, frozen=2, h2=f"measure.Service.measure = lambda *_: exec({FREEZE!r}) or measure.Measured(False)")
    first = doctors.said(0)
    assert doctors.processes[0].returncode == 1
    assert "(127.0.0.3) (there: silent for 2 s (measuring pairs): frozen, or cut off)" in last(first)
    assert "(127.0.0.2) (" not in last(first), "nobody else"
    assert last(first) in doctors.said(1) and doctors.processes[1].returncode == 1
    doctors.processes[2].send_signal(signal.SIGCONT)
    assert "host 0 has gone on without this host: silent for 2 s" in doctors.said(2)
    assert doctors.processes[2].returncode == 1


def test_a_host_that_dies_is_named(doctors):
    doctors.come(0, 1, 2, h1="measure.Service.measure = lambda *_: __import__('os')._exit(9)")
    said, codes = doctors.ended()
    assert codes == [1, 9, 1] and "(127.0.0.2) (there: its doctor has ended (measuring pairs))" in last(said)


def test_when_host_0_freezes_the_others_say_so(doctors):
    doctors.come(0, 1, 2, frozen=0, h0=f"together._Check._pairs = lambda *_: exec({FREEZE!r})")
    for host in (1, 2):
        assert "host 0 (127.0.0.1) has been silent for 2 s" in doctors.said(host)
        assert doctors.processes[host].returncode == 1


def test_who_differs_is_named_with_both_values(doctors, tmp_path):
    """Another torch, a package that only others have, a clock that is three seconds off, another directory."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    versions = "versions._package = lambda name: '2.0' if name == 'torch' else '1'\n"
    own = "local.examine = lambda: [local.Finding('python', 'ok', '3.11', needed=True), local.Finding('apex', 'ok', '1')]\n"
    clock = "import types, time as real\nguest.time = types.SimpleNamespace(time=lambda: real.time() + 3)\n"
    other = f"import pathlib\ndisk.marker = lambda *_: pathlib.Path({str(elsewhere)!r}) / 'mark'\n"
    same = "versions._package = lambda name: '1'\n"
    doctors.come(0, 1, 2, extra=["--directory", tmp_path], h0=same, h1=versions + own, h2=same + clock + other)
    said, codes = doctors.ended()
    assert codes == [1, 1, 1]
    assert "(127.0.0.2) (same torch: it has 2.0, the others have 1)" in last(said)
    assert f"(127.0.0.3) (disk: {tmp_path} is not the directory of host 0" in last(said)
    assert "+3.0" in said and "from the others, by host 0's clock" in said
    assert "own: apex" in said and "not there, but on others" in said


def test_who_keeps_the_all_reduce_waiting_is_named(doctors):
    """One fails by itself; the others, which only wait for it, are stopped."""
    waits = """
import time
def wait(order, address, stopped):
    while not stopped():
        time.sleep(0.01)
    return everybody.Outcome(3, 1.0, everybody.STOPPED)
everybody.take_part = wait
"""
    fails = "everybody.take_part = lambda *_: everybody.Outcome(3, 0.1, 'Unable to find address for: ib7')"
    doctors.come(0, 1, 2, h0=waits, h1=waits, h2=fails)
    said, codes = doctors.ended()
    assert codes == [1, 1, 1]
    found = last(said)
    assert "(127.0.0.3) (all-reduce, gloo: Unable to find address for: ib7 (it got as far as: all have come))" in found
    assert "(127.0.0.2) (" not in found and "(127.0.0.1)" not in found


def test_hosts_that_do_not_agree_say_so(doctors):
    """Host 0 waits for host 1, which comes when the other one has been sent away."""
    doctors.come(0, h0=FEWER.format(there=2))
    doctors.start(2, ["--hosts", 4, "--host-rank", 2, "--store", f"127.0.0.1:{doctors.port}"])
    assert "this host has --hosts 4, host 0 has 3" in doctors.said(2) and doctors.processes[2].returncode == 2
    doctors.come(1)
    said, codes = doctors.ended(0, 1)
    assert codes == [1, 1] and "host 2 (there: has not come" in last(said)


def test_a_host_without_host_0_ends_too(doctors):
    doctors.come(1, extra=["--patience-s", 0.5])
    assert "host 0 is not reached within 0.5 s (127.0.0.1:" in doctors.said(1)
    assert doctors.processes[1].returncode == 1


def test_wrong_options_get_one_line(doctors):
    taken = doctors.start(0, ["--hosts", 2, "--host-rank", 0, "--store", "192.0.2.77:29400"])
    said = doctors.said(0)
    assert taken.returncode == 2 and len(said.strip().splitlines()) == 1, said
    assert "192.0.2.77 is no address of this host" in said
