"""From reports to the next view: who goes on, with which step, which buckets are final, who takes what from whom."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.core.membership import first_view, next_view
from megatron_ft.types import Begun, Report, View

VIEW = View(epoch=3, live=(0, 1, 2, 3), reason="before")


def decide(*reports: Report, dead=None, silent=None) -> View | None:
    return next_view(VIEW, {r.group: r for r in reports}, dead or {}, silent or {}, "why")


def test_a_missing_report_is_awaited():
    assert decide(Report(3, 0, 5), Report(3, 1, 5), dead={3: "killed"}) is None


def test_a_silent_group_is_left_out_with_the_reason():
    view = decide(Report(3, 0, 5), Report(3, 1, 5), Report(3, 2, 5), silent={3: "no report"})
    assert view.live == (0, 1, 2)
    assert view.lost == {3: "no report"}
    assert view.epoch == 4


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


def test_nobody_synced_yet_means_the_lowest_group_is_the_source():
    view = decide(*(Report(3, group, 0, synced=False) for group in (1, 2, 3)), dead={0: "killed"})
    assert (view.source, view.behind) == (1, (2, 3))


def test_an_unsynced_group_never_hands_over_its_state():
    view = decide(
        Report(3, 0, 0, synced=False), Report(3, 1, 0), Report(3, 2, 0), Report(3, 3, 0, synced=False)
    )
    assert (view.source, view.behind) == (1, (0, 3))


def test_a_joiner_takes_the_state_and_every_final_bucket():
    reports = {group: Report(3, group, 5, (0,)) for group in range(4)}
    view = next_view(VIEW, reports, {}, {}, "why", {4: 1})
    assert (view.live, view.joined, view.behind, view.source) == ((0, 1, 2, 3, 4), (4,), (4,), 0)
    assert view.final == {0: 0} and view.missing == {0: (4,)}
    assert view.incarnations == {4: 1}


def test_a_group_enters_again_in_the_view_that_leaves_its_dead_self_out():
    reports = {group: Report(3, group, 5) for group in (0, 1, 2)}
    view = next_view(VIEW, reports, {3: "killed"}, {}, "why", {3: 1})
    assert view.live == (0, 1, 2, 3) and view.lost == {3: "killed"} and view.joined == (3,)


@pytest.mark.parametrize("step", [0, 5])
def test_when_only_joiners_are_left_it_is_a_wipe_out(step):
    """Also in the first step: a group that is gone may have committed it, from another initial model."""
    view = next_view(
        View(epoch=3, live=(0, 4), reason="before", step=step, incarnations={4: 1}),
        {4: Report(3, 4, step, synced=False)},
        {0: "killed"},
        {},
        "why",
    )
    assert view.live == () and "wipe-out" in view.lost[4]


def test_a_joiner_has_no_say_in_which_step_is_decided():
    """It was let in for step 6; its source died before the handover, and the others are still in step 5."""
    view = decide(Report(3, 0, 5, (0,)), Report(3, 1, 5), Report(3, 2, 6, synced=False), dead={3: "killed"})
    assert (view.step, view.source, view.behind) == (5, 0, (2,))
    assert view.missing == {0: (1, 2)}


def test_when_every_group_is_taken_for_dead_it_is_a_wipe_out():
    """One of them still lives, or nobody would decide; it must come to an end instead of waiting for the dead."""
    view = decide(Report(3, 2, 5), dead=dict.fromkeys(range(4), "killed"))
    assert view.live == () and "wipe-out" in view.reason


def test_a_view_holds_the_reports_it_was_decided_from():
    told = [Report(3, 0, 6), Report(3, 1, 5, (0,)), Report(3, 2, 5, (0,))]
    assert decide(*told, dead={3: "killed"}).reports == tuple(told)


def test_an_empty_loss_is_a_view_too():
    """A connection reset without a death: everybody goes on, in a new epoch."""
    view = decide(*(Report(3, group, 5) for group in range(4)))
    assert (view.live, view.lost) == (VIEW.live, {})


@given(st.data())
def test_the_wire_form_keeps_everything(data):
    groups = st.integers(0, 5)
    view = View(
        epoch=data.draw(st.integers(0, 99)),
        live=tuple(data.draw(st.lists(groups, unique=True))),
        reason=data.draw(st.text()),
        step=data.draw(st.integers(0, 99)),
        lost=data.draw(st.dictionaries(groups, st.text())),
        source=data.draw(st.none() | groups),
        behind=tuple(data.draw(st.lists(groups))),
        final=data.draw(st.dictionaries(groups, groups)),
        missing=data.draw(st.dictionaries(groups, st.lists(groups).map(tuple))),
        begun=Begun((1, 2)).after(data.draw(st.sets(groups)), data.draw(st.sets(groups))),
        incarnations=data.draw(st.dictionaries(groups, groups)),
        reports=tuple(Report(0, group, group // 2, (group % 3,)) for group in sorted(data.draw(st.sets(groups)))),
    )
    view = replace(view, reports=tuple(replace(report, epoch=view.epoch - 1) for report in view.reports))
    assert View.from_json(view.to_json()) == view
    flags = data.draw(st.booleans()), data.draw(st.booleans())
    report = Report(1, 2, 3, tuple(data.draw(st.lists(groups))), *flags)
    assert Report.from_json(report.to_json()) == report


def test_the_first_view_makes_group_0_the_source():
    assert first_view(3).behind == (1, 2) and first_view(3).source == 0
    assert first_view(1).behind == ()


def test_who_holds_every_bucket_commits_by_itself():
    """A has committed step 5; B holds all its buckets and needs nothing, C lacks one and takes A's state."""
    b = Report(3, 1, 5, (0, 1), complete=True)
    view = decide(Report(3, 0, 6), b, Report(3, 2, 5, (0,)), dead={3: "killed"})
    assert (view.step, view.source, view.behind) == (6, 0, (2,))
