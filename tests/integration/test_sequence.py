"""Ranks of a group that hold parts of each sequence."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ft.run.injection_points import Breakpoint
from tests import support

JOB = Path(__file__).with_name("sequence_job.py")
STEPS = 6


@pytest.fixture(scope="module")
def whole(tmp_path_factory, data_dir):
    """A run in which each rank has whole sequences."""
    run = start(tmp_path_factory.mktemp("whole") / "run", data_dir, "plain")
    run.check()
    return losses(run)


def start(directory, data_dir, engine: str, holds=(), **changes) -> support.Run:
    zero = {"zero_optimization": {"stage": 2}} if engine == "zero" else {}
    if engine != "plain":
        changes |= {"inner_shards": 2, "inner_shards_divide": "sequence"}
    settings = {"train_micro_batch_size_per_gpu": 1, **zero}
    own = ("--engine", engine)
    return support.start(
        directory, data_dir, holds, script=JOB, groups=2, steps=STEPS, own=own, engine=settings, **changes
    )


def losses(run: support.Run) -> list[float]:
    return [line["loss"] for line in run.events("step")]


@pytest.mark.long
@pytest.mark.parametrize("engine", ["zero", "fsdp"])
def test_a_rank_with_a_part_of_each_sequence_dies(tmp_path, data_dir, whole, engine):
    support.needs_engine("deepspeed")
    undisturbed = start(tmp_path / "undisturbed", data_dir, engine, reduction="exact")
    undisturbed.check()
    assert losses(undisturbed) == pytest.approx(whole, rel=1e-5)
    hold = Breakpoint(group=1, step=3, point="backward", position=1)
    run = start(tmp_path / "run", data_dir, engine, [hold], reduction="exact")
    run.strike(hold)
    run.check(undisturbed)
    assert support.outcome(run) == support.outcome(undisturbed)
