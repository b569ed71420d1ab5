"""The in-step protocol of one group as a state machine: ``step(state, event, now) -> state, actions``.

Intuition. A group always has at most one thing to do in its training thread: compute a microbatch, reduce the buckets,
hand over state, update, or wait. What that is follows from the state alone (:func:`next_action`), so a fault can never
leave a queue of stale orders behind: the event changes the state, and the next action is asked for anew. Fault-free
steps contain no agreement; all of it lives in the epoch change:

    unblock   a suspicion closes the epoch here: abort the communicator, nothing of the epoch may finish any more
    report    publish step, finished buckets (once per epoch)
    agree     the first view written for epoch+1 is everybody's
    decide    lost microbatches are patched, final buckets fetched, a decided step caught up with
    continue  compute what is missing, reduce what is unfinished, update

Why every survivor's local gradient can be summed again: a group adds each microbatch it computes to *all* its local
buckets, also to those that are already final. So at any time the local gradients of the live groups hold disjoint sets
of microbatches whose union is the step, and any bucket can become unfinished again (its only owner died) at no cost.

Assumes: crash-stop groups, an unreliable network inside an epoch, a compare-and-set store that may be slow. ``now`` is
a local monotonic clock, used for durations only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from megatron_ft.core import membership, scheduler
from megatron_ft.types import Bucket, GroupId, Microbatch, Plan, Report, View


@dataclass(frozen=True)
class Job:
    """What is fixed for the whole run. ``shards`` is N, ``per_shard`` is G, ``buckets`` how many gradient buckets."""

    shards: int
    per_shard: int
    buckets: int
    steps: int
    min_groups: int = 1
    report_timeout_s: float = 60.0

    @property
    def microbatches(self) -> int:
        """N*G, what every step sums over, always."""
        return self.shards * self.per_shard


@dataclass(frozen=True)
class GroupState:
    """Everything one group knows of the protocol.

    ``plan``, ``computed`` and ``have`` belong to ``step``. While the view says that ``step`` is decided elsewhere,
    ``ahead`` is the plan its holders already follow for the step after; ``plan`` is kept, because they may all die
    before they hand the state over (hard case 7).
    """

    me: GroupId
    job: Job
    view: View
    step: int
    plan: Plan
    ahead: Plan | None = None
    computed: frozenset[Microbatch] = frozenset()
    have: frozenset[Bucket] = frozenset()
    synced: bool = True
    connected: bool = False
    transferred: bool = False
    reported: bool = False
    closed_by: str = ""
    broken: Mapping[int, str] = field(default_factory=dict)
    dead: Mapping[GroupId, str] = field(default_factory=dict)
    reports: Mapping[GroupId, Report] = field(default_factory=dict)
    waiting_since: float | None = None
    stopped: str = ""

    @property
    def finished(self) -> bool:
        """All steps are committed here."""
        return self.step >= self.job.steps

    @property
    def final(self) -> frozenset[Bucket]:
        """Buckets of ``step`` that some survivor holds finished, or will hand over under this view."""
        return self.have | set(self.view.final if self.view.step == self.step else ())

    @property
    def unfinished(self) -> tuple[Bucket, ...]:
        """Buckets that must be reduced (again): held by no survivor the view knows of."""
        return tuple(bucket for bucket in range(self.job.buckets) if bucket not in self.final)

    @property
    def todo(self) -> tuple[Microbatch, ...]:
        """Microbatches this group still has to compute; none once all buckets are final (hard case 5)."""
        if not self.unfinished or self.finished:
            return ()
        return tuple(microbatch for microbatch in self.plan.of(self.me) if microbatch not in self.computed)


def start(me: GroupId, job: Job, view: View) -> GroupState:
    """The state of a group that enters with ``view``."""
    plan = _plan(job, view.step, view.live)
    return GroupState(me=me, job=job, view=view, step=view.step, plan=plan, synced=me not in view.behind)


# Events: what the shell saw. ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Computed:
    """The gradient of ``microbatch`` is in all local buckets."""

    microbatch: Microbatch


@dataclass(frozen=True)
class Connected:
    """The outer communicator of the view of ``epoch`` stands."""

    epoch: int


@dataclass(frozen=True)
class Transferred:
    """This group's part of the view's transfers is done: state handed over or received, final buckets too."""

    epoch: int


@dataclass(frozen=True)
class Reduced:
    """The host saw the reduction of ``bucket`` complete."""

    bucket: Bucket


@dataclass(frozen=True)
class Updated:
    """The optimizer has taken ``step``."""

    step: int


@dataclass(frozen=True)
class Died:
    """The detector's verdict: ``group`` is dead."""

    group: GroupId
    reason: str


@dataclass(frozen=True)
class Broke:
    """Something of ``epoch`` failed and nobody is named; another group may say so of an epoch not yet entered here."""

    epoch: int
    reason: str


@dataclass(frozen=True)
class ReportSeen:
    report: Report


@dataclass(frozen=True)
class ViewSeen:
    """The view that stands at ``view.epoch``, whoever wrote it."""

    view: View


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


Event = Computed | Connected | Transferred | Reduced | Updated | Died | Broke | ReportSeen | ViewSeen | Tick


# Actions: what the shell must do. -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Abort:
    """Make every pending collective of ``epoch`` return now; none of them counts any more."""

    epoch: int
    reason: str


@dataclass(frozen=True)
class Publish:
    """Publish the report, once per epoch, after :class:`Abort` and before anything else."""

    report: Report


@dataclass(frozen=True)
class Propose:
    """Compare-and-set the view; feed whichever view won back as :class:`ViewSeen`."""

    view: View


@dataclass(frozen=True)
class Compute:
    """Compute one microbatch into all local buckets. ``patch`` marks work taken over from a lost group."""

    microbatch: Microbatch
    patch: bool


@dataclass(frozen=True)
class Connect:
    """Build the outer communicator of the view, together with everybody else in it."""

    view: View


@dataclass(frozen=True)
class Transfer:
    """Do this group's part of the view's transfers, state first, then buckets in ascending order."""

    view: View


@dataclass(frozen=True)
class Reduce:
    """Sum these buckets' kept local gradients over the outer communicator."""

    step: int
    buckets: tuple[Bucket, ...]


@dataclass(frozen=True)
class Update:
    """The gate is open: divide by N*G, clip, take the optimizer's step."""

    step: int


@dataclass(frozen=True)
class AwaitView:
    """Nothing to do but to look for reports, notices and the next view."""

    epoch: int
    missing: tuple[GroupId, ...]


@dataclass(frozen=True)
class Finish:
    """Every step is committed here; stay reachable until every live group says the same."""

    epoch: int


@dataclass(frozen=True)
class Stop:
    """This group must not go on."""

    reason: str


Action = Abort | Publish | Propose | Compute | Connect | Transfer | Reduce | Update | AwaitView | Finish | Stop


def step(state: GroupState, event: Event, now: float) -> tuple[GroupState, tuple[Action, ...]]:
    """Take in one event; return the new state and what to do, in order. The last action is the training thread's."""
    if state.stopped:
        return state, (Stop(state.stopped),)
    match event:
        case Died(group=group, reason=reason):
            state = replace(state, dead={**state.dead, group: reason}) if group in state.view.live else state
        case Broke(epoch=epoch, reason=reason):
            state = replace(state, broken={epoch: reason, **state.broken}) if epoch >= state.view.epoch else state
        case ReportSeen(report=report):
            state = _report(state, report)
        case ViewSeen(view=view):
            state = _adopt(state, view)
        case Tick():
            pass
        case _:
            state = _progress(state, event)
    state, closing = _close(state, now)
    return state, (*closing, *_proposal(state, now), next_action(state))


def next_action(state: GroupState) -> Action:
    """The one thing this group's training thread has to do now."""
    if state.stopped:
        return Stop(state.stopped)
    if state.reported:
        # The view is being agreed on; work that will be needed under any view goes on meanwhile.
        if state.todo and state.synced:
            return _compute(state)
        return AwaitView(state.view.epoch, _unreported(state))
    needs_transfer = bool(state.view.behind or state.view.missing) and not state.transferred
    if needs_transfer:
        return Transfer(state.view) if state.connected else Connect(state.view)
    if state.finished:
        return Finish(state.view.epoch)
    if state.todo:
        return _compute(state)
    if not state.unfinished:
        return Update(state.step)
    if not state.connected:
        return Connect(state.view)
    return Reduce(state.step, state.unfinished)


def _compute(state: GroupState) -> Compute:
    microbatch = state.todo[0]
    return Compute(microbatch, patch=microbatch in state.plan.patched)


def _plan(job: Job, number: int, live: tuple[GroupId, ...]) -> Plan:
    return scheduler.plan_step(number, job.shards, job.per_shard, live)


def _progress(state: GroupState, event: Event) -> GroupState:
    """The training thread did what it was asked to."""
    match event:
        case Computed(microbatch=microbatch):
            assert microbatch in state.plan.of(state.me), f"{microbatch} is not group {state.me}'s"
            assert microbatch not in state.computed, f"{microbatch} was computed twice"
            return replace(state, computed=state.computed | {microbatch})
        case Connected(epoch=epoch):
            return replace(state, connected=True) if _current(state, epoch) else state
        case Transferred(epoch=epoch):
            return _transferred(state) if _current(state, epoch) else state
        case Reduced(bucket=bucket):
            # Feeding a completion seen after the abort would be a bug of the shell: it could be garbage.
            assert not state.reported, f"bucket {bucket} finished after the report of epoch {state.view.epoch}"
            return replace(state, have=state.have | {bucket})
        case Updated(step=done):
            assert done == state.step, f"updated step {done} while in step {state.step}"
            return _begin(state, state.step + 1)
    raise TypeError(f"{event!r} is not an event")


def _current(state: GroupState, epoch: int) -> bool:
    return epoch == state.view.epoch and not state.reported


def _begin(state: GroupState, new: int) -> GroupState:
    """Enter step ``new`` under the present view."""
    plan = _plan(state.job, new, state.view.live)
    return replace(state, step=new, plan=plan, computed=frozenset(), have=frozenset())


def _close(state: GroupState, now: float) -> tuple[GroupState, tuple[Action, ...]]:
    """If something is wrong with the present epoch, close it at this group: abort, and report what was finished by now.

    What is wrong may have been heard before the view came: a member of it died meanwhile, or a faster group has already
    broken it.
    """
    epoch = state.view.epoch
    reason = state.broken.get(epoch) or "; ".join(state.dead.values())
    if state.reported or state.stopped or not reason:
        return state, ()
    report = Report(epoch, state.me, state.step, tuple(sorted(state.have)), state.synced)
    reports = {**state.reports, state.me: report}
    state = replace(state, reported=True, closed_by=reason, reports=reports, waiting_since=now)
    return state, (Abort(epoch, reason), Publish(report))


def _report(state: GroupState, report: Report) -> GroupState:
    if report.epoch != state.view.epoch:
        return state
    return replace(state, reports={**state.reports, report.group: report})


def _unreported(state: GroupState) -> tuple[GroupId, ...]:
    return tuple(group for group in state.view.live if group not in state.reports and group not in state.dead)


def _proposal(state: GroupState, now: float) -> tuple[Action, ...]:
    """Propose the next view as soon as everybody who is not dead has reported, or has been waited for long enough."""
    if state.stopped or not state.reported or state.waiting_since is None:
        return ()
    silent: dict[GroupId, str] = {}
    waited = now - state.waiting_since
    if waited >= state.job.report_timeout_s:
        why = f"no report within {state.job.report_timeout_s:g} s of the end of epoch {state.view.epoch}"
        silent = dict.fromkeys(_unreported(state), why)
    view = membership.next_view(state.view, state.reports, state.dead, silent, state.closed_by)
    return (Propose(view),) if view else ()


def _adopt(state: GroupState, view: View) -> GroupState:
    """Everything that follows from the next view, as a pure function of it."""
    if view.epoch <= state.view.epoch:
        return state
    assert view.epoch == state.view.epoch + 1, f"view {view.epoch} seen in epoch {state.view.epoch}"
    if state.me not in view.live:
        why = view.lost.get(state.me, view.reason)
        return replace(state, stopped=f"group {state.me} is outside view {view.epoch}: {why}")
    if len(view.live) < state.job.min_groups:
        groups = " ".join(map(str, view.live))
        return replace(
            state,
            stopped=f"only groups {groups} are left of {state.job.shards}, min_groups is {state.job.min_groups}",
        )
    lost = tuple(view.lost)
    ahead = None
    if view.step > state.step:
        # Its holders began that step under the previous view, lost groups included, and keep what they computed.
        ahead = scheduler.patch_plan(state.ahead or _plan(state.job, view.step, state.view.live), lost)
    return replace(
        state,
        view=view,
        plan=scheduler.patch_plan(state.plan, lost),
        ahead=ahead,
        connected=False,
        transferred=False,
        reported=False,
        closed_by="",
        broken={epoch: why for epoch, why in state.broken.items() if epoch >= view.epoch},
        dead={group: why for group, why in state.dead.items() if group in view.live},
        reports={},
        waiting_since=None,
        synced=state.synced or state.me == view.source,
    )


def _transferred(state: GroupState) -> GroupState:
    """Transfers of the view are done here: who was behind stands at its step now, and final buckets are held."""
    state = replace(state, transferred=True, synced=True)
    if state.ahead is not None:
        return replace(
            state, step=state.view.step, plan=state.ahead, ahead=None, computed=frozenset(), have=frozenset()
        )
    return replace(state, have=state.final)
