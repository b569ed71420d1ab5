"""The supervisor's loop without a Slurm: what it makes of a record that an earlier job has left."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from megatron_ft.config import RunConfig
from megatron_ft.core import supervision
from megatron_ft.core.slurm_said import STEP, Said
from megatron_ft.launch import slurm, supervisor
from megatron_ft.runtime import history

NODES = ("n1", "n2")
LATER_S = 300.0
"""So long the agents take to come up: longer than steps may go on when a run is over."""


class Slurm:
    """Two nodes; a step is listed as long as its process lives."""

    def __init__(self) -> None:
        self.steps: dict[str, subprocess.Popen] = {}
        self.cancelled: list[str] = []

    def start(self, job, node, name, command, log) -> subprocess.Popen:
        self.steps[name] = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        return self.steps[name]

    def listed(self, job_id) -> list[Said]:
        running = [name for name, process in self.steps.items() if process.poll() is None]
        return [Said(STEP, name, "RUNNING", f"7.{number}") for number, name in enumerate(running)]

    def end(self) -> None:
        for step in self.steps.values():
            step.kill()
            step.wait()


class Clock:
    """Time passes where it is slept only; ``at``: what happens when, once."""

    def __init__(self) -> None:
        self.now, self.at = 0.0, {}

    def monotonic(self) -> float:
        return self.now

    time = monotonic

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for due in [due for due in self.at if due <= self.now]:
            self.at.pop(due)()


@pytest.fixture
def here(monkeypatch):
    fake = Slurm()
    monkeypatch.setattr(slurm, "job", lambda environ: slurm.Job("7", 0, NODES, "n1"))
    for name, answer in {
        "steps": fake.listed,
        "start_step": fake.start,
        "cancel_step": fake.cancelled.append,
        "node_up": lambda node: True,
        "node_states": lambda names: [],
        "numeric_address": lambda node: "127.0.0.1",
        "switches": lambda nodes: {},
        "ends_at": lambda job: None,
        "shown": lambda job: None,
        "accounted": lambda job: [],
        "comment": lambda job, what: None,
    }.items():
        monkeypatch.setattr(slurm, name, answer)
    monkeypatch.setattr(supervisor.signal, "signal", lambda number, handler: None)
    yield fake
    fake.end()


def record_of(run_dir, run_id: str, job: str, *events: dict) -> None:
    run_dir.mkdir(exist_ok=True)
    (run_dir / "config.json").write_text(json.dumps({"job": job, "run_id": run_id}))
    if (run_dir / "history.jsonl").exists():
        (run_dir / "history.jsonl").rename(run_dir / "earlier.jsonl")
    for fields in ({"event": "start", "run_id": run_id}, *events):
        history.append(run_dir, fields["event"], **{name: value for name, value in fields.items() if name != "event"})


@pytest.mark.parametrize("restarted", [False, True], ids=["the batch script's first", "started again at once"])
def test_how_an_earlier_job_has_ended_says_nothing_of_this_one(tmp_path, here, monkeypatch, restarted):
    """Its agents need minutes to come up, and only then the old record is put aside."""
    clock = Clock()
    monkeypatch.setattr(supervisor, "time", clock)
    run_dir = tmp_path / "run"
    record_of(run_dir, "old", "6.0.0.1", {"event": "stop", "exit_code": 3, "reason": "asked by megatron-ft stop"})
    if restarted:
        for node in NODES:
            here.start(None, node, f"mft/0/{node}/0", [], None)

    def ended() -> None:
        history.append(run_dir, "end")
        here.end()

    clock.at = {
        LATER_S: lambda: record_of(run_dir, "new", "7.0.0.1"),
        LATER_S + 60.0: ended,
    }
    limits = supervision.Limits(per_node=3, stop_before_s=120.0)
    own = supervisor.Supervisor(supervisor.Options([], RunConfig(groups=2), run_dir, 0, limits), {})
    assert own.run() == 0 and clock.now > LATER_S
    assert not here.cancelled


def test_a_supervisor_that_is_started_again_knows_that_its_run_has_stopped(tmp_path, here, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(supervisor, "time", clock)
    record_of(tmp_path / "run", "one", "7.0.0.1", {"event": "stop", "exit_code": 3, "reason": "a model that diverged"})
    here.start(None, "n1", "mft/0/n1/0", [], None)
    limits = supervision.Limits(per_node=3, stop_before_s=120.0)
    own = supervisor.Supervisor(supervisor.Options([], RunConfig(groups=2), tmp_path / "run", 0, limits), {})
    monkeypatch.setattr(slurm, "cancel_step", lambda step: here.end())
    assert own.run() == 3
