"""The in-step protocol of one group as a state machine: ``step(state, event, now) -> state, actions``.

Intuition. The training thread of a group always has at most one action to do: compute a microbatch, reduce the buckets,
hand over state, update, or wait. That action follows from the state alone (:func:`next_action`), so a fault can never
leave a queue of stale orders behind: the event changes the state, and the next action is computed anew. Fault-free
steps contain no agreement; all of it is in the epoch change:

    unblock   a suspicion closes the epoch here: abort the communicator, nothing of the epoch may finish any more
    report    publish step, finished buckets (once per epoch)
    agree     the first view written for epoch+1 is that of all groups
    decide    lost microbatches are patched, final buckets fetched, a decided step caught up with
    continue  compute the missing microbatches, reduce the unfinished buckets, update

Every survivor's local gradient can be summed again, because a group adds each microbatch it computes to *all* its local
buckets, also to those that are already final. So at any time the local gradients of the live groups hold disjoint sets
of microbatches whose union is the step, and any bucket can become unfinished again (its only owner died) at no cost.

Assumes: crash-stop groups, an unreliable network inside an epoch, a compare-and-set store that may be slow. ``now`` is
a local monotonic clock, used for durations only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from megatron_ft.core.detection import link_detector, state_divergence, stragglers
from megatron_ft.core.detection.stragglers import Speeds
from megatron_ft.core.protocol import membership
from megatron_ft.core.protocol.membership import admissible
from megatron_ft.core.protocol.messages import (
    Abort,
    Action,
    Announce,
    AwaitView,
    BatchResized,
    CatchUpFailed,
    CaughtUp,
    Compute,
    Computed,
    Connect,
    Connected,
    Discarded,
    EpochAborted,
    Event,
    Finish,
    Follow,
    GroupFailed,
    HostSilent,
    JoinRequested,
    LeaveAnnounced,
    Propose,
    Publish,
    Reduce,
    Reduced,
    Replaced,
    ReportsSeen,
    RunHalted,
    Stop,
    Tick,
    Transfer,
    Transferred,
    Update,
    Updated,
    ViewSeen,
)
from megatron_ft.core.protocol.state import GroupState, Job, changed
from megatron_ft.types import CUT_OFF, GroupId, Plan, PlanOrigin, Report, View

_LOOKS = 10
"""The least number of looks for a report before its group is given up."""


def start(me: GroupId, job: Job, view: View) -> GroupState:
    """Return the state of group ``me`` that enters with ``view``."""
    plan = job.plan(view.step, view.plan_origin, Speeds())
    following = me in view.joined
    return GroupState(
        me=me,
        job=job,
        view=view,
        step=view.step,
        plan_origin=view.plan_origin,
        plan=plan,
        stopped=plan.wipe_out,
        wiped_out=bool(plan.wipe_out),
        incarnation=view.incarnations.get(me, 0),
        synced=me not in view.behind and not following,
        following=following,
    )


def step(state: GroupState, event: Event, now: float) -> tuple[GroupState, tuple[Action, ...]]:
    """Take in one event; return the new state and the actions to do, in order. The last is for the training thread."""
    if state.stopped:
        return state, (_stop(state),)
    match event:
        case RunHalted(why=why):
            state = changed(state, stopped=why, halted=True)
        case GroupFailed():
            state = _died(state, event)
        case LeaveAnnounced():
            state = _leaves(state, event)
        case JoinRequested():
            state = _asked(state, event)
        case CatchUpFailed(reason=reason):
            state = changed(state, stopped=f"group {state.me} has to start over: {reason}")
        case EpochAborted():
            state = _broke(state, event)
        case HostSilent():
            state = _missed(state, event)
        case ReportsSeen(reports=reports):
            state = _reports(state, reports)
        case ViewSeen(view=view):
            state = _adopt(state, view)
        case Replaced():
            own = {group: report for group, report in state.reports.items() if group == state.me}
            state = changed(state, reports=own, looked=None, waited_s=0.0)
        case Tick():
            state = _looked(state, now)
        case _:
            state = _progress(state, event)
    state, closing = _close(_give_up(state))
    return state, (*closing, *_proposal(state), next_action(state))


def next_action(state: GroupState) -> Action:
    """Return the one action that this group's training thread has to do now."""
    if state.stopped:
        return _stop(state)
    if state.reported:
        # The view is being agreed on; work that will be needed under any view goes on meanwhile.
        if state.todo and state.synced:
            return _compute(state)
        return _await_view(state)
    if state.complete and state.next_plan_origin is not None:
        return Update(state.step)  # the step is decided, and nothing of it is missing here
    if state.following:
        return Follow(state.step) if state.connected else Connect(state.view)  # others wait for the communicator first
    if state.needs_transfer:
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


def _stop(state: GroupState) -> Stop:
    return Stop(state.stopped, state.halted, state.wiped_out)


def awaited(state: GroupState) -> AwaitView | None:
    """Return the look that is possible while the training thread computes, between two microbatches or two instructions
    of a pipeline; None if there is nothing to look for.

    The sooner the view is known, the more of its communicator is built meanwhile.
    """
    return None if not state.reported or state.stopped else _await_view(state)


def _await_view(state: GroupState) -> AwaitView:
    return AwaitView(state.view.epoch, _unreported(state) if state.collects else ())


def _compute(state: GroupState) -> Compute:
    microbatch = state.todo[0]
    return Compute(microbatch, patch=microbatch in state.plan.patched)


def plan_ahead(state: GroupState) -> Plan:
    """Return the plan of the next step, if until then no group dies, enters, or becomes faster or slower."""
    return state.job.plan(state.step + 1, state.next_origin, state.speeds)


def discardable(state: GroupState) -> tuple[GroupId, ...]:
    """Return the groups that have taken their state in the complete step and may have computed a part of it. If their states
    differ, the step is computed again, unless other groups have decided it: those knew of no such part."""
    if not state_divergence.compares_all(state.view, state.step):
        return ()
    takers = sorted(state_divergence.takers(state.view, state.step))
    # The plan no longer names the part of a group that is lost, and the sums of the view before can contain it.
    return tuple(group for group in takers if state.plan.of(group) or group not in state.view.live)


def _died(state: GroupState, event: GroupFailed) -> GroupState:
    """Remember the death, whether that incarnation has a seat or not: a view that gives it one may be on its way."""
    state = _blamed(state, event)
    if event.ended:  # for each group, the incarnation that is a member and the one reported last are kept
        others = {seat for seat in state.ended if seat[0] != event.group or state.view.seats(*seat)}
        state = changed(state, ended=frozenset(others | {(event.group, event.incarnation)}))
    if event.incarnation < state.graves.get(event.group, (0, ""))[0]:
        return state
    asking = {g: a for g, a in state.asking.items() if g != event.group or a.incarnation > event.incarnation}
    return changed(state, asking=asking, graves={**state.graves, event.group: (event.incarnation, event.reason)})


def _blamed(state: GroupState, event: GroupFailed) -> GroupState:
    """Stop if two groups have died in the same microbatch, which would take one group after the other.

    A microbatch that is committed here is ignored: no group has to compute it any more.
    """
    microbatch = event.microbatch
    if microbatch is None or microbatch.step < state.step:
        return state
    victims = state.poison_microbatches.get(microbatch, frozenset()) | {event.group}
    state = changed(state, poison_microbatches={**state.poison_microbatches, microbatch: victims})
    if len(victims) < 2:
        return state
    why = (
        f"groups {' and '.join(map(str, sorted(victims)))} died computing the same microbatch {microbatch}, the last of "
        f"them: {event.reason}; it would take one group after the other, so the run stops: look at the samples of that "
        f"microbatch (step/shard.index) and at the memory they need, then start again; the setting "
        f'fault_tolerance.skip_microbatches ["{microbatch}"] leaves it out'
    )
    return changed(state, stopped=why)


def _leaves(state: GroupState, event: LeaveAnnounced) -> GroupState:
    """Remember that a group leaves. The first message about its newest start counts: a rebuilt store may repeat
    messages, those about earlier starts as well."""
    said = state.leaving.get(event.group)
    if said is not None and (said.incarnation, -said.after) >= (event.incarnation, -event.after):
        return state
    return changed(state, leaving={**state.leaving, event.group: event})


def _asked(state: GroupState, event: JoinRequested) -> GroupState:
    """Remember the request, unless that incarnation has or had a seat or is dead already: the notice may be late."""
    alive = event.incarnation > state.graves.get(event.group, (-1, ""))[0]
    seated = event.incarnation <= _seat(state.view, event.group)
    if seated or not alive:
        return state
    return changed(state, asking={**state.asking, event.group: event})


def _broke(state: GroupState, event: EpochAborted) -> GroupState:
    """Remember the first message about an epoch, or a later one that ends the epoch sooner."""
    said = state.broken.get(event.epoch)
    if event.epoch < state.view.epoch or (said is not None and said.after <= event.after):
        return state
    return changed(state, broken={**state.broken, event.epoch: event})


def _missed(state: GroupState, event: HostSilent) -> GroupState:
    others = {pair: said for pair, said in state.missed.items() if pair != event.units}
    if event.heard:
        return changed(state, missed=others)
    return changed(state, missed={**others, event.units: event}, settled_s=0.0)


def _seat(view: View, group: GroupId) -> int:
    """Return the newest incarnation of ``group`` that ever had a seat; -1 if none had."""
    return view.incarnations.get(group, 0 if group in view.live else -1)


def _progress(state: GroupState, event: Event) -> GroupState:
    """Take in the end of an action of the training thread."""
    match event:
        case Computed(microbatch=microbatch, digest_only=True):
            return changed(state, digested=state.digested | {microbatch})
        case Computed(microbatch=microbatch):
            mine = microbatch in state.plan.of(state.me) or state.plan.part(state.me, microbatch)
            assert mine, f"{microbatch} is not group {state.me}'s"
            assert microbatch not in state.computed, f"{microbatch} was computed twice"
            return changed(state, computed=state.computed | {microbatch})
        case Connected(epoch=epoch):
            return changed(state, connected=True) if _current(state, epoch) else state
        case BatchResized(per_shard=per_shard):
            assert not state.computed, f"the batch of step {state.step} was resized when a part of it was computed"
            job = replace(state.job, per_shard=per_shard)
            return changed(state, job=job, plan=job.plan(state.step, state.plan_origin, state.speeds))
        case CaughtUp(speeds=speeds):
            plan = state.job.plan(state.step, state.plan_origin, speeds)
            return changed(state, synced=True, following=False, speeds=speeds, plan=plan)
        case Transferred(epoch=epoch):
            return _transferred(state, event) if _current(state, epoch) else state
        case Reduced(bucket=bucket):
            # A shell that feeds a completion seen after the abort has a bug: the bucket could be garbage.
            assert not state.reported, f"bucket {bucket} finished after the report of epoch {state.view.epoch}"
            return changed(state, reduced_buckets=state.reduced_buckets | {bucket})
        case Discarded(step=discarded):
            assert discarded == state.step and state.complete, f"step {discarded} is not complete at group {state.me}"
            return changed(
                state,
                attempt=state.attempt + 1,
                computed=frozenset(),
                digested=frozenset(),
                reduced_buckets=frozenset(),
            )
        case Updated(step=done, measured=measured):
            assert done == state.step, f"updated step {done} while in step {state.step}"
            job = state.job
            speeds = stragglers.observe(state.speeds, measured, job.straggler_factor, job.straggler_steps)
            return _begin(changed(state, speeds=speeds), state.step + 1)
    raise TypeError(f"{event!r} is not an event")


def _current(state: GroupState, epoch: int) -> bool:
    return epoch == state.view.epoch and not state.reported


def _begin(state: GroupState, new: int) -> GroupState:
    """Enter step ``new`` under the present view, or with the plan that other groups follow for it already."""
    origin = state.next_plan_origin or state.next_origin
    return changed(
        state,
        step=new,
        plan_origin=origin,
        plan=state.job.plan(new, origin, state.speeds),
        next_plan_origin=None,
        attempt=0,
        computed=frozenset(),
        digested=frozenset(),
        reduced_buckets=frozenset(),
        # A committed microbatch cannot kill another group.
        poison_microbatches={
            microbatch: groups for microbatch, groups in state.poison_microbatches.items() if microbatch.step >= new
        },
    )


def _close(state: GroupState) -> tuple[GroupState, tuple[Action, ...]]:
    """Close the present epoch at this group if there is a reason: abort, and report the step and the finished buckets.

    The reason may have been heard before the view came: a member of it died meanwhile, or a faster group has already
    broken it.
    """
    if state.reported or state.stopped or not _news(state):
        return state, ()
    epoch, change = state.view.epoch, _parting(state) or _entry(state)
    # This group announces a cut, a departure or an entry, because other groups may never see it and would stay in an epoch
    # that is over: a group that hears of a cut late may hear at the same time that it has healed, a group that has finished
    # sees no group leave, and a group that asks may be dead before others had to let it in. Groups that are still in the
    # step before a group leaves or enters finish that step first.
    cut = "; ".join(state.cut.values())
    said = state.broken.get(epoch)
    if said is not None and said.after >= state.step:
        said = None
    failed = said.reason if said and not said.in_order else ""
    accused = "; ".join(state.dead.values())
    wrong = accused or failed or cut
    reason = wrong or (said.reason if said else "") or change
    if not reason:
        return state, ()
    # If the batch shrinks, a bucket with a lost group's part belongs to another batch than those that are reduced again.
    reduced = () if state.job.policy.shrinks else tuple(sorted(state.reduced_buckets))
    report = Report(epoch, state.me, state.step, reduced, state.synced, state.complete, state.attempt)
    reports = {**state.reports, state.me: report}
    noticed = "" if reason == accused else reason
    state = changed(state, reported=True, closed_by=reason, noticed=noticed, reports=reports, looked=None, waited_s=0.0)
    state = changed(state, collects=_turn(state) == 0)
    after = -1 if wrong else state.step - 1
    announcement = (Announce(epoch, reason, after),) if reason in (cut, change) else ()
    return state, (Abort(epoch, reason, in_order=not wrong), Publish(report), *announcement)


def _news(state: GroupState) -> bool:
    """Return whether any message that may end an epoch is held. Checked first for speed: there is nearly never one."""
    return bool(state.broken or state.graves or state.missed or state.leaving or state.asking)


def _parting(state: GroupState) -> str:
    """Return the reason to end an epoch because a group has left in order; empty if there is none.

    A step that others have decided must first be committed here: a group that has finished would propose the same
    members again, forever. A group that has left in order stays reachable until a view leaves it out.
    """
    return "; ".join(state.left.values()) if state.left and _settled(state) and state.next_plan_origin is None else ""


def _settled(state: GroupState) -> bool:
    """Return whether every group can finish its present work under this view, if this group ends the epoch in order.

    A view that hands over state or buckets is not ended before the transfers are done; they are done at all groups once
    a step of the view is committed.
    """
    view = state.view
    return state.connected and state.synced and (state.step > view.step or not (view.behind or view.missing))


def _entry(state: GroupState) -> str:
    """Return the reason to end an epoch for groups that ask for a seat; empty while that would cost any group work.

    All groups end it at the boundary after the step that the request names, so none is in the middle of a reduction. A
    group that hears of the request later ends the epoch at once: the others already wait in that step.
    """
    if state.reduced_buckets or state.attempt or state.finished or not _settled(state):
        return ""
    asking = sorted(state.asking.items())
    ready = [group for group, asked in asking if asked.after < state.step and admissible(state.view, asked)]
    return f"groups {' '.join(map(str, ready))} ask to join" if ready else ""


def _reports(state: GroupState, reports: tuple[Report, ...]) -> GroupState:
    new = {report.group: report for report in reports if report.epoch == state.view.epoch}
    return changed(state, reports={**state.reports, **new})


def _turn(state: GroupState) -> int:
    """Return this group's turn to collect reports: 0 for the ``Job.collectors`` lowest live groups, 1 for the next ones."""
    out = _out(state)
    return sum(group < state.me and group not in out for group in state.view.live) // state.job.collectors


def _unreported(state: GroupState) -> tuple[GroupId, ...]:
    gone = {*state.dead, *state.left}
    return tuple(group for group in state.view.live if group not in state.reports and group not in gone)


def _looked(state: GroupState, now: float) -> GroupState:
    """Count the time since the last look: the store has answered, and there was nothing new.

    Only time in which the store answers counts as waiting. While it was away no group could report, and the group that
    reaches it first must not leave the others out for that (hard case 16).
    """
    if not state.reported:
        return state
    since = 0.0 if state.looked is None else now - state.looked
    longest = state.patience_s / _LOOKS
    waited_s, settled_s = state.waited_s + min(since, longest), state.settled_s + since
    if not state.collects and waited_s >= _turn(state) * longest:
        # No group is given up for a report that was never looked for: the time begins anew.
        return changed(state, looked=now, collects=True, waited_s=0.0, settled_s=settled_s)
    return changed(state, looked=now, waited_s=waited_s, settled_s=settled_s)


def _proposal(state: GroupState) -> tuple[Action, ...]:
    """Propose the next view once each group that is not dead has reported, or has been waited for as long as allowed."""
    if state.stopped or not state.collects or not _has_say(state):
        return ()
    silent: dict[GroupId, str] = {}
    if state.waited_s >= state.patience_s:
        # A group that is a step ahead may have another patience, and the view's text must not depend on its writer.
        why = f"no report within {state.job.report_timeout_s:g} s of the end of epoch {state.view.epoch}"
        silent = dict.fromkeys(_unreported(state), why)
    if state.cut and state.settled_s < state.job.settle_s and not _is_undisputed(state, silent):
        return ()
    over = any(report.step >= state.job.steps for report in state.reports.values())  # no group would connect any more
    asking = {} if over else state.asking
    view = membership.next_view(
        state.view, state.reports, _out(state, silent), silent, state.closed_by, asking, state.noticed
    )
    return (_propose(state, replace(view, plan_origin=_origin(state, view)), silent),) if view else ()


def _propose(state: GroupState, view: View, silent: Mapping[GroupId, str]) -> Propose:
    """Return the proposal, with the seats to fence: those that the view leaves out and that may live and go on as the run.

    The end of a later start of a group does not show the end of an earlier one, which may be frozen on another host. No
    group goes on under a view with too few members or after a wipe-out, so such a view needs no fence.
    """
    if not view.lost or len(view.live) < max(state.job.min_groups, 1) or _wipe_out(state, view):
        return Propose(view)
    doubtful = {**_cut_off(state, silent), **state.dead, **silent}
    seats = {group: (group, state.view.incarnations.get(group, 0)) for group in view.lost}
    gone = {group for group in state.left if group not in doubtful}
    fence = (seat for group, seat in sorted(seats.items()) if group not in gone and seat not in state.ended)
    return Propose(view, tuple(fence), reads_log=True)


def _out(state: GroupState, silent: Collection[GroupId] = ()) -> dict[GroupId, str]:
    """Return the members that will not be in the next view, whatever they report, with the reason."""
    return {**_cut_off(state, silent), **state.left, **state.dead}


def _is_undisputed(state: GroupState, silent: Collection[GroupId]) -> bool:
    """Return whether no host has to be waited for to say which hosts it misses."""
    return link_detector.are_unanimous(state.cut, _standing(state, silent), _cut_off(state, silent))


def _standing(state: GroupState, silent: Collection[GroupId]) -> set[GroupId]:
    return set(state.view.live) - state.dead.keys() - state.left.keys() - set(silent)


def _cut_off(state: GroupState, silent: Collection[GroupId] = ()) -> dict[GroupId, str]:
    """Return the groups that leave because hosts do not hear each other, with the reason.

    Groups that are given up because they have not reported (``silent``) accuse no host: two hosts that are lost at once
    must not outvote the third, which misses both.
    """
    cut = state.cut
    if not cut:
        return {}
    leaving = link_detector.who_leaves(cut, _standing(state, silent))
    return {
        group: CUT_OFF + "; ".join(sorted(why for pair, why in cut.items() if any(group in unit for unit in pair)))
        for group in sorted(leaving)
    }


def _has_say(state: GroupState) -> bool:
    """Return whether this group knows the plan origin of the step that would go on, and so may propose a view.

    A group that has just entered knows the origin of its own step only. The same holds for a group that has committed a
    step that the others have not, and is to be left out: it has forgotten the origin of the step they are in.
    """
    out = _out(state)
    told = [report.step for group, report in state.reports.items() if group not in out and report.synced]
    if not told or max(told) == state.step:
        return True
    return state.synced and max(told) > state.step


def _give_up(state: GroupState) -> GroupState:
    """Stop a group that may not propose a view, once no other group has decided on one for twice the patience. The
    others, if they live, do not need it."""
    patience_s = 2 * state.patience_s
    if state.stopped or state.waited_s < patience_s or _has_say(state):
        return state
    why = f"no group that has the model state decided on a view within {patience_s:g} s"
    return changed(state, stopped=f"group {state.me} leaves before it has begun: {why}")


def _origin(state: GroupState, view: View) -> PlanOrigin:
    """Return the plan origin of the view's step, the view's own losses included.

    A group that is a step ahead began that step under the view that ends now (or stood there in the view before
    already), lost groups included, and keeps its computed microbatches. A group that enters gets its share with the
    next step.
    """
    if view.step == state.step:
        return state.plan_origin.after(view.lost, view.joined)
    return (state.next_plan_origin or state.next_origin).after(view.lost, view.joined)


def _adopt(state: GroupState, view: View) -> GroupState:
    """Adopt the next view; the new state is a pure function of it and of the present state."""
    if view.epoch <= state.view.epoch:
        return state
    if not view.seats(state.me, state.incarnation):
        why = view.lost.get(state.me, view.reason)
        # After a view without members there is no other one: no group goes on.
        return changed(state, stopped=f"group {state.me} is outside view {view.epoch}: {why}", wiped_out=not view.live)
    # A group that misses a view has not reported in its epoch, so it is no member of the one after.
    assert view.epoch == state.view.epoch + 1, f"view {view.epoch} seen in epoch {state.view.epoch}"
    if len(view.live) < state.job.min_groups:
        groups = " ".join(map(str, view.live))
        return changed(
            state,
            stopped=f"only groups {groups} are left of {state.job.shards}, min_groups is {state.job.min_groups}",
        )
    if not state.synced:
        state = changed(state, step=view.step, computed=frozenset(), digested=frozenset(), reduced_buckets=frozenset())
    behind = view.step > state.step
    origin = state.plan_origin.after(view.lost, view.joined) if behind else view.plan_origin
    if state.job.policy.shrinks and behind and state.complete:
        origin = state.plan_origin  # all buckets are here, with the parts of all groups
    if ends := _wipe_out(state, view):
        return changed(state, stopped=ends, wiped_out=True)
    return changed(
        state,
        view=view,
        reduced_buckets=frozenset() if state.job.policy.shrinks and not behind else state.reduced_buckets,
        plan_origin=origin,
        plan=state.job.plan(state.step, origin, state.speeds),
        next_plan_origin=view.plan_origin if behind else None,
        connected=False,
        transferred=False,
        reported=False,
        collects=False,
        closed_by="",
        noticed="",
        broken={epoch: why for epoch, why in state.broken.items() if epoch >= view.epoch},
        asking={group: asked for group, asked in state.asking.items() if asked.incarnation > _seat(view, group)},
        reports={},
        waited_s=0.0,
        synced=state.synced or (state.me not in view.behind and not state.following),
    )


def _wipe_out(state: GroupState, view: View) -> str:
    """Return the reason why the step of ``view`` cannot be finished and the job goes back to its checkpoint; or ""."""
    if not view.lost or view.step >= state.job.steps or not state.job.policy.wipes_out:
        return ""
    return state.job.plan(view.step, view.plan_origin, Speeds()).wipe_out  # no speed changes that


def _transferred(state: GroupState, event: Transferred) -> GroupState:
    """Take in the end of the view's transfers: a group that was behind is now at its step, and final buckets are held."""
    taken = event.speeds if state.me in state.view.behind else None
    state = changed(state, transferred=True, synced=True, speeds=state.speeds if taken is None else taken)
    if state.next_plan_origin is None:
        plan = state.plan if taken is None else state.job.plan(state.step, state.plan_origin, taken)
        if state.attempt == state.view.attempt:
            return changed(state, reduced_buckets=state.final, plan=plan)
        state = changed(
            state, computed=frozenset(), digested=frozenset(), reduced_buckets=frozenset(state.view.final), plan=plan
        )
    else:
        state = _begin(state, state.view.step)
    return changed(state, attempt=state.view.attempt)
