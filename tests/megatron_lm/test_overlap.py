"""Parameters that are gathered in the next forward pass (``--overlap-param-gather``) are whole in what is saved before."""

from __future__ import annotations

import pytest
import torch

from megatron_ft.run.checkpoint import reader
from tests import support
from tests.megatron_lm import runs

STEPS = 24
OWN = (
    *(*runs.MOCK, "--train-iters", STEPS, "--use-distributed-optimizer", "--overlap-grad-reduce"),
    *("--overlap-param-gather", "--ddp-num-buckets", 4),
)


VIRTUAL = ("--pipeline-model-parallel-size", 2, "--num-layers-per-virtual-pipeline-stage", 1)


@pytest.mark.long
@pytest.mark.parametrize(
    "ranks, division", [pytest.param(2, (), id="DP2"), pytest.param(4, VIRTUAL, id="DP2, PP2, virtual stages")]
)
def test_the_ranks_of_a_stage_save_the_same_parameters(tmp_path, megatron, ranks, division):
    saved = tmp_path / "saved"
    gate = support.Gate(tmp_path, slowly=STEPS, script=runs.SCRIPT)
    often = {"directory": str(saved), "period_s": 0.05, "keep": STEPS}
    run = runs.start(tmp_path / "run", megatron, ranks, *OWN, *division, script=gate.script, checkpoint=often)
    support.wait_for(lambda: bool(run.events("checkpoint")), run)
    gate.open()
    runs.said(run)
    within = [found for found in reader.find(saved) if found.complete and 0 < found.step < STEPS]
    assert within
    for found in within:
        one, other = (reader.load(found, position)["model"] for position in range(2))
        assert one.keys() == other.keys()
        assert [name for name in one if not torch.equal(one[name], other[name])] == []
