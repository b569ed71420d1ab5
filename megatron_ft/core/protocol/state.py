"""The protocol state of one group, and the settings of the whole run; ``core.protocol.machine`` decides from both.

Values that follow from the fields (dead groups, final buckets, microbatches still to compute) are properties, computed
at most once for each immutable state, so they cannot be out of date.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from megatron_ft.core.detection import stragglers
from megatron_ft.core.detection.link_detector import Unit
from megatron_ft.core.detection.stragglers import Speeds
from megatron_ft.core.exactness import verification
from megatron_ft.core.exactness.verification import Check
from megatron_ft.core.protocol.messages import EpochAborted, HostSilent, JoinRequested, LeaveAnnounced
from megatron_ft.core.replication.placement import Placement
from megatron_ft.core.scheduling.policies import Batch, Policy
from megatron_ft.core.scheduling.policies.stacked_quota import StackedQuota
from megatron_ft.types import Bucket, GroupId, Microbatch, Plan, PlanOrigin, Report, View

_LONG_MICROBATCHES = 4
"""A report is awaited for at least this multiple of the longest microbatch of the last step."""


@dataclass(frozen=True)
class Job:
    """The settings of the run. All are fixed except ``per_shard``, which the script may set before a step.

    Attributes:
        shards: number N of shards, and of groups at the first start.
        per_shard: number G of microbatches in a shard, from the present step on.
        buckets: number of gradient buckets.
        steps: number of steps of the run.
        min_groups: with fewer live groups the run stops.
        report_timeout_s: least time in seconds for which a report is awaited.
        settle_s: when hosts do not hear each other, no view is proposed for this long (seconds) after the last message
            about that, so that all hosts have the time to say so; less where they have (``are_unanimous``).
        placement: the groups that host each shard; None: every group hosts every shard.
        straggler_factor: a group that is slower than this multiple of the median of the others is slow; 0: none ever is.
        straggler_steps: number of slow steps in a row after which a group computes less.
        policy: which group computes and contributes which microbatches (``core.scheduling.policies``).
        skip: microbatches that no group computes: they are no part of their step.
        verify: number of microbatches of a step that are verified, or ``verification.SLACK`` (``core.exactness``).
        digests: number of digests that each group can send in a step; 0: nothing is verified.
        first: the first step of the run since its start, which all groups of that start know; else -1.
        collectors: number of groups at a time that read all reports of an ending epoch and propose the next view. If
            thousands of groups did, they would overload the store.
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
    policy: Policy = StackedQuota()
    skip: frozenset[Microbatch] = frozenset()
    verify: int | str = 0
    digests: int = 0
    first: int = -1
    collectors: int = 4

    @property
    def microbatches(self) -> int:
        """The number N*G of microbatches that a step sums over; the largest number with a policy that shrinks it."""
        return self.shards * self.per_shard

    @property
    def batch(self) -> Batch:
        """The batch of the present step, as a policy takes it."""
        return Batch(self.shards, self.per_shard, self.placement)

    def skips(self, step: int) -> bool:
        """Return whether a microbatch of ``step`` is left out."""
        return any(microbatch.step == step for microbatch in self.skip)

    def plan(self, step: int, origin: PlanOrigin, speeds: Speeds) -> Plan:
        """Return the plan of a step, from its ``origin`` and the speeds known before it.

        It is the same at all groups that hold the committed state the step starts from, because ``speeds`` is part of that.
        """
        slower = stragglers.weights(speeds) if self.policy.balances else {}
        plan = self.policy.plan(self.batch, step, origin, slower)
        return self._without_skipped(plan) if self.skips(step) else plan

    def _without_skipped(self, plan: Plan) -> Plan:
        def kept(microbatches: tuple[Microbatch, ...]) -> tuple[Microbatch, ...]:
            return tuple(microbatch for microbatch in microbatches if microbatch not in self.skip)

        own = {group: kept(share) for group, share in plan.assignment.items()}
        parts = {group: tuple(filter(None, map(kept, parts))) for group, parts in plan.standby.items()}
        return replace(plan, assignment=own, standby=parts, patched=plan.patched - self.skip)


@dataclass(frozen=True)
class GroupState:
    """All that one group knows of the protocol.

    Attributes:
        me: number of this group.
        job: settings of the run.
        view: the newest view that this group has adopted.
        step: the step this group works on; ``step - 1`` is committed here.
        plan_origin: plan origin of ``step``.
        plan: plan of ``step``. It is kept while ``ahead`` is set, because all groups that hold the state of the next
            step may die before they hand it over (hard case 7).
        incarnation: the start of this group.
        attempt: how often the sums of ``step`` were discarded before its update (``Discarded``).
        next_plan_origin: plan origin of ``step + 1``, while the view says that others have decided ``step``; else None.
        computed: microbatches of ``step`` whose gradients are in the local buckets, or in those of a standby part.
        digested: microbatches of ``step`` that were computed for their digest alone.
        reduced_buckets: buckets of ``step`` whose reduction completed here.
        speeds: measured speeds of the groups; part of the state that ``step`` starts from.
        synced: this group holds the model state that ``step`` starts from.
        following: this group has a seat, and not yet the state that it entered with.
        connected: the outer communicator of ``view`` stands.
        transferred: this group has done its part of the transfers of ``view``.
        reported: this group has ended the epoch of ``view`` and published its report.
        collects: this group reads the others' reports of the ending epoch, and may propose the next view.
        closed_by: reason for which this group ended the epoch; empty before.
        noticed: the same, if it is not a verdict against a group; else empty.
        broken: epoch -> the message that ends it, for this epoch and later ones.
        graves: group -> (newest dead incarnation, reason), whether that incarnation ever had a seat or not.
        ended: seats of which a process is known to be gone. Other dead seats may still live.
        asking: group -> its request for a seat.
        reports: group -> its report of the ending epoch.
        leaving: group -> its announcement that it leaves in order.
        poison_microbatches: microbatch -> groups that died while they computed it, for steps not yet committed here.
        missed: pair of hosts (each as its groups) that do not hear each other -> the message that says so.
        looked: local time in seconds of the last look at the store that found nothing new; None before the first.
        waited_s: seconds for which reports have been awaited while the store answered.
        settled_s: seconds since the last message in ``missed``.
        stopped: reason for which this group must not go on; empty while it may.
        halted: with ``stopped``, no other group may go on either.
        wiped_out: with ``stopped``, no group can finish the step, and the job goes on from its checkpoint.
    """

    me: GroupId
    job: Job
    view: View
    step: int
    plan_origin: PlanOrigin
    plan: Plan
    incarnation: int = 0
    attempt: int = 0
    next_plan_origin: PlanOrigin | None = None
    computed: frozenset[Microbatch] = frozenset()
    digested: frozenset[Microbatch] = frozenset()
    reduced_buckets: frozenset[Bucket] = frozenset()
    speeds: Speeds = Speeds()
    synced: bool = True
    following: bool = False
    connected: bool = False
    transferred: bool = False
    reported: bool = False
    collects: bool = False
    closed_by: str = ""
    noticed: str = ""
    broken: Mapping[int, EpochAborted] = field(default_factory=dict)
    graves: Mapping[GroupId, tuple[int, str]] = field(default_factory=dict)
    ended: frozenset[tuple[GroupId, int]] = frozenset()
    asking: Mapping[GroupId, JoinRequested] = field(default_factory=dict)
    reports: Mapping[GroupId, Report] = field(default_factory=dict)
    leaving: Mapping[GroupId, LeaveAnnounced] = field(default_factory=dict)
    poison_microbatches: Mapping[Microbatch, frozenset[GroupId]] = field(default_factory=dict)
    missed: Mapping[tuple[Unit, Unit], HostSilent] = field(default_factory=dict)
    looked: float | None = None
    waited_s: float = 0.0
    settled_s: float = 0.0
    stopped: str = ""
    halted: bool = False
    wiped_out: bool = False

    @property
    def finished(self) -> bool:
        """True if all steps are committed here."""
        return self.step >= self.job.steps

    @property
    def patience_s(self) -> float:
        """The time in seconds for which a report is awaited: it comes between two microbatches, which may take long."""
        return max(self.job.report_timeout_s, _LONG_MICROBATCHES * self.speeds.longest_s)

    @cached_property
    def dead(self) -> dict[GroupId, str]:
        """The members of the view that are known to be dead, with the reason."""
        return {group: why for group, (number, why) in self.graves.items() if number >= self._seat_of(group)}

    @cached_property
    def left(self) -> dict[GroupId, str]:
        """The members of the view that have left in order: the last step that they commit is committed here."""
        events = self.leaving.values() if self.step < self.job.steps else ()
        gone = [e for e in events if e.after < self.step and e.incarnation >= self._seat_of(e.group)]
        return {event.group: event.reason for event in gone}

    def _seat_of(self, group: GroupId) -> float:
        """Return the incarnation of the group that is a member; infinity if the group is no member."""
        return self.view.incarnations.get(group, 0) if group in self.view.live else float("inf")

    @cached_property
    def cut(self) -> dict[tuple[Unit, Unit], str]:
        """The pairs of hosts with live groups that do not hear each other, with the reason."""
        if not self.missed:
            return {}
        live = set(self.view.live) - self.dead.keys() - self.left.keys()
        said = {missed.concerned(self.view): missed.reason for missed in self.missed.values()}
        return {pair: why for pair, why in said.items() if all(live & set(unit) for unit in pair)}

    @cached_property
    def final(self) -> frozenset[Bucket]:
        """The buckets of ``step`` that this group holds finished, or that some member hands over under this view."""
        here = (self.view.step, self.view.attempt) == (self.step, self.attempt)
        return self.reduced_buckets | set(self.view.final if here else ())

    @cached_property
    def unfinished(self) -> tuple[Bucket, ...]:
        """The buckets of ``step`` that must be reduced (again), because they are not final. Empty after the last step."""
        if self.finished:
            return ()
        final = self.final
        return tuple(bucket for bucket in range(self.job.buckets) if bucket not in final)

    @property
    def complete(self) -> bool:
        """True if every bucket of ``step`` is held here."""
        return not self.finished and len(self.reduced_buckets) == self.job.buckets

    @property
    def microbatches(self) -> int:
        """The number of microbatches that the step sums over."""
        return (
            sum(map(len, self.plan.assignment.values()))
            if self.job.policy.shrinks or self.job.skips(self.step)
            else self.job.microbatches
        )

    @property
    def next_origin(self) -> PlanOrigin:
        """The origin of the next step's plan, if it begins under the present view."""
        return self.plan_origin.following(self.view.live, self.job.policy.remembers)

    @property
    def needs_transfer(self) -> bool:
        """True if the view hands over state or buckets, and this group has not done its part."""
        return bool(self.view.behind or self.view.missing) and not self.transferred

    @cached_property
    def standby(self) -> frozenset[Microbatch]:
        """The microbatches that this group computes and does not contribute."""
        return frozenset(self.plan.standby_of(self.me))

    @cached_property
    def checks(self) -> tuple[Check, ...]:
        """The microbatches of the step that several groups compute, to compare their gradients."""
        if not self.job.digests or self.finished:
            return ()
        lost = {group for groups, _ in self.plan_origin.changes for group in groups}
        origin = self.plan_origin
        begun = self.job.plan(self.step, origin._replace(changes=()), self.speeds) if origin.changes else self.plan
        alive = [group for group in self.plan_origin.live if group not in lost]
        everyone = self.step == self.job.first and not self.attempt
        return verification.checks(begun, alive, self.attempt, self.job.verify, self.job.digests, everyone)

    @cached_property
    def digest_only(self) -> tuple[Microbatch, ...]:
        """The microbatches that this group computes for their digest alone: others contribute them."""
        asked = verification.mine(self.checks, self.me)
        own = {*self.plan.of(self.me), *self.standby}
        return tuple(m for m in asked if m not in own and m not in self.digested)

    @cached_property
    def todo(self) -> tuple[Microbatch, ...]:
        """The microbatches that this group still has to compute; empty once all buckets are final (hard case 5).

        Standby work comes first, so that the reduction can overlap with the last microbatch. After a loss in the step it
        comes last, and while a view is being agreed on it is not begun: the others wait for what the group contributes.
        """
        if not self.unfinished:
            return ()
        own, standby = self.plan.of(self.me), self.plan.standby_of(self.me) + self.digest_only
        if self.checks:  # the digest of the last microbatch would be known after its first bucket is sent
            checked = verification.mine(self.checks, self.me)
            own = tuple(sorted(own, key=lambda microbatch: microbatch not in checked))
        if self.reported:
            standby = ()
        order = own + standby if self.plan_origin.changes else standby + own
        return tuple(microbatch for microbatch in order if microbatch not in self.computed)


def changed(state: GroupState, **changes: Any) -> GroupState:
    """Return a copy with ``changes``: a faster ``dataclasses.replace``, because a step changes the state six times."""
    assert changes.keys() <= GroupState.__dataclass_fields__.keys(), f"{changes} are not all fields of a GroupState"
    new = object.__new__(GroupState)
    new.__dict__.update(state.__dict__)
    for name in _WORKED_OUT:
        new.__dict__.pop(name, None)
    new.__dict__.update(changes)
    return new


_WORKED_OUT = tuple(name for name, value in vars(GroupState).items() if isinstance(value, cached_property))
"""Names of the cached properties, whose values are not valid for the next state."""
