"""A short chaos campaign (``make chaos`` plays a long one), and whether its judge would notice."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_ft.runtime import history
from tests.chaos import campaign, play
from tests.chaos.judge import judge
from tests.chaos.plan import draw, is_long, takes
from tests.chaos.play import Played

SEEDS = range(1000, 1015)


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """Of the references, which are played once for all runs of a job."""
    return tmp_path_factory.mktemp("chaos")


@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_keeps_every_promise(directory, seed):
    result = campaign.run(seed, directory)
    assert not result["violations"], "\n".join(campaign.tell(result, directory))


def test_a_seed_says_everything_and_its_keeper_is_never_taken():
    for seed in range(300):
        plan = draw(seed)
        assert plan == draw(seed)
        plan.schedule.check(plan.job.groups, 1)
        taken = [takes(fault) for fault in plan.schedule.faults]
        assert plan.keeper not in frozenset().union(*taken)
        assert frozenset().union(*taken), "nobody is taken"


def test_all_kinds_and_points_are_drawn():
    faults = [fault for seed in range(300) for fault in draw(seed).schedule.faults]
    kinds = Counter(fault.kind for fault in faults)
    assert set(kinds) == {"kill", "stop", "terminate", "exception", "oom", "slow", "rack", "gil", "store", "agent"}
    assert {is_long(fault) for fault in faults if fault.kind == "stop"} == {True, False}
    points = {fault.point for fault in faults}
    assert points == {None, *"begin forward backward reduce bucket gate update recover connect patch finish".split()}
    assert len(faults) > 5 * 300


# --- the judge --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def undisturbed(directory) -> tuple[Played, list[dict]]:
    plan = draw(SEEDS[0])
    data = campaign.prepared(directory)
    lines = play.reference(plan.job, directory, data)
    kept = directory / "reference-{}x{}x{}".format(*plan.job.key)
    return Played(plan, kept, code=0, seconds=1.0), lines


def altered(played: Played, to: Path, change) -> Played:
    """A copy of the run whose history is another one: ``change`` says what becomes of each line, None: it goes."""
    shutil.copytree(played.directory, to)
    lines = [change(line) for line in history.read(to / "run")]
    (to / "run" / history.FILE).write_text("".join(json.dumps(line) + "\n" for line in lines if line is not None))
    return replace(played, directory=to)


def test_the_judge_has_nothing_against_a_run_without_faults(undisturbed):
    played, lines = undisturbed
    assert judge(played, lines) == []


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda line: None if line.get("step") == 3 and line["event"] == "step" else line, "step 3 has 0 lines"),
        (lambda line: line | {"loss": line["loss"] * 1.0001} if line.get("step") == 4 else line, "the loss differs"),
        (lambda line: line | {"microbatches": 1} if line["event"] == "step" else line, "counts 1 microbatches"),
        (lambda line: line | {"params_sha256": "0"} if line.get("group") == 1 else line, "parameters differ"),
        (lambda line: line | {"lost": {"1": "why"}} if line["event"] == "view" else line, "group 1 is lost, it should not"),
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
def test_the_judge_sees_how_it_ended(undisturbed, change, said):
    played, lines = undisturbed
    assert any(said in violation for violation in judge(replace(played, **change), lines))
