"""An agent's reaction to the news: the groups that it starts again, those that it refuses, and the order among hosts
that share a group."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from megatron_ft.core.lifecycle.group_returns import RestartManager
from megatron_ft.core.lifecycle.spare_policy import parts_of
from megatron_ft.core.protocol import signals
from megatron_ft.core.protocol.membership import first_view
from megatron_ft.errors import GroupLeft, RunStopped
from megatron_ft.host.peers import Place
from megatron_ft.host.spare_host import Spare
from megatron_ft.types import Exit, View

FIRST = first_view(3)


@dataclass
class Store:
    """The store that all agents see."""

    keys: dict = field(default_factory=dict)
    log: list = field(default_factory=list)
    view: View = FIRST


@dataclass
class Voice:
    """The announcements of one agent."""

    store: Store
    away: bool = False
    told: bool = True
    heard: int = 0

    def news(self):
        if self.away:
            return []
        found, self.heard = self.store.log[self.heard :], len(self.store.log)
        return found

    def newest_view(self, known):
        return known if self.away else self.store.view

    def put(self, key, value):
        self.store.keys[key] = value
        return True

    def claim(self, key, value):
        return self.store.keys.setdefault(key, value)

    def get(self, key):
        return self.store.keys.get(key)


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def agent(clock, store=None, here=None, shared=(), enabled=True, per_hour=6, patience_s=30.0, begun=lambda *_: True):
    voice = Voice(store or Store())
    allowed = per_hour if enabled else None
    made = RestartManager(voice, here or {1: True, 2: True}, shared, FIRST, 1, allowed, patience_s, begun, clock)
    return made, voice


def dead(group, incarnation=0, **how):
    return signals.RankExited(Exit(group, 0, 7, "h", **{"signal": "SIGKILL", "code": None, **how}), incarnation)


def look(made):
    """Look as the agent does."""
    made.check(made._client.news())


def due(made, unheard=()):
    look(made)
    return [(start.group, start.incarnation) for start in made.due(unheard)]


def start_all(made, unheard=()):
    look(made)
    starts = made.due(unheard)
    for start in starts:
        made.started(start)
    return starts


def test_a_killed_group_is_started_again_at_once_and_then_less_soon(clock):
    made, voice = agent(clock)
    for incarnation, pause in enumerate((0, 1, 2)):
        made.on_signal(dead(1, incarnation))
        voice.store.log.append(dead(1, incarnation))  # the agent hears its own notice, too
        if pause:
            assert due(made) == [] and made.pending()
            clock.now += pause
        (start,) = start_all(made)
        assert (start.group, start.incarnation, start.attempt) == (1, incarnation + 1, incarnation + 1)
        assert start.after_s == pytest.approx(pause) and made.incarnation(1) == incarnation + 1
        assert due(made) == [] and not made.pending()


def test_a_group_that_worked_for_long_after_a_short_return_is_started_at_once_again(clock):
    made, voice = agent(clock)
    for incarnation in range(3):
        made.on_signal(dead(1, incarnation))
        (start,) = start_all(made)
        assert (start.attempt, start.after_s) == (1, 0.0)
        clock.now += 0.5
        voice.store.view = View(incarnation + 1, (0, 1, 2), "", incarnations={1: incarnation + 1})
        look(made)
        clock.now += 10.0
        look(made)


def test_nothing_is_started_while_the_store_is_away_or_the_loss_is_not_told(clock):
    made, voice = agent(clock)
    voice.away = True
    made.on_signal(dead(1))
    assert due(made) == [] and made.pending()
    voice.away, voice.told = False, False
    assert due(made) == []
    voice.told = True
    assert due(made) == [(1, 1)]


def test_a_store_that_stays_away_is_not_waited_for_for_ever(clock):
    made, voice = agent(clock)
    voice.away = True
    made.on_signal(dead(1))
    look(made)
    clock.now += 29.0
    look(made)
    assert made.pending()
    clock.now += 1.0
    assert not made.pending()


def test_without_rejoin_no_group_comes_back(clock):
    made, _ = agent(clock, enabled=False)
    made.on_signal(dead(1))
    assert due(made) == [] and not made.pending() and not made.hopeless and made.seated(1, 0)


def test_the_last_group_takes_those_along_that_wait_for_a_seat(clock):
    made, voice = agent(clock)
    made.on_signal(dead(1))
    assert [start.incarnation for start in start_all(made)] == [1]
    voice.store.log += [dead(0), dead(2)]
    assert due(made) == [] and not made.pending() and made.hopeless
    assert not made.refusals() and not made.seated(1, 1) and made.seated(2, 0)


def test_a_newcomer_with_a_seat_counts_as_a_member(clock):
    made, voice = agent(clock)
    made.on_signal(dead(1))
    start_all(made)
    voice.store.view = View(1, (0, 1, 2), "", incarnations={1: 1})
    voice.store.log += [dead(0), dead(2)]
    assert due(made) == [(2, 1)] and not made.hopeless and made.seated(1, 1)


def test_a_group_that_was_left_out_while_it_lived_comes_back(clock):
    made, voice = agent(clock)
    voice.store.view = View(1, (0, 2), "", lost={1: "cut off"})
    made.on_signal(dead(1, signal=None, code=RunStopped.exit_code, detail="group 1 is outside view 1"))
    assert due(made) == [(1, 1)]


def test_a_group_is_checked_for_being_left_out_when_the_store_answers(clock):
    made, voice = agent(clock)
    voice.away = True
    made.on_signal(dead(1, signal=None, code=RunStopped.exit_code, detail="group 1 is outside view 1"))
    assert due(made) == [] and made.pending()
    voice.away, voice.store.view = False, View(1, (0, 2), "", lost={1: "cut off"})
    assert due(made) == [(1, 1)]


def test_a_script_that_is_done_is_not_waited_for_while_the_store_is_away(clock):
    made, voice = agent(clock)
    voice.away = True
    made.on_signal(dead(1, signal=None, code=0))
    look(made)
    assert not made.pending()


def test_a_group_that_is_killed_while_it_leaves_stays_away(clock):
    made, voice = agent(clock)
    voice.store.log.append(signals.LeaveAnnounced(1, 3, "SIGTERM"))
    made.on_signal(dead(1))
    assert due(made) == [] and not made.pending() and not made.refusals()


def test_a_group_that_stops_with_the_run_does_not_come_back(clock):
    made, _ = agent(clock)
    made.on_signal(dead(1, signal=None, code=RunStopped.exit_code, detail="min_groups"))
    assert due(made) == [] and not made.pending() and not made.refusals()


def test_a_group_that_leaves_in_order_is_not_refused_but_gone(clock):
    made, voice = agent(clock)
    made.on_signal(dead(1, signal=None, code=GroupLeft.exit_code))
    voice.store.log.append(signals.LeaveAnnounced(1, 3, "SIGTERM"))
    assert due(made) == [] and not made.pending() and not made.refusals()


@pytest.mark.parametrize(
    ("how", "words"),
    [({"signal": "SIGTERM"}, "SIGTERM"), ({"signal": None, "code": 0}, "exit code 0")],
)
def test_a_group_that_was_ended_from_outside_is_reported(clock, how, words):
    made, _ = agent(clock)
    made.on_signal(dead(1, **how))
    assert due(made) == [] and not made.pending()
    (refusal,) = made.refusals()
    assert words in refusal.reason and not made.refusals()


def test_the_same_failure_twice_before_the_first_step_is_refused(clock):
    made, _ = agent(clock, begun=lambda *_: False)
    for incarnation in range(2):
        made.on_signal(dead(1, incarnation, signal=None, code=1, detail="no such file"))
        clock.now += 0 if due(made) or incarnation else 1
        start_all(made)
    assert not made.pending()
    (refusal,) = made.refusals()
    assert (refusal.group, refusal.incarnation) == (1, 1) and "no such file" in refusal.reason


def test_no_group_starts_on_a_host_that_cannot_reach_a_member(clock):
    made, voice = agent(clock)
    made.on_signal(dead(1))
    assert due(made, unheard=[0]) == []
    voice.store.log.append(dead(0))
    assert due(made, unheard=[0]) == [(1, 1)], "that host has nobody to be reached any more"


# --- a group with ranks on two hosts ----------------------------------------------------------------------------------


@pytest.fixture
def two(clock):
    store = Store()
    leading, _ = agent(clock, store, {1: True}, [1], per_hour=2)
    other, _ = agent(clock, store, {1: False}, [1], per_hour=2)
    return store, leading, other


def test_hosts_that_share_a_group_start_the_same_incarnation(two, clock):
    store, leading, other = two
    other.on_signal(dead(1))  # a rank of the other host, which announced it
    store.log.append(dead(1))
    assert due(other) == [] and other.pending(), "that is for the leading host to say"
    assert [start.incarnation for start in start_all(leading)] == [1]
    look(leading)  # the leading host announces it
    assert [start.incarnation for start in start_all(other)] == [1]
    assert leading.incarnation(1) == other.incarnation(1) == 1


def test_a_host_that_was_away_follows_to_the_newest_start(two, clock):
    store, leading, other = two
    for incarnation in range(2):
        store.log.append(dead(1, incarnation))
        look(leading)
        clock.now += 2.0
        assert start_all(leading)
    look(leading)
    assert [start.incarnation for start in start_all(other)] == [2]


def test_a_group_that_the_leading_host_refuses_is_not_waited_for(two, clock):
    store, leading, other = two
    for incarnation in range(3):
        store.log.append(dead(1, incarnation))
        look(leading)
        clock.now += 5.0
        start_all(leading)
    look(leading)
    look(other)
    assert not leading.pending() and not other.pending()
    assert len(leading.refusals()) == 1 and not other.refusals()


# --- ranks that move between hosts ------------------------------------------------------------------------------------


def test_a_group_that_is_adopted_is_started_at_once_under_the_next_number(clock):
    made, _ = agent(clock, here={2: True})
    assert due(made) == []
    made.adopt(1, True, False, incarnation=4)
    assert due(made) == [(1, 5)] and made.pending()
    start_all(made)
    made.forget(1)
    assert due(made) == [] and not made.pending() and made.incarnation(1) == 0


def test_a_host_that_follows_a_leading_host_goes_along_when_a_number_was_left_out(two):
    """The leading host had taken number 1 and was lost before it announced it; the spare that came for it takes number
    2."""
    store, _, other = two
    store.log.append(dead(1))
    assert due(other) == []
    store.keys["restart/1.2"] = {}
    assert due(other) == [(1, 2)]


# --- a spare host -----------------------------------------------------------------------------------------------------


@dataclass
class Hosts:
    """Host 0 and 1 have a group each, host 2 is idle; ``silent`` are not heard."""

    silent: set = field(default_factory=set)
    known: set = field(default_factory=lambda: {0, 1})
    ranks: tuple = ()
    max_ranks: int = 1

    @property
    def place(self):
        return Place(hosts=2, rank=2)

    @property
    def parts(self):
        return [*parts_of(0, [(0, 0)]), *parts_of(1, [(1, 0)]), *parts_of(2, self.ranks)]

    @property
    def heartbeats(self):
        return SimpleNamespace(silent=lambda: self.silent, known=lambda: self.known)

    def name(self, host):
        return f"h{host}"


@pytest.fixture
def spare(clock):
    made, voice = agent(clock, here={2: True})
    hosts = Hosts()
    spare = Spare(hosts, voice, made)

    def look_around():
        news = voice.news()
        for signal in news:
            spare.on_signal(signal)
        made.check(news)
        return [(part.group, last) for part, last in spare.poll()]

    return voice.store, hosts, look_around


def test_a_spare_takes_over_once_the_others_go_on_without_the_silent_host(spare):
    store, hosts, look_around = spare
    hosts.silent = {1}
    assert look_around() == [], "its group is still a member"
    store.log.append(dead(1))
    assert look_around() == [(1, 0)]
    assert store.keys == {"start/1.1/0": 2}


def test_of_two_spares_one_gets_it_and_the_host_at_home_may_have_been_faster(spare):
    store, hosts, look_around = spare
    store.log.append(dead(1))
    hosts.silent, store.keys["start/1.1/0"] = {1}, 3
    assert look_around() == []
    store.keys["start/1.1/0"] = 1
    assert look_around() == [(1, 1)], "it was lost before anybody heard of that start"


def test_a_group_that_left_or_was_told_to_end_is_not_taken_over(spare):
    store, hosts, look_around = spare
    hosts.silent = {0, 1}
    left = [signals.LeaveAnnounced(1, 3, "maintenance"), dead(1, signal=None, code=GroupLeft.exit_code)]
    store.log += [dead(0, signal="SIGTERM"), *left]
    assert look_around() == []


def test_a_group_that_was_left_out_and_ended_is_taken_over_even_if_both_are_heard_at_once(spare):
    """With the earlier view alone, the run would look as if it had stopped."""
    store, hosts, look_around = spare
    hosts.silent = {1}
    store.log.append(dead(1, signal=None, code=RunStopped.exit_code))
    store.view = View(1, (0,), "group 1 was cut off")
    assert look_around() == [(1, 0)]


def test_a_group_that_failed_too_often_at_home_is_taken_over_and_no_more_than_fits(spare):
    store, hosts, look_around = spare
    store.log += [dead(0), dead(1), signals.RestartRefused(0, 0, 0), signals.RestartRefused(1, 1, 0)]
    assert look_around() == [(0, 0)]
    hosts.ranks = ((0, 0),)
    assert look_around() == []


@pytest.mark.parametrize(("known", "witnesses", "taken"), [({0}, 2, [(1, 0)]), ({0}, 1, []), ({0, 1}, 2, [])])
def test_a_spare_believes_two_others_about_a_host_that_it_does_not_listen_to(spare, known, witnesses, taken):
    """One of the two may be the one that is cut off; about a host that it hears, the spare knows better."""
    store, hosts, look_around = spare
    hosts.known = known
    store.log += [dead(1)]
    store.log += [signals.HostSilent(f"h{by}", "h1", (by,), (1,), 2.0) for by in range(7, 7 + witnesses)]
    assert look_around() == taken


def test_a_host_that_has_given_up_a_group_itself_takes_none(spare):
    store, hosts, look_around = spare
    store.log += [dead(1), signals.RestartRefused(1, 1, 0), signals.RestartRefused(2, 7, 3)]
    assert look_around() == []
