"""Failures that kill no process: a frozen group, a disk that is full, trackers that misbehave."""

from __future__ import annotations

import os
import resource
import shutil
import signal
from pathlib import Path

import pytest

from megatron_ft.cluster.faults import kill
from megatron_ft.run.injection_points import Breakpoint
from tests import support
from tests.stores import parent_of, store_of
from tools import proc

FROZEN = {"in an all-reduce": Breakpoint(2, 3, "reduce", 1), "the writer, before it wrote": Breakpoint(0, 3, "update")}


@pytest.mark.parametrize("hold", support.first_of(FROZEN, "the writer, before it wrote"))
def test_a_frozen_group_is_left_out_and_fenced_when_it_wakes(tmp_path, data_dir, reference, hold):
    """The agent of the group sees it stopped; no other group waits for a timeout of a collective or a report (hard
    case 18)."""
    detector = {"stopped_timeout_s": 0.5}
    run = support.start(tmp_path / "run", data_dir, [hold], detector=detector)
    support.wait_for(lambda: any(hold.group not in line["live"] for line in run.events("step")), run)
    frozen = kill.pid_of(run.directory, hold.group)
    assert kill.is_frozen(run.directory, hold.group)
    os.kill(frozen, signal.SIGCONT)
    run.check(reference)
    view = run.events("view")[1]
    assert f"(pid {frozen}) is stopped (process state T)" in view["lost"][str(hold.group)]
    assert [line["pid"] for line in run.events("fault")] == [frozen]
    assert [line["group"] for line in run.events("survivor")] == [g for g in range(support.GROUPS) if g != hold.group]
    log = (run.directory / "logs" / f"g{hold.group}.p0.log").read_text()
    assert f"group {hold.group} is outside view 1" in log


@pytest.mark.long
def test_a_full_disk_does_not_stop_training(tmp_path, data_dir, reference):
    """Record, logs and timeline all hit the limit; the run reaches its end with a death on the way."""
    hold = Breakpoint(1, 5, "backward")

    def small_files() -> None:  # room for the config, whose paths are of any length, and for half of the rest
        resource.setrlimit(resource.RLIMIT_FSIZE, (1800, 1800))

    run = support.start(tmp_path / "run", data_dir, [hold], preexec_fn=small_files)
    run.strike(hold)
    said = run.finish()
    assert run.process.returncode == 0, said + run.logs()
    assert "not written, training goes on" in said + run.logs()
    assert not run.events("end"), "the limit was never reached, this test proves nothing"


@pytest.mark.long
def test_a_run_directory_that_is_removed_is_made_again_and_lost_groups_come_back(tmp_path, data_dir):
    gate = support.Gate(tmp_path, slowly=150)
    run = support.start(tmp_path / "run", data_dir, script=gate.script, steps=150, groups=2, rejoin={"enabled": True})
    support.wait_for_step(run, 2)
    pid = support.inject.pid_of(run.directory, 1, 0)
    shutil.rmtree(run.directory)
    support.kill([pid])
    support.wait_for(lambda: run.events("rejoined"), run)
    gate.open()
    said = run.finish()
    assert run.process.returncode == 0 and "is made again" in said and "group 1 lost: rank 0" in said, said
    assert run.events("start") and run.events("begin") and [line["step"] for line in run.events("end")] == [149]
    steps = [line["step"] for line in run.events("step")]
    assert steps == list(range(steps[0], 150))


def test_fault_free_steps_need_neither_store_nor_agent(tmp_path, data_dir):
    """Agent, store and its keeper are frozen in the middle of a run: the steps go on without them."""
    gate = support.Gate(tmp_path, 20)
    run = support.start(tmp_path / "run", data_dir, steps=40, script=gate.script)
    support.wait_for_step(run, 5)
    store = store_of(run.directory)
    frozen = (run.process.pid, parent_of(store), store)
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    gate.open()
    support.wait_for_step(run, 39)
    assert not run.events("end"), "agreeing on the end needs the store"
    for pid in frozen:
        os.kill(pid, signal.SIGCONT)
    run.check()


@pytest.mark.long
def test_a_tracker_that_is_killed_is_started_again_and_misses_nothing(tmp_path, data_dir, reference):
    run, gate = start_tracked(tmp_path, data_dir)
    support.wait_for_step(run, 1)
    killed = tracker_pid(run)
    os.kill(killed, signal.SIGKILL)
    # At the end a run waits only briefly for a tracker: the new one has to be there by then.
    support.wait_for(lambda: any(f".{killed}." not in file.name for file in run.directory.glob("tensorboard/*")), run)
    gate.open()
    run.check(reference)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run.directory / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == list(range(support.STEPS))


@pytest.mark.long
def test_a_tracker_that_hangs_is_not_waited_for(tmp_path, data_dir, reference):
    run, gate = start_tracked(tmp_path, data_dir)
    support.wait_for_step(run, 1)
    hung = tracker_pid(run)
    os.kill(hung, signal.SIGSTOP)
    gate.open()
    run.check(reference)
    assert not os.path.exists(f"/proc/{hung}")


def start_tracked(tmp_path: Path, data_dir: Path) -> tuple[support.Run, support.Gate]:
    """Start a run that lasts until the faults of its tracker have happened."""
    gate = support.Gate(tmp_path, 5)
    return support.start(tmp_path / "run", data_dir, extra=("--track", "tensorboard"), script=gate.script), gate


TRACKER = "megatron-ft: tracker"


def tracker_pid(run: support.Run) -> int:
    """Return the pid of the tracker among the launcher's children. It is started after the ranks, which may be
    quicker."""
    support.wait_for(lambda: trackers(run), run)
    return trackers(run)[0]


def trackers(run: support.Run) -> list[int]:
    children = Path(f"/proc/{run.process.pid}/task/{run.process.pid}/children").read_text().split()
    return [pid for pid in map(int, children) if proc.command(pid)[:1] and proc.command(pid)[0].startswith(TRACKER)]
