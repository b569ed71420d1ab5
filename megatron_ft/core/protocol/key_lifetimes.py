"""Lifetimes of the control store's keys and of the notices in its log. Decisions only.

Every epoch leaves keys behind (its view, its reports, the keys that process groups were built through), and so does
every start of a group. If they are never removed, a store fills up: with 1,024 groups, gloo's addresses alone are about
130 MB for each epoch.

A key of epoch e is not needed any more when the view of epoch e + 2 stands: a group can only be a member of that view if it
has reported in epoch e + 1, and has therefore adopted the view of e + 1. A process that was stopped and has missed a
view finds the oldest remaining one through the floor (``run.store.garbage_collection``), and sees there that it was left
out. The same distance is kept for the starts of a group.

The notice log is not cut off at an epoch: a host that joins must learn where all ranks run, and a new rank must learn
which groups are dead. So removed entries are replaced by the few that can still change a decision (:func:`kept`).

Assumes: a notice may be heard twice; nothing is said about an epoch or a start that is over after that.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_ft.core.lifecycle.checkpoint_protocol import Saves, Stops
from megatron_ft.core.protocol import signals
from megatron_ft.core.protocol.messages import GroupFailed
from megatron_ft.types import GroupId, Microbatch, View

BEHIND = 2
"""The keys of an epoch, or of a start of a group, are removed when the one that comes this number later stands."""
_DIGITS = 19
_FIRST_LATER = 1
"""The first start of a group that was added to a run; its start key is how hosts claim group numbers (``host.join``)."""


@dataclass(frozen=True)
class Floor:
    """The limits below which keys may be gone from the store.

    Attributes:
        epoch: views of older epochs may be gone. The view of this epoch is there.
        index: older entries of the notice log may be gone; those that still matter are in ``kept/<index>``.
    """

    epoch: int = 0
    index: int = 0


def floor_of(view: View, index: int) -> Floor:
    """Return the floor when ``view`` is the newest one and the log is no longer needed before ``index``."""
    return Floor(max(0, view.epoch - BEHIND + 1), index)


@dataclass(frozen=True)
class Present:
    """The knowledge from which keys are judged.

    Attributes:
        view: the newest view.
        floor: the present floor.
        graves: group -> its newest start that is dead.
    """

    view: View
    floor: Floor
    graves: Mapping[GroupId, int] = field(default_factory=dict)

    def newest_start(self, group: GroupId) -> int:
        return max(self.view.incarnations.get(group, 0), self.graves.get(group, 0))


def expired(key: str, present: Present) -> bool:
    """Return whether this key of a run is not needed any more. A key of a kind not listed here lives as long as the run."""
    kind, _, rest = key.partition("/")
    first = rest.partition("/")[0]
    match kind:
        case "view":  # a rank of the first start may be slow to come, and begins with view 0
            return 0 < _number(first) < present.floor.epoch
        case "report" | "ready" | "outer":
            return 0 <= _number(first) < present.floor.epoch
        case "stands":
            _, _, attempt = rest.partition(".e")  # RUN.eEPOCH.GROUP.NUMBER (``run.saves.coordinator``)
            epoch = attempt.partition(".")[0]
            return 0 <= _number(epoch) < present.floor.epoch
        case "inner" | "restart" | "start" | "calls":
            return _start_is_over(kind, first, present)
        # Steps before the view's are committed everywhere; "nonfinite/stop" and the like are not steps.
        case "nonfinite" | "divergence" | "evaluate":
            return 0 <= _number(first) < present.view.step
        case "notice" | "kept":
            return 0 <= _number(first) < present.floor.index
    return False


def _start_is_over(kind: str, seat: str, present: Present) -> bool:
    group, _, number = seat.partition(".")
    start = _number(number or "0")
    if _number(group) < 0 or start < 0 or (kind == "start" and start == _FIRST_LATER):
        return False
    return start <= present.newest_start(_number(group)) - BEHIND


def _number(text: str) -> int:
    """Return the number that ``text`` is; -1 if it is none, because any process can write keys."""
    return int(text) if text.isdecimal() and len(text) < _DIGITS else -1


def graves(notices: Iterable[signals.Signal]) -> dict[GroupId, int]:
    """Return group -> its newest start that one of the notices says is dead."""
    found: dict[GroupId, int] = {}
    for signal in notices:
        verdict = signals.classify(signal)
        if isinstance(verdict, GroupFailed):
            found[verdict.group] = max(verdict.incarnation, found.get(verdict.group, 0))
    return found


def kept(notices: Sequence[signals.Signal], view: View) -> tuple[signals.Signal, ...]:
    """Return the notices that can still change a decision when ``view`` stands, in their order.

    There is at most one for each kind of notice and group, rank, host, or pair of hosts, so their number does not grow
    with the number of losses. Those that concern ``view``'s own epoch, or a later one, are all kept.
    """
    dead = graves(notices)
    holders: dict[Hashable, tuple[tuple[int, ...], int]] = {}
    chosen: set[int] = set()
    for number, signal in enumerate(notices):
        if _still_open(signal, view):
            chosen.add(number)
        for slot, rank in _slots(signal, dead):
            if slot not in holders or rank >= holders[slot][0]:
                holders[slot] = (rank, number)
    chosen |= {number for _, number in holders.values()}
    return tuple(notices[number] for number in sorted(chosen))


def _still_open(signal: signals.Signal, view: View) -> bool:
    """Return whether the signal is about an epoch, or a step, that is not over."""
    match signals.classify(signal):
        case signals.EpochAborted(epoch=epoch) | Saves(epoch=epoch):
            return epoch >= view.epoch
        case GroupFailed(microbatch=Microbatch(step=step)):  # two deaths in one microbatch end the run
            return step >= view.step
    return False


def _slots(signal: signals.Signal, dead: Mapping[GroupId, int]) -> list[tuple[Hashable, tuple[int, ...]]]:
    """Return the subjects of the signal, each with the signal's rank among those about the same subject.

    The signal of the highest rank is kept; among equals the last one.
    """
    verdict = signals.classify(signal)
    against: list[tuple[Hashable, tuple[int, ...]]] = []
    if isinstance(verdict, GroupFailed):
        against.append(((type(signal), verdict.group), (verdict.incarnation,)))
    match signal:
        case signals.RankExited() | signals.RankUnresponsive() | GroupFailed():
            return against
        case signals.HostSilent():
            return [(("silent", signal.units), ()), *against, (("silent names", signal.by, signal.about), ())]
        case signals.LeaveAnnounced(group=group, incarnation=number, after=after):
            return [(("leaving", group), (number, -after))]
        case signals.JoinRequested(group=group, incarnation=number):
            return [(("asking", group), (number,))] if number > dead.get(group, -1) else []
        case signals.LeaveRequested(group=group):
            return [(("dismissed", group), ())]
        case signals.HostAssigned(host=host, ranks=ranks, incarnation=number):
            return [(("host_record", host), ()), *((("rank", rank), (number,)) for rank in ranks)]
        case signals.RestartRefused(host=host, group=group):
            return [(("refused", host, group), ())]
        case Saves(epoch=epoch, at=at):
            return [("saves", (epoch, at))]
        case Stops(groups=groups):
            return [(("stops", groups), ())]
        case signals.ViewAgreed(epoch=epoch):
            return [("agreed", (epoch,))]
        case signals.RunFinished():
            return [("over", ())]
        case signals.RunHalted():
            return [("halts", ())]
        case (
            signals.EpochAborted()
            | signals.ChecksumsRequested()
            | signals.CollectivesRequested()
            | signals.ForgedNotice()
        ):
            return []
    raise TypeError(f"kept: {signal!r} is not a signal")
