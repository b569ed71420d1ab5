"""The report's facts agree with the record, and the parts of the time add up."""

from __future__ import annotations

import argparse
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.commands import report_command
from megatron_ft.record import run_summary
from megatron_ft.record.run_record import Lines, RunRecord


def step(t, number, duration_s, live=(0, 1), **fields):
    fields = {"loss": 1.0, "microbatches": 4, "epoch": 0, "tokens": 100, **fields}
    return {"t": t, "event": "step", "step": number, "duration_s": duration_s, "live": list(live), **fields}


def view(t, epoch, live, lost=(), joined=()):
    lost = {str(group): why for group, why in dict(lost).items()}
    return {
        "t": t,
        "event": "view",
        "epoch": epoch,
        "live": live,
        "lost": lost,
        "joined": list(joined),
        "step": 0,
        "reason": "",
    }


START = {"t": 100.0, "event": "start", "run_id": "r", "groups": 2, "ranks_per_group": 1, "host": "h"}
FAULT = {"t": 110.0, "event": "fault", "group": 1, "incarnation": 0, "detected_s": 0.1, "how": "waitpid", "pid": 7}


def test_every_second_of_a_run_with_a_loss_a_return_and_a_restart_has_a_cause(tmp_path):
    lines = [
        START,
        view(100.5, 0, [0, 1]),
        step(106.0, 0, 4.0),  # 2 s to start
        step(110.0, 1, 3.0),  # 1 s between two steps
        FAULT,
        view(111.0, 1, [0], {1: "died"}),
        {"t": 112.0, "event": "recovery", "step": 2, "epoch": 1, "stall_s": 1.5},
        step(117.0, 2, 7.0, [0]),  # of them 1.5 s of recovery
        {"t": 117.5, "event": "checkpoint", "step": 3, "blocked_s": 0.5},
        view(118.0, 2, [0, 1], joined=[1]),
        step(121.0, 3, 4.0),  # of them 0.5 s of saving
        {"t": 122.0, "event": "stop", "reason": "no group is left", "exit_code": 3},
        {**START, "t": 130.0},  # 8 s without a run
        step(136.0, 3, 4.0),  # 2 s to start, and a step made again
        step(140.0, 4, 4.0, joined=[]),
        {
            "t": 141.0,
            "event": "view",
            **{k: v for k, v in view(0, 3, [0, 1, 2], joined=[2]).items() if k not in ("t", "event")},
        },
        {"t": 142.0, "event": "end", "step": 4, "loss": 0.5, "params_norm": 1.0},
    ]
    facts = run_summary.summary(RunRecord(tmp_path, Lines(lines)))
    assert facts["wall_s"] == pytest.approx(42.0)
    expected = {
        "training": 4.0 + 3.0 + 5.5 + 3.5 + 4.0,
        "recovery": 1.5,
        "saving": 0.5,
        "made again": 4.0,
        "starting": 2.0 + 2.0,
        "between steps": 1.0,
        "not running": 9.0,
        "ending": 2.0,
    }
    assert facts["time_s"] == pytest.approx(expected)
    assert facts["short_handed_s"] == pytest.approx(5.5 - 4.0)
    assert facts["goodput"] == pytest.approx(20.0 / 42.0)
    assert (facts["steps"], facts["steps_made_again"], facts["steps_lost"]) == (5, 1, 0)
    assert (facts["losses"], facts["returns"], facts["joins"], facts["leaves"]) == (1, 1, 1, 0)
    assert facts["tokens_per_s"] == pytest.approx(600 / 42.0)
    assert facts["step_s"] == {"median": 4.0, "p99": 7.0}
    assert (facts["ended"], facts["exit_code"]) == ("all 5 steps are done", 0)
    shown = dict(run_summary.rows(facts))
    assert shown["wall time"] == "42 s" and shown["  recovery"] == "1.5 s (3.6%)"
    assert shown["groups"] == "1 lost, 1 came back, 1 joined"


@given(
    st.lists(
        st.tuples(
            st.floats(0, 5), st.floats(0, 9), st.floats(0, 3), st.sampled_from(["step", "start", "recovery", "stop"])
        )
    )
)
def test_the_parts_of_the_time_add_up(tmp_path_factory, found):
    now, lines = 100.0, [START]
    for number, (gap, duration_s, stall_s, event) in enumerate(found):
        now += gap
        kinds = {"step": step(now, number, duration_s), "start": {**START, "t": now}}
        kinds["recovery"] = {"t": now, "event": "recovery", "step": 0, "epoch": 1, "stall_s": stall_s}
        kinds["stop"] = {"t": now, "event": "stop", "reason": "", "exit_code": 3}
        lines.append(kinds[event])
    facts = run_summary.summary(RunRecord(tmp_path_factory.getbasetemp(), Lines(lines)))
    assert facts["wall_s"] == pytest.approx(now - 100.0)
    assert min(facts["time_s"].values()) >= 0


@pytest.mark.parametrize(
    ("last", "ended"),
    [
        ([], ("it is not over, or was killed", None)),
        ([{"t": 120.0, "event": "stop", "reason": "told to", "exit_code": 5}], ("stopped: told to", 5)),
        ([{"t": 120.0, "event": "end", "step": 0, "of": 5, "reason": "why"}], ("stopped after step 1 of 5: why", 0)),
        (
            [
                {"t": 119.0, "event": "end", "step": 0, "params_norm": 1.0},
                {"t": 120.0, "event": "not_saved", "reason": "step 1 is not saved", "exit_code": 8},
            ],
            ("all 1 steps are done; step 1 is not saved", 8),
        ),
    ],
)
def test_the_report_says_how_the_run_ended_also_as_json(last, ended, tmp_path, capsys):
    lines = [START, step(106.0, 0, 4.0), *last]
    (tmp_path / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = argparse.Namespace(run_dir=tmp_path, reference=None, slurm=False, json=True, check=False)
    assert report_command.run(options) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["ended"], said["exit_code"]) == ended and not (tmp_path / "loss.png").exists()
    options.json = False
    assert report_command.run(options) == 0
    out = capsys.readouterr().out
    assert "No group was lost." in out and ended[0] in out and (tmp_path / "loss.png").exists()
