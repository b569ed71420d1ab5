"""The verdict on a run with injected faults, from its record."""

from __future__ import annotations

import json

import pytest

from megatron_ft import cli
from megatron_ft.proof import verdict

VIEW = {"event": "view", "epoch": 0, "live": [0, 1], "lost": {}, "joined": [], "reason": "the first", "step": 0}
LOST = {**VIEW, "epoch": 1, "live": [0], "lost": {"1": "host n2 is silent"}}
BACK = {**VIEW, "epoch": 2, "joined": [1]}
KILL = {"event": "inject", "group": 1, "signal": "SIGKILL", "kind": "kill", "point": "gate", "fault": "a.0"}
AGENT = {**KILL, "group": None, "kind": "agent", "groups": [1], "fault": "a.1"}
STOP = {**KILL, "signal": "SIGSTOP", "kind": "stop", "fault": "a.2"}
END = {"event": "end", "step": 1, "loss": 1.0, "params_norm": 1.0, "params_sha256": "a"}


def record(directory, *lines: dict, end: dict = END):
    step = {"event": "step", "loss": 1.0, "microbatches": 4, "live": [0, 1], "epoch": 0, "duration_s": 0.1}
    begin = {"event": "begin", "steps": 2, "microbatches": 4, "buckets": 1}
    survivors = [{"event": "survivor", "group": group, "params_sha256": "a"} for group in (0, 1)]
    start = {"event": "start", "run_id": "run", "groups": 2, "ranks_per_group": 1, "host": "n1"}
    written = [start, begin, VIEW, *({**step, "step": n} for n in range(2)), *lines, *survivors, end]
    (directory / "history.jsonl").write_text("".join(json.dumps({"t": 0.0, **line}) + "\n" for line in written))


def judged(directory, *lines: dict, **more) -> str:
    record(directory, *lines, **more)
    return "\n".join(message for message in verdict.judge(directory) if not message.startswith("replay"))


@pytest.mark.parametrize("fault", [KILL, AGENT, STOP])
def test_a_fault_that_is_noticed_breaks_no_promise(tmp_path, fault):
    assert not judged(tmp_path, fault, LOST, BACK)


def test_broken_promises_are_found(tmp_path):
    stopped = {"event": "stop", "exit_code": 7, "reason": "no store"}
    assert "the run ended with exit code 7" in judged(tmp_path, end=stopped)
    assert "group 1 was lost without an injected fault: host n2 is silent" in judged(tmp_path, LOST, BACK)
    assert not judged(tmp_path, STOP), "a rank may go on before it is missed"
    for fault in (KILL, AGENT):
        unseen = f"the fault {fault['kind']} (gate) was not noticed: no view names group 1 as lost"
        assert judged(tmp_path, fault) == unseen
        assert unseen in judged(tmp_path, KILL, LOST, BACK, {**fault, "fault": "a.3"})
        assert not judged(tmp_path, KILL, LOST, fault, BACK), "it was no member at that time"
    left = {"event": "leave", "group": 1, "after": 1, "reason": "SIGTERM"}
    assert not judged(tmp_path, left, LOST, BACK)
    twice = {"event": "step", "step": 1, "loss": 1.0, "microbatches": 4, "live": [0, 1], "epoch": 0}
    assert "step 1 has 2 lines" in judged(tmp_path, twice)
    (tmp_path / "history.jsonl").write_text("")
    assert verdict.judge(tmp_path) == ["the run has not ended", "the run has committed no step"]


def test_the_exit_code_of_the_check_is_the_verdict(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(verdict, "_replayed", lambda start: [])
    record(tmp_path, KILL, KILL, LOST, BACK)
    assert cli.main(["report", str(tmp_path), "--check"]) == 0
    assert capsys.readouterr().out == "check: 1 injected faults, every promise was kept\n"
    record(tmp_path, KILL, LOST)
    assert cli.main(["report", str(tmp_path), "--check"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "NOT KEPT: groups 1 were not members again at the end",
        "check: 1 injected faults, 1 promises were not kept",
    ]
    record(tmp_path, KILL, {"event": "leave", "group": 1, "after": 1, "reason": "SIGTERM"}, LOST)
    assert cli.main(["report", str(tmp_path), "--check"]) == 0, "it left in order"


def test_the_removed_command_names_what_to_use(capsys):
    with pytest.raises(SystemExit):
        cli.main(["burn-in", "--faults", "8"])
    assert "sbatch slurm/chaos.sbatch" in capsys.readouterr().err
