"""Histories in which agents judge heartbeats and ranks, and start groups again: what is rare is reached, and planted bugs
are found."""

from collections import Counter

import pytest

from megatron_ft.proof.scenario import draw_fail_over
from megatron_ft.proof.simulated_cluster import play
from tests.sim.agent_mutations import MUTATIONS

STORIES = ("silent", "heard again", "agent stops", "hangs", "given up: stopped", "given up: stuck")
STORIES += ("starts again", "starts often", "is a member again")


def test_the_histories_reach_what_agents_decide():
    seen = Counter()
    for seed in range(300):
        if all(seen[name] for name in STORIES):
            break
        scenario = draw_fail_over(seed)
        seen.update(fault.kind for fault in scenario.faults)
        starts = Counter()
        for line in play(scenario).lines:
            if line["event"] == "silence":
                seen["heard again" if line["heard"] else "silent"] += 1
            if line["event"] == "restart":
                starts[line["group"]] += 1
            if line["event"] == "view":
                why = " ".join(line["lost"].values())
                seen["given up: stopped"] += "is stopped (process state T)" in why
                seen["given up: stuck"] += "has finished nothing" in why
                seen["is a member again"] += bool(starts.keys() & set(line["joined"]))
        seen["starts again"] += bool(starts)
        seen["starts often"] += max(starts.values(), default=0) > 1
    missing = [name for name in STORIES if not seen[name]]
    assert not missing, f"no history reached: {missing}"


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_planted_bug_is_caught(name, monkeypatch):
    assert MUTATIONS[name].caught_by(monkeypatch) is not None, f"no history shows that {name}"
