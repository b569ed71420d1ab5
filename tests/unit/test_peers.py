"""An agent's knowledge of which host runs which ranks, when ranks have moved between hosts."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations

import pytest

from megatron_ft.config.schema import resolve
from megatron_ft.core.detection.heartbeats import Change
from megatron_ft.core.protocol.signals import HostAssigned
from megatron_ft.errors import LaunchError
from megatron_ft.host import peers as module
from megatron_ft.host.peers import Hosts, Place
from megatron_ft.utils import wait_notice

CONFIG = resolve({}, groups=2)


@pytest.fixture
def hosts(tmp_path, monkeypatch):
    """The knowledge of a host that came later: 0 and 1 are the first hosts, with a group each."""
    monkeypatch.setattr(Hosts, "_boot_store", lambda *_: None)  # no host is asked
    made = Hosts(Place(hosts=2, rank=4, store="127.0.0.1:1"), CONFIG, 1.0, tmp_path, "run")
    yield made
    made.heartbeats.close()
    made.keeper.close()


def test_a_host_without_a_keeper_says_that_the_store_of_the_run_is_embedded(hosts):
    hosts.on_signal(housed(0, 0))
    keeper, hosts.keeper = hosts.keeper, None
    assert hosts.store_said.startswith(
        "control store: embedded, on host 0 (h0) at 127.0.0.1:1; when that host is lost the run ends"
    )
    hosts.keeper = keeper


def housed(host: int, incarnation: int, *ranks) -> HostAssigned:
    return HostAssigned(host, f"h{host}", "127.0.0.1", 1000 + host, 0, ranks, incarnation)


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_the_newest_start_of_a_group_determines_its_host_in_whatever_order_it_is_heard(hosts, order):
    """All processes put everything back at once into a store that came back empty."""
    news = [housed(2, 0), housed(2, 1, (1, 0)), housed(3, 2, (1, 0)), housed(2, 3, (1, 0))]
    for number in order:
        hosts.on_signal(news[number])
    hosts.on_signal(news[1])
    assert {host: hosts.groups(host) for host in range(4)} == {0: {0}, 1: set(), 2: {1}, 3: set()}
    assert hosts.unheard() == set()


def test_a_host_that_does_not_hear_another_corrects_which_groups_that_has(hosts, monkeypatch):
    hosts.on_signal(housed(0, 0)), hosts.on_signal(housed(1, 0))
    monkeypatch.setattr(hosts.heartbeats, "silences", lambda: [Change(1, 2.5, heard=False)])
    hosts.move(4, [(0, 0)], 1)
    said = hosts.signal(Change(1, 1.0, heard=False))
    assert said.units == ((0,), (1,))
    taken_back, now = hosts.on_signal(housed(2, 1, (1, 0)))
    assert taken_back.heard and taken_back.units == said.units
    assert not now.heard and now.units == ((0,), ()) and now.silent_s == 2.5
    assert hosts.on_signal(housed(3, 0)) == [], "nothing has moved"


def test_a_spare_that_takes_a_group_over_accuses_in_its_name_the_hosts_it_does_not_hear(hosts, monkeypatch):
    hosts.on_signal(housed(0, 0)), hosts.on_signal(housed(1, 0))
    monkeypatch.setattr(hosts.heartbeats, "silences", lambda: [Change(1, 2.5, heard=False)])
    taken_back, now = hosts.move(4, [(0, 0)], 1)
    assert taken_back.heard and taken_back.units == ((), (1,))
    assert not now.heard and now.units == ((0,), (1,)) and now.since == ((0, 1),)


def test_a_spare_has_room_for_as_many_ranks_as_the_first_hosts_have(hosts):
    assert hosts.ranks == () and hosts.max_ranks == 1
    hosts.move(4, [(0, 0)], 1)
    assert hosts.ranks == ((0, 0),) and hosts.groups(0) == set()
    assert [(part.group, part.host) for part in hosts.parts] == [(1, 1), (0, 4)]


class Empty:
    """A store to which no other host comes. A wait in it ends when this host has said for whom it waits."""

    def __init__(self, said: threading.Event) -> None:
        self._said = said

    def add(self, *_) -> None:
        pass

    set = add

    def members(self, what):
        return {"0": {}}

    def wait(self, key, timeout_s) -> None:
        self._said.wait()


@pytest.mark.parametrize(
    ("rank", "line"), [(0, "host 0 waits for hosts 1 2: "), (1, "host 1 waits for host 0 to meet all others: ")]
)
def test_a_host_that_waits_says_for_whom_and_where_it_listens(tmp_path, monkeypatch, rank, line):
    lines, said = [], threading.Event()

    def say(text: str) -> None:
        if text.startswith(line):
            lines.append(text)
            said.set()

    monkeypatch.setattr(wait_notice, "say", say)
    monkeypatch.setattr(Hosts, "_boot_store", lambda *_: Empty(said))
    monkeypatch.setattr(module, "MEET_TIMEOUT_S", 0.0)
    monkeypatch.setattr(module.Hosts, "_join", lambda self: ("run", "127.0.0.1:1"))
    config = resolve({"fault_tolerance": {"detector": {"stall_notice_s": 0.01}}}, groups=3)
    made = Hosts(Place(hosts=3, rank=rank, store="127.0.0.1:0"), config, 1.0, tmp_path, "run")
    try:
        with pytest.raises(LaunchError, match="host [12] of 3 has not come to 127.0.0.1:.*check that it reaches that"):
            made.meet()
    finally:
        made.heartbeats.close()
        made.keeper.close()
    assert lines[0].startswith(f"{line}the control store is at {made.store_address}, this host at 127.0.0.1 (")


def test_the_first_claim_has_the_stores_address_by_whichever_host_it_is_made(tmp_path, monkeypatch):
    """Debian's hosts know their own name as 127.0.1.1, where host 0 reaches no store of its own."""
    config = resolve({}, groups=2)
    with contextlib.ExitStack() as ends:

        def host(rank: int, address: str) -> Hosts:
            made = Hosts(Place(hosts=2, rank=rank, store=address, grows=True), config, 1.0, tmp_path, "run")
            ends.callback(made.heartbeats.close)
            ends.callback(made.keeper.close)
            return made

        first = host(0, "127.0.0.1:0")
        other = host(1, f"localhost:{first.store_address.rpartition(':')[2]}")
        monkeypatch.setattr(first, "_prepare_succession", lambda shared: None)  # host 0 is slower
        with ThreadPoolExecutor() as threads:
            for met in [threads.submit(one.meet) for one in (first, other)]:
                met.result()
        first.locator.poll()
        assert [claim.address for claim in first.locator.claims] == [first.keeper.address]
