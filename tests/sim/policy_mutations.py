"""Planted bugs in standby work and in the decisions of policies, each with the policy whose histories find it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from megatron_ft.core.protocol import machine
from megatron_ft.core.scheduling import assignment
from megatron_ft.core.scheduling.policies import recover_roles
from megatron_ft.proof.scenario import draw, draw_of
from megatron_ft.proof.simulated_group import Group
from megatron_ft.types import Plan
from tests.sim.planted import registry

MUTATIONS, mutation = registry(range(1500), draw)


@mutation("standby work is added to the group's own gradient", "is not group", draw=partial(draw_of, "replication"))
def _(patch):
    patch.setattr(Plan, "part", lambda plan, group, microbatch: 0)


@mutation("a promoted part is not added", "counts 0, not 1", draw=partial(draw_of, "replication"))
def _(patch):
    patch.setattr(Group, "_contribute", lambda group: None)


@mutation(
    "a promoted part is added in each attempt to reduce",
    "counts 2, not 1",
    range(300, 1500),
    partial(draw_of, "spare"),
)
def _(patch):
    def contribute(group):
        for part in group.state.plan.promoted(group.me):
            more = group.parts.get(part, [0] * len(group.local))
            group.local = [bucket + other for bucket, other in zip(group.local, more, strict=True)]

    patch.setattr(Group, "_contribute", contribute)


@mutation("every group that stands by is promoted", "counts 2, not 1", draw=partial(draw_of, "replication"))
def _(patch):
    def promotions(plan, pool, survivors):
        lost = set(pool)
        parts = {group: [part for part in plan.standby.get(group, ()) if part[0] in lost] for group in survivors}
        return {group: [m for part in own for m in part] for group, own in parts.items() if own}

    patch.setattr(assignment, "promotions", promotions)


@mutation("a lost microbatch with a standby is patched as well", "counts 2, not 1", draw=partial(draw_of, "slack"))
def _(patch):
    def patch_plan(plan, lost, placement=None):
        found = PATCH_PLAN(plan, lost, placement)
        new = sorted(found.standing_in - plan.standing_in)
        others = [group for group in found.assignment if new and new[0] not in found.of(group)]
        if not others:
            return found
        return replace(found, assignment={**found.assignment, others[0]: (*found.of(others[0]), new[0])})

    patch.setattr(assignment, "patch_plan", patch_plan)


@mutation("each group deals the roles out in an order of its own", "counts 2, not 1", draw=partial(draw_of, "recover"))
def _(patch):
    def dealt(roles, *rest, **named):
        found = ON_FAILURE(roles, *rest, **named)
        shifted = found.roles.majors[1:] + found.roles.majors[:1]
        global _turns
        _turns += 1
        return replace(found, roles=replace(found.roles, majors=shifted)) if _turns % 3 == 0 else found

    patch.setattr(recover_roles, "on_failure", dealt)


@mutation("a wipe-out is overlooked", "after the wipe-out", draw=partial(draw_of, "replication"))
def _(patch):
    patch.setattr(machine, "_wipe_out", lambda state, view: "")


@mutation(
    "a group stops at any loss, as if it were a wipe-out",
    "stops although it has a seat",
    draw=partial(draw_of, "spare"),
)
def _(patch):
    patch.setattr(machine, "_wipe_out", lambda state, view: "wipe-out" if view.lost else "")


@mutation(
    "a view after which no group goes on may be overlooked by one",
    "after the wipe-out",
    draw=partial(draw_of, "restart"),
)
def _(patch):
    patch.setattr(machine, "_wipe_out", lambda state, view: "" if state.me == 0 else WIPE_OUT(state, view))


@mutation(
    "no standby work is done after a loss, and the part counts as computed",
    "counts 0, not 1",
    draw=partial(draw_of, "replication"),
)
def _(patch):
    def add(group, microbatch):
        if not (group.state.plan.part(group.me, microbatch) and group.state.view.epoch):
            ADD(group, microbatch)

    patch.setattr(Group, "_add", add)


_turns = 0
PATCH_PLAN = assignment.patch_plan
ON_FAILURE = recover_roles.on_failure
WIPE_OUT = machine._wipe_out
ADD = Group._add
