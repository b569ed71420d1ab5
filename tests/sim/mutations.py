"""Planted bugs: each breaks one rule of the protocol or of its shell, and the checkers must see it in a simulated world.

``MUTATIONS`` maps the description of a bug to a ``planted.Bug``.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_ft.core.detection import state_divergence
from megatron_ft.core.detection.stragglers import Speeds
from megatron_ft.core.lifecycle import checkpoint_protocol, last_state
from megatron_ft.core.protocol import machine, membership
from megatron_ft.core.protocol.machine import GroupState, Transferred, Updated
from megatron_ft.core.scheduling import assignment
from megatron_ft.proof import simulated_group
from megatron_ft.proof.returning_group import Following
from megatron_ft.proof.scenario import draw, draw_fixed, draw_impure, draw_wiped_out
from megatron_ft.proof.simulated_group import Group
from megatron_ft.proof.simulated_store import Store
from megatron_ft.types import Plan, PlanOrigin
from tests.sim.planted import registry

MUTATIONS, mutation = registry(range(1500), draw_fixed)


# --- agreement ------------------------------------------------------------------------------------------------------


@mutation("a report of another epoch counts", "live groups are")
def _(patch):
    def reports(state, found):
        taken = {report.group: replace(report, epoch=state.view.epoch) for report in found}
        return replace(state, reports={**state.reports, **taken})

    patch.setattr(machine, "_reports", reports)
    patch.setattr(simulated_group, "read_view", lambda store, epoch, missing: _older(store, epoch, missing))


def _older(store, epoch, missing):
    view, reports = LOOK(store, epoch, missing)
    return view, reports or LOOK(store, epoch - 1, missing)[1]


@mutation("a later view of an epoch takes the place of the first", "view 2 is written when 3 are there")
def _(patch):
    def create(store, key, value):
        store.values[key] = value
        return value

    patch.setattr(Store, "create", create)


@mutation("a view is proposed without waiting for reports", "lives and is left out")
def _(patch):
    def hasty(view, reports, dead, silent, *rest):
        missing = {group: "no report yet" for group in view.live if group not in reports}
        return NEXT_VIEW(view, reports, dead, {**silent, **missing}, *rest)

    patch.setattr(membership, "next_view", hasty)


@mutation("the time in which the store is away counts as waiting", "no progress", range(100, 200))
def _(patch):
    patch.setattr(machine, "_LOOKS", 0.01)


@mutation("the step that is least far goes on", "no progress")
def _(patch):
    def backwards(view, reports, *rest, **named):
        least = min(report.step for report in reports.values())
        return NEXT_VIEW(view, {g: replace(r, step=least) for g, r in reports.items()}, *rest, **named)

    patch.setattr(membership, "next_view", backwards)


@mutation("no view is decided when all groups are taken for dead", "no progress")
def _(patch):
    def undecided(view, *rest, **named):
        found = NEXT_VIEW(view, *rest, **named)
        return found if found is None or found.live else None

    patch.setattr(membership, "next_view", undecided)


@mutation("a group without a state waits for ever for lost groups with one", "no progress", range(1000, 1050))
def _(patch):
    patch.setattr(machine, "_has_say", lambda state: state.synced or not any(r.synced for r in state.reports.values()))
    patch.setattr(machine, "_give_up", lambda state: state)


# --- membership -----------------------------------------------------------------------------------------------------


@mutation("a group that is left out goes on", "no progress")
def _(patch):
    def adopt(state, view):
        if state.me not in view.live and view.live:
            view = replace(view, live=tuple(sorted((*view.live, state.me))))
        return ADOPT(state, view)

    patch.setattr(machine, "_adopt", adopt)


@mutation("an older start counts as a member in place of its successor", "live groups are", range(550, 600))
def _(patch):
    patch.setattr(
        machine, "_adopt", lambda s, view: ADOPT(replace(s, incarnation=view.incarnations.get(s.me, 0)), view)
    )


@mutation("a group that is behind does not take the state", "the model is")
def _(patch):
    _change_views(patch, lambda view: replace(view, source=None, behind=()))


# --- coming back ----------------------------------------------------------------------------------------------------


@mutation("a group joins although its donor is no member any more", "the model is", range(4750, 4800))
def _(patch):
    patch.setattr(membership, "admissible", lambda view, asked: asked.group not in view.live)


@mutation("a group joins although others are behind", "the model is", range(1000, 1050))
def _(patch):
    _admit_where(patch, lambda view, reports: view.behind)


@mutation("a group joins although a bucket is final", "counts 0, not 1", range(3250, 3300))
def _(patch):
    _admit_where(patch, lambda view, reports: view.final)


def _admit_where(patch, condition):
    """Requests to join are granted also where this holds, and no state is handed to the joining group."""

    def next_view(view, reports, dead, silent, reason, asking=None, noticed=""):
        found = NEXT_VIEW(view, reports, dead, silent, reason, asking, noticed)
        if not found or not found.live or found.joined or not condition(found, reports):
            return found
        joined = membership._entering(view, found.live, asking or {})
        live = tuple(sorted((*found.live, *joined)))
        return replace(found, live=live, joined=tuple(joined), incarnations={**found.incarnations, **joined})

    patch.setattr(membership, "next_view", next_view)


@mutation("a joining group computes with an incomplete state", ", it is at None")
def _(patch):
    patch.setattr(machine, "start", lambda *arguments: replace(START(*arguments), synced=True, following=False))


@mutation("a joining group keeps its own model in place of the donors'", ", it is at None")
def _(patch):
    async def follow(self, step):
        return machine.CaughtUp(self.state.speeds)

    patch.setattr(Group, "follow", follow)


@mutation("a joining group accepts an older state of its donors", "the model is")
def _(patch):
    def advance(self, limit=None):
        found = ADVANCE(self, limit)
        return found if found is None or limit is None else replace(found, step=limit)

    patch.setattr(Following, "advance", advance)


@mutation("a joining group does not learn the speeds", "with the speeds")
def _(patch):
    def progress(state, event):
        return PROGRESS(state, machine.CaughtUp(Speeds()) if isinstance(event, machine.CaughtUp) else event)

    patch.setattr(machine, "_progress", progress)


@mutation("a joining group that has lost a donor waits for ever", "no progress")
def _(patch):
    async def follow(self, step):
        while not self._inbox and (self._following.advance(step) is None or self._following.advance(step).step < step):
            await self._wait(self.cluster.kernel.now + 1000.0)
        return None if self._inbox else await FOLLOW(self, step)

    patch.setattr(Group, "follow", follow)


@mutation("no group announces that a request has ended the epoch", "lives and is left out")
def _(patch):
    def close(state):
        state, actions = CLOSE(state)
        return state, tuple(a for a in actions if not (isinstance(a, machine.Announce) and a.after >= 0))

    patch.setattr(machine, "_close", close)


# --- plans and sums -------------------------------------------------------------------------------------------------


@mutation("a patched microbatch is given to two groups", "counts 2, not 1")
def _(patch):
    def twice(plan, lost, placement=None):
        patched = PATCH_PLAN(plan, lost, placement)
        new = sorted(patched.patched - plan.patched)
        if not new or len(patched.assignment) < 2:
            return patched
        other = next(group for group in patched.assignment if new[0] not in patched.of(group))
        return replace(patched, assignment={**patched.assignment, other: (*patched.of(other), new[0])})

    patch.setattr(assignment, "patch_plan", twice)


@mutation("what a lost group had is forgotten", "counts 0, not 1")
def _(patch):
    def forgetful(plan, lost, placement=None):
        kept = {group: own for group, own in plan.assignment.items() if group not in lost}
        return Plan(plan.step, kept, plan.reason, plan.patched)

    patch.setattr(assignment, "patch_plan", forgetful)


@mutation("the interrupted step is planned anew", "counts 2, not 1")
def _(patch):
    _change_views(patch, lambda view: replace(view, plan_origin=PlanOrigin(view.live)))


@mutation("a group that joins in the middle of a step gets a share of it", "counts 2, not 1")
def _(patch):
    def generous(plan, joined):
        admitted = ADMIT(plan, joined)
        rich = max(admitted.assignment, key=lambda group: len(admitted.of(group)))
        if not joined or not admitted.of(rich):
            return admitted
        share = {rich: admitted.of(rich)[1:], min(joined): admitted.of(rich)[:1]}
        return replace(admitted, assignment={**admitted.assignment, **share})

    patch.setattr(assignment, "admit", generous)


@mutation("a step is committed before all buckets are there", "counts 0, not 1")
def _(patch):
    def hasty(state):
        action = NEXT_ACTION(state)
        return machine.Update(state.step) if isinstance(action, machine.Reduce) and state.reduced_buckets else action

    patch.setattr(machine, "next_action", hasty)


@mutation("a decided step is committed by a group that lacks a bucket", "counts 0, not 1")
def _(patch):
    patch.setattr(GroupState, "complete", property(lambda state: not state.finished and bool(state.reduced_buckets)))


@mutation("final buckets are not fetched", "counts 0, not 1")
def _(patch):
    _change_views(patch, lambda view: replace(view, missing={}))


@mutation("no group waits for the transfers of a view", "the model is")
def _(patch):
    def impatient(state):
        action = NEXT_ACTION(state)
        return NEXT_ACTION(replace(state, transferred=True)) if isinstance(action, machine.Transfer) else action

    patch.setattr(machine, "next_action", impatient)


@mutation("local gradients do not survive an epoch change", "counts 0, not 1")
def _(patch):
    async def adopt(self, view):
        self.local = [0] * len(self.local)
        await GROUP_ADOPT(self, view)

    patch.setattr(Group, "adopt", adopt)


@mutation("a microbatch is added again when the epoch changes during it", "counts 8, not 1")
def _(patch):
    def reset(self, epoch):
        self.local = [2 * part for part in self.local]
        GROUP_RESET(self, epoch)

    patch.setattr(Group, "reset", reset)


@mutation("a bucket is summed over those that happen to be there", "counts 0, not 1")
def _(patch):
    async def gather(self, key, sources, interruptible=False):
        some = [source for source in sources if source == self.me] if key[0] == "sum" else sources
        result = await GROUP_GATHER(self, key, some, interruptible)
        if key[0] == "sum":
            for source in sources:
                self._inbound[key].setdefault(source, simulated_group.Sum())
        return result

    patch.setattr(Group, "_gather", gather)


# --- speeds ---------------------------------------------------------------------------------------------------------


@mutation("a group that takes the state does not learn the speeds", "with the speeds")
def _(patch):
    patch.setattr(machine, "_transferred", lambda state, event: TRANSFERRED(state, Transferred(event.epoch)))


@mutation("a joining group plans with the speeds that it knew before", "counts 0, not 1")
def _(patch):
    def progress(state, event):
        new = PROGRESS(state, event)
        return replace(new, plan=state.plan) if isinstance(event, machine.CaughtUp) else new

    patch.setattr(machine, "_progress", progress)


@mutation("every group goes by its own clock", "with the speeds")
def _(patch):
    def progress(state, event):
        if isinstance(event, Updated):
            event = Updated(event.step, {**event.measured, state.me: 2 * event.measured.get(state.me, 0.0)})
        return PROGRESS(state, event)

    patch.setattr(machine, "_progress", progress)


@mutation("a bucket that is fetched comes without the times", "with the speeds", range(100, 200))
def _(patch):
    def send(self, targets, key, value):
        GROUP_SEND(self, targets, key, simulated_group.Sum(value.gradient) if key[0] == "bucket" else value)

    patch.setattr(Group, "_send", send)


@mutation("speeds depend on the membership", "with the speeds")
def _(patch):
    def adopt(state, view):
        new = ADOPT(state, view)
        tracks = {group: track for group, track in new.speeds.tracks.items() if group in view.live}
        return replace(new, speeds=replace(new.speeds, tracks=tracks))

    patch.setattr(machine, "_adopt", adopt)


@mutation("a slow group gives away a microbatch that no group takes", "counts 0, not 1")
def _(patch):
    def by_time(*arguments):
        found, reason = BY_TIME(*arguments)
        largest = max(found, key=lambda group: len(found[group].get(group, ())))
        return {**found, largest: {**found[largest], largest: found[largest].get(largest, [0])[1:]}}, reason

    patch.setattr(assignment, "_by_time", by_time)


# --- checkpoints ------------------------------------------------------------------------------------------------------


@mutation("a group that learns too late of a save saves its present step", "has parts of different states")
def _(patch):
    def eager(order, me, step, view, has_state, since):
        return ANSWER(replace(order, at=step) if order.at < step else order, me, step, view, has_state, since)

    patch.setattr(checkpoint_protocol, "answer", eager)


@mutation("a save holds in every epoch", "has parts of different states")
def _(patch):
    def lasting(order, me, step, view, has_state, since):
        return ANSWER(replace(order, epoch=view.epoch), me, step, view, has_state, min(since, view.epoch))

    patch.setattr(checkpoint_protocol, "answer", lasting)


# --- the last state ---------------------------------------------------------------------------------------------------


def _overlook(patch, overlooked):
    """A group publishes what its ranks hold, whatever these parts lack."""

    def refusal(parts, ranks, at):
        return REFUSAL(overlooked(parts, ranks, at), ranks, at)

    patch.setattr(last_state, "refusal", refusal)


@mutation(
    "a group saves its state before all of its ranks have taken it",
    "parts of different states",
    range(300),
    draw_wiped_out,
)
def _(patch):
    _overlook(patch, lambda parts, ranks, at: [replace(part, step=at) if part.step is None else part for part in parts])


@mutation("the ranks of a group save different steps", "parts of different states", range(300), draw_wiped_out)
def _(patch):
    _overlook(patch, lambda parts, ranks, at: [replace(part, step=part.step and at) for part in parts])


@mutation(
    "a group publishes its state although one of its ranks has died", "without a part", range(100), draw_wiped_out
)
def _(patch):
    def complete(parts, ranks, at):
        there = {part.position for part in parts}
        return [*parts, *(last_state.Part(rank, at) for rank in range(ranks) if rank not in there)]

    _overlook(patch, complete)


@mutation(
    "a group takes the loss of its donors for that of all members", "saves the last state, and", range(1500), draw
)
def _(patch):
    patch.setattr(last_state, "fate", lambda members, me, donors: "lost")


@mutation(
    "a group saves the state of the step before as that of its step",
    "has a part of another state",
    range(300),
    draw_wiped_out,
)
def _(patch):
    holds = Following.holds

    def late(self, rank, now):
        found = holds(self, rank, now)
        return None if found is None else replace(found, step=found.step + 1)

    patch.setattr(Following, "holds", late)


# --- states that differ, sizes of a batch, exact reduction --------------------------------------------------------------


@mutation("no state is compared at an entry", "with another state", range(600), draw_impure)
def _(patch):
    patch.setattr(state_divergence, "compares_all", lambda view, step: False)


@mutation(
    "groups that have come back decide which state is right", "although its state is right", range(600), draw_impure
)
def _(patch):
    patch.setattr(state_divergence, "doubted", lambda *arguments: frozenset())


@mutation("a group keeps the old plan when the size of the batch changes", "counts 0, not 1", range(300), draw)
def _(patch):
    def progress(state, event):
        after = PROGRESS(state, event)
        return replace(after, plan=state.plan) if isinstance(event, machine.BatchResized) else after

    patch.setattr(machine, "_progress", progress)


@mutation("a group comes back with the old size of the batch", "counts 0, not 1", range(300), draw)
def _(patch):
    def per_shard(self, step):
        return self.state.job.per_shard if self.incarnation else PER_SHARD(self, step)

    patch.setattr(Group, "per_shard", per_shard)


@mutation("buckets of an earlier attempt count", "is not complete at group", range(350, 1500), draw)
def _(patch):
    def final(state):
        return state.reduced_buckets | set(state.view.final if state.view.step == state.step else ())

    patch.setattr(GroupState, "final", property(final))


@mutation("a digest counts as a contribution", "counts 0, not 1", draw=draw)
def _(patch):
    def progress(state, event):
        after = PROGRESS(state, event)
        counts = isinstance(event, machine.Computed) and event.digest_only
        return replace(after, computed=after.computed | {event.microbatch}) if counts else after

    patch.setattr(machine, "_progress", progress)


def _change_views(patch, change):
    """Apply a change to every proposed view, ``begun`` included."""

    def propose(state):
        return tuple(replace(action, view=change(action.view)) for action in PROPOSAL(state))

    patch.setattr(machine, "_proposal", propose)


ANSWER = checkpoint_protocol.answer
REFUSAL = last_state.refusal
LOOK = simulated_group.read_view
START = machine.start
CLOSE = machine._close
FOLLOW = Group.follow
ADVANCE = Following.advance
NEXT_VIEW = membership.next_view
NEXT_ACTION = machine.next_action
ADOPT = machine._adopt
PROPOSAL = machine._proposal
PATCH_PLAN = assignment.patch_plan
ADMIT = assignment.admit
BY_TIME = assignment._by_time
PROGRESS = machine._progress
TRANSFERRED = machine._transferred
GROUP_ADOPT = Group.adopt
GROUP_RESET = Group.reset
GROUP_GATHER = Group._gather
GROUP_SEND = Group._send
PER_SHARD = Group.per_shard
