"""The leader's side of saving where another leader or group is lost or late (``run.saves.coordinator``)."""

from __future__ import annotations

from unittest.mock import MagicMock

import pytest

from megatron_ft.config import schema
from megatron_ft.core.lifecycle.checkpoint_protocol import Saves
from megatron_ft.errors import RunStopped
from megatron_ft.run.saves.coordinator import STOPPED, CheckpointCoordinator
from megatron_ft.types import View


def coordinator(directory) -> CheckpointCoordinator:
    """Return that of group 1."""
    agreement = MagicMock(run_id="run")
    agreement.clone.return_value.get.return_value = None
    config = schema.resolve({"fault_tolerance": {"checkpoint": {"directory": str(directory)}}}, groups=3)
    rank = MagicMock(group=1, lost_because="", agreement=agreement)
    return CheckpointCoordinator(MagicMock(rank=rank), config)


@pytest.mark.parametrize("live", [(1, 2), (0, 1, 2)])
def test_the_files_of_a_lost_leaders_attempt_are_deleted_with_the_next_one(tmp_path, live):
    one, order = coordinator(tmp_path), Saves(4, 0, "run.e0.0.1", (0, 1), 0, False)
    (left := tmp_path / f"step-00000004-{order.attempt}").mkdir()
    one.on_signal(order)
    one._ask(MagicMock(view=View(1, live, "")), 6)
    one._attempt.dropped = "enough"
    assert one._conductor.saver.wait(60).error == "enough"
    assert left.exists() == (0 in live)


def test_the_leader_ends_with_the_last_save_only_when_every_group_stands(tmp_path):
    """A group that has received the order too late goes on, and nobody leaves it alone."""
    one, view = coordinator(tmp_path), View(0, (0, 1, 2), "")
    one._why, one._rank.link.concerned.return_value = "told to stop", None
    one._agreement.standing.side_effect = [{1}, {0, 1}, {0, 1, 2}]
    with pytest.raises(RunStopped, match="told to stop"):
        one._stop(Saves(4, 0, "run.e0.1.1", (0, 1), 1, True), MagicMock(view=view), mine=True)
    assert one._agreement.standing.call_count == 3
    one._agreement.put.assert_called_once_with(STOPPED, "told to stop")
