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

from dataclasses import replace

from megatron_ft.core import links, membership, stragglers
from megatron_ft.core.membership import admissible
from megatron_ft.core.protocol import (
    Abort,
    Action,
    Announce,
    Asked,
    AwaitView,
    Broke,
    Compute,
    Computed,
    Connect,
    Connected,
    Died,
    Event,
    Finish,
    Follow,
    Followed,
    Leaves,
    Missed,
    Propose,
    Publish,
    Reduce,
    Reduced,
    ReportsSeen,
    Stop,
    Strayed,
    Tick,
    Transfer,
    Transferred,
    Update,
    Updated,
    ViewSeen,
)
from megatron_ft.core.state import GroupState, Job, changed
from megatron_ft.core.stragglers import Speeds
from megatron_ft.types import Begun, GroupId, Plan, Report, View

_LOOKS = 10
"""A report is looked for at least so often before its group is given up."""


def start(me: GroupId, job: Job, view: View) -> GroupState:
    """The state of a group that enters with ``view``."""
    plan = job.plan(view.step, view.begun, Speeds())
    following = me in view.joined
    return GroupState(
        me=me,
        job=job,
        view=view,
        step=view.step,
        begun=view.begun,
        plan=plan,
        incarnation=view.incarnations.get(me, 0),
        synced=me not in view.behind and not following,
        following=following,
    )


def step(state: GroupState, event: Event, now: float) -> tuple[GroupState, tuple[Action, ...]]:
    """Take in one event; return the new state and what to do, in order. The last action is the training thread's."""
    if state.stopped:
        return state, (Stop(state.stopped),)
    match event:
        case Died():
            state = _died(state, event)
        case Leaves():
            state = _leaves(state, event)
        case Asked():
            state = _asked(state, event)
        case Strayed(reason=reason):
            state = changed(state, stopped=f"group {state.me} has to start over: {reason}")
        case Broke():
            state = _broke(state, event)
        case Missed():
            state = _missed(state, event)
        case ReportsSeen(reports=reports):
            state = _reports(state, reports)
        case ViewSeen(view=view):
            state = _adopt(state, view)
        case Tick():
            state = _looked(state, now)
        case _:
            state = _progress(state, event)
    state, closing = _close(_give_up(state))
    return state, (*closing, *_proposal(state), next_action(state))


def next_action(state: GroupState) -> Action:
    """The one thing this group's training thread has to do now."""
    if state.stopped:
        return Stop(state.stopped)
    if state.reported:
        # The view is being agreed on; work that will be needed under any view goes on meanwhile.
        if state.todo and state.synced:
            return _compute(state)
        return awaited(state)
    if state.complete and state.ahead is not None:
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


def awaited(state: GroupState) -> AwaitView | None:
    """What can be looked for between two microbatches, or two instructions of a pipeline, while the training thread goes on
    computing: the sooner the view is known, the more of its communicator is built meanwhile."""
    if not state.reported or state.stopped:
        return None
    return AwaitView(state.view.epoch, _unreported(state) if state.collects else ())


def _compute(state: GroupState) -> Compute:
    microbatch = state.todo[0]
    return Compute(microbatch, patch=microbatch in state.plan.patched)


def plan_ahead(state: GroupState) -> Plan:
    """The plan of the step after this one, if until then nobody dies, enters, or becomes faster or slower."""
    return state.job.plan(state.step + 1, Begun(state.view.live), state.speeds)


def _died(state: GroupState, event: Died) -> GroupState:
    """Remember it, whether that incarnation has a seat or not: a view that gives it one may be on its way."""
    state = _blamed(state, event)
    if event.incarnation < state.graves.get(event.group, (0, ""))[0]:
        return state
    asking = {g: a for g, a in state.asking.items() if g != event.group or a.incarnation > event.incarnation}
    return changed(
        state, asking=asking, graves={**state.graves, event.group: (event.incarnation, event.reason)}
    )


def _blamed(state: GroupState, event: Died) -> GroupState:
    """A microbatch in which two groups have died would take one group after the other: stop instead.

    One that is committed here nobody has to compute any more.
    """
    microbatch = event.microbatch
    if microbatch is None or microbatch.step < state.step:
        return state
    victims = state.deadly.get(microbatch, frozenset()) | {event.group}
    state = changed(state, deadly={**state.deadly, microbatch: victims})
    if len(victims) < 2:
        return state
    why = (
        f"groups {' and '.join(map(str, sorted(victims)))} died computing the same microbatch {microbatch}, the last of "
        f"them: {event.reason}; it would take one group after the other, so the run stops: look at the samples of that "
        f"microbatch (step/shard.index) and at the memory they need, then start again"
    )
    return changed(state, stopped=why)


def _leaves(state: GroupState, event: Leaves) -> GroupState:
    """A store that was rebuilt may say it again, of an earlier start too: the newest start's first word counts."""
    said = state.leaving.get(event.group)
    if said is not None and (said.incarnation, -said.after) >= (event.incarnation, -event.after):
        return state
    return changed(state, leaving={**state.leaving, event.group: event})


def _asked(state: GroupState, event: Asked) -> GroupState:
    """A seat is for an incarnation that neither has, or had, one nor is dead already; the notice may be late."""
    alive = event.incarnation > state.graves.get(event.group, (-1, ""))[0]
    seated = event.incarnation <= _seat(state.view, event.group)
    if seated or not alive:
        return state
    return changed(state, asking={**state.asking, event.group: event})


def _broke(state: GroupState, event: Broke) -> GroupState:
    """Of what was said of an epoch the first word counts; unless a later one ends it sooner."""
    said = state.broken.get(event.epoch)
    if event.epoch < state.view.epoch or (said is not None and said.after <= event.after):
        return state
    return changed(state, broken={**state.broken, event.epoch: event})


def _missed(state: GroupState, event: Missed) -> GroupState:
    others = {pair: why for pair, why in state.missed.items() if pair != (event.by, event.about)}
    if event.heard:
        return changed(state, missed=others)
    return changed(state, missed={**others, (event.by, event.about): event.reason}, settled_s=0.0)


def _seat(view: View, group: GroupId) -> int:
    """The newest incarnation of ``group`` that ever had a seat; -1 if none had."""
    return view.incarnations.get(group, 0 if group in view.live else -1)


def _progress(state: GroupState, event: Event) -> GroupState:
    """The training thread did what it was asked to."""
    match event:
        case Computed(microbatch=microbatch):
            assert microbatch in state.plan.of(state.me), f"{microbatch} is not group {state.me}'s"
            assert microbatch not in state.computed, f"{microbatch} was computed twice"
            return changed(state, computed=state.computed | {microbatch})
        case Connected(epoch=epoch):
            return changed(state, connected=True) if _current(state, epoch) else state
        case Followed(speeds=speeds):
            plan = state.job.plan(state.step, state.begun, speeds)
            return changed(state, synced=True, following=False, speeds=speeds, plan=plan)
        case Transferred(epoch=epoch):
            return _transferred(state, event) if _current(state, epoch) else state
        case Reduced(bucket=bucket):
            # Feeding a completion seen after the abort would be a bug of the shell: it could be garbage.
            assert not state.reported, f"bucket {bucket} finished after the report of epoch {state.view.epoch}"
            return changed(state, have=state.have | {bucket})
        case Updated(step=done, measured=measured):
            assert done == state.step, f"updated step {done} while in step {state.step}"
            job = state.job
            speeds = stragglers.observe(state.speeds, measured, job.straggler_factor, job.straggler_steps)
            return _begin(changed(state, speeds=speeds), state.step + 1)
    raise TypeError(f"{event!r} is not an event")


def _current(state: GroupState, epoch: int) -> bool:
    return epoch == state.view.epoch and not state.reported


def _begin(state: GroupState, new: int) -> GroupState:
    """Enter step ``new`` under the present view, or with the plan that others follow for it already."""
    begun = state.ahead or Begun(state.view.live)
    return changed(
        state,
        step=new,
        begun=begun,
        plan=state.job.plan(new, begun, state.speeds),
        ahead=None,
        computed=frozenset(),
        have=frozenset(),
    )


def _close(state: GroupState) -> tuple[GroupState, tuple[Action, ...]]:
    """If something is wrong with the present epoch, close it at this group: abort, and report what was finished by now.

    What is wrong may have been heard before the view came: a member of it died meanwhile, or a faster group has already
    broken it.
    """
    if state.reported or state.stopped or not _news(state):
        return state, ()
    epoch, change = state.view.epoch, _parting(state) or _entry(state)
    # Not everybody comes to see these: who hears of a cut late may hear at the same time that it has healed, who has
    # finished sees nobody leave, and who asks may be dead before others had to let it in. They would stay in an epoch the
    # others have left. Those who are still in the step before somebody leaves or enters finish that one first.
    cut = "; ".join(state.cut.values())
    said = state.broken.get(epoch)
    told = said is not None and said.after < state.step
    failed = said.reason if told and not said.in_order else ""
    wrong = failed or "; ".join(state.dead.values()) or cut
    reason = wrong or (said.reason if told else "") or change
    if not reason:
        return state, ()
    # A bucket that holds a lost group's part would be that of another batch than those that are reduced again.
    have = () if state.job.drop else tuple(sorted(state.have))
    report = Report(epoch, state.me, state.step, have, state.synced, state.complete)
    reports = {**state.reports, state.me: report}
    state = changed(state, reported=True, closed_by=reason, reports=reports, looked=None, waited_s=0.0)
    state = changed(state, collects=_turn(state) == 0)
    after = -1 if wrong else state.step - 1
    announcement = (Announce(epoch, reason, after),) if reason in (cut, change) else ()
    return state, (Abort(epoch, reason, in_order=not wrong), Publish(report), *announcement)


def _news(state: GroupState) -> bool:
    """Whether anything was ever heard that may end an epoch. Asked first, because it nearly never was."""
    return bool(state.broken or state.graves or state.missed or state.leaving or state.asking)


def _parting(state: GroupState) -> str:
    """The reason to end an epoch because somebody has left.

    Not before a step that others have decided is committed here, too: who has finished would propose the same members
    again, for ever. Who has left has not gone: it stays until a view says so.
    """
    return "; ".join(state.left.values()) if state.left and _settled(state) and state.ahead is None else ""


def _settled(state: GroupState) -> bool:
    """Whether everybody can finish what it is at under this view, if this group ends the epoch here and in order.

    A view that hands over something is left alone until that is done, which it is everywhere once a step of it is committed.
    """
    view = state.view
    return state.connected and state.synced and (state.step > view.step or not (view.behind or view.missing))


def _entry(state: GroupState) -> str:
    """The reason to end an epoch for those who ask for a seat; empty while that would cost anybody anything.

    Everybody ends it at the boundary after the step that was asked for, so nobody is in the middle of a reduction. Who
    hears of it only after that does so at once: the others are waiting in that step by then.
    """
    if state.have or state.finished or not _settled(state):
        return ""
    asking = sorted(state.asking.items())
    ready = [group for group, asked in asking if asked.after < state.step and admissible(state.view, asked)]
    return f"groups {' '.join(map(str, ready))} ask to join" if ready else ""


def _reports(state: GroupState, reports: tuple[Report, ...]) -> GroupState:
    new = {report.group: report for report in reports if report.epoch == state.view.epoch}
    return changed(state, reports={**state.reports, **new})


def _turn(state: GroupState) -> int:
    """The lowest groups collect the reports at once; the next ones when those should have been able to, and so on."""
    out = _out(state)
    return sum(group < state.me and group not in out for group in state.view.live) // state.job.collectors


def _unreported(state: GroupState) -> tuple[GroupId, ...]:
    gone = {*state.dead, *state.left}
    return tuple(group for group in state.view.live if group not in state.reports and group not in gone)


def _looked(state: GroupState, now: float) -> GroupState:
    """The store has answered, and there was nothing new.

    Only time in which it answers counts as waiting. While it was away nobody could report: whoever is back first must
    not leave the others out for that (hard case 16).
    """
    if not state.reported:
        return state
    since = 0.0 if state.looked is None else now - state.looked
    longest = state.patience_s / _LOOKS
    waited_s, settled_s = state.waited_s + min(since, longest), state.settled_s + since
    if not state.collects and waited_s >= _turn(state) * longest:
        # Nobody is given up on for what was never looked for: the time begins anew.
        return changed(state, looked=now, collects=True, waited_s=0.0, settled_s=settled_s)
    return changed(state, looked=now, waited_s=waited_s, settled_s=settled_s)


def _proposal(state: GroupState) -> tuple[Action, ...]:
    """Propose the next view as soon as everybody who is not dead has reported, or has been waited for long enough."""
    if state.stopped or not state.collects or not _has_say(state):
        return ()
    silent: dict[GroupId, str] = {}
    if state.waited_s >= state.patience_s:
        # Who is a step ahead may have another patience: what the view says must not depend on who writes it.
        why = f"no report within {state.job.report_timeout_s:g} s of the end of epoch {state.view.epoch}"
        silent = dict.fromkeys(_unreported(state), why)
    if state.cut and state.settled_s < state.job.settle_s:
        return ()
    over = any(report.step >= state.job.steps for report in state.reports.values())  # nobody would connect any more
    asking = {} if over else state.asking
    view = membership.next_view(state.view, state.reports, _out(state), silent, state.closed_by, asking)
    return (Propose(replace(view, begun=_origin(state, view))),) if view else ()


def _out(state: GroupState) -> dict[GroupId, str]:
    """Members that will not be in the next view, whatever they report, with the reason."""
    return {**_cut_off(state), **state.left, **state.dead}


def _cut_off(state: GroupState) -> dict[GroupId, str]:
    """Who leaves because hosts do not hear each other, with what was said about it."""
    cut = state.cut
    if not cut:
        return {}
    leaving = links.who_leaves(cut, set(state.view.live) - state.dead.keys() - state.left.keys())
    return {
        group: "cut off: " + "; ".join(sorted(why for pair, why in cut.items() if any(group in unit for unit in pair)))
        for group in sorted(leaving)
    }


def _has_say(state: GroupState) -> bool:
    """Whether this group knows how the step came about that would go on.

    Who has just entered knows that of its own step only. So does who has committed a step that the others have not, and
    is to be left out: it has forgotten the one they are in.
    """
    out = _out(state)
    told = [report.step for group, report in state.reports.items() if group not in out and report.synced]
    if not told or max(told) == state.step:
        return True
    return state.synced and max(told) > state.step


def _give_up(state: GroupState) -> GroupState:
    """Without a say and with nobody who decides there is nothing to wait for; the others, if they live, need no one."""
    patience_s = 2 * state.patience_s
    if state.stopped or state.waited_s < patience_s or _has_say(state):
        return state
    why = f"no group that has the model state decided on a view within {patience_s:g} s"
    return changed(state, stopped=f"group {state.me} leaves before it has begun: {why}")


def _origin(state: GroupState, view: View) -> Begun:
    """Where the plan of the view's step comes from, its own losses included.

    Who is a step ahead began that step under the view that ends now (or stood there in the view before already), lost
    groups included, and keeps what it computed. A group that enters gets its share with the next step.
    """
    if view.step == state.step:
        return state.begun.after(view.lost, view.joined)
    return (state.ahead or Begun(state.view.live)).after(view.lost, view.joined)


def _adopt(state: GroupState, view: View) -> GroupState:
    """Everything that follows from the next view, as a pure function of it."""
    if view.epoch <= state.view.epoch:
        return state
    assert view.epoch == state.view.epoch + 1, f"view {view.epoch} seen in epoch {state.view.epoch}"
    if not view.seats(state.me, state.incarnation):
        why = view.lost.get(state.me, view.reason)
        return changed(state, stopped=f"group {state.me} is outside view {view.epoch}: {why}")
    if len(view.live) < state.job.min_groups:
        groups = " ".join(map(str, view.live))
        return changed(
            state,
            stopped=f"only groups {groups} are left of {state.job.shards}, min_groups is {state.job.min_groups}",
        )
    if not state.synced:
        state = changed(state, step=view.step, computed=frozenset(), have=frozenset())
    behind = view.step > state.step
    begun = state.begun.after(view.lost, view.joined) if behind else view.begun
    if state.job.drop and behind and state.complete:
        begun = state.begun  # all buckets are there, with everybody's part
    return changed(
        state,
        view=view,
        have=frozenset() if state.job.drop and not behind else state.have,
        begun=begun,
        plan=state.job.plan(state.step, begun, state.speeds),
        ahead=view.begun if behind else None,
        connected=False,
        transferred=False,
        reported=False,
        collects=False,
        closed_by="",
        broken={epoch: why for epoch, why in state.broken.items() if epoch >= view.epoch},
        asking={group: asked for group, asked in state.asking.items() if asked.incarnation > _seat(view, group)},
        reports={},
        waited_s=0.0,
        synced=state.synced or (state.me not in view.behind and not state.following),
    )


def _transferred(state: GroupState, event: Transferred) -> GroupState:
    """Transfers of the view are done here: who was behind stands at its step now, and final buckets are held."""
    taken = event.speeds if state.me in state.view.behind else None
    state = changed(state, transferred=True, synced=True, speeds=state.speeds if taken is None else taken)
    if state.ahead is None:
        plan = state.plan if taken is None else state.job.plan(state.step, state.begun, taken)
        return changed(state, have=state.final, plan=plan)
    return _begin(state, state.view.step)
