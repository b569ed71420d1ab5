"""An unchanged script of Megatron-LM goes on when a rank is killed and when one is stopped, the groups come back, and the
same command goes on when all is killed: all that it logs is what plain Megatron logs on the same number of data-parallel
ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_ft.config import megatron_lm_arguments
from megatron_ft.run.injection_points import Breakpoint
from tests import support
from tests.megatron_lm import runs

LAYOUTS = {
    "DP": (3, 1),
    "DP2, EP2, distributed optimizer": (
        *(2, 2, "--expert-model-parallel-size", 2, "--num-experts", 4, "--moe-aux-loss-coeff", 0.01),
        *("--moe-router-load-balancing-type", "aux_loss", "--moe-token-dispatcher-type", "alltoall"),
        *("--disable-bias-linear", "--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
    ),
    "PP2": (3, 2, "--pipeline-model-parallel-size", 2),
    "PP2, virtual stages": (
        *(2, 2, "--pipeline-model-parallel-size", 2, "--num-layers-per-virtual-pipeline-stage", 1),
    ),
    "TP2, sequence parallel, per token, growing batch": (
        *(2, 2, "--tensor-model-parallel-size", 2, "--sequence-parallel", "--calculate-per-token-loss"),
        *("--step-batch-size-schedule", "0:8 80:16 240:24", "--eval-global-batch-size", 24),
    ),
    "CP2": (2, 2, "--context-parallel-size", 2),
    # A scale that is too large at first and grows too large again: some steps are skipped.
    "PP2, fp16": (
        *(2, 2, "--pipeline-model-parallel-size", 2, "--fp16", "--accumulate-allreduce-grads-in-fp32"),
        *("--initial-loss-scale", 2**22, "--hysteresis", 2, "--loss-scale-window", 4),
    ),
}
"""Name -> groups, ranks of a group, and how they divide a group."""
LAST, SAVED_EVERY = 30, 10
AGAIN = 2 * SAVED_EVERY
"""The iteration from which the whole job goes on."""
OWN = (*runs.MOCK, "--train-iters", LAST, "--eval-interval", SAVED_EVERY, "--global-batch-size", 24)
SHOWN = {
    *("consumed samples", "learning rate", "global batch size", "lm loss", "loss scale", "grad norm"),
    *("number of skipped iterations", "number of nan iterations"),
}
STOPPED = {"stopped_timeout_s": 1.0, "straggler_factor": 0}
REJOIN = {"enabled": True, "restarts_per_hour": 100}


def _await_back(run: support.Run, group: int, groups: int) -> None:
    """Wait until a group has been lost and has come back, and all groups train."""
    support.wait_for(
        lambda: [line["group"] for line in run.events("rejoined")][-1:] == [group] and run.live == list(range(groups)),
        run,
    )


@pytest.mark.parametrize("layout", support.first_of(LAYOUTS, "DP"))
def test_all_that_is_logged_is_what_plain_megatron_logs(tmp_path, megatron, layout):
    groups, ranks, *division = layout
    own, saved, last = (*OWN, *division), tmp_path / "saved", ranks - 1
    saves = ("--save", saved, "--load", saved, "--save-interval", SAVED_EVERY, "--ckpt-format", "torch_dist")
    saves = (*saves, "--tensorboard-dir", tmp_path / "found")
    gate = support.Gate(tmp_path, slowly=50, script=runs.SCRIPT)
    options = {"groups": groups, "script": gate.script, "rejoin": REJOIN, "detector": STOPPED}
    if layout is not LAYOUTS["DP"]:
        options["reduction"] = "exact"
    hold = Breakpoint(1, 3, "backward", after=1, position=last)
    lost = runs.start(tmp_path / "run", megatron, ranks, *own, *saves, holds=[hold], **options)
    lost.strike(hold)
    _await_back(lost, 1, groups)
    assert _inject(lost, {"kind": "stop", "group": 0, "position": last, "point": "backward", "duration_s": 2.0}) == 0
    _await_back(lost, 0, groups)
    assert [(line["group"], line["position"]) for line in lost.events("fault")] == [(1, last), (0, last)]
    if (
        "--use-distributed-optimizer" in division
    ):  # without Apex and Transformer Engine Megatron cannot load its checkpoint
        gate.open()
        run, parts = lost, [runs.said(lost)]
    else:
        parts = [_until_all_is_killed(lost, gate, saved)]
        gate.open()
        run = runs.start(lost.directory, megatron, ranks, *own, *saves, **options)
        parts.append(runs.said(run))
        assert AGAIN < max(parts[0].iterations) < LAST and min(parts[1].iterations) == AGAIN + 1
        assert parts[1].printed.count("consumed samples: ") == LAST - AGAIN, "the last rank's, of one group"
    plain = runs.plain(megatron, groups * ranks, *own, "--tensorboard-dir", tmp_path / "plain")
    assert plain.iterations[LAST].keys() >= SHOWN
    assert runs.differences(plain, *parts) == [], run.logs()
    expected, found = runs.curves(tmp_path / "plain"), runs.curves(tmp_path / "found")
    assert found.keys() == expected.keys()
    for name, (xs, values) in expected.items():
        # Weights of fp16 turn the last bit of a sum into 2^-11 of a weight, which norms show first.
        within = 1e-3 if "--fp16" in division and name.startswith("grad-norm") else 1e-5
        assert found[name] == (xs, pytest.approx(values, rel=within)), name
    if run.exact:
        options["script"] = runs.SCRIPT
        alone = runs.start(tmp_path / "alone", megatron, ranks, *own, **options)
        runs.said(alone)
        assert _digest(run) == _digest(alone), "the bits of a run in which nothing failed"


def _until_all_is_killed(run: support.Run, gate: support.Gate, saved: Path) -> runs.Said:
    """Kill launcher and ranks some steps after the checkpoint of iteration ``AGAIN``; return what the ranks have said."""
    for step in range(AGAIN + 3):
        gate.open(step)
    support.wait_for(lambda: megatron_lm_arguments.newest(str(saved)) == str(AGAIN), run)
    support.wait_for_step(run, AGAIN + 1)
    listed = json.loads((run.directory / "ranks.json").read_text())
    support.kill([run.process.pid, *(rank["pid"] for rank in listed)])
    return runs.said_so_far(run)


def _inject(run: support.Run, fault: dict[str, object]) -> int:
    schedule = run.directory.with_suffix(".faults.json")
    schedule.write_text(json.dumps({"faults": [{**fault, "after_s": 0}]}))
    return support.ft("inject", run.directory, schedule).returncode


def _digest(run: support.Run) -> str:
    return run.events("end")[-1]["params_sha256"]


@pytest.mark.long
def test_a_step_can_be_computed_again(tmp_path, megatron):
    run = runs.start(tmp_path / "run", megatron, 2, *runs.MOCK, *LAYOUTS["PP2"][2:], reduction="exact")
    runs.said(run)
    replay = support.ft("replay", run.directory, "--step", 3, env=runs.environment(megatron))
    assert replay.returncode == 0 and "step 3: the record agrees" in replay.stdout, replay.stdout + replay.stderr
