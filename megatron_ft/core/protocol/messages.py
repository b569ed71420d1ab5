"""The messages between ``core.protocol.machine`` and its shell: the shell sends events, the machine returns actions.

The shell is ``core.protocol.shell``, in a real run and in simulated ones. An event states what has happened, an action what
the shell must do. Detailed reasons are in views and reports (``types``).

Senders of events: the training thread (``Computed``, ``Connected``, ``Transferred``, ``Reduced``, ``Discarded``,
``Updated``, ``BatchResized``, ``CaughtUp``, ``CatchUpFailed``), notices through ``signals.classify`` (``GroupFailed``,
``LeaveAnnounced``, ``JoinRequested``, ``EpochAborted``, ``HostSilent``, ``RunHalted``; ``GroupFailed`` also from
claims, ``store_failover.verdicts``), and looks at the control store (``ReportsSeen``, ``ViewSeen``, ``Replaced``, ``Tick``).
Receivers of actions: the communicators (``Abort``), the control store (``Publish``, ``Propose``), the notice log
(``Announce``), and the training thread (all others).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_ft.core.detection.link_detector import Unit
from megatron_ft.core.detection.stragglers import Speeds
from megatron_ft.types import Bucket, GroupId, Microbatch, Report, View, host_name

# Events: from the shell to the machine. ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Computed:
    """The training thread has added the gradient of a microbatch to all local buckets.

    Attributes:
        microbatch: the one that was computed; the present plan assigns it to this group.
        digest_only: it was computed for its digest, and its gradient was added to nothing. The plan may have changed since.
    """

    microbatch: Microbatch
    digest_only: bool = False


@dataclass(frozen=True)
class Connected:
    """The outer communicator of a view is built.

    Attributes:
        epoch: of that view. The machine ignores an epoch that is not the present one.
    """

    epoch: int


@dataclass(frozen=True)
class Transferred:
    """This group has handed over or received the state and the final buckets that the view names.

    Attributes:
        epoch: of the view whose transfers are done.
        speeds: ``GroupState.speeds`` of the source, which is part of the state; None if this group received no state.
    """

    epoch: int
    speeds: Speeds | None = None


@dataclass(frozen=True)
class Reduced:
    """The reduction of a bucket has completed on the host.

    Attributes:
        bucket: index of the bucket in the present step.
    """

    bucket: Bucket


@dataclass(frozen=True)
class Discarded:
    """Every bucket is reduced, and the sums must not be used: the step is computed again, in its next attempt.

    Whether an attempt is discarded is a function of its sums, so every group that has them decides the same. The next
    attempt depends on why, so a group that lacks a bucket takes the state of a group that has begun that attempt.

    Attributes:
        step: the step whose sums are discarded; it is not committed in any group.
    """

    step: int


@dataclass(frozen=True)
class Updated:
    """The optimizer has taken a step.

    Attributes:
        step: the step that is now committed here.
        measured: seconds per microbatch of every group that computed in the step, received with the sum of bucket 0.
    """

    step: int
    measured: Mapping[GroupId, float] = field(default_factory=dict)


@dataclass(frozen=True)
class GroupFailed:
    """The fault detector's verdict that one incarnation of a group is dead. Also a notice, by the group that has compared
    the states of all groups, against one whose state is not that of most others: it is left out like a group that died.

    Attributes:
        group: the dead group.
        reason: one sentence for people.
        incarnation: the dead start of the group. Earlier starts are dead as well.
        microbatch: the one that the group was computing when it ended by itself with an exception, else None.
        ended: True if the kernel has reported the end of one of its processes, so that it can commit nothing any more;
            False if it may still live.
    """

    group: GroupId
    reason: str
    incarnation: int = 0
    microbatch: Microbatch | None = None
    ended: bool = False


@dataclass(frozen=True)
class LeaveAnnounced:
    """One incarnation of a group leaves in order, so that nothing of its work is lost. Also a notice, by its leader.

    Attributes:
        group: the group that leaves.
        after: the last step that it commits.
        why: the reason, for people.
        incarnation: the start of the group that leaves.
    """

    group: GroupId
    after: int
    why: str
    incarnation: int = 0

    @property
    def reason(self) -> str:
        """One sentence for people, without a subject."""
        return f"leaves after step {self.after}: {self.why}"


@dataclass(frozen=True)
class JoinRequested:
    """A new incarnation of a group follows its donors and asks for a seat. Also a notice, by its leader.

    To follow means to receive the state of a step, and from then on all inputs of the updates that lead to the next one.

    Attributes:
        group: the group that asks.
        incarnation: its new start.
        donors: (group, incarnation) of each member that sends it the state.
        after: the newest step that the donors were known to work on. The group gets its seat after that step is committed.
    """

    group: GroupId
    incarnation: int
    donors: tuple[tuple[GroupId, int], ...]
    after: int


@dataclass(frozen=True)
class CaughtUp:
    """This group, which has entered without the state, now holds the state that its view's step starts from.

    Attributes:
        speeds: the donors' ``GroupState.speeds``, which is part of that state.
    """

    speeds: Speeds


@dataclass(frozen=True)
class BatchResized:
    """The training script has set the number of microbatches in a shard, before this group computes any of the step.

    Attributes:
        per_shard: number G of microbatches in a shard, for the present step and those after it.
    """

    per_shard: int


@dataclass(frozen=True)
class CatchUpFailed:
    """This group, which has entered without the state, can no longer get it.

    A donor was lost before it had handed over all of it, or this group has made a step that is made again.

    Attributes:
        reason: one sentence for people.
    """

    reason: str


@dataclass(frozen=True)
class EpochAborted:
    """An epoch ends, and no group is accused. Also a notice: by a group that saw a collective fail (reset, timeout, or any
    other error of the network) or has a reason that others may not know (:class:`Announce`). It may be about an epoch that
    is not yet entered here.

    Attributes:
        epoch: the epoch that ends.
        why: the error or the reason, for people.
        after: the epoch is over for groups that work on a later step than this; the others finish this step first.
            -1: it is over for all.
        by: the group that ends it; None if that is not known.
    """

    epoch: int
    why: str
    after: int = -1
    by: GroupId | None = None

    @property
    def reason(self) -> str:
        """One sentence for people."""
        return self.why if self.by is None else f"group {self.by} reports: {self.why}"

    @property
    def in_order(self) -> bool:
        """True if nothing failed, but a group leaves or enters."""
        return self.after >= 0


@dataclass(frozen=True)
class HostSilent:
    """One host does not hear another host, or hears it again. Also a notice, by the agent of the host that listens. It does
    not tell which of them is cut off.

    The notice may come late; ``core.protocol.group_locations`` works out from ``since`` and ``until`` which groups, and
    which starts of them, it still concerns.

    Attributes:
        by: name of the host that listens.
        about: name of the host that is not heard.
        groups_by: the groups that ``by`` runs, whole or in part.
        groups_about: the groups that ``about`` runs, whole or in part.
        silent_s: how long no heartbeat came, in seconds.
        heard: True if ``by`` hears ``about`` again, which withdraws the earlier notice.
        incarnation: of a group that has ranks on both hosts, the start that ``by`` made last.
        since: (group, start) of each group that came from another host: from that start on, ``by`` knows it where it is.
        until: (group, newest start that was on its host by then) of each group that was started again. A later start may
            be on another host, so the silence concerns it only when the log says so. All starts of a group that is not
            listed here are concerned.
        hosts: the numbers of both hosts, for people; empty where they have none.
    """

    by: str
    about: str
    groups_by: tuple[GroupId, ...]
    groups_about: tuple[GroupId, ...]
    silent_s: float
    heard: bool = False
    incarnation: int = 0
    since: tuple[tuple[GroupId, int], ...] = ()
    until: tuple[tuple[GroupId, int], ...] = ()
    hosts: tuple[int, ...] = ()

    @property
    def units(self) -> tuple[Unit, Unit]:
        """The pair of hosts that this notice is about, each as the tuple of its groups."""
        return self.groups_by, self.groups_about

    @property
    def reason(self) -> str:
        """One sentence for people."""
        one, other = map(host_name, (self.by, self.about), self.hosts or (None, None))
        silent = f"{one} has heard nothing of {other} for {self.silent_s:.1f} s"
        return f"{one} hears {other} again" if self.heard else silent

    def concerned(self, view: View) -> tuple[Unit, Unit]:
        """Return ``units`` without the groups whose start in ``view`` is not concerned."""
        newer = {group for group, start in self.until if view.incarnations.get(group, 0) > start}
        by, about = (tuple(group for group in unit if group not in newer) for unit in self.units)
        return by, about


@dataclass(frozen=True)
class RunHalted:
    """An invariant is broken, and no group can be accused of it: every group ends, and none is masked as a lost group.
    Also a notice, by the group that saw it.

    Attributes:
        step: the step in which it was seen.
        why: one sentence for people.
    """

    step: int
    why: str


@dataclass(frozen=True)
class ReportsSeen:
    """The reports of this epoch that one look at the control store has found.

    Attributes:
        reports: all that were found. A group that collects reports may draw conclusions from the absent ones.
    """

    reports: tuple[Report, ...]


@dataclass(frozen=True)
class ViewSeen:
    """The shell has read the view that won an epoch.

    Attributes:
        view: the view that stands at ``view.epoch``; any group may have written it.
    """

    view: View


@dataclass(frozen=True)
class Replaced:
    """The control store that the reports were read from is lost, and every group writes what it knows into another one.

    A group that has adopted the next view writes that view, and no report. So the others learn of the view before they
    decide on one of their own from the reports that they have read before.
    """


@dataclass(frozen=True)
class Tick:
    """Time has passed, and a look at a store that answers has found nothing new."""


Event = (
    Computed | Connected | Transferred | Reduced | Discarded | Updated | BatchResized | CaughtUp | CatchUpFailed
    | GroupFailed | LeaveAnnounced | JoinRequested | RunHalted | EpochAborted | HostSilent
    | ReportsSeen | ViewSeen | Replaced | Tick
)  # fmt: skip


# Actions: from the machine to the shell. -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Abort:
    """Make every pending collective of an epoch return now; no result of them counts any more.

    Attributes:
        epoch: the epoch that ends.
        reason: one sentence for people.
        in_order: True if nothing failed. Groups that are still in the step before finish it, and data that this group
            has sent for that step may be on its way, so its connections stay open until the next view stands.
    """

    epoch: int
    reason: str
    in_order: bool = False


@dataclass(frozen=True)
class Publish:
    """Write this group's report to the control store, once per epoch, after :class:`Abort` and before anything else.

    Attributes:
        report: the report of the epoch that ends.
    """

    report: Report


@dataclass(frozen=True)
class Announce:
    """Tell every group that an epoch is over, for a reason that other groups may not know.

    Attributes:
        epoch: the epoch that ends.
        reason: one sentence for people.
        after: as in :class:`EpochAborted`.
    """

    epoch: int
    reason: str
    after: int = -1


@dataclass(frozen=True)
class Propose:
    """Compare-and-set the view, and feed back the view that won as :class:`ViewSeen`.

    Attributes:
        view: the proposed view.
        fence: seats (group, incarnation) that the view leaves out and that may still live. Where the control store can
            fail over (``core.lifecycle.store_failover``), a claim must first fence those that no claim has fenced yet.
        reads_log: True if the view leaves a group out. Where the store can fail over, the shell must then first read
            the log of claims to its end; it feeds a claim that is new to the machine, which then proposes anew.
    """

    view: View
    fence: tuple[tuple[GroupId, int], ...] = ()
    reads_log: bool = False


@dataclass(frozen=True)
class Compute:
    """Compute one microbatch, and add its gradient to all local buckets.

    Attributes:
        microbatch: the one to compute.
        patch: True for work that is taken over from a lost group.
    """

    microbatch: Microbatch
    patch: bool


@dataclass(frozen=True)
class Connect:
    """Build the outer communicator of the view, together with all other members.

    Attributes:
        view: the present view.
    """

    view: View


@dataclass(frozen=True)
class Transfer:
    """Do this group's part of the view's transfers, the state first, then the buckets in ascending order.

    Attributes:
        view: the present view, whose ``behind`` and ``missing`` name the transfers.
    """

    view: View


@dataclass(frozen=True)
class Follow:
    """Get to the state that a step starts from, with the data that the donors send.

    Attributes:
        step: the step of the present view.
    """

    step: int


@dataclass(frozen=True)
class Reduce:
    """Sum the kept local gradients of buckets over the outer communicator.

    Attributes:
        step: the present step.
        buckets: the unfinished buckets, ascending.
    """

    step: int
    buckets: tuple[Bucket, ...]


@dataclass(frozen=True)
class Update:
    """Pass the gate: divide by N*G, clip, and take the optimizer's step.

    Attributes:
        step: the step to commit.
    """

    step: int


@dataclass(frozen=True)
class AwaitView:
    """Look for notices, for the next view, and for reports; this group has nothing else to do.

    Attributes:
        epoch: the epoch that has ended here.
        missing: groups whose reports to look for; empty if other groups collect them.
    """

    epoch: int
    missing: tuple[GroupId, ...]


@dataclass(frozen=True)
class Finish:
    """Stay reachable until every live group has committed every step, as this group has.

    Attributes:
        epoch: the present epoch.
    """

    epoch: int


@dataclass(frozen=True)
class Stop:
    """End this group's training.

    Attributes:
        reason: one sentence for people.
        halted: True if no other group may go on either.
        wiped_out: True if no group can finish the step, and the job goes on from its checkpoint.
    """

    reason: str
    halted: bool = False
    wiped_out: bool = False


Action = (
    Abort | Publish | Announce | Propose | Compute | Connect | Transfer | Follow
    | Reduce | Update | AwaitView | Finish | Stop
)  # fmt: skip
