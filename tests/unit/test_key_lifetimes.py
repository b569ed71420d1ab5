"""Removals from the control store never change a decision: readers of what is left know what all others know."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.core.lifecycle.checkpoint_protocol import Saves, Stops
from megatron_ft.core.protocol import group_locations, key_lifetimes
from megatron_ft.core.protocol import signals as detector
from megatron_ft.core.protocol.key_lifetimes import Floor, Present, expired, floor_of, graves, kept
from megatron_ft.core.protocol.membership import first_view
from megatron_ft.core.protocol.messages import EpochAborted, GroupFailed, HostSilent, JoinRequested, LeaveAnnounced
from megatron_ft.types import Exit, View

GROUPS, EPOCHS, STEPS = range(4), 6, 8
group, number, epoch = st.sampled_from(GROUPS), st.integers(0, 3), st.integers(0, EPOCHS)
microbatch = st.none() | st.builds("{}/{}.0".format, st.integers(0, STEPS), group)
signal = st.none() | st.just("SIGKILL")
exits = st.builds(Exit, group, st.just(0), st.just(1), st.just("h"), signal, st.just(1), st.just(""), microbatch)
units = st.sampled_from([(0,), (1,), (2, 3), (1, 2)])
signals = st.one_of(
    st.builds(detector.RankExited, exits, number),
    st.builds(detector.RankUnresponsive, group, st.just(0), st.just(1), st.just("h"), st.just("stopped"), number),
    st.builds(detector.EpochAborted, epoch, group, st.just("reset"), st.integers(-1, 2)),
    st.builds(
        detector.HostSilent, st.sampled_from("ab"), st.sampled_from("cd"), units, units, st.just(1.0), st.booleans(), number
    ),
    st.builds(detector.LeaveAnnounced, group, st.integers(0, STEPS), st.just("told"), number),
    st.builds(detector.JoinRequested, group, number, st.just(((0, 0),)), st.integers(0, STEPS)),
    st.builds(detector.LeaveRequested, group, st.just("told")),
    st.builds(
        detector.HostAssigned, st.integers(2, 4), st.just("n"), st.just("a"), st.integers(1, 3), st.just(0),
        st.lists(st.tuples(group, st.integers(0, 1)), unique=True, max_size=2).map(tuple), number,
    ),
    st.builds(detector.RestartRefused, st.integers(0, 2), group, number),
    st.builds(Saves, st.integers(0, STEPS), epoch, st.sampled_from("xyz"), st.just((0,)), st.just(0)),
    st.builds(Stops, st.sampled_from([(0,), (1,), (0, 1)]), st.just("told")),
    st.builds(detector.ViewAgreed, epoch),
    st.just(detector.RunFinished()),
)  # fmt: skip
views = st.builds(
    View,
    epoch,
    st.sets(group, min_size=1).map(sorted).map(tuple),
    st.just(""),
    st.integers(0, STEPS),
    incarnations=st.dictionaries(group, number),
)


def known(notices, view: View) -> dict[str, object]:
    """Return all that a process goes by which hears these from the beginning, with ``view`` standing."""
    place = group_locations.GroupLocations()
    dead, asking, leaving, gone, missed = {}, {}, {}, {}, {}
    broken, deadly, host_records, ranks, refused, stops = {}, {}, {}, {}, set(), set()
    saves, over, dismissed = (-1, -1), False, set()
    for signal in notices:
        place, verdicts = group_locations.apply(place, signal)
        for verdict in verdicts:
            match verdict:
                case GroupFailed(group=g, incarnation=n):
                    dead[g] = max(n, dead.get(g, 0))
                    if verdict.microbatch is not None and verdict.microbatch.step >= view.step:
                        deadly.setdefault(verdict.microbatch, set()).add(g)
                    asking = {a: s for a, s in asking.items() if a != g or s.incarnation > n}
                    gone[g] = max(n, gone.get(g, 0))
                case JoinRequested(group=g, incarnation=n):
                    if n > dead.get(g, -1) and n >= asking.get(g, verdict).incarnation:
                        asking[g] = verdict
                        gone.pop(g, None)
                case LeaveAnnounced(group=g, incarnation=n, after=after):
                    if g not in leaving or (leaving[g][0], -leaving[g][1]) < (n, -after):
                        leaving[g] = (n, after)
                case EpochAborted(epoch=e, after=after) if e >= view.epoch:
                    broken[e] = min(after, broken.get(e, after))
                case HostSilent(heard=heard):
                    missed[verdict.units] = not heard
                case detector.LeaveRequested(group=g):
                    dismissed.add(g)
                case detector.HostAssigned(host=host, port=port, ranks=own, incarnation=n):
                    host_records[host] = port
                    for rank in own:
                        if n > ranks.get(rank, (-1,))[0]:
                            ranks[rank] = (n, host)
                case detector.RestartRefused(host=host, group=g):
                    refused.add((host, g))
                case Saves(epoch=e, at=at):
                    saves = max(saves, (e, at))
                case Stops(groups=told):
                    stops |= set(told)
                case detector.RunFinished():
                    over = True
    return {
        "dead": dead, "asking": asking, "leaving": leaving, "deadly": deadly, "broken": broken, "host_records": host_records,
        "missed": {pair for pair, yes in missed.items() if yes}, "moved": place.moved, "dismissed": dismissed,
        "ranks": {rank: n for rank, (n, _) in ranks.items()}, "refused": refused, "saves": saves, "stops": stops,
        "over": over,
    }  # fmt: skip


@given(notices=st.lists(signals, max_size=25), view=views)
@settings(max_examples=100)
def test_a_reader_of_only_what_was_kept_knows_the_same(notices, view):
    assert known(kept(notices, view), view) == known(notices, view)


@given(notices=st.lists(signals, max_size=25), more=st.lists(signals, max_size=5), view=views)
@settings(max_examples=100)
def test_a_reader_of_a_part_learns_the_rest_from_what_was_kept(notices, more, view):
    """A late reader takes in what was kept after the entries that it had read before."""
    for read in range(0, len(notices), 5):
        late = [*notices[:read], *kept(notices, view), *more]
        assert known(late, view) == known([*notices, *more], view)


@given(notices=st.lists(signals, max_size=25), view=views, cut=st.integers(0, 25))
def test_kept_notices_may_be_kept_again(notices, view, cut):
    twice = kept([*kept(notices[:cut], view), *notices[cut:]], view)
    assert known(twice, view) == known(notices, view)


def test_the_number_of_kept_notices_does_not_grow_with_the_losses():
    """Two groups of 4 are lost and come back in turn, 1,000 times; what is kept after 1,000 is as much as after 10."""

    def after(losses: int) -> int:
        said: tuple = ()
        for loss in range(losses):
            lost, start = 2 + loss % 2, loss // 2
            view = View(2 * loss + 2, (0, 1, 2, 3), "", incarnations={lost: start + 1})
            new = (
                detector.RankExited(Exit(lost, 0, 1, "h", "SIGKILL", None), start),
                detector.EpochAborted(2 * loss, "reset", by=0),
                detector.ViewAgreed(2 * loss + 1),
                detector.JoinRequested(lost, start + 1, ((0, 0),), loss),
                detector.ViewAgreed(2 * loss + 2),
            )
            said = kept((*said, *new), view)
        return len(said)

    assert after(1000) == after(10) <= 6


@given(view=views, index=st.integers(0, 50), later=st.integers(0, 3))
def test_nothing_of_the_newest_two_epochs_or_starts_is_removed(view, index, later):
    floor = floor_of(view, index)
    present = Present(view, floor, {0: 5})
    for epoch in range(max(0, view.epoch - 1), view.epoch + later + 1):
        for key in ("view/{}", "report/{}", "ready/{}/1.0", "outer/{}/0/rank_0", "stands/r.e{}.0.1"):
            assert not expired(key.format(epoch), present), (key, epoch)
    for number in (4, 5):
        assert not expired(f"inner/0.{number}/1/0", present)
    assert not expired(f"notice/{index}", present) and not expired(f"kept/{index}", present)


def test_each_kind_of_key_has_its_lifetime():
    view = View(7, (0, 1), "", step=20, incarnations={1: 3})
    present = Present(view, floor_of(view, 30), {0: 2})
    old = [
        "view/5", "report/5", "report/5/0", "ready/5/1.0", "outer/5/0/x/y", "stands/run.e5.0.1", "inner/1.1/0/1",
        "inner/1/0", "restart/1.1", "start/1/0", "nonfinite/19", "divergence/19/0/1", "notice/29", "kept/29",
    ]  # fmt: skip
    new = [
        "view/0", "view/6", "report/6", "ready/7/1.0", "inner/1.2/0", "start/1.1/0", "restart/0.1",
        "nonfinite/20", "divergence/20/0/1",
        "nonfinite/stop", "notice/30", "kept/30", "donor/1/0", "host/0", "late/2", "ended", "done",
        "done/1.3", "resume", "saved/0/0", "floor", "left/0",
    ]  # fmt: skip
    assert [key for key in (*old, *new) if expired(key, present)] == old


def test_a_death_of_each_kind_fills_its_grave():
    silent = detector.HostSilent("a", "b", (1,), (1,), 2.0, incarnation=4)
    ended = detector.RankExited(Exit(2, 0, 1, "h", None, 1), 1)
    assert graves([silent, ended, detector.RunFinished()]) == {1: 4, 2: 1} and Floor() == key_lifetimes.Floor(0, 0)


@pytest.mark.parametrize("kind", ["view", "report", "outer", "notice", "inner", "start", "nonfinite"])
@pytest.mark.parametrize("rest", ["²", "٣x", "9" * 5000, "", "-1", "1.²", "²/0", "\udcff"])
def test_keys_that_a_stranger_has_written_are_no_error(kind, rest):
    present = key_lifetimes.Present(first_view(2), key_lifetimes.Floor(9, 9))
    assert key_lifetimes.expired(f"{kind}/{rest}", present) in (True, False)


def test_every_kind_of_notice_has_a_lifetime():
    said = (
        detector.ForgedNotice(),
        detector.RunHalted(3, "x"),
        GroupFailed(1, "x", 2),
        GroupFailed(1, "y", 1),
    )
    assert key_lifetimes.kept((detector.ChecksumsRequested(3, (0, 1)), *said), first_view(2)) == said[1:3]
