"""Histories in which the control store fails over: no violations, all rare cases, and planted bugs that are found."""

from collections import Counter
from dataclasses import replace

import pytest

from megatron_ft.proof import explore
from megatron_ft.proof.scenario import draw, draw_fail_over
from megatron_ft.proof.simulated_cluster import play
from megatron_ft.record import lineage
from tests.sim.fail_over_mutations import MUTATIONS
from tests.sim.planted import SEEDS, check_histories


@pytest.mark.parametrize("seeds", SEEDS)
def test_histories_without_a_violation(seeds):
    check_histories(seeds, draw_fail_over, "--fail-over")


def test_every_fourth_scenario_can_fail_over():
    assert [draw(seed).fails_over for seed in range(8)] == [False, False, False, True] * 2
    assert replace(draw(7), discards=(), verify=0) == draw_fail_over(7)


def test_the_histories_reach_what_is_rare():
    kinds = ("host dies", "successor dies", "host freezes", "host isolated", "split", "disk away", "disk away from all")
    kinds += ("disk slow", "claims race", "store dies", "cut", "accuse", "freeze", "start", "kill")
    stories = (
        "fence",
        "several fenced at once",
        "take-over",
        "take-over by a spare host",
        "fenced alive",
        "comes back",
    )
    seen = Counter()
    for seed in range(300):
        if all(seen[name] for name in (*kinds, *stories)):
            break
        scenario = draw_fail_over(seed)
        seen.update(fault.kind for fault in scenario.faults)
        history = play(scenario)
        for line in history.lines:
            if line["event"] == "claim":
                seen["fence"] += bool(line["fenced"])
                seen["several fenced at once"] += len(line["fenced"]) > 1
                seen["take-over"] += bool(line["number"]) and not line["fenced"]
                seen["take-over by a spare host"] += line["host"] >= scenario.groups + 2
            if line["event"] == "stop":
                seen["fenced alive"] += "left out by claim" in line["reason"]
            if line["event"] == "view":
                seen["comes back"] += bool(line["joined"])
    missing = [name for name in (*kinds, *stories) if not seen[name]]
    assert not missing, f"no history reached: {missing}"


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_planted_bug_is_caught(name, monkeypatch):
    assert MUTATIONS[name].caught_by(monkeypatch) is not None, f"no history shows that {name}"


def test_a_history_with_one_store_is_judged_as_before():
    lines = play(draw_fail_over(0)).lines
    assert lineage.check(lines) == []
    commit = next(index for index, line in enumerate(lines) if line["event"] == "commit")
    assert lineage.check([*lines[:commit], *lines[commit + 1 :]])


def test_a_failing_history_is_replayed_with_its_own_command(monkeypatch, capsys):
    bug = MUTATIONS["a claim is made at any number"]
    bug.plant(monkeypatch)
    first, count = str(bug.seeds.start), str(len(bug.seeds))
    assert explore.main(["--fail-over", "--first", first, "--seeds", count, "--jobs", "1"]) == 1
    command = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("shrunk")).split(": ")[1]
    assert explore.main(command.removeprefix(explore.COMMAND).split()) == 1
