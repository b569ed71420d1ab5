"""Burn-in: the drawn faults, their targets, and the verdict."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.burnin import strikes, verdict
from megatron_ft.burnin.strikes import Strike, Victim, choose, draw
from megatron_ft.burnin.verdict import Case
from megatron_ft.errors import ConfigError

AT = {(0, 0): "n1", (1, 0): "n2", (2, 0): "n2", (3, 0): "n3"}


@given(st.integers(1, 40), st.integers(0, 10**6), st.sets(st.sampled_from(sorted(strikes.KINDS)), min_size=1))
def test_the_same_seed_draws_the_same_faults_and_kinds_take_turns(count, seed, kinds):
    drawn = draw(count, seed, 5.0, sorted(kinds))
    assert drawn == draw(count, seed, 5.0, sorted(kinds)) and [strike.number for strike in drawn] == [
        *range(1, count + 1)
    ]
    for first in range(0, count - len(kinds) + 1, len(kinds)):
        assert {strike.kind for strike in drawn[first : first + len(kinds)]} == kinds
    assert all(strike.point is None or strike.kind == "rank" for strike in drawn)


@given(
    st.sampled_from(sorted(strikes.KINDS)),
    st.floats(0, 1, exclude_max=True),
    st.sets(st.sampled_from(["n1", "n2", "n3"])),
)
def test_a_spared_node_loses_a_rank_at_most(kind, pick, spared):
    victim = choose(Strike(1, kind, 0.0, pick), AT, spared)
    if kind == "rank":
        assert AT[victim.groups[0], victim.position] == victim.node
    elif spared >= {"n1", "n2", "n3"}:
        assert victim is None
    else:
        assert victim.node not in spared
        assert victim.groups == tuple(group for (group, _), node in AT.items() if node == victim.node)


def test_without_ranks_there_is_no_target():
    assert choose(Strike(1, "rank", 0.0, 0.5), {}, []) is None


@pytest.mark.parametrize(
    "count, every_s, kinds", [(0, 1.0, ["rank"]), (1, 0.0, ["rank"]), (1, 1.0, []), (1, 1.0, ["node"])]
)
def test_invalid_options_are_refused(count, every_s, kinds):
    with pytest.raises(ConfigError):
        draw(count, 1, every_s, kinds)


VIEW = {"epoch": 0, "live": [0, 1], "lost": {}, "joined": [], "reason": "the first", "step": 0}


def record(directory, *lines: dict):
    directory.mkdir(exist_ok=True)
    (directory / "history.jsonl").write_text("".join(json.dumps({"t": 0.0, **line}) + "\n" for line in lines))


def judged(directory, *lines: dict, cases=(), code: int = 0) -> str:
    begin = {"event": "begin", "steps": 2, "microbatches": 4, "buckets": 1}
    steps = [{"event": "step", "step": n, "loss": 1.0, "microbatches": 4, "live": [0, 1], "epoch": 0} for n in range(2)]
    end = {"event": "end", "step": 1, "loss": 1.0, "params_norm": 1.0, "params_sha256": "a"}
    survivors = [{"event": "survivor", "group": group, "params_sha256": "a"} for group in (0, 1)]
    record(directory, begin, {"event": "view", **VIEW}, *steps, *lines, *survivors, end)
    found = verdict.judge(directory, code, cases)
    return "\n".join(message for message in found if not message.startswith("replay"))


def test_broken_promises_are_found(tmp_path):
    struck = Case(Strike(1, "step", 0.0, 0.0), Victim("n2", (1,)), back_s=1.0, why="host n2 is silent")
    left = {"event": "view", **VIEW, "epoch": 1, "live": [0], "lost": {"1": "host n2 is silent"}}
    back = {"event": "view", **VIEW, "epoch": 2, "joined": [1]}
    assert not judged(tmp_path, left, back, cases=[struck])
    assert "exit code 3" in judged(tmp_path, code=3)
    assert "group 1 was lost without an injected fault" in judged(tmp_path, left, back)
    unnoticed = Case(struck.strike, struck.victim)
    assert "fault 1 (step) on n2 was not noticed" in judged(tmp_path, cases=[unnoticed])
    gone = Case(struck.strike, struck.victim, why="host n2 is silent")
    assert "not all groups were members again" in judged(tmp_path, left, cases=[gone])
    assert "was not injected: the run was over" in judged(
        tmp_path, cases=[Case(struck.strike, refused="the run was over")]
    )
    twice = {"event": "step", "step": 1, "loss": 1.0, "microbatches": 4, "live": [0, 1], "epoch": 0}
    assert "step 1 has 2 lines" in judged(tmp_path, twice)


def test_a_run_without_a_step_has_broken_a_promise(tmp_path):
    record(tmp_path)
    assert verdict.judge(tmp_path, 0, []) == ["the run has committed no step"]
