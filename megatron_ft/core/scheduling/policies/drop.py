"""``drop``: a lost group's shard is left out (ReCoVer, arXiv 2605.11215, ablation); for comparison.

The batch shrinks, and the gradient is divided by the number of microbatches left, so it differs from the failure-free
run's; the paper shows loss spikes. A slow group keeps its shard.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from megatron_ft.core.scheduling.policies.policy_port import Batch, StepPolicy
from megatron_ft.types import GroupId, Microbatch, Plan


class Drop(StepPolicy):
    """Every live group computes its own shard."""

    shrinks = True

    def begin(self, batch: Batch, step: int, live: tuple[GroupId, ...], speeds: Mapping[GroupId, float]) -> Plan:
        own = {g: tuple(Microbatch(step, g, i) for i in range(batch.per_shard)) for g in live if g < batch.shards}
        left, whole = len(own) * batch.per_shard, batch.shards * batch.per_shard
        some = f"{left} of {whole} microbatches, the gradient is divided by {left}"
        reason = f"{len(own)} of {batch.shards} groups live: {some}"
        return Plan(step, own, reason)

    def change(self, batch: Batch, plan: Plan, lost: Collection[GroupId], joined: Collection[GroupId]) -> Plan:
        return replace(plan, assignment={g: own for g, own in plan.assignment.items() if g not in lost})
