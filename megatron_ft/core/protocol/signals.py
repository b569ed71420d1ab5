"""The entries of the notice log (*signals*), and the verdict that each of them leads to.

Intuition: a signal either names a culprit or only says that something is wrong. An agent that waited for a process
knows which process died and why, so its notice is a verdict. A reset connection or a collective's timeout names no
culprit: gloo's exception never says which peer is lost, and every survivor that gives up resets its neighbours in turn.
Such a signal ends the epoch, and the reports then show which groups are missing (``core.protocol.membership``).

An agent also samples its ranks while they live (``core.detection.rank_health``). A rank that is stopped or stuck is
accused by name, and its group is left out like a dead one.

Senders are named at each signal; all leaders, followers and agents read the log in its order.

Assumes: agents tell the truth about their own children; a notice may arrive late, twice or about a group that is no
longer a member, and is ignored then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast, get_args

from megatron_ft import codec
from megatron_ft.core.lifecycle.checkpoint_protocol import Saves, Stops
from megatron_ft.core.protocol.messages import (
    EpochAborted,
    GroupFailed,
    HostSilent,
    JoinRequested,
    LeaveAnnounced,
    RunHalted,
)
from megatron_ft.types import Exit, GroupId, Microbatch, View, rank_name


@dataclass(frozen=True)
class RankExited:
    """An agent saw one of its processes end.

    Attributes:
        exit: the process, and how it ended.
        incarnation: the start of its group.
    """

    exit: Exit
    incarnation: int = 0


@dataclass(frozen=True)
class RankUnresponsive:
    """An agent gave up one of its living processes, which is stopped or stuck (``core.detection.rank_health``).

    Attributes:
        group: of the rank.
        position: of the rank in its group.
        pid: of the process.
        host: name of the host.
        why: the reason, a predicate for people.
        incarnation: the start of the group.
        host_rank: number of the host; None in a run on one host.
    """

    group: GroupId
    position: int
    pid: int
    host: str
    why: str
    incarnation: int = 0
    host_rank: int | None = None


@dataclass(frozen=True)
class LeaveRequested:
    """The wish of an operator, or of one of its ranks, that a group leaves. The group's leader answers with
    :class:`LeaveAnnounced`.

    Attributes:
        group: the group that is to leave.
        why: the reason, for people.
    """

    group: GroupId
    why: str


@dataclass(frozen=True)
class HostAssigned:
    """A host that joined the run later tells the other agents which ranks it runs.

    Attributes:
        host: number of the host.
        name: its name.
        address: where its agent is reached.
        port: of its agent, for heartbeats.
        copies: port of its agent, for copies of checkpoints.
        ranks: (group, position) of each rank: new ones, or those that another host had. Empty if the host is idle.
        incarnation: the host runs these ranks from this start of their groups on.
    """

    host: int
    name: str
    address: str
    port: int
    copies: int
    ranks: tuple[tuple[GroupId, int], ...]
    incarnation: int


@dataclass(frozen=True)
class RestartRefused:
    """A host tells the other agents that it does not start its part of a group again.

    Attributes:
        host: number of the host.
        group: the group.
        incarnation: the last start of the group there.
    """

    host: int
    group: GroupId
    incarnation: int


@dataclass(frozen=True)
class ViewAgreed:
    """A view stands, so the groups can stop looking for it and read it.

    Attributes:
        epoch: of that view.
    """

    epoch: int


@dataclass(frozen=True)
class RunFinished:
    """The run has reached its end."""


@dataclass(frozen=True)
class ChecksumsRequested:
    """The groups' states differ, so ranks publish a checksum of each tensor, for the record to name those that differ.

    Attributes:
        step: the step at whose beginning the states differ.
        groups: the groups whose ranks publish checksums.
    """

    step: int
    groups: tuple[GroupId, ...]


@dataclass(frozen=True)
class CollectivesRequested:
    """A rank waits inside its group for too long, or has seen a process group break: all ranks of the group publish which
    collectives they have entered.

    Attributes:
        group: the group.
        incarnation: its start.
        asked: a name of this request, unique in that start.
    """

    group: GroupId
    incarnation: int
    asked: str


@dataclass(frozen=True)
class ForgedNotice:
    """An entry of the notice log that no process of the run has written. It has no effect."""


Verdict = (
    GroupFailed
    | EpochAborted
    | LeaveAnnounced
    | JoinRequested
    | RunHalted
    | HostSilent
    | LeaveRequested
    | HostAssigned
    | RestartRefused
    | Saves
    | Stops
    | ViewAgreed
    | RunFinished
    | ChecksumsRequested
    | CollectivesRequested
    | ForgedNotice
)
"""The notices that mean the same to every reader; the result of :func:`classify`."""

Signal = RankExited | RankUnresponsive | Verdict


def once(signal: Signal) -> str | None:
    """Return the name under which several processes may send the same signal and one is enough; None if each counts."""
    match signal:
        case EpochAborted(epoch=epoch, after=after):
            return f"reset {epoch} {after}"
        case ViewAgreed(epoch=epoch):
            return f"agreed {epoch}"
        case RunFinished():
            return "over"
        case GroupFailed(group=group, incarnation=incarnation):
            return f"failed {group} {incarnation}"
        case RunHalted():
            return "halts"
    return None


def classify(signal: Signal) -> Verdict:
    """Return the verdict that a signal leads to. ``core.protocol.machine`` decides whether it still concerns a member.

    One dead rank takes its whole group out, because the healthy ranks cannot go on without it (architecture.md, *group*).
    """
    match signal:
        case RankExited(exit=exit_, incarnation=incarnation):
            return GroupFailed(exit_.group, str(exit_), incarnation, _blamed(exit_), ended=True)
        case RankUnresponsive(group=group, position=position, pid=pid, host=host, why=why, incarnation=incarnation):
            return GroupFailed(group, f"{rank_name(position, pid, host, signal.host_rank)} {why}", incarnation)
        case HostSilent(heard=False, incarnation=incarnation) if split := {*signal.groups_by} & {*signal.groups_about}:
            # A group with ranks on both hosts is split, whichever host is cut off.
            return GroupFailed(min(split), f"{signal.reason}, and the group has ranks on both", incarnation)
        case _:
            return signal


def ends(verdict: Verdict, view: View, step: int) -> bool:
    """Return whether the verdict ends the epoch of ``view`` for a group that works on ``step``.

    Such a group may not wait in the epoch any more; ``core.protocol.machine`` closes it.
    """
    match verdict:
        case GroupFailed(group=group, incarnation=incarnation):
            return group in view.live and incarnation >= view.incarnations.get(group, 0)
        case RunHalted():
            return True
        case EpochAborted(epoch=epoch, after=after):
            return epoch == view.epoch and after < step
        case HostSilent(heard=heard):
            return not heard and all(set(unit) & set(view.live) for unit in verdict.concerned(view))
    # A group that leaves in order is waited for; an epoch that ends for a request is announced (``EpochAborted``).
    return False


def remember(heard: tuple[Verdict, ...], verdict: Verdict) -> tuple[Verdict, ...]:
    """Return the verdicts a rank has to keep of ``heard`` and ``verdict``, so that :func:`ends` gives the same as with all.

    Their number does not grow with the number of losses, if the caller drops those about epochs that are over. For a
    dead group the verdict about its newest start is kept; for a pair of hosts the last one.
    """
    rest = tuple(earlier for earlier in heard if not _outdated(earlier, verdict))
    never = (
        not isinstance(verdict, GroupFailed | EpochAborted | HostSilent)
        or isinstance(verdict, HostSilent)
        and verdict.heard
    )
    return rest if never or any(_outdated(verdict, earlier) for earlier in rest) else (*rest, verdict)


def _outdated(verdict: Verdict, other: Verdict) -> bool:
    """Return whether ``other`` implies ``verdict``, or withdraws it."""
    match verdict, other:
        case GroupFailed(), GroupFailed():
            return verdict.group == other.group and verdict.incarnation <= other.incarnation
        case EpochAborted(), EpochAborted():
            return (verdict.epoch, verdict.in_order) == (other.epoch, other.in_order) and verdict.after >= other.after
        case HostSilent(), HostSilent():
            return verdict.units == other.units
    return False


def in_order(verdict: Verdict) -> bool:
    """Return whether a verdict that ends an epoch does so without a failure, so that groups in the step before finish it."""
    return isinstance(verdict, EpochAborted) and verdict.in_order


def _blamed(exit_: Exit) -> Microbatch | None:
    """Return the microbatch that may have ended the process; None if a signal killed it, which the microbatch did not cause.

    What a dying process wrote may be torn, and then accuses no microbatch.
    """
    if exit_.signal is not None or exit_.microbatch is None:
        return None
    try:
        return Microbatch.parse(exit_.microbatch)
    except ValueError:
        return None


_KINDS: dict[str, type] = {kind.__name__: kind for kind in get_args(Signal)}


def to_json(signal: Signal) -> dict[str, Any]:
    """Return the wire form of a signal in the control store's notice log."""
    return {"kind": type(signal).__name__, **codec.encode(signal)}


def from_json(raw: Mapping[str, Any]) -> Signal:
    """Return the signal of a wire form (inverse of :func:`to_json`). Raises ``ValueError`` for what is none."""
    fields = dict(raw)
    if (kind := _KINDS.get(name := fields.pop("kind"))) is None:
        raise ValueError(f"notice of kind {name!r} is not known; do all nodes run the same megatron_ft?")
    return cast(Signal, codec.decode(kind, fields))
