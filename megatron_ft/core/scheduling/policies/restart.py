"""``restart``: any loss ends the attempt, and the job goes on from its last checkpoint; for comparison.

It is what engines do without this layer: checkpoint and restart (``CKPT`` in SPARe, arXiv 2603.00357, and the baseline of
ReCoVer, arXiv 2605.11215).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from megatron_ft.core.scheduling import assignment
from megatron_ft.core.scheduling.policies.policy_port import Batch, StepPolicy, wiped_out
from megatron_ft.types import GroupId, Plan, listed


class Restart(StepPolicy):
    """The groups that the attempt began with share the batch evenly."""

    wipes_out = True

    def begin(self, batch: Batch, step: int, live: tuple[GroupId, ...], speeds: Mapping[GroupId, float]) -> Plan:
        return assignment.plan_step(step, batch.shards, batch.per_shard, live, batch.placement)

    def change(self, batch: Batch, plan: Plan, lost: Collection[GroupId], joined: Collection[GroupId]) -> Plan:
        if not lost:
            return super().change(batch, plan, lost, joined)
        reason = f"group {listed(sorted(lost), most=8)} lost: with the policy restart, any loss ends the attempt"
        return wiped_out(plan.step, reason)


def divisible_world(live: int, total: int) -> int:
    """Return the number of groups, of ``live``, with which an engine restarts that divides ``total`` microbatches evenly.

    It is the largest number that divides ``total``: one group less than a power of two is as good as half of it.
    """
    if live < 1 or total < 1:
        raise ValueError(f"live and total must both be at least 1, got {live} and {total}")
    return next(world for world in range(live, 0, -1) if total % world == 0)
