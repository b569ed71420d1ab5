"""``megatron-ft doctor`` on hosts in network namespaces: slow and cut links, and firewalls. The faulty host is named."""

from __future__ import annotations

import pytest

from tests import netlab, slurm, support
from tests.doctors import FEWER, Doctors, command

HOSTS = 3
PORT = 29400
pytestmark = pytest.mark.system


PATIENT = """
disk._VISIBLE_S, bandwidth._HANDSHAKE_S, bandwidth._BLOCK_TIMEOUT_S, bandwidth.MAX_S = 30.0, 10.0, 10.0, 60.0
"""
"""A process that waits for a processor is not taken for a fault of the network."""

cluster = slurm.lab(HOSTS)


class InNamespaces(Doctors):
    def __init__(self, lab: netlab.Lab) -> None:
        super().__init__()
        self.lab = lab

    def come(self, *hosts: int, store: str | None = None, first: str = "") -> None:
        """Start these hosts; ``first``: further lines of Python for host 0."""
        for host in hosts:
            store = store or f"{self.lab.address(0)}:{PORT}"
            where = ["--hosts", HOSTS, "--host-rank", host, "--store", store]
            self.start(host, where, PATIENT + (first if host == 0 else ""), self.lab.inside(host, []))


@pytest.fixture
def doctors():
    netlab.require()
    doctors = InNamespaces(netlab.Lab(HOSTS))
    yield doctors
    doctors.kill()
    doctors.lab.close()


def verdict(said: str) -> str:
    return said.strip().splitlines()[-1]


def test_healthy_hosts_with_ipv6_addresses_are_ready(doctors):
    doctors.lab.add_ipv6()
    doctors.come(0, 1, 2, store=f"[{doctors.lab.address6(0)}]:{PORT}")
    said, codes = doctors.ended()
    assert codes == [0, 0, 0], said
    assert verdict(said) == "all 3 hosts are ready" and f"({doctors.lab.address6(1)})" in said


@pytest.mark.parametrize("deaf", [[(1, 2), (2, 1)], [(1, 2)]])
def test_a_link_that_is_cut_one_way_or_both_is_named_as_a_link(doctors, deaf):
    for host, to in deaf:
        doctors.lab.deafen(host, to)
    doctors.come(0, 1, 2)
    said, codes = doctors.ended()
    assert codes == [1, 1, 1]
    found = verdict(said)
    assert "(10.99.0.2) or " in found and "(10.99.0.3) (" in found and "(10.99.0.1)" not in found, found
    assert "cannot connect to" in found and "); and 1 more)" in found, found


def test_only_the_slow_host_is_named(doctors):
    doctors.lab.slow(2, mbit=10)
    doctors.come(0, 1, 2)
    said, codes = doctors.ended()
    assert codes == [1, 1, 1]
    found = verdict(said)
    assert found.count("bandwidth:") == 1 and "(10.99.0.3) (bandwidth: sends at " in found, found


def test_a_host_whose_firewall_refuses_connections_is_named(doctors):
    """The host can connect to the others; they cannot connect to it."""
    doctors.lab.filter(2, "input", "ct state new meta l4proto { tcp, udp } drop")
    doctors.come(0, 1, 2)
    said, codes = doctors.ended()
    assert codes == [1, 1, 1]
    found = verdict(said)
    words = "(10.99.0.3) (bandwidth: no other host can connect to it)"
    assert found.count("bandwidth:") == 1 and words in found, found


def test_a_host_that_cannot_connect_to_host_0_is_named(doctors):
    doctors.lab.deafen(2, to=0)
    doctors.come(0, 1, 2, first=FEWER.format(there=2))
    first = doctors.said(0)
    assert doctors.processes[0].returncode == 1
    found = verdict(first)
    assert found == "do not start on: host 2 (present: has not connected within 60 s)" and found in doctors.said(1)


def test_one_command_checks_the_nodes_of_a_slurm_job(cluster, tmp_path):
    """Slurm numbers the hosts; they meet by a file in the directory."""
    srun = ["srun", f"-N{HOSTS}", "--ntasks-per-node=1", "--chdir", support.ROOT]
    done = cluster.run([*srun, *command(PATIENT, ["--directory", tmp_path])], timeout=support.TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout.splitlines()
    assert {"all 3 hosts are ready", "host 1: all 3 hosts are ready", "host 2: all 3 hosts are ready"} <= set(said)
    assert "(found: srun, job" in done.stderr and not list(tmp_path.iterdir())
