"""Saves beside training: their time, their writers, and the outcome of an attempt. Decisions only.

Intuition. The leader of the lowest live group writes to the notice log, a step or two ahead: "at the beginning of step
s, if the epoch is still e, these groups save". The boundary is the same for all groups, so they copy the same state
without another message. The order holds for one epoch because a step may be committed again, with sums in another
order, when groups are lost at that very boundary, and parts of two versions must never be combined. A group that cannot
save (it heard too late, the epoch is another, it has no state) answers with the reason, the attempt is dropped, and
another one follows.

Assumes: any of the groups may be lost at any moment, the one that gave the order as well; notices may come late, or again.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_ft.core.lifecycle import checkpoint_policy
from megatron_ft.types import GroupId, View

MOST_PARTS = 4
"""The most parts of a checkpoint. More writers shorten the copy that training waits for, but more hosts must not fail
meanwhile."""
FEWEST_VOICES = 3
"""The groups whose states are compared before a checkpoint is sealed, if there are as many: two cannot tell which is
right."""
MARGIN = (2, 256)
"""The steps by which an order precedes its save, at first and at most; doubled each time it was too late for a group."""
FIRST_S = 60.0
"""Seconds until the first save, which measures the duration of a save."""
PRIOR_S = 86_400.0
"""Expected time between two restarts in seconds before any was seen: a day."""
AGAIN_S = 5.0
"""Seconds until the next attempt after a save that failed; twice as long each time, and never longer than a period."""


@dataclass(frozen=True)
class Saves:
    """The order to save, in the notice log; it leads to :func:`answer` at every group.

    Attributes:
        at: the groups save the state that this step starts from, at its beginning.
        epoch: the only epoch in which the order holds.
        attempt: name of the attempt.
        writers: the groups that write, the i-th of them part i.
        by: the group that completes the checkpoint.
        last: True if no group goes on with step ``at``, because the whole job was told to stop.
        witnesses: groups that write nothing, but send a checksum of their state as the writers do.
    """

    at: int
    epoch: int
    attempt: str
    writers: tuple[GroupId, ...]
    by: GroupId
    last: bool = False
    witnesses: tuple[GroupId, ...] = ()

    @property
    def voices(self) -> tuple[GroupId, ...]:
        """The groups that send a checksum of their state, the writers first."""
        return self.writers + self.witnesses

    def part_of(self, group: GroupId) -> int | None:
        """Return the part that ``group`` writes, or None."""
        return self.writers.index(group) if group in self.writers else None


@dataclass(frozen=True)
class Stops:
    """The notice that an agent was told to stop. Once this holds for all groups, the run saves once more and ends.

    Attributes:
        groups: the groups of that agent.
        why: the reason, for people.
    """

    groups: tuple[GroupId, ...]
    why: str


# --- decisions at a step boundary -------------------------------------------------------------------------------------


def answer(order: Saves, me: GroupId, step: int, view: View, has_state: bool, since: int) -> str | None:
    """Return a group's answer to an order at the beginning of ``step``: "" to save; None: not yet; else why it cannot.

    Args:
        order: the order.
        me: the group.
        step: the step that the group is about to begin.
        view: the present view, under which the step before was committed here.
        has_state: True if the group holds the model state.
        since: the epoch in which this start of the group got its seat. Earlier orders are not for it.
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
    """Return the groups that write, spread over failure domains; those in ``avoid`` only if there are no others."""
    willing = [group for group in live if group not in avoid]
    return checkpoint_policy.writers(willing or live, domains, MOST_PARTS)


def witnesses(live: Collection[GroupId], writers: Collection[GroupId], everyone: bool) -> tuple[GroupId, ...]:
    """Return the groups that send a checksum beside the writers: all others if ``everyone``, else as many as are needed
    to outvote one group together with the writers."""
    others = sorted(set(live) - set(writers))
    return tuple(others if everyone else others[: max(0, FEWEST_VOICES - len(writers))])


def stopping(told: Collection[GroupId], view: View) -> bool:
    """Return whether the whole job is told to stop, not only some hosts of it."""
    return set(view.live) <= set(told)


def told_too(told: Collection[GroupId], view: View) -> frozenset[GroupId]:
    """Return the groups that enter with ``view`` if the whole job was told to stop before: they have not been told."""
    return frozenset(view.joined) if set(view.live) - set(view.joined) <= set(told) else frozenset()


def lost_voices(order: Saves, view: View) -> tuple[GroupId, ...]:
    """Return the writers and witnesses that ``view`` has left out, or that have come back with it: their parts are not
    finished, and their checksums may never come."""
    return tuple(group for group in order.voices if group not in view.live or group in view.joined)


# --- the time of the next save ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CheckpointSchedule:
    """The measurements that the period of saves is computed from; times are in seconds.

    Attributes:
        setting: the period that the user has set; None to compute it.
        save_s: time that the last save cost training; None before the first.
        write_s: time that the last save took in all.
        ran_s: time that the job had run before this start.
        ends: number of starts of the job after an unplanned end.
        failed: number of failed attempts in a row.
        late: number of attempts of which a group heard too late.
    """

    setting: float | None = None
    save_s: float | None = None
    write_s: float = 0.0
    ran_s: float = 0.0
    ends: int = 0
    failed: int = 0
    late: int = 0

    def period_s(self, here_s: float) -> float:
        """Return the seconds between two saves; ``here_s``: seconds since this start."""
        if self.setting is not None:
            return self.setting
        if self.save_s is None:
            return FIRST_S
        uptime_s = checkpoint_policy.expected_uptime_s(self.ran_s + here_s, self.ends, PRIOR_S)
        return checkpoint_policy.period_s(self.save_s, uptime_s, self.write_s)

    def wait_s(self, here_s: float, step_s: float) -> float:
        """Return the seconds from the last attempt to the boundary at which the next one is due."""
        period_s = self.period_s(here_s)
        if self.failed:
            period_s = min(period_s, AGAIN_S * 2.0 ** min(self.failed - 1, 20))
        return period_s - step_s / 2  # the boundary nearest to the end of the period

    @property
    def margin(self) -> int:
        first, most = MARGIN
        return min(int(first * 2 ** min(self.late, 20)), most)

    def saved(self, save_s: float, write_s: float) -> CheckpointSchedule:
        return replace(self, save_s=save_s, write_s=write_s, failed=0)

    def lost(self, late: bool) -> CheckpointSchedule:
        """Return the rhythm after a failed attempt."""
        return replace(self, failed=self.failed + 1, late=self.late + late)

    def to_json(self, here_s: float, planned: bool) -> dict[str, Any]:
        """Return the values that the next start of the job needs. ``planned``: the job was told to end."""
        return {"ran_s": round(self.ran_s + here_s, 3), "ends": self.ends + (not planned)}

    def resumed(self, before: Mapping[str, Any]) -> CheckpointSchedule:
        """Return the rhythm with the values that the start before has left."""
        return replace(self, ran_s=before["ran_s"], ends=before["ends"])
