"""Trackers in their own process: fed by the record alone, guarded from each other, and ended with the run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ft.errors import ConfigError
from megatron_ft.host import tracker
from megatron_ft.record import history
from tests.unit.test_run_tables import step as a_step
from tests.unit.test_run_tables import write_run


@pytest.fixture
def run_dir(tmp_path):
    return write_run(tmp_path)


def test_an_unknown_tracker_is_refused():
    with pytest.raises(ConfigError, match="'mlflow' is not known; known are: tensorboard, wandb, megatron_lm"):
        tracker.check_trackers(["mlflow"])


def test_a_tracker_that_is_not_installed_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(tracker.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^tensorboard is not installed; pip install 'megatron_ft\[track\]'$"):
        tracker.check_trackers(["tensorboard"])


def run_tracker(run_dir, names: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "megatron_ft.host.tracker", "--run-dir", run_dir, "--track", names],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_tensorboard_gets_every_step(run_dir):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="no tensorboard")
    run_tracker(run_dir, "tensorboard")
    run_tracker(run_dir, "tensorboard")  # a restarted tracker starts over, it does not double
    events = accumulator.EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(0, 8.0), (1, 7.0), (2, 6.0), (3, 5.0)]
    assert [(e.step, e.value) for e in events.Scalars("patched_microbatches")] == [(2, 2.0)]
    assert [(e.step, e.value) for e in events.Scalars("stall_s")] == [(2, 0.125)]
    assert [e.value for e in events.Scalars("failures")] == [0.0, 0.0, 1.0, 1.0]
    assert [e.value for e in events.Scalars("live_groups")] == [2.0, 2.0, 1.0, 1.0]


class Broken:
    def __init__(self, run_dir):
        raise RuntimeError("service is down")


class Good:
    """A tracker that remembers what it was given."""

    logged: list = []

    def __init__(self, run_dir):
        self.logged.clear()

    def log(self, step, scalars):
        self.logged.append(step)

    def close(self):
        self.logged.append("closed")


def test_a_tracker_that_fails_does_not_stop_the_other(run_dir, monkeypatch, capsys):
    monkeypatch.setattr(tracker, "_TRACKERS", {"wandb": Broken, "tensorboard": Good})
    tracker.run(run_dir, ["wandb", "tensorboard"])
    assert Good.logged == [0, 1, 2, 2, 3, "closed"]
    assert "wandb failed and is dropped" in capsys.readouterr().err


class Growing(Good):
    """A tracker during which the run goes on: each step's line comes after the one before was logged."""

    run_dir: Path

    def log(self, step, scalars):
        super().log(step, scalars)
        if step == 6:
            history.append(self.run_dir, "stop", reason="enough")
        elif step >= 3:
            history.append(self.run_dir, "step", **a_step(step + 1, 4.0, [0]))


def test_the_tracker_follows_a_run_that_was_stopped_and_started_again_in_the_same_directory(run_dir, monkeypatch):
    lines = (run_dir / history.FILE).read_text().splitlines(keepends=True)
    stopped = [json.dumps({"t": 0.0, "event": event, "reason": "asked"}) + "\n" for event in ("stop", "start")]
    (run_dir / history.FILE).write_text("".join([*stopped, *lines[:-1]]))
    monkeypatch.setattr(Growing, "run_dir", run_dir, raising=False)
    monkeypatch.setattr(tracker, "_TRACKERS", {"tensorboard": Growing})
    tracker.run(run_dir, ["tensorboard"])
    assert Good.logged[-4:] == [4, 5, 6, "closed"]


def test_the_tracker_ends_when_its_agent_is_gone(run_dir, monkeypatch):
    """The record has no end line, and the parent changes: the tracker writes the lines that are there, then ends."""
    kept = [line for line in (run_dir / history.FILE).read_text().splitlines() if '"end"' not in line]
    (run_dir / history.FILE).write_text("\n".join(kept) + "\n")
    parents = iter([4242])
    monkeypatch.setattr(tracker.os, "getppid", lambda: next(parents, 1))
    monkeypatch.setattr(tracker, "_TRACKERS", {"tensorboard": Good})
    tracker.run(run_dir, ["tensorboard"])
    assert Good.logged[-2:] == [3, "closed"]


def a_log(step: int, iteration: int, loss: float) -> dict[str, object]:
    entries = [[iteration, {"lm loss": loss}], [16 * iteration, {"lm loss vs samples": loss}]]
    told = {"iteration": iteration, "tensorboard": entries, "wandb": [[iteration, {"lm loss": loss}]]}
    return {"step": step, "values": {"megatron_lm": json.dumps(told)}}


def begin(run_dir: Path, logs: Path, run_id: str, *lines: dict[str, object]) -> None:
    """Write the record of a start of a Megatron-LM job that writes to ``logs``."""
    (run_dir / "megatron_lm").mkdir(parents=True, exist_ok=True)
    about = {"texts": [["seed", "7", 0]], "tensorboard": {"log_dir": str(logs), "max_queue": 1}}
    (run_dir / "megatron_lm" / "writers.json").write_text(json.dumps(about))
    history.append(run_dir, "start", run_id=run_id)
    for line in lines:
        history.append(run_dir, "log", **line)
    history.append(run_dir, "stop", reason="asked")


def test_what_megatron_lm_logs_has_its_names_and_is_there_once_when_the_job_goes_on(tmp_path):
    """The first start has logged iterations 5 to 7, and the second goes on from a checkpoint of iteration 6."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="no tensorboard")
    run_dir, logs = tmp_path / "run", tmp_path / "logs"
    logs.mkdir()
    other = logs / "events.out.tfevents.1.host.1.0"
    other.write_bytes(b"")
    begin(run_dir, logs, "first", a_log(0, 5, 3.0), a_log(1, 6, 2.5), a_log(2, 7, 2.25))
    run_tracker(run_dir, "megatron_lm.tensorboard")
    (run_dir / "earlier" / "0001").mkdir(parents=True)
    (run_dir / history.FILE).rename(run_dir / "earlier" / "0001" / history.FILE)
    begin(run_dir, logs, "second", a_log(0, 7, 2.0), a_log(1, 8, 1.5))
    run_tracker(run_dir, "megatron_lm.tensorboard")
    assert other.exists()
    events = accumulator.EventAccumulator(str(logs))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("lm loss")] == [(5, 3.0), (6, 2.5), (7, 2.0), (8, 1.5)]
    assert [e.step for e in events.Scalars("lm loss vs samples")] == [80, 96, 112, 128]
    assert events.Tags()["scalars"] == ["lm loss", "lm loss vs samples"]
    assert events.Tags()["tensors"] == ["seed/text_summary"]


def test_arguments_of_megatron_lm_ask_for_trackers():
    assert tracker.asked_for(["--tensorboard-dir", "logs"]) == ["megatron_lm.tensorboard"]
    assert tracker.asked_for(["--lr", "1", "--wandb-project=p"]) == ["megatron_lm.wandb"]
    assert tracker.asked_for(["--log-interval", "1"]) == []


@pytest.mark.long
def test_wandb_writes_offline_and_into_the_run_directory_only(run_dir, tmp_path_factory, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed")
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    for name in ("WANDB_MODE", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    run_tracker(run_dir, "wandb")
    assert list((run_dir / "wandb").glob("offline-run-*/*.wandb"))
    assert not list(home.rglob("*"))
