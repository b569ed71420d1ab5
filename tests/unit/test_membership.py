"""From reports to the next view: the groups that go on, the step, the final buckets, and the state transfers."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.core.protocol.membership import admissible, first_view, next_view
from megatron_ft.core.protocol.messages import JoinRequested
from megatron_ft.types import PlanOrigin, Report, View

VIEW = View(epoch=3, live=(0, 1, 2, 3), reason="before")
ASKED = JoinRequested(4, 1, donors=((0, 0), (1, 0)), after=4)


def decide(*reports: Report, dead=None, silent=None, asked=()) -> View | None:
    asking = {each.group: each for each in asked}
    return next_view(VIEW, {r.group: r for r in reports}, dead or {}, silent or {}, "why", asking)


def test_a_missing_report_is_awaited():
    assert decide(Report(3, 0, 5), Report(3, 1, 5), dead={3: "killed"}) is None


def test_a_silent_group_is_left_out_with_the_reason():
    view = decide(Report(3, 0, 5), Report(3, 1, 5), Report(3, 2, 5), silent={3: "no report"})
    assert view.live == (0, 1, 2)
    assert view.lost == {3: "no report"}
    assert view.epoch == 4


def test_the_reason_is_what_is_known_against_the_lost_groups():
    """A survivor that lost its connection to a dead group has noticed the death; it has not caused it."""
    told = [Report(3, group, 5) for group in (0, 1)]
    reset = "group 1 reports: a connection broke"
    view = next_view(VIEW, {r.group: r for r in told}, {2: "killed", 3: "killed"}, {}, reset, noticed=reset)
    assert (view.reason, view.noticed) == ("killed", reset)
    view = next_view(VIEW, {r.group: r for r in told}, {2: "killed"}, {3: "no report"}, "killed")
    assert (view.reason, view.noticed) == ("killed; no report", "")


def test_the_reason_of_many_losses_is_short():
    view = decide(Report(3, 0, 5), dead={group: f"rank 0 of group {group} died" for group in (1, 2, 3)})
    assert view.reason.count("died") == 3
    many = replace(VIEW, live=tuple(range(9)))
    view = next_view(many, {0: Report(3, 0, 5)}, {group: f"death {group}" for group in range(1, 9)}, {}, "why")
    assert view.reason == "death 1; death 2; death 3; and 5 more" and len(view.lost) == 8


def test_without_a_loss_the_reason_is_what_ended_the_epoch():
    reset = "group 1 reports: a connection broke"
    view = next_view(VIEW, {g: Report(3, g, 5) for g in VIEW.live}, {}, {}, reset, noticed=reset)
    assert (view.reason, view.noticed) == (reset, "")


def test_a_bucket_finished_anywhere_is_final_and_handed_over():
    """Hard case 3: A saw bucket 1 finish, B and C did not."""
    view = decide(Report(3, 0, 5, (0, 1)), Report(3, 1, 5, (0,)), Report(3, 2, 5, (0,)), dead={3: "killed"})
    assert view.final == {0: 0, 1: 0}
    assert view.missing == {1: (1, 2)}
    assert view.source is None


def test_a_group_that_has_passed_its_gate_decides_the_step():
    """Hard case 6: B is in step 6, the others catch up by one step instead of reducing step 5 again."""
    view = decide(Report(3, 0, 5, (0, 1)), Report(3, 1, 6), Report(3, 2, 5), dead={3: "killed"})
    assert (view.step, view.source, view.behind) == (6, 1, (0, 2))
    assert view.final == {} and view.missing == {}


def test_only_the_attempt_of_the_step_that_goes_on_counts():
    """Group 0 holds all sums of a later attempt of step 5, which it commits by itself; the others have committed it."""
    view = decide(Report(3, 0, 5, (0, 1), complete=True, attempt=1), *(Report(3, group, 6) for group in (1, 2, 3)))
    assert (view.step, view.attempt, view.source, view.behind) == (6, 0, None, ())
    behind = decide(Report(3, 0, 5, (0,)), *(Report(3, group, 5, attempt=1) for group in (1, 2, 3)))
    assert (behind.step, behind.attempt, behind.source, behind.behind) == (5, 1, 1, (0,))


def test_a_view_knows_at_which_step_each_group_has_entered():
    """One that could not finish that step takes the state again, so it enters in the step after it."""
    assert decide(*(Report(3, group, 5) for group in range(4)), asked=[ASKED]).entered == {4: 5}
    before = replace(VIEW, incarnations={3: 1, 2: 1}, entered={2: 1, 3: 5})
    reports = {group: Report(3, group, 6) for group in (0, 1, 2)}
    assert next_view(before, {**reports, 3: Report(3, 3, 6)}, {}, {}, "why").entered == {2: 1, 3: 5}
    again = next_view(before, {**reports, 3: Report(3, 3, 5, (0,))}, {}, {}, "why")
    assert again.behind == (3,) and again.entered == {2: 1, 3: 6}
    assert next_view(before, reports, {3: "killed"}, {}, "why").entered == {2: 1, 3: 5}


def test_without_a_synced_group_the_lowest_group_is_the_source():
    view = decide(*(Report(3, group, 0, synced=False) for group in (1, 2, 3)), dead={0: "killed"})
    assert (view.source, view.behind) == (1, (2, 3))


def test_an_unsynced_group_never_hands_over_its_state():
    view = decide(Report(3, 0, 0, synced=False), Report(3, 1, 0), Report(3, 2, 0), Report(3, 3, 0, synced=False))
    assert (view.source, view.behind) == (1, (0, 3))


def test_a_group_that_follows_enters_and_nothing_is_handed_to_it():
    view = decide(*(Report(3, group, 5) for group in range(4)), asked=[ASKED])
    assert (view.live, view.joined, view.behind, view.source) == ((0, 1, 2, 3, 4), (4,), (), None)
    assert view.final == view.missing == {} and view.incarnations == {4: 1}


STAY_OUT = {
    "a bucket is final": [Report(3, 0, 5, (0,)), *(Report(3, group, 5) for group in (1, 2, 3))],
    "somebody is behind": [Report(3, 0, 6), *(Report(3, group, 5) for group in (1, 2, 3))],
    "somebody has yet to commit the step before": [
        *(Report(3, group, 6) for group in (0, 1, 2)),
        Report(3, 3, 5, (0, 1), complete=True),
    ],
    "the step is made in a later attempt": [Report(3, group, 5, attempt=1) for group in range(4)],
    "nobody has the first state yet": [Report(3, group, 0, synced=False) for group in range(4)],
}


@pytest.mark.parametrize("reports", STAY_OUT.values(), ids=STAY_OUT)
def test_no_group_enters_where_something_is_handed_over_or_to_be_committed(reports):
    """A group that enters has no bucket, and gets none; and the step must never go back behind the one it enters
    with."""
    view = decide(*reports, asked=[ASKED])
    assert view.joined == () and view.live == (0, 1, 2, 3) and view.incarnations == {}


@pytest.mark.parametrize(
    ("donors", "enters"),
    [
        (((0, 0),), True),
        (((0, 0), (2, 5)), True),
        (((2, 0),), False),  # an earlier start of a member
        (((2, 6),), False),  # a later one, which has no seat yet
        (((0, 0), (3, 0)), False),  # one of them is lost
        (((7, 0),), False),  # was never here
        ((), False),
    ],
)
def test_a_group_that_enters_follows_members_only(donors, enters):
    """A donor that is left out may have committed a version of a step that the others make again."""
    view = View(3, (0, 1, 2, 3), "before", incarnations={2: 5})
    reports = {group: Report(3, group, 5) for group in (0, 1, 2)}
    asked = JoinRequested(4, 1, donors, after=4)
    new = next_view(view, reports, {3: "killed"}, {}, "why", {4: asked})
    assert new.joined == ((4,) if enters else ()) and new.live == (0, 1, 2, *new.joined)
    assert admissible(View(4, (0, 1, 2), "after", incarnations={2: 5}), asked) == enters


def test_a_group_enters_again_in_the_view_that_leaves_its_dead_self_out():
    again = JoinRequested(3, 1, ((0, 0),), after=4)
    reports = {group: Report(3, group, 5) for group in (0, 1, 2)}
    view = next_view(VIEW, reports, {3: "killed"}, {}, "why", {3: again})
    assert view.live == (0, 1, 2, 3) and view.lost == {3: "killed"} and view.joined == (3,)


def test_a_member_that_lives_does_not_enter_a_second_time():
    view = decide(*(Report(3, group, 5) for group in range(4)), asked=[JoinRequested(3, 1, ((0, 0),), after=4)])
    assert view.joined == () and view.incarnations == {}


@pytest.mark.parametrize("step", [0, 5])
def test_when_only_joiners_are_left_it_is_a_wipe_out(step):
    """Also in the first step: a lost group may have committed it, from another initial model."""
    view = next_view(
        View(epoch=3, live=(0, 4), reason="before", step=step, incarnations={4: 1}),
        {4: Report(3, 4, step, synced=False)},
        {0: "killed"},
        {},
        "why",
    )
    assert view.live == () and "wipe-out" in view.lost[4]


def test_a_group_that_follows_has_no_say_in_which_step_is_decided_and_is_never_behind():
    """The group has its seat, and not its state yet: it gets that by itself, whatever is handed to others."""
    view = View(3, (0, 1, 2, 3), "before", step=5, incarnations={2: 1})
    told = {0: Report(3, 0, 5), 1: Report(3, 1, 5), 2: Report(3, 2, 5, synced=False)}
    new = next_view(view, told, {3: "killed"}, {}, "why")
    assert (new.step, new.source, new.behind, new.live) == (5, None, (), (0, 1, 2))
    first = View(3, (0, 1, 2, 3), "before", incarnations={2: 1})
    told = {0: Report(3, 0, 0), 1: Report(3, 1, 0, synced=False), 2: Report(3, 2, 0, synced=False)}
    new = next_view(first, told, {3: "killed"}, {}, "why")
    assert (new.source, new.behind) == (0, (1,)), "who belongs to the first start takes it from another"


def test_when_every_group_is_taken_for_dead_it_is_a_wipe_out():
    """One of them still lives, or no group would decide; it must come to an end instead of waiting for the dead."""
    view = decide(Report(3, 2, 5), dead=dict.fromkeys(range(4), "killed"))
    assert view.live == () and "wipe-out" in view.reason


def test_a_view_holds_the_reports_of_its_decision():
    told = [Report(3, 0, 6), Report(3, 1, 5, (0,)), Report(3, 2, 5, (0,))]
    assert decide(*told, dead={3: "killed"}).reports == tuple(told)


def test_an_empty_loss_is_a_view_too():
    """A connection was reset without a death: all groups go on, in a new epoch."""
    view = decide(*(Report(3, group, 5) for group in range(4)))
    assert (view.live, view.lost) == (VIEW.live, {})


@given(st.data())
def test_the_wire_form_keeps_everything(data):
    groups = st.integers(0, 5)
    view = View(
        epoch=data.draw(st.integers(0, 99)),
        live=tuple(data.draw(st.lists(groups, unique=True))),
        reason=data.draw(st.text()),
        noticed=data.draw(st.text()),
        step=data.draw(st.integers(0, 99)),
        lost=data.draw(st.dictionaries(groups, st.text())),
        source=data.draw(st.none() | groups),
        behind=tuple(data.draw(st.lists(groups))),
        final=data.draw(st.dictionaries(groups, groups)),
        missing=data.draw(st.dictionaries(groups, st.lists(groups).map(tuple))),
        plan_origin=PlanOrigin((1, 2)).after(data.draw(st.sets(groups)), data.draw(st.sets(groups))),
        incarnations=data.draw(st.dictionaries(groups, groups)),
        reports=tuple(Report(0, group, group // 2, (group % 3,)) for group in sorted(data.draw(st.sets(groups)))),
    )
    view = replace(view, reports=tuple(replace(report, epoch=view.epoch - 1) for report in view.reports))
    assert View.from_json(view.to_json()) == view


def test_the_first_view_makes_group_0_the_source():
    assert first_view(3).behind == (1, 2) and first_view(3).source == 0
    assert first_view(1).behind == ()


def test_a_group_that_holds_every_bucket_commits_by_itself():
    """A has committed step 5; B holds all its buckets and needs nothing, C lacks one and takes A's state."""
    b = Report(3, 1, 5, (0, 1), complete=True)
    view = decide(Report(3, 0, 6), b, Report(3, 2, 5, (0,)), dead={3: "killed"})
    assert (view.step, view.source, view.behind) == (6, 0, (2,))


def test_the_attempt_is_that_of_the_newest_step():
    """Group 0 can commit the second attempt of step 5 alone; its state of step 5 is not what group 1 in step 6 lacks."""
    ahead = (Report(3, 0, 5, (0, 1), complete=True, attempt=1), Report(3, 1, 6))
    view = decide(*ahead, dead={2: "killed", 3: "killed"})
    assert (view.step, view.attempt, view.source, view.behind) == (6, 0, None, ())


def test_no_group_enters_in_a_later_attempt_of_a_step():
    """What the attempt was discarded for is part of its state, and the group that enters has the step's first one."""
    for attempt in (0, 1):
        view = decide(*(Report(3, group, 5, attempt=attempt) for group in range(4)), asked=[ASKED])
        assert view.attempt == attempt and view.joined == (() if attempt else (4,))
