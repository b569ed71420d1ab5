"""The end of a wait in a rank whose group has lost another rank."""

from __future__ import annotations

import threading
from unittest.mock import MagicMock

import pytest

from megatron_ft.core.protocol.messages import GroupFailed, RunHalted
from megatron_ft.errors import InvariantBroken, RunStopped
from megatron_ft.run.peer_lost import LivenessTracker, wait_for_return

DEATHS = [GroupFailed(group, "its rank 1 has ended", 0) for group in (0, 1)]


def wait(census: LivenessTracker) -> None:
    rank, store = MagicMock(group=0, position=0, lost_because="its rank 1 has ended"), MagicMock()
    rank.env.config.fault_tolerance.store_patience_s = 60.0
    store.get.return_value = None
    wait_for_return(MagicMock(rank=rank), store, census, "a connection broke", lambda: "")


@pytest.mark.parametrize("later", [False, True])
def test_a_run_that_was_halted_ends_every_rank_with_the_same_error(later):
    """The other rank of the group has seen a tie, and has announced it before it ended; this rank may have missed it
    first."""
    census = LivenessTracker(2)
    if later:
        threading.Timer(0.2, census.on_signal, [RunHalted(3, "the states differ")]).start()
    else:
        for verdict in (RunHalted(3, "the states differ"), *DEATHS):
            census.on_signal(verdict)
    with pytest.raises(InvariantBroken, match="the states differ"):
        wait(census)


def test_without_another_group_the_rank_ends_as_left_out():
    census = LivenessTracker(2)
    for death in DEATHS:
        census.on_signal(death)
    with pytest.raises(RunStopped, match="was left out: its rank 1 has ended") as caught:
        wait(census)
    assert caught.type is RunStopped
