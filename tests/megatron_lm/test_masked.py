"""An unchanged script of Megatron-LM goes on when a rank dies: all that it logs is what plain Megatron logs on the same
number of data-parallel ranks."""

from __future__ import annotations

import pytest

from megatron_ft.faults.injection_points import Breakpoint
from tests import support
from tests.megatron_lm import runs

LAYOUTS = {
    "PP2, virtual stages": ("--pipeline-model-parallel-size", 2, "--num-layers-per-virtual-pipeline-stage", 1),
    "DP2, EP2, distributed optimizer": (
        *("--expert-model-parallel-size", 2, "--num-experts", 4, "--moe-aux-loss-coeff", 0.01),
        *("--moe-router-load-balancing-type", "aux_loss", "--moe-token-dispatcher-type", "alltoall"),
        *("--disable-bias-linear", "--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
    ),
    "TP2, sequence parallel, per token": (
        *("--tensor-model-parallel-size", 2, "--sequence-parallel", "--calculate-per-token-loss"),
    ),
    "CP2": ("--context-parallel-size", 2),
    "PP2": ("--pipeline-model-parallel-size", 2),
}
"""Divisions of a group into two ranks."""
RANKS = 2


@pytest.mark.parametrize("layout", support.first_of(LAYOUTS, "PP2, virtual stages", "DP2, EP2, distributed optimizer"))
def test_all_that_is_logged_is_what_plain_megatron_logs(tmp_path, megatron, layout):
    own = (*runs.MOCK, *layout)
    hold = Breakpoint(1, 3, "backward", after=1, position=1)
    run = runs.start(tmp_path / "run", megatron, RANKS, *own, holds=[hold])
    run.strike_in_step(hold)
    said = runs.said(run)
    assert run.events("fault") and run.live == [0]
    assert runs.differences(runs.plain(megatron, 2 * RANKS, *own), said, run) == [], run.logs()
