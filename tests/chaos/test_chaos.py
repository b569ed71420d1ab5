"""A short chaos campaign (``make chaos`` plays a long one), and tests of its judge; those of its draws are in
``tests/unit/test_chaos_plan.py``."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_ft.cluster.faults.injector import Case
from megatron_ft.cluster.faults.schedule import Fault
from megatron_ft.record import history
from tests import support
from tests.chaos import campaign, play
from tests.chaos.judge import judge
from tests.chaos.plan import OTHERS, SHORT, draw
from tests.chaos.play import Played

OFTEN = ("1423",)
SEEDS = {str(seed): seed for seed in (*SHORT, 1414, 1417, 1418, 1419, 1420, 1422)}


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """The directory of the references, which are played once for all runs of a job."""
    return tmp_path_factory.mktemp("chaos")


@pytest.mark.parametrize("seed", support.first_of(SEEDS, *OFTEN))
def test_a_run_keeps_every_promise(directory, seed):
    result = campaign.run(seed, directory)
    if "skipped" in result:
        pytest.skip(result["skipped"])
    assert not result["violations"], "\n".join(campaign.tell(result, directory))


@pytest.mark.parametrize("policy", support.first_of({name: name for name in OTHERS}, "spare"))
def test_a_run_with_another_policy_keeps_every_promise(directory, policy):
    result = campaign.run(SHORT[0], directory, policy=policy)
    assert not result["violations"], "\n".join(campaign.tell(result, directory))


# --- the judge --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def undisturbed(directory) -> tuple[Played, list[dict]]:
    drawn = draw(SHORT[0])
    plan = replace(drawn, job=replace(drawn.job, ranks=1, hosts=1, kind="plain", nonfinite="skip"))
    data = campaign.prepared(directory)
    lines = play.reference(plan.job, directory, data)
    kept = directory / "reference-{}x{}x{}-{}".format(*plan.job.key)
    return Played(plan, kept, code=0, seconds=1.0), lines


def altered(played: Played, to: Path, change) -> Played:
    """Return a copy of the run with another history: ``change`` returns the new line, or None to drop it."""
    shutil.copytree(played.directory, to)
    lines = [change(line) for line in history.read(to / "run")]
    (to / "run" / history.FILE).write_text("".join(json.dumps(line) + "\n" for line in lines if line is not None))
    return replace(played, directory=to)


def is_step(line: dict, step: int) -> bool:
    """Return whether the line is that of the step; a slow group has a line of its own on a busy machine."""
    return line["event"] == "step" and line["step"] == step


def test_the_judge_has_nothing_against_a_run_without_faults(undisturbed):
    played, lines = undisturbed
    assert judge(played, lines) == []


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda line: None if line.get("step") == 3 and line["event"] == "step" else line, "step 3 has 0 lines"),
        (lambda line: line | {"loss": line["loss"] * 1.0001} if is_step(line, 4) else line, "the loss differs"),
        (lambda line: line | {"microbatches": 1} if line["event"] == "step" else line, "counts 1 microbatches"),
        (lambda line: line | {"params_sha256": "0"} if line.get("group") == 1 else line, "parameters differ"),
        (
            lambda line: line | {"lost": {"1": "why"}} if line["event"] == "view" else line,
            "group 1 is lost, it should not",
        ),
        (lambda line: None if line["event"] == "end" else line, "0 end lines"),
        (lambda line: line | {"epoch": 5} if line["event"] == "step" else line, "replay"),
        (lambda line: None if line.get("group") == 0 else line, "the survivors are"),
    ],
    ids=["a step", "a loss", "a count", "a parameter", "a group", "the end", "an epoch", "a survivor"],
)
def test_the_judge_sees_what_is_wrong(undisturbed, tmp_path, change, said):
    played, lines = undisturbed
    found = judge(altered(played, tmp_path / "copy", change), lines)
    assert any(said in violation for violation in found), found


@pytest.mark.parametrize(
    "change, said",
    [({"code": 1}, "exit code 1"), ({"code": None}, "it hung"), ({"left": [4242]}, "process 4242 of the run is left")],
)
def test_the_judge_sees_how_a_run_ended(undisturbed, change, said):
    played, lines = undisturbed
    assert any(said in violation for violation in judge(replace(played, **change), lines))


def struck(played: Played, policy: str, *faults: Fault) -> Played:
    """Return the run as if these faults had struck it, and this were its policy."""
    cases = [Case(number, fault, f"key/{number}", 0, "injected") for number, fault in enumerate(faults, 1)]
    return replace(played, plan=replace(played.plan, job=replace(played.plan.job, nonfinite=policy)), cases=cases)


NAN = Fault(kind="nan", group=1, step=3)


@pytest.mark.parametrize(
    "policy, said",
    [
        ("skip", "group 1 had a NaN in step 3, and is not named"),
        ("recompute", "group 1 had a NaN, and stayed"),
        ("stop", "a gradient of group 1 was NaN, and it did not stop"),
    ],
)
def test_the_judge_sees_a_nan_that_had_no_consequence(undisturbed, policy, said):
    played, lines = undisturbed
    assert judge(struck(played, policy, NAN), lines) == [said]


def test_the_judge_looks_at_the_losses_until_a_gradient_is_corrupted(undisturbed, tmp_path):
    played, lines = undisturbed
    flip = Fault(kind="bitflip", group=1, step=3)

    def wrong_in(step: int) -> list[str]:
        change = lambda line: line | {"loss": line["loss"] * 1.1} if is_step(line, step) else line  # noqa: E731
        return judge(struck(altered(played, tmp_path / str(step), change), "skip", flip), lines)

    assert ["before the first error" in said for said in wrong_in(2)] == [True]
    assert wrong_in(4) == []


def test_the_judge_knows_why_a_run_may_stop(undisturbed, tmp_path):
    played, lines = undisturbed

    def change(line: dict) -> dict | None:
        if line["event"] == "end":
            return {"event": "stop", "reason": "step 3: ..., and nonfinite is 'stop'; ..."}
        return {"event": "nonfinite", "group": 1, "step": 3} if line["event"] == "survivor" else line

    stopped = altered(played, tmp_path / "copy", change)
    assert judge(struck(replace(stopped, code=3), "stop", NAN), lines) == []
    assert judge(struck(stopped, "stop", NAN), lines) == ["it stopped, but the launcher ended with exit code 0"]
    assert "it stopped, which is not its policy" in judge(struck(replace(stopped, code=3), "skip", NAN), lines)
    assert "it stopped, but no gradient was corrupted" in judge(struck(replace(stopped, code=3), "stop"), lines)
