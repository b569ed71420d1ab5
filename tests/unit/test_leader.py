"""The leader's loop where no whole run gets reliably: views that come faster than they can be entered."""

from __future__ import annotations

from unittest.mock import MagicMock

from megatron_ft.config import RunConfig, placement_of
from megatron_ft.core import recovery
from megatron_ft.runtime import history
from megatron_ft.runtime.history import History
from megatron_ft.runtime.leader import Leader
from megatron_ft.types import Begun, View

GROUPS = 3


class Store:
    """The agreement of a group that proposes later than others."""

    def __init__(self, standing: View) -> None:
        self._views = {standing.epoch: standing}

    def propose(self, view: View) -> tuple[View, bool]:
        return self._views.setdefault(view.epoch, view), True

    def adopted(self, view: View) -> None: ...

    def publish(self, report) -> None: ...

    def announce(self, signal) -> None: ...


def view_of_the_others(leader: Leader) -> View:
    """What group 0 makes of the reports of all three: an epoch was broken, and nobody is known to be gone."""
    state = recovery.start(0, leader._state.job, leader._first_view)
    state, (_, publish, *_) = recovery.step(state, recovery.Broke(0, "a collective failed"), 0.0)
    proposed = []
    for group in range(1, GROUPS):
        report = recovery.step(recovery.start(group, state.job, state.view), recovery.Broke(0, "..."), 0.0)[1][1].report
        state, actions = recovery.step(state, recovery.ReportsSeen((report,)), 0.0)
        proposed += [action.view for action in actions if isinstance(action, recovery.Propose)]
    return proposed[0]


def test_a_view_that_is_outdated_when_it_is_adopted_takes_nothing_from_the_next(tmp_path):
    """Groups 0 and 2 are dead by then: group 1 adopts view 1 and, in there, view 2, and has to write the record."""
    rank = MagicMock(group=1, incarnation=0, size=1, inner=None, num_buckets=2, lost_because="")
    rank.nonfinite.stopped.return_value = None
    first = View(epoch=0, live=tuple(range(GROUPS)), reason="the run starts", step=0, begun=Begun(tuple(range(GROUPS))))
    config = RunConfig(groups=GROUPS, microbatches_per_group=2)
    leader = Leader(rank, config, MagicMock(), History(tmp_path), placement_of(config), first)
    leader.enter(total=5, comes_back=False)
    leader._agreement = Store(view_of_the_others(leader))
    leader._feed(recovery.Broke(0, "a collective failed"))
    for group in (0, 2):
        leader._feed(recovery.Died(group, f"group {group} died"))
    leader._interruptions.resumed(leader._state)

    lines = [line for line in history.read(tmp_path) if line["event"] in ("view", "recovery")]
    assert [(line["event"], line["epoch"]) for line in lines] == [("view", 0), ("view", 1), ("view", 2), ("recovery", 2)]
    assert [line["live"] for line in lines[:3]] == [[0, 1, 2], [0, 1, 2], [1]]
