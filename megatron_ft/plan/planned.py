"""A policy whose plans are those of the real groups (``core.scheduling.policies``), made again for every membership.

It covers every policy and setting of a run, rejoin included, at the cost of a plan for each change: for the tens of groups
of a run that is compared (``like_run``), not for the sweeps of ``policy_models``.
"""

from __future__ import annotations

from collections.abc import Collection

from megatron_ft.core.detection.stragglers import Speeds
from megatron_ft.core.protocol.state import Job
from megatron_ft.plan.policy_models import Loss, Policy
from megatron_ft.plan.setting import Setting
from megatron_ft.types import GroupId, Plan, PlanOrigin


def largest_load(plan: Plan, live: Collection[GroupId]) -> int:
    """Return how many microbatches the busiest of the ``live`` groups computes, standby work included."""
    return max(len(plan.of(group)) + len(plan.standby_of(group)) for group in live)


class Planned(Policy):
    """The policy of ``job``. ``rejoins``: lost groups come back, from the next step on."""

    def __init__(self, setting: Setting, job: Job, rejoins: bool) -> None:
        self.job, self.rejoins = job, rejoins
        super().__init__(setting)

    def restart(self, gone: Collection[GroupId] = ()) -> None:
        super().restart(gone)
        self._begin(PlanOrigin(tuple(sorted(self.live))))

    def stacks(self) -> float:
        return largest_load(self._plan, self.live) / self.per_shard

    def lose(self, groups: Collection[GroupId]) -> Loss:
        self.live -= set(groups)
        if not self.live:
            return Loss(wiped_out=True)
        before = self._plan
        self._begin(self._origin.after(groups, ()))
        if self._plan.wipe_out:
            return Loss(wiped_out=True)
        anew = self._plan.patched - before.patched
        return Loss(patch=max(len(anew.intersection(self._plan.of(group))) for group in self.live) / self.per_shard)

    def begin_step(self) -> None:
        following = self._origin.following(tuple(sorted(self.live)), self.job.policy.remembers)
        if following != self._origin:
            self._begin(following)

    def rejoin(self, group: GroupId) -> None:
        self.live.add(group)
        self._begin(PlanOrigin(tuple(sorted(self.live))))

    def _begin(self, origin: PlanOrigin) -> None:
        self._origin = origin
        self._plan: Plan = self.job.plan(0, origin, Speeds())
