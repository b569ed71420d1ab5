"""What Megatron-LM writes to TensorBoard is there once, with its names, x values and values, when the group of its writer is
killed and comes back."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ft.faults.injection_points import Breakpoint
from tests import support
from tests.megatron_lm import runs

STEPS = 24
RANKS = 2
OWN = (
    *(*runs.MOCK, "--pipeline-model-parallel-size", 2, "--train-iters", STEPS),
    *("--log-validation-ppl-to-tensorboard", "--log-timers-to-tensorboard"),
)
TIMES = ("iteration-time",)


def curves(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the x and value of all points of each name in the only file of a directory."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="no tensorboard")
    (file,) = directory.iterdir()
    events = accumulator.EventAccumulator(str(file), size_guidance={accumulator.SCALARS: 0})
    events.Reload()
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_curves_are_those_of_plain_megatron_when_the_group_of_the_writer_is_killed(tmp_path, megatron):
    gate = support.Gate(tmp_path, slowly=STEPS, script=runs.SCRIPT)
    hold = Breakpoint(0, 3, "backward", after=1, position=1)
    rejoin = {"enabled": True, "restarts_per_hour": 100}
    own = (*OWN, "--tensorboard-dir", tmp_path / "found")
    run = runs.start(tmp_path / "run", megatron, RANKS, *own, script=gate.script, holds=[hold], rejoin=rejoin)
    run.strike_in_step(hold)
    support.wait_for(lambda: bool(run.events("rejoined")), run)
    gate.open()
    runs.said(run)
    assert run.events("fault") and run.live == [0, 1]
    runs.plain(megatron, 2 * RANKS, *OWN, "--tensorboard-dir", tmp_path / "plain")
    plain, found = curves(tmp_path / "plain"), curves(tmp_path / "found")
    assert plain.keys() == found.keys()
    for name, points in plain.items():
        assert [x for x, _ in found[name]] == [x for x, _ in points], name
        if name not in TIMES:
            values = [value for _, value in points]
            assert [value for _, value in found[name]] == pytest.approx(values, rel=1e-5), name
