"""Comparison of hosts: versions, clocks, and the rates between them."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.cluster.doctor import outliers

USUAL = 1e9
quick = settings(max_examples=60)


@st.composite
def measured(draw, least: int, most: int = 20, noise: float = 1.3):
    """Rates between healthy hosts, within ``noise`` of each other."""
    hosts = draw(st.integers(least, most))
    ways = sorted(way for targets in outliers.rounds(list(range(hosts))) for way in targets.items())
    rates = draw(st.lists(st.floats(USUAL / noise, USUAL), min_size=len(ways), max_size=len(ways)))
    return hosts, dict(zip(ways, rates, strict=True))


@given(st.integers(2, 16))
def test_all_ways_between_up_to_sixteen_hosts_are_measured_once(hosts):
    ways = [way for targets in outliers.rounds(list(range(hosts))) for way in targets.items()]
    assert sorted(ways) == sorted(permutations(range(hosts), 2))


@given(st.integers(2, 200))
def test_in_a_round_each_host_sends_once_and_receives_once(hosts):
    rounds = outliers.rounds(list(range(hosts)))
    assert len(rounds) == min(hosts - 1, outliers.MAX_SHIFTS)
    for targets in rounds:
        assert sorted(targets) == sorted(targets.values()) == list(range(hosts))
        assert all(sender != receiver for sender, receiver in targets.items())
    assert len({targets[0] for targets in rounds}) == len(rounds)


@quick
@given(measured(2, noise=outliers.FACTOR - 0.01))
def test_noise_within_the_factor_names_no_host_and_no_link(setting):
    found = outliers.slow(setting[1])
    assert not found.senders and not found.receivers and not found.links


@quick
@given(measured(3), st.floats(4.5, 1e4), st.sampled_from(["sends", "receives", "both"]), st.data())
def test_one_slow_host_is_named_for_its_direction_and_no_other_host(setting, by, direction, data):
    hosts, rates = setting
    bad = data.draw(st.integers(0, hosts - 1))
    for way in rates:
        if (way[0] == bad and direction != "receives") or (way[1] == bad and direction != "sends"):
            rates[way] /= by
    found = outliers.slow(rates)
    assert set(found.senders) == ({bad} if direction != "receives" else set())
    assert set(found.receivers) == ({bad} if direction != "sends" else set())
    assert not found.links


@quick
@given(measured(3), st.data())
def test_a_host_without_connections_is_named(setting, data):
    hosts, rates = setting
    bad = data.draw(st.integers(0, hosts - 1))
    rates |= {way: 0.0 for way in rates if way[1] == bad}
    found = outliers.slow(rates)
    assert not found.senders and set(found.receivers) == {bad} and found.receivers[bad] == 0.0


@quick
@given(measured(4), st.floats(4.5, 1e4), st.data())
def test_a_slow_link_between_two_fast_hosts_is_named_as_a_link(setting, by, data):
    _, rates = setting
    bad = data.draw(st.sampled_from(sorted(rates)))
    rates[bad] /= by
    found = outliers.slow(rates)
    assert not found.senders and not found.receivers and set(found.links) == {bad}


def test_two_hosts_alone_are_not_told_apart():
    found = outliers.slow({(0, 1): USUAL, (1, 0): 0.0})
    assert not found.senders and not found.receivers and dict(found.links) == {(1, 0): 0.0}
    assert dict(outliers.slow({(0, 1): 0.0, (1, 0): 0.0}).links) == {(0, 1): 0.0, (1, 0): 0.0}
    assert not outliers.slow({}).links


@given(st.integers(2, 8))
def test_two_halves_with_a_slow_network_between_them_name_links_only(half):
    rates = {(a, b): USUAL if (a < half) == (b < half) else USUAL / 100 for a, b in permutations(range(2 * half), 2)}
    found = outliers.slow(rates)
    assert not found.senders and not found.receivers
    assert set(found.links) == {(a, b) for a, b in rates if (a < half) != (b < half)}


def test_the_factor_is_configurable():
    rates = {way: USUAL / (2 if 2 in way else 1) for way in permutations(range(4), 2)}
    assert not outliers.slow(rates).senders and set(outliers.slow(rates, factor=1.5).senders) == {2}


@given(st.integers(3, 30), st.data())
def test_a_minority_is_named_with_both_values(hosts, data):
    odd = data.draw(st.sets(st.integers(0, hosts - 1), max_size=(hosts - 1) // 2))
    values = {host: "2.8" if host in odd else "2.9" for host in range(hosts)}
    assert outliers.different(values) == ("2.9", dict.fromkeys(sorted(odd), "2.8"))


def test_of_two_hosts_that_differ_host_0_is_the_reference():
    assert outliers.different({1: "a", 0: "b"}) == ("b", {1: "a"})
    assert outliers.astray({0: 0.0, 1: -2.0}, 0.5) == {1: -2.0}
    assert outliers.different({}) == ("", {}) and outliers.astray({}, 0.5) == {}


def test_a_single_clock_that_is_off_is_named_even_that_of_host_0():
    assert outliers.astray({0: 0.0, 1: 0.1, 2: 3.0, 3: -0.1}, 0.5) == {2: pytest.approx(3.0, abs=0.11)}
    assert list(outliers.astray({0: 0.0, 1: 3.0, 2: 3.1, 3: 3.0}, 0.5)) == [0]
