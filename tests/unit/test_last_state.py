"""What groups on their way back do when their donors are lost (``core.lifecycle.last_state``)."""

from __future__ import annotations

from unittest.mock import MagicMock

import pytest
import torch

from megatron_ft.config import schema
from megatron_ft.core.lifecycle.last_state import Part, fate, refusal
from megatron_ft.core.lifecycle.restart_policy import Seats
from megatron_ft.record import history
from megatron_ft.record.history import History
from megatron_ft.run import checkpoint
from megatron_ft.run.engines.port import StepResult
from megatron_ft.run.rejoin.last_save import LastSave
from megatron_ft.run.rejoin.state_receiver import Held
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


def test_no_last_state_is_saved_with_a_step_that_the_record_lacks(tmp_path):
    """The groups that wrote the record are lost, and this group has only remembered its lines."""
    (tmp_path / "saved").mkdir()
    config = schema.resolve({"fault_tolerance": {"checkpoint": {"directory": str(tmp_path / "saved")}}}, groups=2)
    result = StepResult(step=3, loss=1.0, microbatches=2, gradient_norm=1.0)
    copy = checkpoint.snapshot({"weight": torch.ones(2)}, 0, 1)
    executor = MagicMock()
    executor.rank.agreement.run_id, executor.rank.history = "run", History(tmp_path)
    executor.local.identities.of_run.return_value = {}
    executor.local.following.held = Held(4, result, {"speeds": {}}, None, {})
    executor.carry_out = lambda order: [checkpoint.write_part(tmp_path / "saved", order.at, order.attempt, 0, copy)]
    executor.rank.history.record("step", step=3, epoch=0, loss=1.0)
    said = LastSave(executor, MagicMock(config=config, group=1, incarnation=1), 9).save()
    assert "the state that step 4 starts from is saved in" in said
    assert [(line["event"], line["step"]) for line in history.read(tmp_path)] == [("step", 3), ("checkpoint", 4)]
