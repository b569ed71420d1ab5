"""The leader's loop in cases that no whole run reaches reliably: views that come faster than they can be entered, and the
order of its actions when an epoch or the run ends."""

from __future__ import annotations

from unittest.mock import AsyncMock, MagicMock

import pytest

from megatron_ft.config.schema import RunConfig
from megatron_ft.core.lifecycle.store_failover import Claim
from megatron_ft.core.protocol import machine, signals
from megatron_ft.core.protocol.shell import carry_out
from megatron_ft.record import history
from megatron_ft.record.history import History
from megatron_ft.run.collectives.base import Broken
from megatron_ft.run.engines.port import StepResult
from megatron_ft.run.group_leader import GroupLeader
from megatron_ft.types import PlanOrigin, View

GROUPS = 3


class Store:
    """The agreement of a group that proposes later than others."""

    def __init__(self, *standing: View, claims: tuple[Claim, ...] = ()) -> None:
        self._views = {view.epoch: view for view in standing}
        self.claims, self.fenced, self.memory = claims, [], None

    def fence(self, seats, reason: str) -> tuple[Claim, ...]:
        new, self.claims = self.claims, ()
        if not new:
            self.fenced += seats
        return new

    def check(self) -> None: ...

    def propose(self, view: View, memory: None) -> tuple[View, bool]:
        return self._views.setdefault(view.epoch, view), True

    def adopted(self, view: View) -> None: ...

    def publish(self, report) -> None: ...

    def announce(self, signal) -> None: ...

    def get(self, key: str) -> None: ...

    def view(self, epoch: int) -> None: ...

    def reports(self, epoch: int, groups) -> tuple:
        return ()


def view_of_the_others(leader: GroupLeader) -> View:
    """Return the view that group 0 makes of the reports of all three: an epoch was broken, and no group is known to be
    gone."""
    state = machine.start(0, leader._shell.state.job, leader._first_view)
    state, (_, publish, *_) = machine.step(state, machine.EpochAborted(0, "a collective failed"), 0.0)
    proposed = []
    for group in range(1, GROUPS):
        report = machine.step(machine.start(group, state.job, state.view), machine.EpochAborted(0, "..."), 0.0)[1][
            1
        ].report
        state, actions = machine.step(state, machine.ReportsSeen((report,)), 0.0)
        proposed += [action.view for action in actions if isinstance(action, machine.Propose)]
    return proposed[0]


def leader_of_group_1(tmp_path) -> GroupLeader:
    config = RunConfig(groups=GROUPS, microbatches_per_group=2)
    rank = MagicMock(group=1, size=1, inner=None, lost_because="", history=History(tmp_path))
    rank.env.config = config
    local = MagicMock(rank=rank)
    local.reducing.gradients.num_buckets, local.guard.nonfinite.stopped.return_value = 2, None
    first = View(
        epoch=0,
        live=tuple(range(GROUPS)),
        reason="the run starts",
        step=0,
        plan_origin=PlanOrigin(tuple(range(GROUPS))),
    )
    leader = GroupLeader(local, first)
    leader.enter(total=5, comes_back=False)
    return leader


def use(leader: GroupLeader, store: Store) -> Store:
    leader._store._agreement = leader._ranks._agreement = store
    leader._store._memory = None
    return store


def feed(leader: GroupLeader, event: machine.Event) -> None:
    carry_out(leader._shell.feed(event))


def test_a_view_that_leaves_a_group_out_is_decided_anew_when_the_log_holds_a_new_claim(tmp_path):
    """Group 0 may live; meanwhile a claim has fenced group 2, which the first decision had in the view."""
    leader = leader_of_group_1(tmp_path)
    claims = (Claim(1, "run", 0, "a:1"), Claim(2, "run", 0, "a:1", frozenset({(2, 0)}), 0, "it is silent"))
    agreement = use(leader, Store(claims=claims))
    feed(leader, machine.EpochAborted(0, "a collective failed"))
    report = machine.step(
        machine.start(2, leader._shell.state.job, leader._first_view), machine.EpochAborted(0, "..."), 0.0
    )[1][1].report  # fmt: skip
    feed(leader, machine.ReportsSeen((report,)))
    feed(leader, machine.GroupFailed(0, "host 0 is silent"))
    assert not agreement.claims and leader._shell.state.view.live == (1,)
    assert agreement._views[1].lost.keys() == {0, 2} and sorted(agreement.fenced) == [(0, 0), (2, 0)]


def test_while_the_claim_log_does_not_answer_no_group_is_given_up_for_its_silence(tmp_path):
    """The group may not have read yet where it is to report."""
    leader = leader_of_group_1(tmp_path)
    agreement = use(leader, Store())
    feed(leader, machine.EpochAborted(0, "a collective failed"))
    for answers in (False, True):
        agreement.log_answers = lambda answers=answers: answers
        leader._store._looked = 0.0
        assert not carry_out(leader._shell.look())
        assert (leader._shell.state.looked is not None) == answers


def test_a_view_that_is_outdated_when_it_is_adopted_takes_nothing_from_the_next(tmp_path):
    """Groups 0 and 2 are dead by then: group 1 adopts view 1 and, while it does so, view 2, and has to write the
    record."""
    leader = leader_of_group_1(tmp_path)
    use(leader, Store(view_of_the_others(leader)))
    feed(leader, machine.EpochAborted(0, "a collective failed"))
    for group in (0, 2):
        feed(leader, machine.GroupFailed(group, f"group {group} died"))
    leader._ranks._recovery_metrics.resumed(leader._shell.state)

    lines = [line for line in history.read(tmp_path) if line["event"] in ("view", "recovery")]
    assert [(line["event"], line["epoch"]) for line in lines] == [
        ("view", 0),
        ("view", 1),
        ("view", 2),
        ("recovery", 2),
    ]
    assert [line["live"] for line in lines[:3]] == [[0, 1, 2], [0, 1, 2], [1]]


@pytest.mark.parametrize("in_order", [False, True])
def test_an_epoch_that_failed_is_closed_at_once_and_one_that_ends_in_order_with_the_next_view(tmp_path, in_order):
    """Data of the step before may still be on its way to a member of an epoch that ends in order."""
    leader = leader_of_group_1(tmp_path)
    use(leader, Store())
    closes = leader._local.close_epoch
    leader._shell.state = machine.changed(leader._shell.state, step=1)
    feed(leader, machine.EpochAborted(0, "it is over", after=0 if in_order else -1))
    assert leader._shell.state.reported and closes.call_count == (not in_order)
    for group in (0, 2):
        feed(leader, machine.GroupFailed(group, f"group {group} died"))
    assert leader._shell.state.view.epoch == 1 and closes.call_count == 1


@pytest.mark.parametrize(
    ("verdicts", "told"),
    [
        pytest.param([], [0], id="first to know"),
        pytest.param([machine.EpochAborted(0, "a connection failed")], [], id="known"),
        pytest.param([machine.GroupFailed(0, "it died"), machine.GroupFailed(2, "it died")], [], id="next view"),
    ],
)
def test_an_operation_that_broke_ends_the_epoch_in_which_it_began_and_no_later_one(tmp_path, verdicts, told):
    leader = leader_of_group_1(tmp_path)
    use(leader, Store())
    tell = leader._rank.link.tell_broken

    async def operation() -> None:
        for verdict in verdicts:
            leader.on_signal(verdict)
        raise Broken("a connection broke")

    carry_out(leader._shell._attempt(operation()))
    state = leader._shell.state
    assert [call.args[0] for call in tell.call_args_list] == told
    assert state.view.epoch == (len(verdicts) == 2) and state.reported == (len(verdicts) < 2)


def test_the_end_of_the_run_is_announced_when_it_can_be_read(tmp_path):
    """An agent or another group that hears of it may read it at once."""
    leader, written, read = leader_of_group_1(tmp_path), {}, []
    leader._local.state.result = StepResult(step=4, loss=1.0, microbatches=6, gradient_norm=1.0)
    agreement = use(leader, MagicMock(put=written.__setitem__))
    agreement.all_done.return_value = {
        group: {"state": "a", "params_sha256": "b", "params_norm": 1.0} for group in range(GROUPS)
    }
    agreement.announce.side_effect = lambda signal: read.append((signal, dict(written)))
    assert leader._ranks._write_end()
    assert read == [(signals.RunFinished(), {"ended": {"step": 4}})]


@pytest.mark.parametrize("decided", [False, True])
def test_an_interruption_ends_with_the_update_unless_others_have_decided_it(tmp_path, decided):
    """In the other case it is the step after it that was interrupted, and that does not go on yet."""
    leader = leader_of_group_1(tmp_path)
    ranks, shell = leader._ranks, leader._shell
    ranks._recovery_metrics, ranks.update = MagicMock(), AsyncMock(return_value=None)
    if decided:
        shell.state = machine.changed(shell.state, next_plan_origin=PlanOrigin((0, 2)))
    carry_out(shell._perform(machine.Update(0)))
    assert ranks.update.called and ranks._recovery_metrics.resumed.called != decided
