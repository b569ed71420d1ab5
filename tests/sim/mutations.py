"""Planted bugs: each breaks one rule of the protocol or of its shell, and the checkers must see it in a simulated world.

``MUTATIONS`` maps what the bug is to a function that plants it with pytest's ``monkeypatch``, and the seeds in which it
shows; a rare one is looked for where it was found once.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_ft.core import membership, recovery, scheduler
from megatron_ft.core.recovery import GroupState, Transferred, Updated
from megatron_ft.sim import group
from megatron_ft.sim.group import Group
from megatron_ft.sim.store import Store
from megatron_ft.types import Begun, Plan

MUTATIONS = {}


def mutation(name, seeds=range(1500)):
    def add(plant):
        MUTATIONS[name] = plant, seeds
        return plant

    return add


# --- agreement ------------------------------------------------------------------------------------------------------


@mutation("a report of another epoch counts")
def _(patch):
    def report(state, found):
        return replace(state, reports={**state.reports, found.group: replace(found, epoch=state.view.epoch)})

    patch.setattr(recovery, "_report", report)
    patch.setattr(group, "look", lambda store, epoch, missing: _older(store, epoch, missing))


def _older(store, epoch, missing):
    view, reports = LOOK(store, epoch, missing)
    return view, reports or LOOK(store, epoch - 1, missing)[1]


@mutation("a later view of an epoch takes the place of the first")
def _(patch):
    def create(store, key, value):
        store.values[key] = value
        return value

    patch.setattr(Store, "create", create)


@mutation("nobody waits for reports")
def _(patch):
    def hasty(view, reports, dead, silent, reason, joining=None):
        missing = {group: "no report yet" for group in view.live if group not in reports}
        return NEXT_VIEW(view, reports, dead, {**silent, **missing}, reason, joining)

    patch.setattr(membership, "next_view", hasty)


@mutation("the time in which the store is away counts as waiting", range(4400, 4800))
def _(patch):
    patch.setattr(recovery, "_LOOKS", 0.01)


@mutation("the step that is least far goes on")
def _(patch):
    def backwards(view, reports, *rest, **named):
        least = min(report.step for report in reports.values())
        return NEXT_VIEW(view, {g: replace(r, step=least) for g, r in reports.items()}, *rest, **named)

    patch.setattr(membership, "next_view", backwards)


@mutation("that all are taken for dead is not decided")
def _(patch):
    def undecided(view, *rest, **named):
        found = NEXT_VIEW(view, *rest, **named)
        return found if found is None or found.live else None

    patch.setattr(membership, "next_view", undecided)


@mutation("who has no state and does not know the step proposes all the same", range(1900, 2300))
def _(patch):
    patch.setattr(recovery, "_has_say", lambda state: True)


@mutation("who has committed the step and is to be left out proposes how the others go on with it", range(28600, 28700))
def _(patch):
    patch.setattr(recovery, "_has_say", lambda state: state.synced or HAS_SAY(state))


@mutation("who has no state waits for ever for those that had")
def _(patch):
    patch.setattr(recovery, "_has_say", lambda state: state.synced or not any(r.synced for r in state.reports.values()))
    patch.setattr(recovery, "_give_up", lambda state: state)


# --- membership -----------------------------------------------------------------------------------------------------


@mutation("who is left out goes on")
def _(patch):
    def adopt(state, view):
        if state.me not in view.live and view.live:
            view = replace(view, live=tuple(sorted((*view.live, state.me))))
        return ADOPT(state, view)

    patch.setattr(recovery, "_adopt", adopt)


@mutation("an older start takes its successor's seat")
def _(patch):
    patch.setattr(recovery, "_adopt", lambda s, view: ADOPT(replace(s, incarnation=view.incarnations.get(s.me, 0)), view))


@mutation("who joins keeps its own model")
def _(patch):
    _change_views(patch, lambda view: replace(view, behind=tuple(g for g in view.behind if g not in view.joined)))


@mutation("who is behind does not take the state")
def _(patch):
    _change_views(patch, lambda view: replace(view, source=None, behind=()))


@mutation("a joiner's own model is as good as any in the first step", range(2700, 3100))
def _(patch):
    def next_view(view, reports, dead, silent, reason, joining=None):
        starts, ours = view.incarnations, replace(view, incarnations={})
        found = NEXT_VIEW(ours if view.step == 0 else view, reports, dead, silent, reason, joining)
        return found and replace(found, incarnations={**starts, **found.incarnations})

    patch.setattr(membership, "next_view", next_view)


# --- plans and sums -------------------------------------------------------------------------------------------------


@mutation("a patched microbatch is given to two groups")
def _(patch):
    def twice(plan, lost, placement=None):
        patched = PATCH_PLAN(plan, lost, placement)
        new = sorted(patched.patched - plan.patched)
        if not new or len(patched.assignment) < 2:
            return patched
        other = next(group for group in patched.assignment if new[0] not in patched.of(group))
        return replace(patched, assignment={**patched.assignment, other: (*patched.of(other), new[0])})

    patch.setattr(scheduler, "patch_plan", twice)


@mutation("what a lost group had is forgotten")
def _(patch):
    def forgetful(plan, lost, placement=None):
        kept = {group: own for group, own in plan.assignment.items() if group not in lost}
        return Plan(plan.step, kept, plan.reason, plan.patched)

    patch.setattr(scheduler, "patch_plan", forgetful)


@mutation("the interrupted step is planned anew")
def _(patch):
    _change_views(patch, lambda view: replace(view, begun=Begun(view.live)))


@mutation("who joins in the middle of a step gets a share of it")
def _(patch):
    def generous(plan, joined):
        admitted = ADMIT(plan, joined)
        rich = max(admitted.assignment, key=lambda group: len(admitted.of(group)))
        if not joined or not admitted.of(rich):
            return admitted
        share = {rich: admitted.of(rich)[1:], min(joined): admitted.of(rich)[:1]}
        return replace(admitted, assignment={**admitted.assignment, **share})

    patch.setattr(scheduler, "admit", generous)


@mutation("a step is committed before all buckets are there")
def _(patch):
    def hasty(state):
        action = NEXT_ACTION(state)
        return recovery.Update(state.step) if isinstance(action, recovery.Reduce) and state.have else action

    patch.setattr(recovery, "next_action", hasty)


@mutation("a decided step is committed by who lacks a bucket")
def _(patch):
    patch.setattr(GroupState, "complete", property(lambda state: not state.finished and bool(state.have)))


@mutation("final buckets are not fetched")
def _(patch):
    _change_views(patch, lambda view: replace(view, missing={}))


@mutation("nobody waits for the transfers of a view")
def _(patch):
    def impatient(state):
        action = NEXT_ACTION(state)
        return NEXT_ACTION(replace(state, transferred=True)) if isinstance(action, recovery.Transfer) else action

    patch.setattr(recovery, "next_action", impatient)


@mutation("local gradients do not survive an epoch change")
def _(patch):
    def adopt(self, view):
        self.local = [0] * len(self.local)
        yield from GROUP_ADOPT(self, view)

    patch.setattr(Group, "_adopt", adopt)


@mutation("a microbatch is added again when the epoch changes during it")
def _(patch):
    def reset(self, epoch):
        self.local = [2 * part for part in self.local]
        GROUP_RESET(self, epoch)

    patch.setattr(Group, "reset", reset)


@mutation("a bucket is summed over those that happen to be there")
def _(patch):
    def gather(self, key, sources, interruptible=False):
        some = [source for source in sources if source == self.me] if key[0] == "sum" else sources
        result = yield from GROUP_GATHER(self, key, some, interruptible)
        if key[0] == "sum":
            for source in sources:
                self._inbound[key].setdefault(source, group.Sum())
        return result

    patch.setattr(Group, "_gather", gather)


# --- speeds ---------------------------------------------------------------------------------------------------------


@mutation("who takes the state does not learn who is slow")
def _(patch):
    patch.setattr(recovery, "_transferred", lambda state, event: TRANSFERRED(state, Transferred(event.epoch)))


@mutation("who takes the state plans on with what it knew before")
def _(patch):
    def transferred(state, event):
        return replace(TRANSFERRED(state, event), plan=state.plan) if state.ahead is None else TRANSFERRED(state, event)

    patch.setattr(recovery, "_transferred", transferred)


@mutation("every group goes by its own clock")
def _(patch):
    def progress(state, event):
        if isinstance(event, Updated):
            event = Updated(event.step, {**event.measured, state.me: 2 * event.measured.get(state.me, 0.0)})
        return PROGRESS(state, event)

    patch.setattr(recovery, "_progress", progress)


@mutation("a bucket that is fetched comes without the times")
def _(patch):
    def send(self, targets, key, value):
        GROUP_SEND(self, targets, key, group.Sum(value.gradient) if key[0] == "bucket" else value)

    patch.setattr(Group, "_send", send)


@mutation("who is slow depends on who is a member")
def _(patch):
    def adopt(state, view):
        new = ADOPT(state, view)
        tracks = {group: track for group, track in new.speeds.tracks.items() if group in view.live}
        return replace(new, speeds=replace(new.speeds, tracks=tracks))

    patch.setattr(recovery, "_adopt", adopt)


@mutation("a slow group gives away a microbatch that nobody takes")
def _(patch):
    def by_time(*arguments):
        found, reason = BY_TIME(*arguments)
        largest = max(found, key=lambda group: len(found[group].get(group, ())))
        return {**found, largest: {**found[largest], largest: found[largest].get(largest, [0])[1:]}}, reason

    patch.setattr(scheduler, "_by_time", by_time)


def _change_views(patch, change):
    """Every view that is proposed is changed on its way, ``begun`` included."""

    def propose(state):
        return tuple(recovery.Propose(change(action.view)) for action in PROPOSAL(state))

    patch.setattr(recovery, "_proposal", propose)


LOOK = group.look
NEXT_VIEW = membership.next_view
NEXT_ACTION = recovery.next_action
HAS_SAY = recovery._has_say
ADOPT = recovery._adopt
PROPOSAL = recovery._proposal
PATCH_PLAN = scheduler.patch_plan
ADMIT = scheduler.admit
BY_TIME = scheduler._by_time
PROGRESS = recovery._progress
TRANSFERRED = recovery._transferred
GROUP_ADOPT = Group._adopt
GROUP_RESET = Group.reset
GROUP_GATHER = Group._gather
GROUP_SEND = Group._send
