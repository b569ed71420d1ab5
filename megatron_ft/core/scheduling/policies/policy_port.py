"""The port of a policy: which group contributes which microbatches of a step, and which ones it computes as standby.

Standby work is the one mechanism of redundancy. A group computes a *part*, microbatches that another group contributes,
and keeps its gradient apart. When the contributor is lost in the same step, the group is *promoted*: it adds that part to
its own gradient, and nothing is computed again. The protocol, the ranks and the simulated cluster know plans only
(:class:`~megatron_ft.types.Plan`), so a new policy is one file in this folder and a name in its ``__init__``.

A plan is a pure function of its arguments, so all groups make the same one without a message. A policy whose plans depend
on the losses of earlier steps sets ``remembers`` and finds them in ``PlanOrigin.past``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar

from megatron_ft.core.replication.placement import Placement
from megatron_ft.core.scheduling import assignment
from megatron_ft.types import GroupId, Plan, PlanOrigin


@dataclass(frozen=True)
class Batch:
    """The batch of a step.

    Attributes:
        shards: number N of shards, and of groups at the first start.
        per_shard: number G of microbatches in a shard.
        placement: the groups that host each shard; None: every group hosts every shard.
    """

    shards: int
    per_shard: int
    placement: Placement | None = None


@dataclass(frozen=True)
class Policy(ABC):
    """A policy. Its fields are settings."""

    remembers: ClassVar[bool] = False
    """Plans depend on the losses of earlier steps."""
    shrinks: ClassVar[bool] = False
    """A step sums only over what the live groups have; all other policies sum over all microbatches of the step."""
    balances: ClassVar[bool] = False
    """A slow group gets less work."""
    wipes_out: ClassVar[bool] = False
    """A loss may end the attempt although groups are left: the job then goes on from its checkpoint."""

    @abstractmethod
    def plan(self, batch: Batch, step: int, origin: PlanOrigin, speeds: Mapping[GroupId, float]) -> Plan:
        """Return the plan of ``step``, which began with ``origin``; with ``Plan.wipe_out`` where there is none.

        ``speeds``: speed of the stragglers relative to that of the others, which is 1."""

    def most_parts(self, batch: Batch) -> int:
        """Return the largest number of standby parts that a group can have; each takes memory like its gradient."""
        return 0


class StepPolicy(Policy):
    """A policy whose plan follows from the members that the step began with, and from the changes since."""

    @abstractmethod
    def begin(self, batch: Batch, step: int, live: tuple[GroupId, ...], speeds: Mapping[GroupId, float]) -> Plan:
        """Return the plan with which ``step`` begins.

        Args:
            batch: the step's batch.
            step: the step.
            live: the live groups, ascending; at least one.
            speeds: speed of the stragglers relative to that of the others, which is 1.
        """

    def change(self, batch: Batch, plan: Plan, lost: Collection[GroupId], joined: Collection[GroupId]) -> Plan:
        """Return the plan of the running step after ``lost`` were left out and ``joined`` entered without a share of it."""
        return assignment.admit(assignment.patch_plan(plan, lost, batch.placement), joined)

    def plan(self, batch: Batch, step: int, origin: PlanOrigin, speeds: Mapping[GroupId, float]) -> Plan:
        plan = self.begin(batch, step, origin.live, speeds)
        for lost, joined in origin.changes:
            if plan.wipe_out:
                break
            plan = self.change(batch, plan, lost, joined)
        return plan


def wiped_out(step: int, reason: str) -> Plan:
    """Return the plan of a step that cannot be finished."""
    return Plan(step, {}, reason, wipe_out=reason)
