"""``recover``: roles of groups, with constant microbatches (ReCoVer, arXiv 2605.11215, versatile workload).

Majors contribute G microbatches, one minor the remainder. A spare has what one contributor computes as its standby part,
the same microbatches, so that a promoted spare keeps the step exact. A loss without a spare is a policy boundary: every
survivor computes b or b - 1 of the lost microbatches, and from the next step on the roles are dealt out anew.

The paper's bucket recovery needs nothing here. *Blocking* (a promotion): the survivors wait for the new communicator only,
and reduce the unfinished buckets again. *Non-blocking* (a boundary): the communicator is built while the extra microbatches
run. Where the paper rolls reduced buckets back to snapshots, a group's own gradient is still there in a buffer of its own
(``run.engines.port``), and a bucket that a survivor has finished stays final.

When a group joins, the roles are dealt out anew among the live groups, because the paper has no rejoin.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain

from megatron_ft.core.scheduling import assignment
from megatron_ft.core.scheduling.policies import recover_roles
from megatron_ft.core.scheduling.policies.past_losses import PastLosses
from megatron_ft.core.scheduling.policies.policy_port import Batch, Policy, wiped_out
from megatron_ft.core.scheduling.policies.recover_roles import Roles
from megatron_ft.types import GroupId, Plan, PlanOrigin

Losses = tuple[tuple[GroupId, ...], ...]
"""The groups that each view of one step left out."""


class Recover(Policy):
    """ReCoVer, exact."""

    remembers = True

    def plan(self, batch: Batch, step: int, origin: PlanOrigin, speeds: Mapping[GroupId, float]) -> Plan:
        shape = batch.shards, batch.per_shard
        base = tuple(sorted({*origin.live, *chain.from_iterable(chain.from_iterable(origin.past))}))
        roles = _PAST.state(*shape, base, items=origin.past)
        facts = {"quota": roles.quota, "majors": len(roles.majors), "spares": len(roles.shadows)}
        plan = replace(recover_roles.plan(roles, step, *shape), facts={"recovery": "none", **facts})
        for lost, joined in origin.changes:
            entered = {group: own for group, own in plan.assignment.items() if group not in roles.live}
            gone = [group for group in lost if group in roles.live]
            if gone:  # else only groups without a role yet, which have joined in this step
                recovery = recover_roles.on_failure(roles, gone, exact=True)
                left = tuple(group for group in entered if group not in lost)
                if recovery.kind == "wipe-out" and not left:
                    return wiped_out(step, recovery.reason)
                if recovery.kind == "wipe-out":  # only groups that have joined in this step are left
                    plan = assignment.patch_plan(plan, lost)
                    account = {group: len(plan.of(group)) for group in left}
                    roles = replace(recover_roles.dealt(*shape, left), contributed=account, boundary=True, shadows={})
                else:
                    roles, plan = recovery.roles, recover_roles.patch(plan, recovery)
                plan = replace(plan, facts={"recovery": recovery.kind, **facts, "b": recovery.b, "z": recovery.z})
            there = {**entered, **{group: plan.of(group) for group in roles.live}}
            there = {group: own for group, own in there.items() if group not in lost} | dict.fromkeys(joined, ())
            plan = replace(plan, assignment=dict(sorted(there.items())))
        return plan

    def most_parts(self, batch: Batch) -> int:
        return 1


def _after(roles: Roles, losses: Losses) -> Roles:
    """Return the roles with which the step after one with ``losses`` begins."""
    for lost in losses:
        if gone := [group for group in lost if group in roles.live]:
            roles = recover_roles.on_failure(roles, gone, exact=True).roles
    return recover_roles.next_step(roles)


_PAST: PastLosses[Roles, Losses] = PastLosses(recover_roles.dealt, _after)
