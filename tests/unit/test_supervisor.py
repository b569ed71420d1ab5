"""The supervisor's loop without Slurm, with the record of an earlier job."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

from megatron_ft.cluster.launchers import supervisor_loop
from megatron_ft.cluster.launchers.slurm import commands, supervisor
from megatron_ft.config.schema import RunConfig
from megatron_ft.core.lifecycle import supervisor_policy
from megatron_ft.errors import WIPED_OUT, StoreError
from megatron_ft.record import history

NODES = ("n1", "n2")
LATER_S = 300.0
"""Start-up time of the agents: longer than steps may continue after a run."""


class Slurm:
    """A Slurm with two nodes that lists a step while its process lives."""

    def __init__(self) -> None:
        self.steps: dict[str, subprocess.Popen] = {}
        self.cancelled: list[str] = []

    def start(self, job, node, name, command, log, more=()) -> subprocess.Popen:
        code = f"import sys; sys.stdin.read(); sys.exit({WIPED_OUT})"
        self.steps[name] = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
        return self.steps[name]

    def give_up(self, name: str) -> None:
        """End a step as one that has found no control store."""
        self.steps[name].communicate()

    def listed(self, job_id) -> dict[str, str]:
        running = [name for name, process in self.steps.items() if process.poll() is None]
        return {name: f"7.{number}" for number, name in enumerate(running)}

    def end(self) -> None:
        for step in self.steps.values():
            step.kill()
            step.wait()


class Clock:
    """A clock that advances in sleeps only; ``at``: events by time, each once."""

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
    monkeypatch.setattr(commands, "job", lambda environ: commands.Job("7", 0, NODES, "n1"))
    for name, answer in {
        "steps": fake.listed,
        "start_step": fake.start,
        "cancel": fake.cancelled.append,
        "node_up": lambda node: True,
        "numeric_address": lambda node: "127.0.0.1",
        "switches": lambda nodes: {},
        "ends_at": lambda job: None,
        "comment": lambda job, what: None,
    }.items():
        monkeypatch.setattr(commands, name, answer)
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
def test_the_record_of_an_earlier_job_does_not_end_this_one(tmp_path, here, monkeypatch, restarted):
    """The agents need minutes to start, and move the old record away only then."""
    clock = Clock()
    for module in (supervisor, supervisor_loop):
        monkeypatch.setattr(module, "time", clock)
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
    limits = supervisor_policy.Limits(per_node=3, stop_before_s=120.0)
    own = supervisor.Supervisor([], RunConfig(groups=2), run_dir, 0, limits)
    assert own.run() == 0 and clock.now > LATER_S
    assert not here.cancelled


def test_a_restarted_supervisor_knows_that_its_run_has_stopped(tmp_path, here, monkeypatch):
    clock = Clock()
    for module in (supervisor, supervisor_loop):
        monkeypatch.setattr(module, "time", clock)
    record_of(tmp_path / "run", "one", "7.0.0.1", {"event": "stop", "exit_code": 3, "reason": "a model that diverged"})
    here.start(None, "n1", "mft/0/n1/0", [], None)
    limits = supervisor_policy.Limits(per_node=3, stop_before_s=120.0)
    own = supervisor.Supervisor([], RunConfig(groups=2), tmp_path / "run", 0, limits)
    monkeypatch.setattr(commands, "cancel", lambda step: here.end())
    assert own.run() == 3


def test_a_run_whose_agents_find_no_store_is_started_again_without_the_lost_node(tmp_path, here, monkeypatch):
    """Slurm has not noticed the loss of n2: its step seems to run, and the node to be up."""
    clock = Clock()
    for module in (supervisor, supervisor_loop):
        monkeypatch.setattr(module, "time", clock)
    run_dir = tmp_path / "run"

    def ended() -> None:
        record_of(run_dir, "again", "7.0.1.1", {"event": "end"})
        here.end()

    clock.at = {
        5.0: lambda: record_of(run_dir, "first", "7.0.0.1", {"event": "step", "step": 0}),
        60.0: lambda: here.give_up("mft/0/n1/0"),
        LATER_S: ended,
    }
    limits = supervisor_policy.Limits(per_node=3, stop_before_s=120.0, whole=2)
    own = supervisor.Supervisor([], RunConfig(groups=2), run_dir, 0, limits)
    assert own.run() == 0
    assert [name for name in here.steps if name.startswith("mft/")] == ["mft/0/n2/0", "mft/0/n1/0", "mft/1/n1/0"]
    assert here.cancelled and not own._loop.job.nodes["n1"].failures


def test_the_end_of_a_start_does_not_end_the_one_after_it(tmp_path, here, monkeypatch):
    """The new agents need minutes until they have moved the record away that says that the run was wiped out."""
    clock = Clock()
    for module in (supervisor, supervisor_loop):
        monkeypatch.setattr(module, "time", clock)
    run_dir = tmp_path / "run"

    def wiped_out() -> None:
        history.append(run_dir, "stop", exit_code=WIPED_OUT, reason="no group is left")
        for name in [*here.steps]:
            here.give_up(name)

    def ended() -> None:
        record_of(run_dir, "again", "7.0.1.1", {"event": "end"})
        here.end()

    clock.at = {
        5.0: lambda: record_of(run_dir, "first", "7.0.0.1", {"event": "step", "step": 0}),
        60.0: wiped_out,
        60.0 + LATER_S: ended,
    }
    limits = supervisor_policy.Limits(per_node=3, stop_before_s=120.0, whole=2)
    own = supervisor.Supervisor([], RunConfig(groups=2), run_dir, 0, limits)
    assert own.run() == 0 and not here.cancelled
    assert sorted(name for name in here.steps if "mft/1/" in name) == ["mft/1/n1/0", "mft/1/n2/0"]


def test_a_run_whose_store_does_not_answer_is_told_to_stop_again(tmp_path, here, monkeypatch, capsys):
    clock, asked = Clock(), []
    for module in (supervisor, supervisor_loop):
        monkeypatch.setattr(module, "time", clock)

    def stop(run_dir, why: str) -> None:
        asked.append(why)
        if len(asked) < 3:
            raise StoreError("no answer")
        record_of(run_dir, "first", "7.0.0.1", {"event": "stop", "exit_code": 3, "reason": why})
        here.end()

    monkeypatch.setattr(supervisor_loop.operator_requests, "stop", stop)
    monkeypatch.setattr(commands, "ending", lambda job: False)
    monkeypatch.setattr(commands, "requeue", lambda job: "")
    limits = supervisor_policy.Limits(per_node=3, stop_before_s=120.0)
    own = supervisor.Supervisor([], RunConfig(groups=2), tmp_path / "run", 0, limits)
    clock.at = {5.0: lambda: own._signalled(signal.SIGUSR1, None)}
    assert own.run() == supervisor.REQUEUED
    assert asked == ["SIGUSR1: the job is to end soon"] * 3
    said = capsys.readouterr().err
    assert said.count("is told to save and to stop") == said.count("cannot be told to stop yet") == 1


def test_an_adopted_node_is_not_given_up_for_ends_that_may_be_excused(tmp_path, here, monkeypatch):
    record_of(tmp_path / "run", "one", "7.0.0.1")
    here.start(None, "n1", "mft/0/n1/5", [], None)
    limits = supervisor_policy.Limits(per_node=3, stop_before_s=120.0)
    own = supervisor.Supervisor([], RunConfig(groups=2), tmp_path / "run", 0, limits)
    own._ask_slurm()
    own._adopt(own._found())
    node = own._loop.job.nodes["n1"]
    assert (node.step, node.failures, node.failures + node.excused) == ("mft/0/n1/5", 2, 5)


def test_a_supervisor_that_was_silent_is_off_duty_when_it_is_back(tmp_path, here):
    own = ([], RunConfig(groups=2), tmp_path / "run", 0, supervisor_policy.Limits())
    first, second = (supervisor.Supervisor(*own, waits) for waits in (False, True))

    def on_duty(one: supervisor.Supervisor) -> bool:
        one._heartbeat_at = -float("inf")
        return one._on_duty()

    def after_a_silence(one: supervisor.Supervisor) -> bool:
        return [on_duty(one) for _ in range(supervisor._SILENT_LOOKS + 1)][-1]

    assert not after_a_silence(second), "the first turn is that of the first one, however late it begins"
    for _ in range(2 * supervisor._SILENT_LOOKS):
        assert [on_duty(first), on_duty(second)] == [True, False]
    assert after_a_silence(second)
    assert [on_duty(first), on_duty(second)] == [False, True], "the first one was frozen and has resumed"
    again = supervisor.Supervisor(*own)
    for _ in range(2 * supervisor._SILENT_LOOKS):
        assert [on_duty(again), on_duty(second)] == [False, True], "the batch script has started one"
    assert after_a_silence(again)
    assert [on_duty(first), on_duty(second), on_duty(again)] == [False, False, True]


def test_a_first_supervisor_acts_where_it_can_give_no_sign_of_life(tmp_path, here, monkeypatch):
    def no_links(*_):
        raise OSError("Operation not permitted")

    monkeypatch.setattr(supervisor.shared_file, "create", no_links)
    own = ([], RunConfig(groups=2), tmp_path / "run", 0, supervisor_policy.Limits())
    assert [supervisor.Supervisor(*own, waits)._on_duty() for waits in (False, True)] == [True, False]
