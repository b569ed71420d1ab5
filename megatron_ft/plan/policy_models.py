"""Cost of a loss with each policy, in *stacks*: the time that one group takes for one shard.

A policy knows the live groups, the compute part of a step, and the cost of a loss in the running step. ``core`` makes
every decision. What is left out here are the microbatches: whole plans (``planned``) of 1000 groups take a hundred times as
long (500 steps of ``stacked_quota_rejoin``: 5.8 s instead of 0.04 s), too long for sweeps of thousands of runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass

from megatron_ft.core.replication import placement
from megatron_ft.core.replication.placement import Placement
from megatron_ft.core.scheduling import assignment
from megatron_ft.core.scheduling.policies import recover_roles, rectlr
from megatron_ft.core.scheduling.policies.replication import replica_sets
from megatron_ft.core.scheduling.policies.restart import divisible_world
from megatron_ft.errors import ConfigError
from megatron_ft.plan.setting import Setting
from megatron_ft.types import GroupId


@dataclass(frozen=True)
class Loss:
    """Consequence of a loss: ``patch`` stacks to compute, one after the other, before the next all-reduce; or a
    wipe-out."""

    patch: float = 0.0
    wiped_out: bool = False


class Policy(ABC):
    """A policy with all groups live at the start.

    Attributes:
        rejoins: Lost groups come back.
        plans_restarts: A planned restart may be worth its time.
        spares_stragglers: A straggler gets less work; with the other policies it delays all groups.
        stacked: A group reads ``redundancy`` shards in every step, otherwise only its own.
        whole: The placement is made for all groups, so a restart needs all of them.
    """

    rejoins = False
    plans_restarts = False
    spares_stragglers = False
    stacked = False
    whole = False

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.groups = setting.cluster.groups
        self.per_shard = setting.cluster.microbatches
        if self.whole and setting.restart_finds != "everybody":
            raise ConfigError(
                f"restart_finds is {setting.restart_finds!r}; {type(self).__name__.lower()} has a placement for all groups "
                f'and cannot restart with fewer: simulate it with "everybody", or another policy'
            )
        self.live: set[GroupId] = set()
        self.restart()

    def restart(self, gone: Collection[GroupId] = ()) -> None:
        """Make all groups live, except those that are lost for good."""
        self.live = set(range(self.groups)) - set(gone)

    @abstractmethod
    def stacks(self) -> float:
        """Return the number of stacks that a group computes in a step, one after the other."""

    @abstractmethod
    def lose(self, groups: Collection[GroupId]) -> Loss:
        """Remove live groups that are lost in the running step."""

    def begin_step(self) -> None:  # noqa: B027  # most policies have nothing to do
        """Begin the step after a committed one."""

    def rejoin(self, group: GroupId) -> None:
        """Add a lost group that is back, at a step boundary."""
        raise AssertionError(f"{type(self).__name__} has no rejoin, group {group} cannot come back")


class Restart(Policy):
    """Checkpoint-restart: any loss ends the attempt. The groups that restart share the whole global batch."""

    def stacks(self) -> float:
        total, world = self.groups * self.per_shard, len(self.live)
        if self.setting.restart_finds == "divisor":
            world = divisible_world(world, total)
        return -(-total // world) / self.per_shard

    def lose(self, groups: Collection[GroupId]) -> Loss:
        self.live -= set(groups)
        return Loss(wiped_out=True)


class Replication(Policy):
    """r copies compute the same r shards; a set without a live copy is a wipe-out (SPARe's baseline)."""

    stacked = True
    whole = True

    def restart(self, gone: Collection[GroupId] = ()) -> None:
        super().restart(gone)
        N, r = self.groups, self.setting.redundancy
        self._alive = [len(members) for members in replica_sets(N, r)]

    def stacks(self) -> float:
        return float(self.setting.redundancy)

    def lose(self, groups: Collection[GroupId]) -> Loss:
        self.live -= set(groups)
        sets = [group // self.setting.redundancy for group in groups]
        for number in sets:
            self._alive[number] -= 1
        if any(self._alive[number] == 0 for number in sets):
            return Loss(wiped_out=True)
        return Loss(patch=1.0 if self.setting.patch_in_replication else 0.0)


class Spare(Policy):
    """SPARe: ReCtlr on stacks (``core.scheduling.policies.rectlr``)."""

    stacked = True
    whole = True

    def __init__(self, setting: Setting) -> None:
        self._orders = tuple(_placement(setting).stacks)
        super().__init__(setting)

    def restart(self, gone: Collection[GroupId] = ()) -> None:
        super().restart(gone)
        self._stacks = rectlr.Stacks(self._orders)

    def stacks(self) -> float:
        return float(self._stacks.S)

    def lose(self, groups: Collection[GroupId]) -> Loss:
        self.live -= set(groups)
        depth = 0
        for group in groups:
            repaired = self._stacks.lose(group)
            if repaired.phase == "wipe-out":
                return Loss(wiped_out=True)
            depth += repaired.depth
        match self.setting.patch_in_spare:
            case "one":
                depth = max(depth, 1)
            case "step" if depth:
                depth = self._stacks.S
        return Loss(patch=float(depth))

    def begin_step(self) -> None:
        self._stacks.begin_step()


class Recover(Policy):
    """ReCoVer: roles (``recover_roles``); a promotion costs nothing, a policy boundary costs b microbatches."""

    plans_restarts = True

    def restart(self, gone: Collection[GroupId] = ()) -> None:
        super().restart(gone)
        self._roles = recover_roles.initial(self.groups, self.per_shard)
        if gone and self.live:
            self._roles = recover_roles.on_failure(self._roles, gone).roles
            self.begin_step()

    def stacks(self) -> float:
        return self._roles.quota / self.per_shard

    def lose(self, groups: Collection[GroupId]) -> Loss:
        self.live -= set(groups)
        recovery = recover_roles.on_failure(self._roles, groups)
        if recovery.kind == "wipe-out":
            return Loss(wiped_out=True)
        self._roles = recovery.roles
        return Loss(patch=recovery.b / self.per_shard)

    def begin_step(self) -> None:
        if self._roles.boundary:
            self._roles = recover_roles.next_step(self._roles)


class StackedQuota(Policy):
    """Quotas in microbatches (``assignment``); a patch is spread evenly over all survivors."""

    stacked = True
    plans_restarts = True
    spares_stragglers = True

    def __init__(self, setting: Setting) -> None:
        self._hosting = _placement(setting) if setting.hosted else None
        super().__init__(setting)

    def restart(self, gone: Collection[GroupId] = ()) -> None:
        super().restart(gone)
        self._load: int | None = None

    def stacks(self) -> float:
        if self._load is None:
            self._load = assignment.least_load(self.groups, self.per_shard, self.live, self._hosting)
        return self._load / self.per_shard

    def lose(self, groups: Collection[GroupId]) -> Loss:
        lost = round(self.stacks() * self.per_shard) * len(groups)
        self.live -= set(groups)
        self._load = None
        if not self.live:
            return Loss(wiped_out=True)
        return Loss(patch=-(-lost // len(self.live)) / self.per_shard)


class StackedQuotaRejoin(StackedQuota):
    """Stacked quotas with groups that come back."""

    rejoins = True
    plans_restarts = False

    def rejoin(self, group: GroupId) -> None:
        unhosted = self._hosting is not None and self._hosting.wiped_out(self.live)
        self.live.add(group)
        ideal = -(-self.groups * self.per_shard // len(self.live))
        if unhosted or self._load != ideal:  # otherwise the plan without the group serves
            self._load = None


POLICIES: dict[str, type[Policy]] = {
    "restart": Restart,
    "replication": Replication,
    "spare": Spare,
    "recover": Recover,
    "stacked_quota": StackedQuota,
    "stacked_quota_rejoin": StackedQuotaRejoin,
}


def _placement(setting: Setting) -> Placement:
    make = placement.golomb if setting.placement == "golomb" else placement.consecutive
    return make(setting.cluster.groups, setting.redundancy)
