"""``megatron-ft doctor`` on hosts in network namespaces: links, firewalls, interfaces. The bad one is named."""

from __future__ import annotations

import pytest

from tests import netlab, slurm, support
from tests.doctors import FEWER, NO_TORCH, Doctors, command

HOSTS = 3
PORT = 29400
pytestmark = pytest.mark.system


PATIENT = """
line.SILENCE_S = hub.SILENCE_S = guest.SILENCE_S = 60.0
disk._SEEN_S, measure._ANSWER_S, measure._HEARD_S = 30.0, 10.0, 4.0
"""
"""Nobody here is slow to answer but who has no processor, and that is no trouble to be named."""

cluster = slurm.lab(HOSTS)


class InNamespaces(Doctors):
    def __init__(self, lab: netlab.Lab) -> None:
        super().__init__()
        self.lab = lab

    def come(self, *hosts: int, store: str | None = None, change: str = NO_TORCH, first: str = "", **env) -> None:
        """They start; ``env``: of one host (``h2``) a dictionary; ``first``: more lines of Python on host 0."""
        for host in hosts:
            store = store or f"{self.lab.address(0)}:{PORT}"
            where = ["--hosts", HOSTS, "--host-rank", host, "--store", store]
            own = PATIENT + change + (first if host == 0 else "")
            self.start(host, where, own, self.lab.inside(host, []), **env.get(f"h{host}", {}))


@pytest.fixture
def doctors():
    netlab.require()
    doctors = InNamespaces(netlab.Lab(HOSTS))
    yield doctors
    doctors.kill()
    doctors.lab.close()


def verdict(said: str) -> str:
    return said.strip().splitlines()[-1]


def test_ipv6_and_a_wrong_interface(doctors):
    """With a real all-reduce of those that are left. Host 0 has one more interface, which leads nowhere."""
    doctors.lab.add_ipv6()
    doctors.lab.add_interface(0, "eth1")
    doctors.come(0, 1, 2, store=f"[{doctors.lab.address6(0)}]:{PORT}", change="", h1={"GLOO_SOCKET_IFNAME": "ib7"})
    said, codes = doctors.ended()
    assert codes == [1, 1, 1]
    name = f"({doctors.lab.address6(1)})"
    assert f"{name} (interface: GLOO_SOCKET_IFNAME=ib7: this host has no ib7; it has eth0, lo)" in verdict(said)
    assert verdict(said).count("(interface") == 1 and "(fd99::1)" not in verdict(said)
    assert "eth0, eth1 are up, NCCL_SOCKET_IFNAME is not set" in said and "NCCL_SOCKET_IFNAME=eth0, which leads" in said
    assert "all-reduce, gloo" in said and "the 2 that are well" in said


@pytest.mark.parametrize(
    ("deaf", "words"),
    [
        ([(1, 2), (2, 1)], "nothing passes between {1} and {2}, either way"),
        ([(1, 2)], "what {2} sends does not reach {1}; the other way passes"),
    ],
)
def test_a_link_that_is_cut_is_named_as_a_link_and_which_way(doctors, deaf, words):
    for host, to in deaf:
        doctors.lab.deafen(host, to)
    doctors.come(0, 1, 2)
    said, codes = doctors.ended()
    assert codes == [1, 1, 1]
    found = verdict(said)
    whole = [name for name in said.split() if name.endswith(")") and "(10.99.0." in name]
    names = {host: next(name for name in whole if name.endswith(f"({doctors.lab.address(host)})")) for host in (1, 2)}
    assert found == f"do not start on: {names[1]} or {names[2]} ({words.format('', names[1], names[2])})"


def test_a_slow_host_is_named_and_nobody_else(doctors):
    doctors.lab.slow(2, mbit=10)
    doctors.come(0, 1, 2)
    said, codes = doctors.ended()
    assert codes == [1, 1, 1]
    found = verdict(said)
    assert found.count("pairs:") == 1 and "(10.99.0.3) (pairs: sends to " in found, found
    assert "(2 of 2 measured) at " in found


def test_a_host_that_takes_no_connections_is_named(doctors):
    """A firewall: it may call, and nobody may call it."""
    doctors.lab.filter(2, "input", "ct state new meta l4proto { tcp, udp } drop")
    doctors.come(0, 1, 2)
    said, codes = doctors.ended()
    assert codes == [1, 1, 1]
    found = verdict(said)
    assert found.count("pairs:") == 1 and "(10.99.0.3) (pairs: it takes no connection from " in found, found


def test_a_host_that_is_heard_and_hears_nothing_is_named(doctors):
    """It never comes, because what host 0 sends does not reach it; its datagrams say that it is there."""
    doctors.lab.deafen(2, to=0)
    heard = FEWER.format(there=2).replace("len(self._lines) < 2", "len(self._lines) < 2 or not self.calling")
    doctors.come(0, 1, 2, first=heard)
    first = doctors.said(0)
    assert doctors.processes[0].returncode == 1
    found = verdict(first)
    assert "do not start on: host 2 (there: it is heard, but makes no connection" in found
    assert "what host 0 sends does not reach it" in found and found in doctors.said(1)


def test_in_slurm_one_command_is_enough(cluster, tmp_path):
    """Slurm says who they are; they meet by a file in the directory."""
    srun = ["srun", f"-N{HOSTS}", "--ntasks-per-node=1", "--chdir", support.ROOT]
    done = cluster.run([*srun, *command(PATIENT + NO_TORCH, ["--directory", tmp_path])], timeout=support.TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout.splitlines()
    assert {"all 3 hosts are ready", "host 1: all 3 hosts are ready", "host 2: all 3 hosts are ready"} <= set(said)
    assert "(found: Slurm, job" in done.stderr and not list(tmp_path.iterdir())
