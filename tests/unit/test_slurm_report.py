"""Notes of a supervisor in the run record, and the Slurm section of the report."""

from __future__ import annotations

import pytest

from megatron_ft import cli
from megatron_ft.cluster.launchers.notes import Notes
from megatron_ft.cluster.launchers.slurm import commands as slurm
from megatron_ft.errors import LaunchError
from megatron_ft.record import history


@pytest.fixture
def commands(monkeypatch):
    """Set the replies of Slurm's commands by their first word; other commands fail."""
    answers: dict[str, str] = {}

    def answer(*command: str) -> str:
        if command[0] not in answers:
            raise LaunchError(f"{command[0]}: not found")
        return answers[command[0]]

    monkeypatch.setattr(slurm, "_answer", answer)
    return answers


def noted(run_dir) -> list[dict]:
    return [line for line in history.read(run_dir) if line["event"] == "slurm"]


def test_notes_wait_for_the_record_of_the_run_that_begins(tmp_path):
    history.append(tmp_path, "start", run_id="old", groups=2, ranks_per_group=1)
    notes = Notes(tmp_path, "slurm", job="12")
    notes.begin()
    notes.note("job")
    notes.note("spare agent", node="n2", failures=1)
    notes.on_line({"event": "start", "run_id": "old"})
    assert not notes.begun and not noted(tmp_path)
    notes.on_line({"event": "start", "run_id": "new"})
    assert notes.begun
    notes.note("requeued", reason="time")
    found = noted(tmp_path)
    assert [line["what"] for line in found] == ["job", "spare agent", "requeued"]
    assert {line["job"] for line in found} == {"12"} and found[1]["node"] == "n2"


def test_a_record_that_cannot_be_written_is_reported_once(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    notes = Notes(tmp_path / "file", "slurm")
    notes.on_line({"event": "start", "run_id": "new"})
    notes.note("requeued", reason="time")
    notes.note("requeued", reason="time")
    assert capsys.readouterr().err.count("run record not written") == 1


def test_steps_are_listed_with_their_ids_and_a_silent_controller_lists_none(commands):
    assert slurm.steps("12") is None
    commands["squeue"] = "mft/0/n1/0|12.1\nodd|name|12.2\n"
    assert slurm.steps("12") == {"mft/0/n1/0": "12.1", "odd|name": "12.2"}


def test_a_job_is_described_by_sacct_or_without_accounting_by_scontrol(commands):
    with pytest.raises(LaunchError, match="scontrol: not found"):
        slurm.described("12")
    commands["scontrol"] = "JobId=12 JobState=RUNNING\n"
    commands["sacct"] = "JobID JobName\n----- -------\n"
    assert slurm.described("12") == commands["scontrol"]
    commands["sacct"] += "12 pretrain\n"
    assert slurm.described("12") == commands["sacct"]


@pytest.fixture
def run_dir(tmp_path):
    history.append(tmp_path, "start", run_id="new", groups=2, ranks_per_group=1)
    history.append(tmp_path, "slurm", what="drained", node="n2", reason="3 agents", job="12")
    history.append(tmp_path, "step", step=0, epoch=0, live=[0, 1], microbatches=4, loss=1.0, duration_s=0.1)
    return tmp_path


def test_the_report_shows_the_supervisors_actions_and_slurms_own_words(run_dir, commands, capsys):
    commands["sacct"] = "JobID\n-----\n12.0 [red]FAILED\n"
    assert cli.main(["report", str(run_dir)]) == 0
    said = capsys.readouterr().out
    assert "Slurm: job 12" in said and "drained" in said and "node n2, reason 3 agents" in said
    assert "FAILED" not in said
    assert cli.main(["report", str(run_dir), "--slurm"]) == 0
    assert "12.0 [red]FAILED" in capsys.readouterr().out


def test_slurm_is_not_asked_about_a_run_that_was_not_supervised(tmp_path, capsys):
    history.append(tmp_path, "start", run_id="new", groups=2, ranks_per_group=1)
    assert cli.main(["report", str(tmp_path), "--slurm"]) == 2
    assert "was not supervised in Slurm" in capsys.readouterr().err
