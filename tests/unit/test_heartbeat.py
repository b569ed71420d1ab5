"""Heartbeats between agents: only those that another agent of the run has just sent count."""

from __future__ import annotations

import os
import queue
import socket
from pathlib import Path

import pytest

from megatron_ft.core.detection.heartbeats import Said
from megatron_ft.host.heartbeat import _MAGIC, MESSAGE_BYTES, HeartbeatService
from megatron_ft.utils import file_descriptors
from tests.stores import await_
from tests.support import SECRET

KEY = SECRET.of("run")
NOTHING = Said()


@pytest.fixture
def hosts():
    made = [HeartbeatService(f"127.0.0.{number + 1}", number, KEY, 5.0) for number in range(3)]
    yield made
    for one in made:
        one.close()


def heard(host: HeartbeatService, *datagrams: bytes) -> int:
    """Return how many of these count as heartbeats of host 0."""
    host.listen_to([0])
    host._others[0].heartbeats = 0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as mouth:
        for data in datagrams:
            mouth.sendto(data, host._socket.getsockname())
            assert file_descriptors.readable(host._socket, 60)
            host._receive()
    return host._others[0].heartbeats


def heartbeat(host: HeartbeatService, to: int, count: int, said: Said = NOTHING) -> bytes:
    return host._message(host._rank, to, count, said)


def test_hosts_hear_each_other(hosts):
    addresses = {number: (f"127.0.0.{number + 1}", host.port) for number, host in enumerate(hosts)}
    for host in hosts:
        host.add(addresses)
    await_(lambda: all(other.heartbeats > 2 for host in hosts for other in host._others.values()), "all are heard")
    assert not any(host.silent() for host in hosts) and all(len(host.known()) == 2 for host in hosts)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["127.0.0.{}", pytest.param("::1", marks=pytest.mark.long)])
def test_a_flood_of_a_stranger_does_not_reach_the_buffer_while_all_hosts_are_heard(family):
    hosts = [HeartbeatService(family.format(number + 1), number, KEY, 5.0) for number in range(3)]
    addresses = {number: host._socket.getsockname()[:2] for number, host in enumerate(hosts)}
    try:
        for host in hosts:
            host.add(addresses)
        await_(lambda: all(host._passed is not None for host in hosts), "all are heard")
        with socket.socket(hosts[0]._socket.family, socket.SOCK_DGRAM) as stranger:
            for _ in range(10_000):
                stranger.sendto(_MAGIC.ljust(MESSAGE_BYTES, b"x"), addresses[0])
        before = {rank: other.heartbeats for rank, other in hosts[0]._others.items()}
        await_(
            lambda: all(hosts[0]._others[rank].heartbeats > before[rank] + 1 for rank in before), "all are still heard"
        )
        assert dropped(hosts[0]._socket) >= 10_000, "by the filter"
        hosts[1].close()
        await_(lambda: hosts[0]._passed is None, "a host that comes back may have another address", 60)
    finally:
        for host in hosts:
            host._stop.set()
        for host in hosts:
            host.close()


def dropped(udp: socket.socket) -> int:
    """Return how many datagrams the kernel has dropped for this socket."""
    inode = str(os.fstat(udp.fileno()).st_ino)
    name = "udp6" if udp.family == socket.AF_INET6 else "udp"
    rows = [line.split() for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return next(int(row[-1]) for row in rows if row[9] == inode)


def test_a_beat_counts_once_and_only_at_the_host_it_was_sent_to(hosts):
    first, second, third = hosts
    said = [heartbeat(first, 1, count) for count in (1, 2, 3)]
    assert heard(second, *said) == 3
    assert heard(second, *said) == 0, "they were sent again"
    assert heard(second, heartbeat(first, 1, 4)) == 1
    assert heard(third, *said) == 0, "they were for another host"


def test_beats_carry_their_hosts_knowledge_of_the_control_store(hosts):
    first, second, _ = hosts
    addresses = {number: (f"127.0.0.{number + 1}", host.port) for number, host in enumerate(hosts)}
    first.says = Said(3, True)
    for host in (first, second):
        host.add(addresses)
    await_(lambda: second.said() == {0: Said(3, True)}, "it is heard; nothing is known of a host that was never heard")
    first.says = Said(4, False)
    await_(lambda: second.said() == {0: Said(4, False)}, "the newest heartbeat counts")
    second.least_s = 0.0
    first.close()
    await_(lambda: second.said() == {}, "it is silent")


def test_hosts_agree_by_their_beats_that_one_is_lost(hosts):
    addresses = {number: (f"127.0.0.{number + 1}", host.port) for number, host in enumerate(hosts)}
    for host in hosts:
        host.least_s, host.agreed_s = 1e9, 0.2
        host.add(addresses)
    await_(lambda: all(other.heartbeats > 2 for host in hosts for other in host._others.values()), "all are heard")
    first, second, third = hosts
    woken = queue.SimpleQueue()
    first.changed = lambda: woken.put(True)
    third.close()
    await_(lambda: first.silent() == second.silent() == {2}, "neither would say so alone")
    assert woken.get(timeout=60)
    first.close()
    assert not second.look(0.0) and second.silent() == {2}, "one host is no majority of two"


def test_a_forged_beat_does_not_count(hosts):
    first, second, _ = hosts
    stranger = HeartbeatService("127.0.0.9", 0, SECRET.of("another run"), 5.0)
    good = heartbeat(first, 1, 7)
    changed = [good[:12] + (9).to_bytes(8, "big") + good[20:], good[:24] + b"\x01" + good[25:]]
    changed += [good[:25] + (2).to_bytes(4, "big") + good[29:]]
    changed += [good[:-1] + bytes([good[-1] ^ 1]), good[:-1], b"", good * 2]
    assert heard(second, heartbeat(stranger, 1, 5), *changed, bytes(len(good))) == 0
    assert heard(second, good) == 1, "no forged counter has got ahead of it"
    stranger.close()
