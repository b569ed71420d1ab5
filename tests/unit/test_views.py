"""Invariants of every next view, for any reports, any deaths, any joiners. The single cases are in
test_membership.py."""

from __future__ import annotations

import json
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.core.protocol.membership import first_view, follows, next_view
from megatron_ft.core.protocol.messages import JoinRequested
from megatron_ft.types import PlanOrigin, Report, View

BUCKETS = 3


class Case(NamedTuple):
    view: View
    reports: dict[int, Report]
    dead: dict[int, str]
    silent: dict[int, str]
    asking: dict[int, JoinRequested]

    def next(self) -> View | None:
        return next_view(self.view, self.reports, self.dead, self.silent, "why", self.asking)

    def follows(self, group: int) -> bool:
        return follows(self.view, self.reports[group])


@st.composite
def cases(draw) -> Case:
    """A strategy for all that the protocol can meet: live groups at most one step apart, and no bucket of the later
    step reduced then; where a group follows, all others stand at its step with no bucket, because it has not taken
    part in any."""
    live = tuple(sorted(draw(st.sets(st.integers(0, 6), min_size=1))))
    low = draw(st.integers(0, 3))
    steps = {group: low + draw(st.integers(0, 1)) for group in live}
    high = max(steps.values())
    together = min(steps.values()) == high
    reports = {}
    starts = {group: draw(st.integers(1, 3)) for group in draw(st.sets(st.sampled_from(live), max_size=2))}
    unsynced = {group for group in live if draw(st.booleans())}
    following = unsynced & starts.keys()
    for group, step in steps.items():
        synced = group not in unsynced
        step = high if following else step
        can_have = synced and not following and (together or step < high)
        have = tuple(sorted(draw(st.sets(st.integers(0, BUCKETS - 1))))) if can_have else ()
        reports[group] = Report(4, group, step, have, synced, complete=len(have) == BUCKETS)
    groups = st.sampled_from(live)
    dead = dict.fromkeys(draw(st.sets(groups | st.integers(0, 9), max_size=3)), "killed")
    silent = dict.fromkeys(draw(st.sets(groups, max_size=2)), "no report")
    told = {group: report for group, report in reports.items() if draw(st.integers(0, 9)) or group in live[:1]}
    seats = [(group, starts.get(group, 0)) for group in live]
    donors = st.lists(st.sampled_from(seats) | st.tuples(st.integers(0, 9), st.integers(0, 3)), max_size=2).map(tuple)
    asking = {
        group: JoinRequested(group, draw(st.integers(4, 6)), draw(donors), high - 1)
        for group in draw(st.sets(st.integers(0, 9), max_size=2))
    }
    view = View(4, live, "before", step=high if following else low, incarnations=starts)
    return Case(view, told, dead, silent, asking)


@given(cases())
@settings(max_examples=100)
def test_a_view_waits_for_exactly_the_groups_that_are_neither_dead_nor_silent(case):
    awaited = [g for g in case.view.live if g not in case.reports and g not in case.dead and g not in case.silent]
    assert (case.next() is None) == bool(awaited)


@given(cases())
@settings(max_examples=100)
def test_the_right_groups_are_in_and_out(case):
    view = case.next()
    if view is None:
        return
    gone = {group for group in case.view.live if group in case.dead or group in case.silent}
    stay = set(case.view.live) - gone
    assert view.epoch == case.view.epoch + 1
    assert gone <= set(view.lost) <= set(case.view.live)
    assert all(view.lost[group] == case.dead.get(group, "no report") for group in gone)
    if not view.live:  # no group is left, or none that has the model
        assert not any(case.reports[group].synced for group in stay) and "wipe-out" in view.reason
        return
    assert view.live == tuple(sorted(stay | set(view.joined))) and set(view.lost) == gone
    assert view.incarnations == {**case.view.incarnations, **{g: case.asking[g].incarnation for g in view.joined}}
    seats = {(group, case.view.incarnations.get(group, 0)) for group in stay}
    admitted = {g for g, a in case.asking.items() if g not in stay and a.donors and set(a.donors) <= seats}
    together = all(case.reports[g].step == view.step for g in stay if case.reports[g].synced)
    assert set(view.joined) == (admitted if together and not view.behind and not view.final else set())


@given(cases())
@settings(max_examples=100)
def test_all_groups_end_up_with_the_state_and_every_final_bucket(case):
    """Architecture, step protocol 4: a bucket that any survivor finished is final, a passed gate decides the step."""
    view = case.next()
    if view is None or not view.live:
        return
    stay = {group: case.reports[group] for group in view.live if group not in view.joined}
    synced = {group: report for group, report in stay.items() if report.synced}
    if synced:
        assert view.step == max(report.step for report in synced.values()), "the step of who is furthest goes on"
        assert view.source is None or (synced[view.source].step == view.step)
    by_itself = {g for g, report in synced.items() if report.step == view.step or report.complete}
    by_itself |= {g for g in stay if case.follows(g)}
    if synced:
        assert set(view.behind) == stay.keys() - by_itself
    assert (view.source is None) == (not view.behind) and view.source not in view.behind
    holders = {g: set(report.reduced_buckets) for g, report in synced.items() if report.step == view.step}
    assert set(view.final) == {bucket for have in holders.values() for bucket in have}
    for bucket, owner in view.final.items():
        assert bucket in holders[owner]
        lacking = {g for g, have in holders.items() if bucket not in have} | set(view.behind)
        assert set(view.missing.get(bucket, ())) == lacking
    assert set(view.missing) <= set(view.final)


@given(cases(), st.randoms(use_true_random=False))
def test_the_order_of_the_notices_does_not_matter(case, shuffle):
    def shuffled(mapping):
        items = list(mapping.items())
        shuffle.shuffle(items)
        return dict(items)

    view = case.next()
    assert Case(case.view, *map(shuffled, case[1:])).next() == view
    if view is not None:
        for written in (view.to_json(), view.to_wire()):
            assert View.from_json(json.loads(json.dumps(written))) == view, "it is the same at who reads it"


@given(st.sets(st.integers(0, 60), min_size=1), st.sets(st.integers(0, 60)))
def test_a_view_of_many_groups_is_short_on_the_wire(live, behind):
    view = View(
        3, tuple(sorted(live)), "why", behind=tuple(sorted(behind)), plan_origin=PlanOrigin(tuple(sorted(live)))
    )
    assert View.from_json(json.loads(json.dumps(view.to_wire()))) == view
    assert len(json.dumps(first_view(100_000).to_wire())) < 500


@given(st.integers(1, 40))
def test_the_run_starts_from_one_model(groups):
    """All groups begin with the model of group 0, whatever their scripts initialised."""
    view = first_view(groups)
    assert view.live == tuple(range(groups)) and view.plan_origin == PlanOrigin(view.live)
    assert view.source == 0 and view.behind == tuple(range(1, groups)) and (view.epoch, view.step) == (0, 0)
