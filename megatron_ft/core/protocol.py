"""The words between ``core.recovery`` and its shell: events go in, actions come out.

The shell is ``runtime.leader`` in a real run, and a simulated one in tests. An event says what has happened, an action
what is to be done; neither says why at length, views and reports do (``types``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_ft.core.stragglers import Speeds
from megatron_ft.types import Bucket, GroupId, Microbatch, Report, View

# Events: what the shell saw. ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Computed:
    """The gradient of ``microbatch`` is in all local buckets."""

    microbatch: Microbatch


@dataclass(frozen=True)
class Connected:
    """The outer communicator of the view of ``epoch`` stands."""

    epoch: int


@dataclass(frozen=True)
class Transferred:
    """This group's part of the view's transfers is done: state handed over or received, final buckets too.

    ``speeds`` is the source's ``GroupState.speeds``, which belongs to the state it handed over; None where none was
    received.
    """

    epoch: int
    speeds: Speeds | None = None


@dataclass(frozen=True)
class Reduced:
    """The host saw the reduction of ``bucket`` complete."""

    bucket: Bucket


@dataclass(frozen=True)
class Updated:
    """The optimizer has taken ``step``.

    ``measured`` came with the sum of bucket 0: seconds per microbatch of every group that computed in the step.
    """

    step: int
    measured: Mapping[GroupId, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Died:
    """The detector's verdict: this incarnation of ``group`` is dead.

    ``microbatch`` is the one in whose computation it ended by itself, with an exception.
    """

    group: GroupId
    reason: str
    incarnation: int = 0
    microbatch: Microbatch | None = None


@dataclass(frozen=True)
class Leaves:
    """This incarnation of ``group`` leaves in order once it has committed step ``after``."""

    group: GroupId
    after: int
    reason: str
    incarnation: int = 0


@dataclass(frozen=True)
class Asked:
    """A new incarnation of ``group`` follows ``donors`` (group, incarnation) and asks for a seat.

    To follow: to receive the state of a step, and from then on everything that makes the next one of it. ``after`` is the
    newest step that its donors were known to work on: the seat is given once that is committed.
    """

    group: GroupId
    incarnation: int
    donors: tuple[tuple[GroupId, int], ...]
    after: int


@dataclass(frozen=True)
class Followed:
    """A group that has entered holds the state that its view's step starts from; ``speeds`` belong to it."""

    speeds: Speeds


@dataclass(frozen=True)
class Strayed:
    """A group that has entered cannot get that state any more: a donor was lost before it had handed over all of it."""

    reason: str


@dataclass(frozen=True)
class Broke:
    """Something of ``epoch`` failed and nobody is named; another group may say so of an epoch not yet entered here.

    It is over for who works on a step later than ``after``; who does not finishes that one first.
    """

    epoch: int
    reason: str
    after: int = -1

    @property
    def in_order(self) -> bool:
        """Nothing failed: somebody leaves or enters."""
        return self.after >= 0


@dataclass(frozen=True)
class Missed:
    """The groups of one host do not hear those of another, or do again (``heard``); which of them is cut off is not said."""

    by: tuple[GroupId, ...]
    about: tuple[GroupId, ...]
    reason: str
    heard: bool = False


@dataclass(frozen=True)
class ReportsSeen:
    """All that a look has found: who collects them may draw conclusions from those that are not there."""

    reports: tuple[Report, ...]


@dataclass(frozen=True)
class ViewSeen:
    """The view that stands at ``view.epoch``, whoever wrote it."""

    view: View


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


Event = (
    Computed | Connected | Transferred | Reduced | Updated
    | Died | Leaves | Asked | Followed | Strayed | Broke | Missed | ReportsSeen | ViewSeen | Tick
)  # fmt: skip


# Actions: what the shell must do. -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Abort:
    """Make every pending collective of ``epoch`` return now; none of them counts any more.

    ``in_order``: nothing failed. Who is still in the step before finishes it, and what this group has sent for that may be
    on its way: its connections stay until the next view stands.
    """

    epoch: int
    reason: str
    in_order: bool = False


@dataclass(frozen=True)
class Publish:
    """Publish the report, once per epoch, after :class:`Abort` and before anything else."""

    report: Report


@dataclass(frozen=True)
class Announce:
    """Tell every group that the epoch is over, after that step; the reason is this group's own, the others may not know."""

    epoch: int
    reason: str
    after: int = -1


@dataclass(frozen=True)
class Propose:
    """Compare-and-set the view; feed whichever view won back as :class:`ViewSeen`."""

    view: View


@dataclass(frozen=True)
class Compute:
    """Compute one microbatch into all local buckets. ``patch`` marks work taken over from a lost group."""

    microbatch: Microbatch
    patch: bool


@dataclass(frozen=True)
class Connect:
    """Build the outer communicator of the view, together with everybody else in it."""

    view: View


@dataclass(frozen=True)
class Transfer:
    """Do this group's part of the view's transfers, state first, then buckets in ascending order."""

    view: View


@dataclass(frozen=True)
class Follow:
    """Get to the state that ``step`` starts from, with what the donors send."""

    step: int


@dataclass(frozen=True)
class Reduce:
    """Sum these buckets' kept local gradients over the outer communicator."""

    step: int
    buckets: tuple[Bucket, ...]


@dataclass(frozen=True)
class Update:
    """The gate is open: divide by N*G, clip, take the optimizer's step."""

    step: int


@dataclass(frozen=True)
class AwaitView:
    """Nothing to do but to look for notices, the next view, and the reports of these groups; of none, if others collect
    them."""

    epoch: int
    missing: tuple[GroupId, ...]


@dataclass(frozen=True)
class Finish:
    """Every step is committed here; stay reachable until every live group says the same."""

    epoch: int


@dataclass(frozen=True)
class Stop:
    """This group must not go on."""

    reason: str


Action = (
    Abort | Publish | Announce | Propose | Compute | Connect | Transfer | Follow
    | Reduce | Update | AwaitView | Finish | Stop
)  # fmt: skip
