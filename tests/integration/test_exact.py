"""Exact reduction: whatever happens to a run, its losses and its parameters have the same bits."""

from __future__ import annotations

import signal

import pytest

from megatron_ft.faults.injection_points import Breakpoint
from megatron_ft.runlog.run_record import RunRecord
from tests import support

EXACT = {"reduction": "exact"}


def outcome(run: support.Run) -> tuple[list[float], str]:
    """Return the losses of all steps and the digest of the parameters."""
    (end,) = run.events("end")
    losses = {line["step"]: line["loss"] for line in run.events("step")}
    return [losses[step] for step in sorted(losses)], end["params_sha256"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, data_dir):
    run = support.start(tmp_path_factory.mktemp("exact") / "run", data_dir, **EXACT)
    run.check()
    return outcome(run)


def test_a_killed_group_changes_no_bit(tmp_path, data_dir, undisturbed):
    """In a forward pass, in the first all-reduce, during the update; the step that measures the grid is one of them."""
    holds = [Breakpoint(1, 0, "backward"), Breakpoint(2, 3, "reduce", 2), Breakpoint(3, 5, "update")]
    run = support.start(tmp_path / "run", data_dir, holds, **EXACT)
    run.strike_in_step(*holds)
    run.check()
    assert len(run.events("fault")) == 3
    assert outcome(run) == undisturbed
