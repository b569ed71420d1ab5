"""An unchanged script of Megatron-LM goes on when a rank dies, and the group comes back: all that it logs is what plain
Megatron logs on the same number of data-parallel ranks."""

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
STEPS = 24
REJOIN = {"enabled": True, "restarts_per_hour": 100}


@pytest.mark.parametrize("layout", support.first_of(LAYOUTS, "DP2, EP2, distributed optimizer"))
def test_all_that_is_logged_is_what_plain_megatron_logs(tmp_path, megatron, layout):
    own = (*runs.MOCK, "--train-iters", STEPS, "--eval-interval", 10, *layout)
    hold = Breakpoint(1, 3, "backward", after=1, position=1)
    gate = support.Gate(tmp_path, slowly=STEPS, script=runs.SCRIPT)
    run = runs.start(tmp_path / "run", megatron, RANKS, *own, holds=[hold], script=gate.script, rejoin=REJOIN)
    run.strike_in_step(hold)
    support.wait_for(lambda: bool(run.events("rejoined")), run)
    gate.open()
    said = runs.said(run)
    assert run.live == [line["group"] for line in run.events("survivor")] == [0, 1]
    assert runs.differences(runs.plain(megatron, 2 * RANKS, *own), said, run) == [], run.logs()


@pytest.mark.long
def test_exact_sums_have_the_same_bits_with_and_without_losses(tmp_path, megatron):
    own = (*runs.MOCK, *LAYOUTS["DP2, EP2, distributed optimizer"])
    hold = Breakpoint(1, 3, "backward", after=1, position=1)
    run = runs.start(tmp_path / "run", megatron, RANKS, *own, holds=[hold], reduction="exact")
    run.strike_in_step(hold)
    assert runs.said(run).iterations and run.live == [0]
    alone = runs.start(tmp_path / "alone", megatron, RANKS, *own, reduction="exact")
    runs.said(alone)
    assert support.outcome(run) == support.outcome(alone)
