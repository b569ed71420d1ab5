"""Who is bad, from what pairs of hosts have measured: the bad one is named, and nobody else."""

from __future__ import annotations

import random
from itertools import combinations, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.core import alike, pairs
from megatron_ft.core.pairs import CLOSED, CUT, LATE, LOST, REFUSED, SLOW, Way, judge

RTT_S, BYTES_S = 0.0005, 1e9
quick = settings(max_examples=40)
NAMES = {host: f"n{host}" for host in range(100)}


def healthy(hosts: int, noise=lambda: 1.0) -> dict[pairs.Pair, Way]:
    """All ways between so many; with ``noise`` no two values are the same."""
    measured = {pair for some in pairs.rounds(range(hosts)) for pair in some}
    both = {way for pair in measured for way in (pair, pair[::-1])}
    return {way: Way(True, rtt_s=RTT_S * noise(), bytes_s=BYTES_S / noise()) for way in sorted(both)}


def slow(ways, hit, by: float):
    """The ways for which ``hit`` is true are slower by so much."""
    return {
        way: Way(True, rtt_s=value.rtt_s, bytes_s=value.bytes_s / by) if hit(*way) else value for way, value in ways.items()
    }


@st.composite
def noisy(draw, least: int, most: int, factor: float = 1.3):
    """(number of hosts, ways that differ by less than ``factor``)."""
    hosts = draw(st.integers(least, most))
    generator = random.Random(draw(st.integers(0, 2**32)))
    return hosts, healthy(hosts, lambda: generator.uniform(1.0, factor))


# --- rounds -----------------------------------------------------------------------------------------------------------


@given(st.integers(1, 16))
def test_all_pairs_of_up_to_sixteen_meet_once_and_nobody_is_in_two_at_once(hosts):
    found = pairs.rounds(range(hosts))
    assert sorted(pair for some in found for pair in some) == sorted(combinations(range(hosts), 2))
    for some in found:
        busy = [host for pair in some for host in pair]
        assert len(busy) == len(set(busy))


@given(st.integers(17, 60), st.integers(1, 20))
def test_of_many_every_host_is_measured_about_as_often(hosts, most):
    found = pairs.rounds(range(hosts), most)
    met = [sum(host in pair for some in found for pair in some) for host in range(hosts)]
    every = hosts - 1 + hosts % 2
    assert len(found) == min(most, every) and max(met) - min(met) <= 1
    assert len({pair for some in found for pair in some}) == sum(map(len, found)), "no pair twice"


@given(st.sets(st.tuples(st.integers(0, 8), st.integers(0, 8)).filter(lambda pair: pair[0] < pair[1])))
def test_a_second_look_keeps_hosts_apart_too(some):
    found = pairs.apart(some)
    assert {pair for one in found for pair in one} == some
    for one in found:
        busy = [host for pair in one for host in pair]
        assert len(busy) == len(set(busy))


# --- who is named -----------------------------------------------------------------------------------------------------


@quick
@given(noisy(2, 20, factor=pairs.FACTOR - 0.01))
def test_noise_within_the_factor_names_nobody(setting):
    _, ways = setting
    found = judge(ways)
    assert not found.hosts and not found.links and not pairs.suspects(ways)


@quick
@given(noisy(2, 20), st.floats(1.0, 1e6))
def test_everything_as_slow_names_nobody(setting, by):
    _, ways = setting
    assert judge(slow(ways, lambda *_: True, by)).hosts == ()


@quick
@given(noisy(3, 20), st.floats(4.5, 1e4), st.data())
def test_one_slow_host_is_named_and_nobody_else(setting, by, data):
    hosts, ways = setting
    bad = data.draw(st.integers(0, hosts - 1))
    found = judge(slow(ways, lambda a, b: bad in (a, b), by))
    assert [named.host for named in found.hosts] == [bad] and not found.links
    assert {t.what for t in found.hosts[0].troubles} == {SLOW} and not found.hosts[0].well_with


@quick
@given(noisy(3, 20), st.floats(4.5, 1e4), st.booleans(), st.data())
def test_a_host_that_is_slow_one_way_is_named_for_that_way(setting, by, sends, data):
    hosts, ways = setting
    bad = data.draw(st.integers(0, hosts - 1))
    found = judge(slow(ways, lambda a, b: bad == (a if sends else b), by))
    assert [named.host for named in found.hosts] == [bad] and not found.links
    assert all((t.sender == bad) is sends for t in found.hosts[0].troubles)


@quick
@given(noisy(6, 20), st.floats(4.5, 1e4), st.data())
def test_several_slow_hosts_are_all_named(setting, by, data):
    """Up to a third of them, as long as every pair is measured."""
    hosts, ways = setting
    most = hosts // 3 if hosts <= pairs.MOST_ROUNDS else 2
    bad = data.draw(st.sets(st.integers(0, hosts - 1), min_size=1, max_size=most))
    found = judge(slow(ways, lambda a, b: bool(bad & {a, b}), by))
    assert {named.host for named in found.hosts} == bad and not found.links


@quick
@given(noisy(3, 20), st.floats(4.5, 1e4), st.booleans(), st.data())
def test_one_slow_link_is_named_as_a_link(setting, by, one_way, data):
    _, ways = setting
    pair = data.draw(st.sampled_from(sorted(ways)))
    found = judge(slow(ways, lambda a, b: (a, b) == pair or (not one_way and (b, a) == pair), by))
    assert not found.hosts
    expected = {pair} if one_way else {pair, pair[::-1]}
    assert {(t.sender, t.receiver) for t in found.links} == expected and {t.what for t in found.links} == {SLOW}


@quick
@given(noisy(3, 20), st.data())
def test_a_host_that_nobody_reaches_is_named(setting, data):
    hosts, ways = setting
    bad = data.draw(st.integers(0, hosts - 1))
    found = judge({way: Way(False, "timed out") if bad in way else value for way, value in ways.items()})
    assert [named.host for named in found.hosts] == [bad] and not found.links
    assert {t.what for t in found.hosts[0].troubles} == {CUT}


@quick
@given(noisy(4, 12), st.floats(4.5, 1e4), st.data())
def test_a_bad_host_and_a_bad_link_elsewhere_are_both_found(setting, by, data):
    hosts, ways = setting
    bad, a, b = data.draw(st.permutations(range(hosts)))[:3]
    ways = slow(ways, lambda *way: bad in way, by)
    ways |= {(a, b): Way(False), (b, a): Way(False)}
    found = judge(ways)
    assert [named.host for named in found.hosts] == [bad]
    assert [(t.what, {t.sender, t.receiver}) for t in found.links] == [(CUT, {a, b})]


@given(st.integers(2, 8), st.floats(4.5, 1e4))
def test_two_halves_that_are_well_among_themselves_name_no_host(half, by):
    """It is what connects them; which of two racks is to be left out is not for us to say."""
    ways = slow(healthy(2 * half), lambda a, b: (a < half) != (b < half), by)
    found = judge(ways)
    assert not found.hosts and len({frozenset((t.sender, t.receiver)) for t in found.links}) in (0, half * half)


def test_a_part_that_is_cut_off_is_named_and_who_it_is_well_with():
    """Three hosts behind a bad uplink."""
    ways = {way: Way(False) if (way[0] < 5) != (way[1] < 5) else value for way, value in healthy(8).items()}
    found = judge(ways)
    assert [(bad.host, bad.well_with) for bad in found.hosts] == [(5, (6, 7)), (6, (5, 7)), (7, (5, 6))]
    assert "well with n6 and n7" in found.hosts[0].words(NAMES)


anything = st.builds(
    Way, st.booleans(), heard=st.booleans(), rtt_s=st.none() | st.floats(1e-5, 10), bytes_s=st.none() | st.floats(1, 1e11)
)


@given(st.dictionaries(st.sampled_from(sorted(permutations(range(6), 2))), anything))
def test_whatever_is_measured_everything_bad_is_told_once_and_nothing_else(ways):
    found = judge(ways)
    named = {bad.host for bad in found.hosts}
    told = {frozenset((t.sender, t.receiver)) for t in found.links}
    told_of_hosts = {frozenset((t.sender, t.receiver)) for bad in found.hosts for t in bad.troubles}
    assert told | told_of_hosts == set(map(frozenset, pairs.suspects(ways))) and not told & told_of_hosts
    assert not any(named & pair for pair in told)
    words = [trouble.words(NAMES) for trouble in found.links] + [bad.words(NAMES) for bad in found.hosts]
    assert all(words), "there is always something to say"


# --- one way ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "there, back, what, ends",
    [
        (Way(False), Way(False), CUT, (1, 2)),
        (Way(False, heard=True), Way(False), LOST, (2, 1)),  # what 1 sends arrives, what 2 sends does not
        (Way(False), Way(False, heard=True), LOST, (1, 2)),
        (Way(False, heard=True), Way(False, heard=True), CLOSED, (1, 2)),
        (Way(True), Way(False, "refused"), REFUSED, (2, 1)),
        (Way(True, rtt_s=0.5), Way(True, rtt_s=0.4), LATE, (1, 2)),
    ],
)
def test_kinds_of_links(there, back, what, ends):
    found = judge({**healthy(5), (1, 2): there, (2, 1): back})
    assert not found.hosts
    assert [(t.what, t.sender, t.receiver) for t in found.links] == [(what, *ends)]


def test_a_host_whose_packets_are_lost_is_named_for_that():
    ways = healthy(4) | {(3, k): Way(False) for k in range(3)} | {(k, 3): Way(False, heard=True) for k in range(3)}
    (bad,) = judge(ways).hosts
    assert bad.words(NAMES) == "what it sends does not reach n0, n1 and n2 (3 of 3 measured)"


def test_a_longer_round_trip_of_microseconds_is_nothing():
    ways = healthy(3) | {(0, 1): Way(True, rtt_s=2 * RTT_S), (1, 0): Way(True, rtt_s=2 * RTT_S)}
    assert not judge(ways, factor=1.5).links


def test_the_factor_is_the_users():
    ways = slow(healthy(4), lambda a, b: 2 in (a, b), 2.0)
    assert not judge(ways).hosts and [bad.host for bad in judge(ways, factor=1.5).hosts] == [2]


def test_a_host_is_named_with_what_it_does_and_what_is_usual():
    (bad,) = judge(slow(healthy(4), lambda a, b: a == 3, 100.0)).hosts
    assert bad.words(NAMES) == "sends to n0, n1 and n2 (3 of 3 measured) at 10 MB/s, usual are 1000 MB/s"


ways_ = st.builds(Way, st.booleans(), rtt_s=st.none() | st.floats(0, 1), bytes_s=st.none() | st.floats(0, 1e9))


@given(ways_, ways_)
def test_of_two_looks_the_better_one_counts(first, second):
    found = pairs.better(first, second)
    assert found.opens == (first.opens or second.opens)
    counted = [way for way in (first, second) if way.opens == found.opens]
    assert found.bytes_s == max((way.bytes_s for way in counted if way.bytes_s is not None), default=None)
    assert found.rtt_s == min((way.rtt_s for way in counted if way.rtt_s is not None), default=None)
    assert pairs.better(None, second) == second and pairs.better(first, None) == first


# --- alike ------------------------------------------------------------------------------------------------------------


@given(st.integers(3, 30), st.data())
def test_a_minority_is_named_with_both_values(hosts, data):
    odd = data.draw(st.sets(st.integers(0, hosts - 1), max_size=(hosts - 1) // 2))
    values = {host: "2.8" if host in odd else "2.9" for host in range(hosts)}
    assert alike.different(values) == ("2.9", dict.fromkeys(sorted(odd), "2.8"))


def test_of_two_that_differ_host_0_counts():
    assert alike.different({1: "a", 0: "b"}) == ("b", {1: "a"})
    assert alike.astray({0: 0.0, 1: -2.0}, 0.5) == {1: -2.0}
    assert alike.different({}) == ("", {}) and alike.astray({}, 0.5) == {}


def test_a_clock_that_is_alone_is_astray_host_0s_too():
    assert alike.astray({0: 0.0, 1: 0.1, 2: 3.0, 3: -0.1}, 0.5) == {2: pytest.approx(3.0, abs=0.11)}
    assert list(alike.astray({0: 0.0, 1: 3.0, 2: 3.1, 3: 3.0}, 0.5)) == [0]


def test_a_slow_disk_among_three():
    assert alike.slower({0: 100.0, 1: 90.0, 2: 10.0}, 3.0) == (90.0, {2: 10.0})
    assert alike.slower({0: 100.0, 1: 10.0}, 3.0)[1] == {} and alike.slower({}, 3.0) == (0.0, {})


@pytest.mark.parametrize(
    ("stages", "failed", "alone", "suspected", "guilty"),
    [
        ({0: 3, 1: 1, 2: 3}, {1}, {}, {}, (1,)),  # it did not come as far as the others
        ({0: 3, 1: 1, 2: 1}, {1, 2}, {}, {}, (1, 2)),
        ({0: 3, 1: 3, 2: 3}, {2}, {2}, {}, (2,)),  # it has no such interface
        ({0: 3, 1: 3, 2: 3}, {0}, {}, {}, ()),  # it does not reach somebody: who of the two?
        ({0: 3, 1: 3, 2: 3}, {0, 2}, {}, {1}, (1,)),  # one has another interface: they do not reach it
        ({0: 5, 1: 5, 2: 5}, {}, {}, {1}, ()),  # and yet all went well
        ({0: 3}, {0}, {}, {1}, ()),  # it takes no part
    ],
)
def test_who_spoils_what_all_do_together(stages, failed, alone, suspected, guilty):
    assert alike.to_blame(stages, failed, alone, suspected) == guilty


def test_where_nobody_comes_it_is_host_0():
    assert alike.to_blame_for_absence(4, {0}) == (0,)
    assert alike.to_blame_for_absence(4, {0, 2}) == (1, 3)
    assert alike.to_blame_for_absence(2, {0}) == (1,), "of two, either"
    assert alike.to_blame_for_absence(3, {0, 1, 2}) == ()
