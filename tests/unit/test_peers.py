"""What an agent knows of which host runs what, when ranks have moved between hosts."""

from __future__ import annotations

from itertools import permutations

import pytest

from megatron_ft.config import resolve
from megatron_ft.core.detector import Housed
from megatron_ft.launch import hosts as module
from megatron_ft.launch.heartbeat import Change
from megatron_ft.launch.hosts import Hosts, Place

CONFIG = resolve({}, groups=2)


@pytest.fixture
def hosts(tmp_path, monkeypatch):
    """As a host that came later knows them: 0 and 1 are the first ones, with a group each."""
    monkeypatch.setattr(module, "boot_store", lambda *_: None)  # nobody is asked
    made = Hosts(Place(hosts=2, rank=4, store="127.0.0.1:1"), CONFIG, 1.0, tmp_path, "run")
    yield made
    made.beats.close()


def housed(host: int, incarnation: int, *ranks) -> Housed:
    return Housed(host, f"h{host}", "127.0.0.1", 1000 + host, 0, ranks, incarnation)


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_the_newest_start_of_a_group_says_where_it_is_in_whatever_order_that_is_heard(hosts, order):
    """A store that came back empty is told everything again, by everybody at once."""
    news = [housed(2, 0), housed(2, 1, (1, 0)), housed(3, 2, (1, 0)), housed(2, 3, (1, 0))]
    for number in order:
        hosts.hear(news[number])
    hosts.hear(news[1])
    assert {host: hosts.groups(host) for host in range(4)} == {0: {0}, 1: set(), 2: {1}, 3: set()}
    assert hosts.unheard() == set()


def test_who_does_not_hear_a_host_corrects_which_groups_that_has(hosts, monkeypatch):
    hosts.hear(housed(0, 0)), hosts.hear(housed(1, 0))
    monkeypatch.setattr(hosts.beats, "silences", lambda: [Change(1, 2.5, heard=False)])
    hosts.take(4, [(0, 0)], 1)
    said = hosts.signal(Change(1, 1.0, heard=False))
    assert said.units == ((0,), (1,))
    taken_back, now = hosts.hear(housed(2, 1, (1, 0)))
    assert taken_back.heard and taken_back.units == said.units
    assert not now.heard and now.units == ((0,), ()) and now.silent_s == 2.5
    assert hosts.hear(housed(3, 0)) == [], "nothing has moved"


def test_a_spare_has_room_for_as_many_ranks_as_the_first_hosts_have(hosts):
    assert hosts.ranks == () and hosts.room == 1
    hosts.take(4, [(0, 0)], 1)
    assert hosts.ranks == ((0, 0),) and hosts.groups(0) == set()
    assert [(part.group, part.host) for part in hosts.parts] == [(1, 1), (0, 4)]
