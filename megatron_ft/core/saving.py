"""Saving a run beside training: when, who, and what becomes of an attempt. Decisions only.

Intuition. Who leads the lowest live group says in the notice log, a step or two ahead: "at the beginning of step s, if we
are still in epoch e, these groups save". The boundary is the same for everybody, so all of them copy the same state without
another word; the epoch is part of it because a step may be committed again, with sums in another order, when groups are
lost at that very boundary, and parts of two versions must never come together. Whoever cannot (it heard too late, the epoch
is another, it has no state) says so, and the attempt is dropped: another one follows.

Assumes: any of the groups may be lost at any moment, the one that asked as well; notices may come late, or again.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_ft.core import checkpoints
from megatron_ft.types import GroupId, View

MOST_PARTS = 4
"""More writers make the copy that training waits for shorter, and more hosts that must not fail meanwhile."""
MARGIN = (2, 256)
"""So many steps ahead a save is said; twice as many after each time that was too late for somebody."""
FIRST_S = 60.0
"""The first one, with which nothing is measured yet; it is what tells how long it takes."""
PRIOR_S = 86_400.0
"""How long a job is believed to live before any end was seen: a day."""
AGAIN_S = 5.0
"""After a save that failed, at first; twice as long each time, and never longer than a period."""


@dataclass(frozen=True)
class Saves:
    """At the beginning of step ``at`` the groups ``writers`` save the state it starts from, the i-th of them part i.

    Holds in ``epoch`` only. ``attempt`` names it; ``by`` completes it. With ``last`` nobody goes on with that step: the
    whole job was told to stop.
    """

    at: int
    epoch: int
    attempt: str
    writers: tuple[GroupId, ...]
    by: GroupId
    last: bool = False

    def part_of(self, group: GroupId) -> int | None:
        """Which part it writes, if it does."""
        return self.writers.index(group) if group in self.writers else None


@dataclass(frozen=True)
class Stops:
    """The agent of these groups was told to stop. When that is true of all, the run saves once more and ends."""

    groups: tuple[GroupId, ...]
    why: str


# --- what to do at a boundary -----------------------------------------------------------------------------------------


def answer(order: Saves, me: GroupId, step: int, view: View, has_state: bool, since: int) -> str | None:
    """What a group does about an order, at the beginning of ``step``: "" is to save; None, nothing yet; else why it cannot.

    Args:
        view: the present one, under which the step before was committed here.
        since: the epoch in which this start of the group got its seat. What was said before is not for it.
    """
    if order.at > step and order.epoch >= view.epoch:
        return None
    if order.epoch < since:
        return "it is for those that were there before"
    if order.epoch != view.epoch:
        return f"epoch {order.epoch} ended before step {order.at}"
    if order.at < step:
        return f"group {me} heard of it in step {step} only"
    return "" if has_state else f"group {me} has no state yet"


def writers(
    live: Collection[GroupId], domains: Mapping[GroupId, Hashable], avoid: Collection[GroupId]
) -> tuple[GroupId, ...]:
    """Who writes: spread over failure domains. Those to avoid only where there is nobody else."""
    willing = [group for group in live if group not in avoid]
    return checkpoints.writers(willing or live, domains, MOST_PARTS)


def stopping(told: Collection[GroupId], view: View) -> bool:
    """Whether the whole job is told to stop, and not a host of it."""
    return set(view.live) <= set(told)


def told_too(told: Collection[GroupId], view: View) -> frozenset[GroupId]:
    """Who enters with ``view``, if the whole job was told to stop by then: nobody has told them."""
    return frozenset(view.joined) if set(view.live) - set(view.joined) <= set(told) else frozenset()


def lost_writers(order: Saves, view: View) -> tuple[GroupId, ...]:
    """Writers that the next view has left out, or that have come back with it: what they were writing is not finished."""
    return tuple(group for group in order.writers if group not in view.live or group in view.joined)


# --- when -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rhythm:
    """How often, from what was measured. ``setting``: seconds, or None to find out.

    ``save_s``: what the last save cost training, None before the first; ``write_s``, how long it took in all. The job was
    started ``ends`` times after an end, and had run for ``ran_s`` before this start; ``restart_s`` is what this one took.
    ``failed``: attempts in a row. ``late``: how often somebody heard too late.
    """

    setting: float | None = None
    save_s: float | None = None
    write_s: float = 0.0
    ran_s: float = 0.0
    ends: int = 0
    restart_s: float = 0.0
    failed: int = 0
    late: int = 0

    def period_s(self, here_s: float) -> float:
        """Seconds between two saves; ``here_s``: since this start."""
        if self.setting is not None:
            return self.setting
        if self.save_s is None:
            return FIRST_S
        uptime_s = checkpoints.expected_uptime_s(self.ran_s + here_s, self.ends, PRIOR_S)
        return checkpoints.period_s(self.save_s, uptime_s, self.restart_s, write_s=self.write_s)

    def wait_s(self, here_s: float, step_s: float) -> float:
        """From the last attempt to the boundary at which the next one is due."""
        period_s = self.period_s(here_s)
        if self.failed:
            period_s = min(period_s, AGAIN_S * 2.0 ** min(self.failed - 1, 20))
        return period_s - step_s / 2  # the boundary nearest to it: ``checkpoints.due``

    @property
    def margin(self) -> int:
        first, most = MARGIN
        return min(first * 2 ** min(self.late, 20), most)

    def saved(self, save_s: float, write_s: float) -> Rhythm:
        return replace(self, save_s=save_s, write_s=write_s, failed=0)

    def lost(self, late: bool) -> Rhythm:
        """An attempt came to nothing."""
        return replace(self, failed=self.failed + 1, late=self.late + late)

    def to_json(self, here_s: float, planned: bool) -> dict[str, Any]:
        """What the next start of the job has to know. ``planned``: it was told to end, which is no failure."""
        return {"ran_s": round(self.ran_s + here_s, 3), "ends": self.ends + (not planned)}

    def resumed(self, before: Mapping[str, Any]) -> Rhythm:
        """As the start before has left it."""
        return replace(self, ran_s=before["ran_s"], ends=before["ends"])
