"""Hosts that do not hear each other: when a silence counts, and which hosts leave. Whatever is reported, those that
stay hear each other."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.core.detection import link_detector
from megatron_ft.core.detection.link_detector import FIRST_S, LISTEN_S, Peer, listen, who_leaves

BEAT, LEAST = 0.1, 0.8
hosts = st.integers(2, 6).flatmap(lambda n: st.just([(2 * k, 2 * k + 1) for k in range(n)]))


def heard(peer, gaps_s, least_s=LEAST, step_s=BEAT):
    """Return a detector that got one heartbeat after each gap; it is looked at every ``step_s``."""
    now = 0.0 if peer.looked is None else peer.looked
    for gap_s in gaps_s:
        for _ in range(round(gap_s / step_s)):
            now += step_s
            peer = listen(peer, peer.heartbeats, now, least_s)
        peer = listen(peer, peer.heartbeats + 1, now, least_s)
    return peer


def silence(peer, least_s=LEAST, step_s=BEAT):
    """Return the time until the peer counts as lost."""
    now, since = peer.looked, peer.looked
    while not peer.lost:
        now += step_s
        peer = listen(peer, peer.heartbeats, now, least_s)
    return now - since


def test_silence_counts_after_the_least_time():
    assert silence(heard(Peer(), [BEAT] * 50)) == pytest.approx(LEAST + BEAT, abs=0.15)


def test_a_busy_host_is_given_more_time_and_that_is_forgotten():
    """Gaps of half a second are the habit of the host: silence is three times as long. After a thousand regular heartbeats
    it is not."""
    busy = heard(Peer(), [0.5] * 20)
    assert silence(busy) > 1.4
    assert silence(heard(busy, [BEAT] * 2000)) == pytest.approx(LEAST + BEAT, abs=0.15)


def test_gaps_that_grow_do_not_let_a_silence_last_for_ever():
    """Each is shorter than three times the one before, so none of them counts as an outage."""
    peer = heard(Peer(), [BEAT * 2.5**n for n in range(6)])
    assert peer.longest_s > 9.0 and not peer.lost
    assert silence(heard(peer, [2.5 * peer.longest_s])) == pytest.approx(30.0 + BEAT, abs=0.15)


def test_a_host_that_was_never_heard_is_given_time_to_begin_and_that_is_not_learned():
    assert silence(listen(Peer(), 0, 0.0, LEAST)) == pytest.approx(FIRST_S + BEAT, abs=0.15)
    peer = heard(listen(Peer(), 0, 0.0, LEAST), [10.0, *[BEAT] * 5])
    assert not peer.lost and silence(peer) == pytest.approx(LEAST + BEAT, abs=0.15)


def test_an_outage_is_not_learned():
    peer = heard(Peer(), [BEAT] * 10)
    now = peer.looked
    for _ in range(600):
        now += BEAT
        peer = listen(peer, peer.heartbeats, now, LEAST)
    assert peer.lost
    peer = heard(peer, [BEAT] * 5)
    assert not peer.lost and silence(peer) == pytest.approx(LEAST + BEAT, abs=0.15)


@given(st.floats(1, 1e6))
def test_time_in_which_the_agent_did_not_run_is_no_silence(gap_s):
    peer = listen(heard(Peer(), [BEAT] * 3), 3, 1.0, LEAST)
    peer = listen(peer, peer.heartbeats, 1.0 + gap_s, LEAST)
    assert not peer.lost and peer.silent_s <= 2 * LISTEN_S


@given(st.lists(st.tuples(st.integers(1, 30), st.booleans()), max_size=40))
def test_only_a_host_that_was_silent_for_long_enough_is_lost(looks):
    peer, heartbeats, now, silent_s = Peer(), 0, 0.0, 0.0
    for ticks, heartbeat in looks:
        now += ticks / 128  # sums of such times are exact
        heartbeats += heartbeat
        silent_s = silent_s + ticks / 128  # at least the time that the peer may count
        peer = listen(peer, heartbeats, now, LEAST)
        assert not peer.lost or silent_s > LEAST
        silent_s = 0.0 if heartbeat else silent_s


# --- which hosts leave ------------------------------------------------------------------------------------------------

A, B, C = (0, 1), (2, 3), (4, 5)
LIVE = range(6)


@pytest.mark.parametrize(
    "silences, gone",
    [
        ([(A, B)], B),  # only A reports anything: B is probably gone
        ([(A, B), (B, A)], B),  # a cut link: the higher
        ([(A, C), (B, C)], C),  # a dead host
        ([(A, B), (A, C), (B, A), (C, A)], A),  # A is cut off from all others
        ([(A, B), (A, C)], A),  # A hears no host, and no host misses another: A cannot receive
        ([(B, A), (C, A), (A, B)], A),  # no host hears A: it cannot send
    ],
)
def test_the_hard_cases(silences, gone):
    assert who_leaves(silences, LIVE) == set(gone)


@pytest.mark.parametrize(
    "silences, settled",
    [
        ([(A, C), (B, C)], True),
        ([(A, C), (B, C), (C, A), (C, B)], True),
        ([(A, C)], False),  # B may hear it
        ([(C, A), (C, B)], False),  # only the host that leaves has said something
        ([(A, B), (A, C), (B, C)], False),  # two leave, and one stays
    ],
)
def test_a_view_waits_for_no_host_once_all_that_stay_are_of_one_mind(silences, settled):
    assert link_detector.are_unanimous(silences, LIVE, who_leaves(silences, LIVE)) == settled
    assert not link_detector.are_unanimous([(A, B)], A + B, set(B)), "of two hosts either may be the one"
    assert not link_detector.are_unanimous(silences, range(7), who_leaves(silences, LIVE)), "a host has said nothing"


def test_no_more_hosts_leave_than_have_to_also_where_that_is_three():
    """Taken by the number of silent links, 2, 4 and 5 would leave; without 0 and 1 no two hosts miss each other."""
    one = [(group,) for group in range(6)]
    silences = [(one[0], one[2]), (one[0], one[5]), (one[1], one[4]), (one[2], one[1])]
    assert who_leaves(silences, range(6)) == {0, 1}


@given(hosts=st.integers(2, 3000), pair=st.tuples(st.integers(0, 4000), st.integers(0, 4000)))
def test_partners_are_mutual_and_few(hosts, pair):
    one, other = pair
    assert link_detector.are_partners(one, other, hosts) == link_detector.are_partners(other, one, hosts)
    partners = sum(link_detector.are_partners(one, peer, hosts) for peer in range(hosts))
    late = one >= hosts  # a late host has one more partner: the host in the same place
    assert (
        partners == hosts - (not late)
        if hosts <= link_detector.EVERYBODY
        else partners <= 2 * hosts.bit_length() + late
    )


@given(hosts=st.integers(33, 200), first=st.integers(0, 199), share=st.floats(0.01, 0.49))
def test_racks_that_are_cut_off_leave_as_a_whole_however_few_listen_to_each_other(hosts, first, share):
    racks = {(first + number) % hosts for number in range(max(1, int(share * hosts)))}
    pairs = itertools.product(range(hosts), repeat=2)
    cut = [((a,), (b,)) for a, b in pairs if (a in racks) != (b in racks) and link_detector.are_partners(a, b, hosts)]
    assert link_detector.who_leaves(cut, range(hosts)) == racks


def test_a_host_with_fewer_live_groups_leaves():
    assert who_leaves([(A, B), (B, A)], [1, 2, 3]) == {1}


@given(hosts, st.data())
def test_hosts_that_stay_hear_each_other_and_at_least_one_stays(units, data):
    pairs = st.sampled_from([(a, b) for a in units for b in units if a != b])
    silences = data.draw(st.sets(pairs, max_size=20))
    live = data.draw(st.sets(st.integers(0, 2 * len(units) - 1), min_size=1))
    leaving = who_leaves(silences, live)
    staying = live - leaving
    assert leaving <= live and staying
    for by, about in silences:
        assert not (staying & set(by) and staying & set(about))
    assert all(not (leaving & set(unit)) or live & set(unit) <= leaving for unit in units), "a host leaves as a whole"
    assert leaving == who_leaves(sorted(silences, reverse=True), sorted(live)), "the order says nothing"
    named = {group for pair in silences for unit in pair for group in unit}
    assert leaving <= named, "nobody leaves of whom nothing was said"


def test_an_accusation_of_a_host_that_leaves_does_not_speak_for_its_author():
    """Host 0 reported that it does not hear host 1, and was lost itself; only host 2 reports anything about it now."""
    silences = [((0,), (1,)), ((2,), (1,)), ((2,), (0,))]
    assert who_leaves(silences, (0, 1, 2)) == {0, 1}


def test_two_hosts_leave_rather_than_three_that_each_of_them_misses():
    """The worst one by one are the three that are accused; without the two accusers all others hear each other, too."""
    silences = [((0,), (2,)), ((0,), (3,)), ((1,), (2,)), ((1,), (4,))]
    assert who_leaves(silences, range(5)) == {0, 1}
