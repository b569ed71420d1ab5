"""A silence between hosts concerns the groups that are still there (core.places)."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.core.detector import Housed, Silent
from megatron_ft.core.places import Places, hear
from megatron_ft.core.protocol import Died, Missed


def housed(host: int, group: int, start: int) -> Housed:
    return Housed(host, f"h{host}", "", 0, 0, ((group, 0),), start)


def standing(notices) -> set:
    """What is left of all silences for the protocol, which knows pairs of groups."""
    places, left = Places(), set()
    for notice in notices:
        places, verdicts = hear(places, notice)
        for verdict in verdicts:
            if isinstance(verdict, Missed):
                (left.discard if verdict.heard else left.add)((verdict.by, verdict.about))
    return {pair for pair in left if all(pair)}


def test_who_was_cut_off_and_has_lost_its_group_accuses_nobody_when_its_link_is_healed():
    """It says late that it heard nobody, and its group is well, elsewhere (a run in which a healthy group left for that)."""
    late = Silent("h2", "h1", (2,), (1,), 0.9)
    assert standing([late]) == {((2,), (1,))}
    assert standing([housed(3, 2, 1), late]) == set()
    assert standing([housed(3, 2, 1), late, replace(late, heard=True)]) == set()
    assert standing([housed(3, 2, 1), replace(late, groups_by=(2, 5))]) == {((5,), (1,))}
    assert standing([housed(3, 2, 1), replace(late, since=((2, 1),))]) == {((2,), (1,))}


def test_what_was_said_of_a_lost_host_is_taken_back_when_its_groups_are_started_elsewhere():
    """Also by those that are gone; what remains true of its other groups stands."""
    silent = Silent("h0", "h1", (0,), (1, 5), 1.0)
    healed = Silent("h7", "h1", (2,), (1, 5), 1.0)
    said = [silent, healed, replace(healed, heard=True)]
    assert standing([*said, housed(3, 1, 1)]) == {((0,), (5,))}
    assert standing([*said, housed(3, 1, 1), housed(3, 5, 1)]) == set()
    assert standing([*said, housed(3, 7, 1)]) == {((0,), (1, 5))}
    assert standing([*said, housed(3, 1, 1), replace(silent, heard=True)]) == set()


def test_a_group_with_ranks_on_both_hosts_has_come_apart_whatever_has_moved():
    places, _ = hear(Places(), housed(3, 1, 4))
    _, (verdict,) = hear(places, Silent("h2", "h1", (1,), (1,), 0.9, incarnation=4))
    assert isinstance(verdict, Died) and verdict.incarnation == 4


HOSTS, GROUPS = 4, 6
hosts = st.integers(0, HOSTS - 1)
acts = st.one_of(
    st.tuples(st.just("move"), st.integers(0, GROUPS - 1), hosts),
    st.tuples(st.sampled_from(["silent", "heard"]), hosts, hosts).filter(lambda act: act[1] != act[2]),
    st.tuples(st.just("catch up"), hosts, st.none()),
)


@given(st.lists(acts, max_size=30))
def test_what_stands_is_what_hosts_say_of_the_groups_that_are_where_they_believe_them_to_be(done):
    """Hosts learn late, or never, that groups have moved, and correct themselves when they do."""
    truth = {group: (group % HOSTS, 0) for group in range(GROUPS)}
    beliefs = {host: dict(truth) for host in range(HOSTS)}
    silences: set[tuple[int, int]] = set()
    log = []

    def say(by: int, about: int, heard: bool) -> None:
        mine, theirs = (tuple(g for g, (place, _) in beliefs[by].items() if place == host) for host in (by, about))
        since = tuple((group, beliefs[by][group][1]) for group in (*mine, *theirs))
        log.append(Silent(f"h{by}", f"h{about}", mine, theirs, 1.0, heard, since=since))

    for what, one, other in done:
        if what == "move":
            truth[one] = other, truth[one][1] + 1
            log.append(housed(other, one, truth[one][1]))
        elif what == "catch up":
            old = [about for by, about in silences if by == one]
            for about in old:
                say(one, about, heard=True)
            beliefs[one] = dict(truth)
            for about in old:
                say(one, about, heard=False)
        elif what == "silent" or (one, other) in silences:
            say(one, other, heard=what == "heard")
            (silences.add if what == "silent" else silences.discard)((one, other))

    def true_of(by: int, host: int) -> tuple[int, ...]:
        return tuple(g for g in truth if beliefs[by][g] == truth[g] and truth[g][0] == host)

    expected = {(true_of(by, by), true_of(by, about)) for by, about in silences}
    assert standing(log) == {pair for pair in expected if all(pair)}
