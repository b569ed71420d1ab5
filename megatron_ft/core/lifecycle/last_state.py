"""The last complete state of a run: the decisions of groups on their way back whose donors are lost.

Intuition. A group that follows holds the state of a committed step. As long as a member of the run lives, that state is
worth nothing: the members are further. Once all members are lost, the groups on their way back hold the newest states there
are, and no group is left whose word could be waited for. So none is: each of them saves what it holds as a checkpoint of
its own and ends, and the job goes on from the newest complete checkpoint, as after every wipe-out. That choice is the
agreement; it needs no messages between processes that are about to end.

Until it is known that a member lives, a group that has lost its donors keeps its state: the notices of the other losses may
be on their way. A view without the donors shows that members live. If neither comes, the group starts over after a while.

A group has one state only if each of its ranks holds the same step. All ranks take the state, and make each step, or none
does; but a rank may die in between, or before its part is written. Then nothing is published.

Assumes: notices may come late, or not at all; ranks of the group may be lost at any moment.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_ft.core.lifecycle.restart_policy import Seats
from megatron_ft.types import GroupId

Fate = Literal["unknown", "goes on", "lost"]
"""What a group that has lost its donors knows of the run. goes on: members live. lost: no member does."""


@dataclass(frozen=True)
class Part:
    """What a rank says of its part of the group's state.

    Attributes:
        position: of the rank.
        step: the step that starts from the state it has written; None if it has written none.
        error: why it has written none.
    """

    position: int
    step: int | None
    error: str = ""


def fate(seats: Seats, me: GroupId, donors: Collection[tuple[GroupId, int]]) -> Fate:
    """Return what group ``me``, which has no seat and has lost one of its ``donors``, (group, incarnation), knows of the
    run. A member that is an older start of ``me`` is lost: else there were no later one."""
    if not seats.taken - {me}:
        return "lost"
    return "unknown" if all(seats.view.seats(*donor) for donor in donors) else "goes on"


def refusal(parts: Sequence[Part], ranks: int, at: int) -> str:
    """Return why a group of ``ranks`` ranks has no state of step ``at`` to publish; "" if it has."""
    missing = sorted(set(range(ranks)) - {part.position for part in parts})
    if missing:
        return f"nothing has come of the ranks {', '.join(map(str, missing))}"
    for part in parts:
        if part.step is None:
            return f"rank {part.position} has no part: {part.error}"
        if part.step != at:
            return f"rank {part.position} holds the state of step {part.step}, rank 0 that of step {at}"
    return ""
