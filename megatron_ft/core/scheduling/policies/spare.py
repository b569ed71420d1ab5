"""``spare``: redundant shards stacked across groups, put in order by ReCtlr (SPARe, arXiv 2603.00357; ``rectlr``).

Every live group computes the first S shards of its stack. It contributes those that the matching gives it, and has the
others as standby parts, one for each shard. S begins at 1 and grows to at least ceil(N / (N - k)) after k losses; the
all-reduce begins as soon as S shards are computed, not all r (the paper's early all-reduce). A wipe-out (a shard without
a live host) ends the attempt, and the job goes on from its checkpoint with S = 1.

In the step of a loss nothing moves between living groups: what they have computed is in their sums. A lost shard goes to
a group that has it as standby, and costs nothing; else ReCtlr's new order says which host patches the whole shard. The
paper patches the same shards: those that no group has computed. The new orders hold from the next step on.

Groups beyond the first N host nothing, and compute nothing. When a group joins, the orders begin anew with the live
groups, because the paper has no rejoin.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import chain

from megatron_ft.core.replication.placement import Placement
from megatron_ft.core.scheduling import assignment
from megatron_ft.core.scheduling.policies import rectlr
from megatron_ft.core.scheduling.policies.past_losses import PastLosses
from megatron_ft.core.scheduling.policies.policy_port import Batch, Policy, wiped_out
from megatron_ft.types import GroupId, Plan, PlanOrigin, given

Shard = int


class Spare(Policy):
    """SPARe on the stacks of ``Batch.placement``."""

    remembers = wipes_out = True

    def plan(self, batch: Batch, step: int, origin: PlanOrigin, speeds: Mapping[GroupId, float]) -> Plan:
        placement, losses = given(batch.placement), tuple(chain.from_iterable(origin.past))
        base = tuple(sorted({*origin.live, *chain.from_iterable(losses)} & set(range(placement.groups))))
        plan = _begin(batch, step, _PAST.state(placement, base, items=losses), origin.live)
        for lost, joined in origin.changes:
            if plan.wipe_out:
                break
            losses = (*losses, lost)
            plan = _change(batch, plan, _PAST.state(placement, base, items=losses), lost, joined)
        return plan

    def most_parts(self, batch: Batch) -> int:
        return given(batch.placement).redundancy - 1


def _start(placement: Placement, base: tuple[GroupId, ...]) -> rectlr.Outcome:
    """Return the least S that works for the groups of a run, or for those that are there when one has joined."""
    return rectlr.reconfigure(tuple(placement.stacks), base, 1)


def _after(before: rectlr.Outcome, lost: tuple[GroupId, ...]) -> rectlr.Outcome:
    """Return ReCtlr's decision after a loss; after a wipe-out nothing follows."""
    if before.phase == "wipe-out":
        return before
    return rectlr.reconfigure(before.orders, before.contributes.keys() - set(lost), before.S)


_PAST: PastLosses[rectlr.Outcome, tuple[GroupId, ...]] = PastLosses(_start, _after)


def _begin(batch: Batch, step: int, outcome: rectlr.Outcome, live: tuple[GroupId, ...]) -> Plan:
    """Return the plan with which a step begins: the order stands, so the phase is ``fixed``."""
    if outcome.phase == "wipe-out":
        return wiped_out(step, outcome.reason)
    indices, none = list(range(batch.per_shard)), dict[Shard, list[int]]()
    own = dict.fromkeys(live, none) | {
        group: dict.fromkeys(shards, indices) for group, shards in outcome.contributes.items()
    }
    idle = {
        group: [shard for shard in outcome.orders[group][: outcome.S] if shard not in shards]
        for group, shards in outcome.contributes.items()
    }
    standby = assignment.NamedParts(step, {group: shards for group, shards in idle.items() if shards}, batch.per_shard)
    reason = f"{len(outcome.contributes)} of {batch.shards} groups live, each computes {outcome.S} shards"
    return Plan(
        step, assignment.Named(step, own), reason, standby=standby, facts={"S": outcome.S, "phase": "fixed", "moves": 0}
    )


def _change(
    batch: Batch, plan: Plan, outcome: rectlr.Outcome, lost: Collection[GroupId], joined: Collection[GroupId]
) -> Plan:
    """Return the plan of the running step after a loss: promoted groups, and patches as the new order has them."""
    placement = given(batch.placement)
    if outcome.phase == "wipe-out":
        there = (plan.assignment.keys() - set(lost)) | set(joined)
        if placement.wiped_out({group for group in there if group < placement.groups}):
            return wiped_out(plan.step, outcome.reason)
        # A host has joined in this step; from the next one on the orders begin anew with it.
        return assignment.admit(assignment.patch_plan(plan, lost, placement), joined)
    plan = plan.without_standby_of(lost)
    kept = {group: own for group, own in plan.assignment.items() if group not in lost}
    pool = [microbatch for group in sorted(lost) for microbatch in plan.of(group)]
    taken = assignment.promotions(plan, pool, outcome.contributes)
    missing = set(pool) - set(chain.from_iterable(taken.values()))
    hosts = {shard: group for group, shards in outcome.contributes.items() for shard in shards}
    for microbatch in sorted(missing):
        taken.setdefault(hosts[microbatch.shard], []).append(microbatch)
    added = {group: (*own, *taken.get(group, ())) for group, own in kept.items()}
    facts = {"S": outcome.S, "phase": outcome.phase, "moves": len(outcome.moves)}
    changed = replace(plan, assignment=added, reason=outcome.reason, patched=plan.patched | missing, facts=facts)
    return assignment.admit(changed, joined)
