"""DeepSpeed's pipelines inside groups: a rank of any stage and slice dies at any moment of a flush, and the step is kept."""

from __future__ import annotations

import pytest

from megatron_ft.runtime.points import Hold
from tests import support

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")

SCRIPT = support.ROOT / "examples" / "pretrain_gpt_deepspeed" / "train.py"
STEPS = 5


def start(directory, data_dir, holds=(), *, groups=2, stages=2, slices=1, own=(), **options) -> support.Run:
    return support.start(
        directory,
        data_dir,
        holds,
        steps=STEPS,
        script=SCRIPT,
        groups=groups,
        extra=["--ranks-per-group", stages * slices],
        own=["--stages", stages, "--slices", slices, *own],
        **options,
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory, data_dir) -> support.Run:
    """Two groups that are pipelines of two stages, without failures."""
    run = start(tmp_path_factory.mktemp("alone") / "run", data_dir)
    run.check()
    return run


STORIES = {
    "a first stage in a forward pass": [Hold(1, 2, "forward")],
    "a last stage in a backward pass": [Hold(1, 2, "backward", position=1)],
    "a last stage in the all-reduce of its first bucket": [Hold(1, 2, "reduce", position=1)],
}


@pytest.mark.parametrize("holds", STORIES.values(), ids=STORIES.keys())
def test_a_rank_that_dies_in_a_flush_costs_no_step(tmp_path, data_dir, alone, holds):
    run = start(tmp_path / "run", data_dir, holds)
    run.strike(*holds)
    run.check(alone)
