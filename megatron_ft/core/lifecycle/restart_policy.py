"""Restarts of lost groups: the time of the next start, or the reason for none.

Intuition. A group that was taken down from outside (a signal, a node that failed, a link that was cut) is started again at
once: its place is empty, and the others do its work meanwhile. A group that ended by itself, with an exception, is
started a moment later: the same error may be about to take its neighbours as well, and then there is no run to come
back to. A group that is soon lost again waits twice as long each time. Some groups do not come back at all:

- a group that left in order, was told to end (SIGTERM), or whose script ended by itself: that was wanted;
- a group that stopped because the whole run stops (``min_groups``, a microbatch that kills each group that computes
  it). A group that stopped because the others left it out while it lived (stopped and awake again, cut off and healed)
  comes back;
- a group that fails twice with the same message before its first step: a third start would fail, too;
- a group that was started as often within an hour as is allowed;
- any group, once no group has the model any more, because no group could hand it over.

Every start of a group is an *incarnation*, numbered from 0; a verdict about an older one changes nothing.

Assumes: verdicts may come twice, late, or about an older incarnation. ``now`` is a local monotonic clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from megatron_ft.errors import GroupLeft, InvariantBroken, RunStopped, StartOver, StoreError, WipedOut
from megatron_ft.types import Exit, GroupId, View

HOUR_S = 3600.0
FIRST_S, LONGEST_S = 1.0, 60.0
"""The first pause before a start and the longest one, in seconds; each further one is twice as long."""
WELL_S, WELL_TIMES = 600.0, 4.0
"""The pauses begin anew after a group has lived for this number of seconds, or has been a member again for this multiple of
the duration of its return: its return has then paid off, however short the steps are."""
_DOUBLINGS = 30
"""The largest number of doublings of a pause, against overflow: the longest pause is reached long before."""

Kind = Literal["died", "failed", "left", "ended", "over"]
"""The kind of a loss. died: taken down from outside, or left out or cut off while it lived. failed: ended by itself,
with an exception. left: in order. ended: an operator or its script wanted it to end. over: it stopped because the whole
run does."""


WANTED: frozenset[Kind] = frozenset({"left", "ended", "over"})
"""The kinds of loss after which a group does not come back."""


@dataclass(frozen=True)
class Loss:
    """The loss of an incarnation.

    Attributes:
        incarnation: the start that is lost.
        kind: of the loss.
        why: its last message.
        begun: True if it has had a part in a committed step.
    """

    incarnation: int
    kind: Kind
    why: str
    begun: bool = True


@dataclass(frozen=True)
class Group:
    """One group as the agent that brings it back knows it. Times are in seconds on a local monotonic clock.

    Attributes:
        incarnation: its newest start.
        down: True if that start is lost.
        due: time of the next start of a group that is down.
        never: why it is not started again; empty if it is.
        again: times at which it was started again, within the last hour.
        since: time of the last start.
        back: time at which it was a member again after that; None before.
        quick: number of losses in a row without a good time in between, and so of the next start, from 1.
        words: last message of a start that failed before its first step, else None.
        lost_at: time of the last loss.
    """

    incarnation: int = 0
    down: bool = False
    due: float | None = None
    never: str = ""
    again: tuple[float, ...] = ()
    since: float = 0.0
    back: float | None = None
    quick: int = 0
    words: str | None = None
    lost_at: float = 0.0

    @property
    def pending(self) -> bool:
        """True if the group is down and will be started again."""
        return self.down and not self.never


def lost(group: Group, loss: Loss, now: float, per_hour: int) -> Group:
    """Take in the loss of an incarnation; the first verdict against it counts. ``per_hour``: the starts that are allowed in
    any hour, the very first not counted."""
    if loss.incarnation != group.incarnation or group.down:
        return group
    words = loss.why if loss.kind == "failed" and not loss.begun else None
    quick = 0 if _lived_well(group, now) else group.quick
    due = now + pause_s(quick + (loss.kind == "failed"))
    again = tuple(start for start in group.again if start > due - HOUR_S)
    down = replace(group, down=True, due=due, again=again, quick=quick + 1, words=words, lost_at=now)
    return replace(down, never=group.never or _refusal(down, group.words, loss, per_hour))


def _lived_well(group: Group, now: float) -> bool:
    if now - group.since >= WELL_S:
        return True
    return group.back is not None and now - group.back >= WELL_TIMES * (group.back - group.lost_at)


def pause_s(doublings: int) -> float:
    """Return the pause in seconds: 0 the first time, then ``FIRST_S``, twice that, ..."""
    if not doublings:
        return 0.0
    return min(FIRST_S * 2.0 ** min(doublings - 1, _DOUBLINGS), LONGEST_S)


def _refusal(group: Group, words_before: str | None, loss: Loss, per_hour: int) -> str:
    """Return why the group is not started again; empty if it is."""
    if loss.kind in WANTED:
        return loss.why
    if group.words is not None and group.words == words_before:
        return (
            f"it has failed before its first step twice, in the same words: {loss.why}; it would again: correct that, then "
            f"start the run again to have the group back"
        )
    if len(group.again) >= per_hour:
        return (
            f"it was started again {len(group.again)} times within an hour, and fault_tolerance.rejoin.restarts_per_hour is "
            f"{per_hour}; the last time it was lost: {loss.why}; see in its log what takes it down, or allow more"
        )
    return ""


def never(group: Group, why: str) -> Group:
    """Return the group marked as never to be started again; the first reason stands."""
    return replace(group, never=group.never or why)


def is_due(group: Group, now: float) -> bool:
    """Return whether the group's next incarnation is to be started now."""
    return group.pending and group.due is not None and now >= group.due


def started(group: Group, now: float) -> Group:
    """Return the group after its next incarnation was started at ``now``."""
    assert is_due(group, now), f"{group} is not due at {now}"
    again = (*(start for start in group.again if start > now - HOUR_S), now)
    return replace(group, incarnation=group.incarnation + 1, down=False, due=None, again=again, since=now, back=None)


def member(group: Group, now: float) -> Group:
    """Note that the newest incarnation is a member; the first such time counts."""
    if group.down or group.back is not None or not group.incarnation:
        return group
    return replace(group, back=now)


def kind_of(exit_: Exit, incarnation: int, seats: Seats) -> Kind:
    """Return the kind of loss that the end of a process means for its group."""
    if exit_.signal is not None:
        return "ended" if exit_.signal == "SIGTERM" else "died"
    match exit_.code:
        case 0:
            return "ended"
        case GroupLeft.exit_code:
            return "left"
        case StoreError.exit_code | StartOver.exit_code:
            return "died"  # it was cut off from the store for too long, or has lost its donors
        case InvariantBroken.exit_code | WipedOut.exit_code:
            return "over"
        case RunStopped.exit_code:
            return "died" if seats.left_out(exit_.group, incarnation) else "over"
    return "failed"


# --- groups that have the model ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seats:
    """The members, from the newest view and the deaths that are known.

    Attributes:
        view: the newest view.
        min_groups: with fewer live groups the run stops.
        graves: group -> its newest incarnation that is dead.
    """

    view: View
    min_groups: int = 1
    graves: Mapping[GroupId, int] = field(default_factory=dict)

    def after(self, view: View) -> Seats:
        return replace(self, view=view) if view.epoch > self.view.epoch else self

    def without(self, group: GroupId, incarnation: int) -> Seats:
        """Return the seats after the death of that incarnation."""
        if incarnation <= self.graves.get(group, -1):
            return self
        return replace(self, graves={**self.graves, group: incarnation})

    @property
    def taken(self) -> frozenset[GroupId]:
        """The members that are not known to be dead: they have the model, or get it before any new group does."""
        incarnations = self.view.incarnations
        return frozenset(g for g in self.view.live if incarnations.get(g, 0) > self.graves.get(g, -1))

    @property
    def enough(self) -> bool:
        """True if there is a run to come back to."""
        return bool(self.taken) and len(self.view.live) >= self.min_groups

    def left_out(self, group: GroupId, incarnation: int) -> bool:
        """Return whether other groups go on without that incarnation."""
        return not self.view.seats(group, incarnation) and len(self.view.live) >= self.min_groups
