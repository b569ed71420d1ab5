"""Whether, and when, a lost group is started again.

Intuition. A group that was taken down from outside (a signal, a node that failed, a link that was cut) is started again at
once: its place is empty, and the others do its work meanwhile. One that ended by itself, with an exception, is started a
moment later: what it fell over may be about to take its neighbours as well, and then there is nobody to come back to. Who
is lost again soon waits twice as long each time. Some do not come back at all:

- who left in order, was told to end (SIGTERM), or whose script came to its end by itself: somebody wanted that;
- who stopped because the whole run stops (``min_groups``, a microbatch that kills whoever computes it). Who stopped because
  the others have left it out while it lived (stopped and awake again, cut off and healed) does come back;
- who fails twice in the same words before its first step: it would the third time, too;
- who was started as often within an hour as is allowed;
- anybody, once no group has the model any more: there is nobody who could hand it over.

Every start of a group is an *incarnation*, numbered from 0; what is said about an older one changes nothing.

Assumes: verdicts may come twice, late, or about an older incarnation. ``now`` is a local monotonic clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from megatron_ft.errors import GroupLeft, RunStopped, StartOver, StoreError
from megatron_ft.types import Exit, GroupId, View

HOUR_S = 3600.0
_DOUBLINGS = 30
"""More would only overflow: the longest pause is reached long before."""

Kind = Literal["died", "failed", "left", "ended", "over"]
"""died: taken down from outside, or left out or cut off while it lived. failed: ended by itself, with an exception. left: in
order. ended: somebody, or its script, wanted it to end. over: it stopped because the whole run does."""


WANTED: frozenset[Kind] = frozenset({"left", "ended", "over"})
"""Such a group does not come back."""


@dataclass(frozen=True)
class Limits:
    """``per_hour``: starts of one group in any hour, the very first not counted. A pause is ``first_s`` or twice the one
    before, at most ``longest_s``. A group begins anew when it has lived for ``well_s``, or has been a member again for
    ``well_times`` as long as its return took: to have it back pays off then, however short the steps are."""

    per_hour: int = 6
    first_s: float = 1.0
    longest_s: float = 60.0
    well_s: float = 600.0
    well_times: float = 4.0


@dataclass(frozen=True)
class Loss:
    """An incarnation is lost. ``why``: its last words; ``begun``: it has had a part in a committed step."""

    incarnation: int
    kind: Kind
    why: str
    begun: bool = True


@dataclass(frozen=True)
class Group:
    """One group as the agent that brings it back knows it.

    ``incarnation`` lives unless it is ``down``. A group that is down is started again at ``due``, or never, with the reason.
    ``again``: when it was started again, within the last hour; ``since``: when for the last time; ``back``: when it was a
    member again after that; ``quick``: how often in a row it was lost soon; ``words``: the last ones of who failed before
    its first step.
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
        """It will be started again, if nothing comes between."""
        return self.down and not self.never

    @property
    def attempt(self) -> int:
        """Which start in a row the next one is, without a good time in between; from 1."""
        return self.quick


def lost(group: Group, loss: Loss, now: float, limits: Limits) -> Group:
    """The verdict against an incarnation; the first one counts."""
    if loss.incarnation != group.incarnation or group.down:
        return group
    words = loss.why if loss.kind == "failed" and not loss.begun else None
    quick = 0 if _lived_well(group, now, limits) else group.quick
    due = now + _pause_s(quick + (loss.kind == "failed"), limits)
    again = tuple(start for start in group.again if start > due - HOUR_S)
    down = replace(group, down=True, due=due, again=again, quick=quick + 1, words=words, lost_at=now)
    return replace(down, never=group.never or _refusal(down, group.words, loss, limits))


def _lived_well(group: Group, now: float, limits: Limits) -> bool:
    if now - group.since >= limits.well_s:
        return True
    return group.back is not None and now - group.back >= limits.well_times * (group.back - group.lost_at)


def _pause_s(doublings: int, limits: Limits) -> float:
    """Nothing the first time, then ``first_s``, twice that, ..."""
    if not doublings:
        return 0.0
    return min(limits.first_s * 2.0 ** min(doublings - 1, _DOUBLINGS), limits.longest_s)


def _refusal(group: Group, words_before: str | None, loss: Loss, limits: Limits) -> str:
    """Why it is not started again; empty if it is."""
    if loss.kind in WANTED:
        return loss.why
    if group.words is not None and group.words == words_before:
        return (
            f"it has failed before its first step twice, in the same words: {loss.why}; it would again: correct that, then "
            f"start the run again to have the group back"
        )
    if len(group.again) >= limits.per_hour:
        return (
            f"it was started again {len(group.again)} times within an hour, and fault_tolerance.rejoin.restarts_per_hour is "
            f"{limits.per_hour}; the last time it was lost: {loss.why}; see in its log what takes it down, or allow more"
        )
    return ""


def never(group: Group, why: str) -> Group:
    """Whatever happens to it, it is not started again; the first reason stands."""
    return replace(group, never=group.never or why)


def is_due(group: Group, now: float) -> bool:
    return group.pending and group.due is not None and now >= group.due


def started(group: Group, now: float) -> Group:
    """Its next incarnation is started now."""
    assert is_due(group, now), f"{group} is not due at {now}"
    again = (*(start for start in group.again if start > now - HOUR_S), now)
    return replace(group, incarnation=group.incarnation + 1, down=False, due=None, again=again, since=now, back=None)


def member(group: Group, now: float) -> Group:
    """The incarnation that was started last is a member, seen now; the first sight counts."""
    if group.down or group.back is not None or not group.incarnation:
        return group
    return replace(group, back=now)


def kind_of(exit_: Exit, incarnation: int, seats: Seats) -> Kind:
    """What the end of a process says about its group."""
    if exit_.signal is not None:
        return "ended" if exit_.signal == "SIGTERM" else "died"
    match exit_.code:
        case 0:
            return "ended"
        case GroupLeft.exit_code:
            return "left"
        case StoreError.exit_code | StartOver.exit_code:
            return "died"  # it was cut off from the store for too long, or has lost those it followed
        case RunStopped.exit_code:
            return "died" if seats.left_out(exit_.group, incarnation) else "over"
    return "failed"


# --- who has the model ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seats:
    """Who is a member, from the newest view and the deaths that are known. ``graves``: the newest incarnation of a group
    that is dead; ``min_groups``: with fewer the run stops."""

    view: View
    min_groups: int = 1
    graves: Mapping[GroupId, int] = field(default_factory=dict)

    def after(self, view: View) -> Seats:
        return replace(self, view=view) if view.epoch > self.view.epoch else self

    def without(self, group: GroupId, incarnation: int) -> Seats:
        """That one is dead."""
        if incarnation <= self.graves.get(group, -1):
            return self
        return replace(self, graves={**self.graves, group: incarnation})

    @property
    def taken(self) -> frozenset[GroupId]:
        """Members that are not known to be dead: they have the model, or get it before anybody new does."""
        incarnations = self.view.incarnations
        return frozenset(g for g in self.view.live if incarnations.get(g, 0) > self.graves.get(g, -1))

    @property
    def enough(self) -> bool:
        """Whether there is a run to come back to."""
        return bool(self.taken) and len(self.view.live) >= self.min_groups

    def left_out(self, group: GroupId, incarnation: int) -> bool:
        """Whether others go on without that incarnation, which was not a reason for them to stop."""
        return not self.view.seats(group, incarnation) and len(self.view.live) >= self.min_groups
