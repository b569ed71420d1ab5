"""What one group knows of the protocol, and what is fixed for the whole run; ``core.recovery`` decides from it.

Nothing here changes anything: what follows from the fields (who is dead, which buckets are final, what is still to be
computed) is worked out at most once for each state, when it is asked for, so it cannot be out of date.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from megatron_ft.core import baselines, links, scheduler, stragglers
from megatron_ft.core.protocol import Asked, Broke, Leaves
from megatron_ft.core.replication import Placement
from megatron_ft.core.stragglers import Speeds
from megatron_ft.types import Begun, Bucket, GroupId, Microbatch, Plan, Report, View

_LONG_MICROBATCHES = 4
"""So many times the longest microbatch of the last step are waited for a report."""


@dataclass(frozen=True)
class Job:
    """What is fixed for the whole run. ``shards`` is N, ``per_shard`` is G, ``buckets`` how many gradient buckets.

    ``settle_s``: when hosts do not hear each other, nobody leaves before all have had the time to say so.
    ``placement`` says who hosts which shards; without one everybody hosts everything. A group that is slower than
    ``straggler_factor`` times the median of the others, for ``straggler_steps`` steps in a row, computes less; 0: never.
    With ``drop`` nobody takes over what a lost group had: the batch shrinks (``core.baselines``), for comparison.
    ``collectors``: so many groups at a time read all reports of an ending epoch and propose the next view; with thousands of
    groups the store would drown if all did.
    """

    shards: int
    per_shard: int
    buckets: int
    steps: int
    min_groups: int = 1
    report_timeout_s: float = 60.0
    settle_s: float = 0.3
    placement: Placement | None = None
    straggler_factor: float = 1.5
    straggler_steps: int = 3
    drop: bool = False
    collectors: int = 4

    @property
    def microbatches(self) -> int:
        """N*G, what every step sums over, always; with ``drop`` at most."""
        return self.shards * self.per_shard

    def plan(self, step: int, begun: Begun, speeds: Speeds) -> Plan:
        """Of a step, from the membership it was begun with, the changes since, and the speeds known before it.

        The same at everybody who has the committed state that the step starts from, because ``speeds`` is part of that.
        """
        if self.drop:
            return self._shrunk(step, begun)
        slower = stragglers.weights(speeds)
        plan = scheduler.plan_step(step, self.shards, self.per_shard, begun.live, self.placement, slower)
        for lost, joined in begun.changes:
            plan = scheduler.admit(scheduler.patch_plan(plan, lost, self.placement), joined)
        return plan

    def _shrunk(self, step: int, begun: Begun) -> Plan:
        """Everybody who was there from the step's beginning on, and still is, does its own shard."""
        lost = {group for gone, _ in begun.changes for group in gone}
        own = [group for group in begun.live if group not in lost and group < self.shards]
        none = Plan(step, {}, "no group has a shard of its own")
        return baselines.drop(step, self.shards, self.per_shard, own).plan or none


@dataclass(frozen=True)
class GroupState:
    """Everything one group knows of the protocol.

    ``plan``, ``computed`` and ``have`` belong to ``step``. While the view says that ``step`` is decided elsewhere,
    ``ahead`` is where its holders' plan for the step after comes from; ``plan`` is kept, because they may all die
    before they hand the state over (hard case 7). While ``following``, this group has a seat and not yet the state it
    entered with. ``asking`` are groups that want a seat; ``leaving`` those that will have left after some step; ``graves``
    the newest incarnation of each group that is known to be dead, whether it ever had a seat or not; ``missed`` the hosts
    (as their groups) that do not hear each other, with the reason; nothing new was said of that for ``settled_s``.
    ``collects``: since this group has reported, or later, it reads the others' reports, and may propose.
    ``speeds`` is part of the state that ``step`` starts from. ``deadly`` are the groups that each microbatch has killed.
    """

    me: GroupId
    job: Job
    view: View
    step: int
    begun: Begun
    plan: Plan
    incarnation: int = 0
    ahead: Begun | None = None
    computed: frozenset[Microbatch] = frozenset()
    have: frozenset[Bucket] = frozenset()
    speeds: Speeds = Speeds()
    synced: bool = True
    following: bool = False
    connected: bool = False
    transferred: bool = False
    reported: bool = False
    collects: bool = False
    closed_by: str = ""
    broken: Mapping[int, Broke] = field(default_factory=dict)
    graves: Mapping[GroupId, tuple[int, str]] = field(default_factory=dict)
    asking: Mapping[GroupId, Asked] = field(default_factory=dict)
    reports: Mapping[GroupId, Report] = field(default_factory=dict)
    leaving: Mapping[GroupId, Leaves] = field(default_factory=dict)
    deadly: Mapping[Microbatch, frozenset[GroupId]] = field(default_factory=dict)
    missed: Mapping[tuple[links.Unit, links.Unit], str] = field(default_factory=dict)
    looked: float | None = None
    waited_s: float = 0.0
    settled_s: float = 0.0
    stopped: str = ""

    @property
    def finished(self) -> bool:
        """All steps are committed here."""
        return self.step >= self.job.steps

    @property
    def patience_s(self) -> float:
        """How long reports are waited for: one comes between two microbatches, and these may take long."""
        return max(self.job.report_timeout_s, _LONG_MICROBATCHES * self.speeds.longest_s)

    @cached_property
    def dead(self) -> dict[GroupId, str]:
        """Members of the view that are known to be dead, with the reason."""
        return {group: why for group, (number, why) in self.graves.items() if number >= self._seat_of(group)}

    @cached_property
    def left(self) -> dict[GroupId, str]:
        """Members of the view that have left in order: this group has committed the step after which they do."""
        events = self.leaving.values() if self.step < self.job.steps else ()
        gone = [e for e in events if e.after < self.step and e.incarnation >= self._seat_of(e.group)]
        return {event.group: event.reason for event in gone}

    def _seat_of(self, group: GroupId) -> float:
        """The incarnation that is a member; infinite for who is none."""
        return self.view.incarnations.get(group, 0) if group in self.view.live else float("inf")

    @cached_property
    def cut(self) -> dict[links.Unit, str]:
        """Pairs of hosts with live groups that do not hear each other."""
        if not self.missed:
            return {}
        live = set(self.view.live) - self.dead.keys() - self.left.keys()
        return {pair: why for pair, why in self.missed.items() if all(live & set(unit) for unit in pair)}

    @cached_property
    def final(self) -> frozenset[Bucket]:
        """Buckets of ``step`` that some survivor holds finished, or will hand over under this view."""
        return self.have | set(self.view.final if self.view.step == self.step else ())

    @cached_property
    def unfinished(self) -> tuple[Bucket, ...]:
        """Buckets that must be reduced (again): held by no survivor the view knows of. None after the last step."""
        if self.finished:
            return ()
        final = self.final
        return tuple(bucket for bucket in range(self.job.buckets) if bucket not in final)

    @property
    def complete(self) -> bool:
        """Every bucket of ``step`` is held here."""
        return not self.finished and len(self.have) == self.job.buckets

    @property
    def microbatches(self) -> int:
        """How many the step sums over."""
        return sum(map(len, self.plan.assignment.values())) if self.job.drop else self.job.microbatches

    @property
    def needs_transfer(self) -> bool:
        """The view hands over state or buckets, and this group has not done its part."""
        return bool(self.view.behind or self.view.missing) and not self.transferred

    @cached_property
    def todo(self) -> tuple[Microbatch, ...]:
        """Microbatches this group still has to compute; none once all buckets are final (hard case 5)."""
        if not self.unfinished:
            return ()
        return tuple(microbatch for microbatch in self.plan.of(self.me) if microbatch not in self.computed)


def changed(state: GroupState, **changes: Any) -> GroupState:
    """``dataclasses.replace``, without calling ``__init__`` with all the fields: a step changes the state six times."""
    assert changes.keys() <= GroupState.__dataclass_fields__.keys(), f"{changes} are not all fields of a GroupState"
    new = object.__new__(GroupState)
    new.__dict__.update(state.__dict__)
    for name in _WORKED_OUT:
        new.__dict__.pop(name, None)
    new.__dict__.update(changes)
    return new


_WORKED_OUT = tuple(name for name, value in vars(GroupState).items() if isinstance(value, cached_property))
"""What a state keeps of these is not true of the next one."""
