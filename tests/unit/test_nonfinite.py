"""How many steps without a finite gradient end a run, or make a group suspect: only those in a row count."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from megatron_ft.errors import RunStopped
from megatron_ft.record.history import History
from megatron_ft.run.engines.port import StepResult
from megatron_ft.run.nonfinite import MOST_IN_A_ROW, SUSPECT_AFTER, NonFinite


class Group:
    """Group 0 with the policy "skip", which asks no other group."""

    def __init__(self, directory) -> None:
        self.account, self.step = NonFinite("skip", 0, History(directory), SimpleNamespace()), 0

    def end_steps(self, count: int, norm: float, finite_here: bool = True, searches_scale: bool = False) -> None:
        """End steps with a gradient of that norm. ``finite_here``: whether the part of this group was finite."""
        engine = SimpleNamespace(local_finite=lambda: finite_here, searches_scale=searches_scale)
        for _ in range(count):
            self.account.check(StepResult(self.step, 1.0, 2, norm), engine)
            self.step += 1


@pytest.fixture
def group(tmp_path):
    return Group(tmp_path)


def test_a_run_stops_after_skipped_steps_in_a_row_and_a_step_with_an_update_begins_the_count_anew(group):
    for _ in range(2):
        group.end_steps(MOST_IN_A_ROW - 1, math.inf)
        group.end_steps(1, 1.0)
    group.end_steps(MOST_IN_A_ROW - 1, math.nan)
    with pytest.raises(RunStopped, match="the model has diverged"):
        group.end_steps(1, math.nan)


def test_steps_that_are_skipped_while_a_loss_scale_is_sought_are_not_counted(group):
    group.end_steps(4 * MOST_IN_A_ROW, math.inf, finite_here=False, searches_scale=True)
    assert not group.account.suspect
    group.end_steps(MOST_IN_A_ROW - 1, math.inf)
    with pytest.raises(RunStopped, match="the model has diverged"):
        group.end_steps(1, math.inf)


@pytest.mark.parametrize(
    "norm", [pytest.param(1.0, id="an update"), pytest.param(math.nan, id="the gradient of another group")]
)
def test_a_group_is_suspect_after_steps_in_a_row_in_which_its_own_gradient_was_not_finite(group, norm):
    for _ in range(2):
        group.end_steps(SUSPECT_AFTER - 1, math.nan, finite_here=False)
        group.end_steps(1, norm)
    group.end_steps(SUSPECT_AFTER - 1, math.nan, finite_here=False)
    assert not group.account.suspect
    group.end_steps(1, math.nan, finite_here=False)
    assert group.account.suspect
