"""What groups on their way back do when their donors are lost (``core.lifecycle.last_state``)."""

from __future__ import annotations

import pytest

from megatron_ft.core.lifecycle.last_state import Part, fate, refusal
from megatron_ft.core.lifecycle.restart_policy import Seats
from megatron_ft.types import View


def members(*live: int, dead: dict[int, int] | None = None, **incarnations: int) -> Seats:
    starts = {int(name[1:]): start for name, start in incarnations.items()}
    return Seats(View(3, live, "", incarnations=starts), graves=dead or {})


@pytest.mark.parametrize(
    "seats, known",
    [
        (members(0, 1), "unknown"),
        (members(0, 1, dead={0: 0}), "unknown"),
        (members(0, 1, dead={0: 0, 1: 0}), "lost"),
        (members(1), "goes on"),
        (members(1, dead={1: 0}), "lost"),
        (members(), "lost"),
        (members(0, 2, dead={0: 0}), "lost"),
        (members(0, 1, dead={0: 0, 1: 0}, g1=1), "unknown"),
    ],
    ids=[
        "only the connection has ended",
        "another member lives",
        "all are dead",
        "a view goes on without the donor",
        "a view did, and its members are dead",
        "a view has no members",
        "the other member is an older start of the group",
        "an older start of a member is dead",
    ],
)
def test_what_a_group_knows_that_has_lost_its_donor(seats, known):
    assert fate(seats, me=2, donors=[(0, 0)]) == known


@pytest.mark.parametrize(
    "parts, why",
    [
        ([Part(0, 7), Part(1, 7)], ""),
        ([Part(0, 7)], "nothing has come of the ranks 1"),
        ([Part(0, 7), Part(1, 6)], "rank 1 holds the state of step 6, rank 0 that of step 7"),
        ([Part(0, 7), Part(1, None, "the disk is full")], "rank 1 has no part: the disk is full"),
    ],
)
def test_a_state_is_published_only_if_all_ranks_have_written_that_step(parts, why):
    assert refusal(parts, ranks=2, at=7) == why
