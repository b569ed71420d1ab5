"""Hosts that hear each other's heartbeats: when each of them says that another one is silent."""

import pytest

from megatron_ft.core.detection.heartbeats import DOUBTS, Listener, Said
from megatron_ft.core.detection.link_detector import AGREED

BEAT, ALONE = 0.05, 0.8
AGREE = AGREED * ALONE


class Air:
    """Hosts that send a heartbeat every ``BEAT`` seconds, each at another moment of it. ``open(sender, receiver)``: whether
    that link works."""

    def __init__(self, hosts: int) -> None:
        self.hosts = [Listener(ALONE, AGREE) for _ in range(hosts)]
        self.now, self.rounds = 100.0, 0
        for me, host in enumerate(self.hosts):
            host.listen_to(set(range(hosts)) - {me})

    def run(self, seconds, opened=lambda sender, receiver: True):
        """Return (host, other) -> seconds from now until the host has said that the other is silent."""
        said, began = {}, self.now
        for _ in range(round(seconds / BEAT)):
            self.rounds += 1
            for sender, host in enumerate(self.hosts):
                self.now += BEAT / len(self.hosts)
                for receiver, other in enumerate(self.hosts):
                    if receiver != sender and opened(sender, receiver):
                        other.hear(sender, self.rounds, Said(doubts=host.doubts), self.now)
                for change in host.look(self.now):
                    assert not change.heard
                    said[sender, change.rank] = self.now - began
        return said


def lost(gone):
    return lambda sender, receiver: (sender in gone) == (receiver in gone)


@pytest.mark.parametrize("hosts, gone", [(3, {0}), (4, {2}), (5, {4}), (5, {1, 3}), (20, {0, 7, 19})])
def test_what_most_hosts_miss_is_lost_soon_and_a_minority_waits(hosts, gone):
    """Those that are gone hear fewer than half of the hosts, and may be well otherwise: a cut has two sides."""
    air = Air(hosts)
    assert not air.run(3.0)
    said = air.run(1.5, lost(gone))
    assert said.keys() == {(a, b) for a in range(hosts) for b in range(hosts) if (a in gone) != (b in gone)}
    for (by, _), seconds in said.items():
        least = ALONE if by in gone else AGREE
        assert least - BEAT <= seconds <= least + 3 * BEAT


@pytest.mark.parametrize("hosts, gone", [(2, {1}), (4, {0, 1})])
def test_without_a_majority_each_host_waits(hosts, gone):
    air = Air(hosts)
    air.run(3.0)
    said = air.run(1.5, lost(gone))
    assert said and min(said.values()) >= ALONE - BEAT


def test_more_lost_hosts_than_a_heartbeat_names_are_all_lost_in_the_end():
    air = Air(20)
    air.run(1.0)
    gone = set(range(DOUBTS + 1))
    said = air.run(1.5, lost(gone))
    assert {air.hosts[19].doubts[0] in gone, len(air.hosts[19].doubts) == DOUBTS} == {True}
    assert sorted(seconds > ALONE - BEAT for (by, _), seconds in said.items() if by == 19) == [False] * DOUBTS + [True]


def test_a_host_that_one_other_hears_is_not_lost_soon():
    air = Air(4)
    air.run(3.0)
    said = air.run(1.5, lambda sender, receiver: sender != 3 or receiver == 0)
    assert said.keys() == {(1, 3), (2, 3)} and min(said.values()) >= ALONE - BEAT


def test_a_link_that_was_late_is_given_more_time():
    air = Air(3)
    air.run(1.0)
    assert not air.run(4 * BEAT, lost({2})) and not air.run(1.0), "a short gap: no host doubts"
    assert min(air.run(2.0, lost({2})).values()) >= 0.6 - BEAT


def test_what_a_host_has_said_before_it_fell_silent_itself_does_not_count():
    air = Air(3)
    air.run(1.0)
    first, second, _ = air.hosts
    air.run(AGREE + BEAT, lambda sender, receiver: sender != 2 or receiver == 0)
    assert 2 in second.doubts, "host 2 is silent there"
    said = air.run(1.5, lambda sender, receiver: False)
    assert min(said[0, 1], said[0, 2]) >= ALONE - 2 * BEAT and first.silent() == {1, 2}
