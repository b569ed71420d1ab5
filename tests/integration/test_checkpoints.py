"""Runs that save and go on: jobs killed, or told to stop; damaged checkpoints, other numbers of groups, disks that fail."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
from pathlib import Path

import pytest

from megatron_ft.errors import WIPED_OUT
from megatron_ft.faults import checkers, inject, processes
from megatron_ft.runtime import checkpoint
from megatron_ft.runtime.checkpoint.memory import Shelf
from megatron_ft.runtime.points import Hold
from tests import checkpoint_kills, support
from tests.integration.test_hosts import Agents

MICROBATCHES = support.GROUPS * support.PER_GROUP
OFTEN, ONCE = 0.05, 1e6
"""Seconds between two saves: nearly always, and only at the end."""


def start(directory: Path, data_dir: Path, saved: Path, period_s: float = ONCE, **options) -> support.Run:
    return support.start(directory, data_dir, checkpoint={"directory": str(saved), "period_s": period_s}, **options)


def pids_of(run: support.Run) -> list[int]:
    return [rank.pid for rank in processes.ranks(run.directory)]


def complete(saved: Path) -> list[int]:
    """Steps of the checkpoints that are whole, newest first; all of their files are read."""
    found = [one for one in checkpoint.find(saved) if one.complete]
    for one in found:
        checkpoint.verify(one)
    return [one.step for one in found]


def went_well(run: support.Run) -> str:
    said = run.finish()
    assert run.process.returncode == 0, f"{said}\n{run.logs()}"
    return " ".join(said.split())


@pytest.fixture(scope="module")
def halfway(tmp_path_factory, data_dir):
    """The reference's job, ended after four steps: its checkpoints."""
    root = tmp_path_factory.mktemp("halfway")
    went_well(start(root / "run", data_dir, root / "saved", steps=4))
    assert complete(root / "saved") == [4]
    return root / "saved"


@pytest.fixture
def saved(tmp_path, halfway):
    return Path(shutil.copytree(halfway, tmp_path / "saved"))


def equals_the_rest(run: support.Run, reference: support.Run, tolerance: float) -> None:
    """From step 4 on what the uninterrupted run has made: the same samples in every step."""
    lines = run.events("step")
    assert [line["step"] for line in lines] == [4, 5, 6, 7]
    assert {line["microbatches"] for line in lines} == {MICROBATCHES}
    theirs = {line["step"]: line["loss"] for line in reference.events("step")}
    assert [line["loss"] for line in lines] == pytest.approx([theirs[line["step"]] for line in lines], rel=tolerance)


def test_a_job_that_is_killed_again_and_again_comes_to_what_an_uninterrupted_one_does(tmp_path, data_dir):
    alone = checkpoint_kills.start(tmp_path / "alone", data_dir, steps=40)
    alone.check()
    played = checkpoint_kills.play(tmp_path / "run", data_dir, 2, random.Random(5), steps=40)
    assert not checkpoint_kills.judge(played, alone.history, checkpoint_kills.GROUPS * support.PER_GROUP)
    assert checkpoint_kills.off(played, alone.history) <= checkers.LOSS_TOLERANCE


@pytest.mark.parametrize("groups", [2, 3, 5])
def test_another_number_of_groups_trains_the_same_batches(tmp_path, data_dir, reference, saved, groups):
    run = start(tmp_path / "run", data_dir, saved, groups=groups)
    went_well(run)
    equals_the_rest(run, reference, 1e-4)
    assert {len(line["live"]) for line in run.events("step")} == {groups}
    assert complete(saved) == [8, 4]


def test_a_group_that_dies_after_going_on_is_recovered_from(tmp_path, data_dir, reference, saved):
    """Group 0 at the first barrier: everybody has read the checkpoint, nobody needs it for its model."""
    hold = Hold(0, 4, "connect")
    run = start(tmp_path / "run", data_dir, saved, holds=[hold])
    run.strike(hold)
    went_well(run)
    equals_the_rest(run, reference, checkers.LOSS_TOLERANCE)
    (begin,) = run.events("resume")
    assert begin["step"] == 4 and begin["checkpoint"].startswith(str(saved))


def test_a_finished_run_says_so(tmp_path, data_dir, saved):
    run = start(tmp_path / "run", data_dir, saved, steps=4)
    assert "all 4 steps done" in went_well(run)
    assert not run.events("step") and len(run.events("end")) == 1
    assert len({line["params_sha256"] for line in run.events("survivor")}) == 1


def test_a_damaged_checkpoint_is_said_and_the_one_before_is_taken(tmp_path, data_dir):
    saved = tmp_path / "saved"
    run = start(tmp_path / "run", data_dir, saved, OFTEN, steps=100_000)
    support.wait_for(lambda: len(run.events("checkpoint")) >= 3, run)
    run.process.send_signal(signal.SIGTERM)
    stops_with_a_checkpoint(run, saved, groups=support.GROUPS)
    steps = complete(saved)
    assert len(steps) == 3, "keep is 3"
    newest = Path(checkpoint.find(saved)[0].path)
    part = max(newest.glob("position-*/*.safetensors"), key=os.path.getsize)
    os.truncate(part, part.stat().st_size - 1)
    again = start(tmp_path / "run", data_dir, saved, OFTEN, steps=steps[0] + 1)  # the same directory: the same command
    said = went_well(again)
    assert f"of step {steps[0]} is not used" in said and part.name in said
    assert [line["step"] for line in again.events("step")] == list(range(steps[1], steps[0] + 1))
    assert checkers.losses(again.history)[steps[0] - 1] == checkers.losses(_earlier(again))[steps[0] - 1]


def test_what_is_in_memory_need_not_be_read_from_disk(tmp_path, data_dir):
    """Here it cannot be: the files are damaged. Where all steps are done nobody needs the copies any more."""
    saved = tmp_path / "saved"
    options = {"checkpoint": {"directory": str(saved), "period_s": ONCE, "memory_gb": 1.0}, "groups": 2}
    run = support.start(tmp_path / "run", data_dir, steps=100_000, **options)
    support.wait_for_step(run, 2)
    run.process.send_signal(signal.SIGTERM)
    run.finish()
    (step,) = complete(saved)
    shelf = Shelf(saved, 1e9)
    assert shelf.listed()
    for part in Path(checkpoint.find(saved)[0].path).glob("position-*/*.safetensors"):
        with part.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(bytes([part.read_bytes()[-1] ^ 1]))
    again = support.start(tmp_path / "run", data_dir, steps=step + 2, **options)
    went_well(again)
    assert [line["step"] for line in again.events("step")] == [step, step + 1]
    assert not shelf.listed()


def _earlier(run: support.Run) -> list[dict]:
    """The record of the start before, put aside."""
    return support.history.read(run.directory / "earlier" / "0001")


def test_a_job_that_is_told_to_stop_saves_first(tmp_path, data_dir):
    """With two ranks in each group."""
    options = {"groups": 2, "extra": ["--ranks-per-group", "2"]}
    alone = support.start(tmp_path / "alone", data_dir, steps=12, **options)
    alone.check()
    run = start(tmp_path / "run", data_dir, tmp_path / "saved", steps=100_000, **options)
    support.wait_for_step(run, 3)
    run.process.send_signal(signal.SIGTERM)
    said = " ".join(run.finish().split())
    assert run.process.returncode == 128 + signal.SIGTERM, said
    last = run.events("step")[-1]["step"]
    assert f"stopped by SIGTERM after step {last}; the checkpoint of step {last + 1} is complete" in said
    assert complete(tmp_path / "saved") == [last + 1] and not run.events("fault")
    again = start(tmp_path / "run", data_dir, tmp_path / "saved", steps=max(12, last + 2), **options)
    went_well(again)
    both = checkers.joined([_earlier(again), again.history])
    assert list(checkers.losses(both)) == list(range(max(12, last + 2)))
    assert checkers.largest_loss_difference(both, alone.history) <= checkers.LOSS_TOLERANCE


def test_a_disk_that_is_full_costs_the_checkpoint_and_nothing_else(tmp_path, data_dir, reference):
    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    run = start(tmp_path / "run", data_dir, tmp_path / "saved", OFTEN, preexec_fn=small_files)
    run.check(reference)
    failed = [line["reason"] for line in run.events("checkpoint_failed")]
    # Others may have been said too late; the last one, with all steps done, cannot be.
    assert any("files may not be that large there" in reason for reason in failed), failed
    assert not run.events("checkpoint") and not complete(tmp_path / "saved")


SLOW = """
import os, time
from megatron_ft.runtime import checkpoint
write = checkpoint.write_part
def write_when_told(*arguments):
    (HERE / f"begun-{os.getpid()}").touch()
    while not (HERE / "go").exists():
        time.sleep(0.01)
    return write(*arguments)
checkpoint.write_part = write_when_told
"""


def script_here(here: Path, change: str) -> Path:
    """The training script with lines that know this directory."""
    return support.changed_script(here / "train.py", f"from pathlib import Path\nHERE = Path({str(here)!r})\n{change}")


def await_writing(run: support.Run, here: Path, groups: int = 3) -> None:
    support.wait_for(lambda: len(list(here.glob("begun-*"))) == groups, run)


def test_a_slow_disk_delays_no_step_and_who_dies_meanwhile_costs_that_checkpoint_only(tmp_path, data_dir):
    """Group 0 gave the order and dies while everybody writes: group 1 gives the next one."""
    saves = {"directory": str(tmp_path / "saved"), "period_s": OFTEN, "keep": 100_000}
    options = {"script": script_here(tmp_path, SLOW), "steps": 100_000, "groups": 3}
    run = support.start(tmp_path / "run", data_dir, checkpoint=saves, **options)
    await_writing(run, tmp_path)
    support.wait_for_step(run, len(run.events("step")) + 8)
    assert not run.events("checkpoint")
    support.kill([inject.pid_of(run.directory, 0)])
    (tmp_path / "go").touch()
    support.wait_for(lambda: bool(run.events("checkpoint")), run)
    made = run.events("checkpoint")[0]
    assert set(made["writers"]) <= {1, 2}, "one may still be at the part that nobody needs any more"
    support.wait_for_step(run, made["step"])
    assert all(line["epoch"] == 1 for line in run.events("step") if line["step"] >= made["step"])
    run.process.send_signal(signal.SIGTERM)
    run.finish()
    assert complete(tmp_path / "saved")[-1] == made["step"]


def stops_with_a_checkpoint(run: support.Run, saved: Path, groups: int = 3) -> None:
    """The last one, and all has been in a step before."""
    said = " ".join(run.finish().split())
    last = run.events("step")[-1]["step"]
    assert f"stopped by SIGTERM after step {last}; the checkpoint of step {last + 1} is complete" in said, run.logs()
    assert run.process.returncode == 128 + signal.SIGTERM and complete(saved)[0] == last + 1
    assert [line["step"] for line in run.events("step")] == list(range(last + 1))
    assert {line["microbatches"] for line in run.events("step")} == {groups * support.PER_GROUP}


LATE = """
import time
from megatron_ft.core.saving import Saves
from megatron_ft.runtime import watcher
from megatron_ft.runtime.collecting import Checkpoints
announce, boundary, at = watcher.announce, Checkpoints.boundary, [0]
def announce_late(store, signal, by=None):
    said = at[0]
    while isinstance(signal, Saves) and not signal.last and at[0] < said + 6:
        time.sleep(0.001)
    announce(store, signal, by)
def begin(self, state, step_s):
    at[0] = state.step
    boundary(self, state, step_s)
watcher.announce, Checkpoints.boundary = announce_late, begin
"""


def test_an_order_that_is_heard_too_late_is_given_earlier_the_next_time(tmp_path, data_dir):
    """The news takes six steps: for orders two and four steps ahead that is too long, however fast the steps are. Who was
    late is not asked to write the next time, but then again."""
    script = support.changed_script(tmp_path / "train.py", LATE)
    run = start(tmp_path / "run", data_dir, tmp_path / "saved", OFTEN, script=script, steps=100_000, groups=2)
    support.wait_for(lambda: any(line["writers"] == [0, 1] for line in run.events("checkpoint")), run)
    failed = run.events("checkpoint_failed")
    late = [line for line in failed if "group 1 heard of it in step" in line["reason"]]
    assert len(late) >= 2 and all(line in late or "is still being written" in line["reason"] for line in failed), failed
    assert len({line["step"] for line in failed}) == len(failed)
    run.process.send_signal(signal.SIGTERM)
    stops_with_a_checkpoint(run, tmp_path / "saved", groups=2)


MISSED = """
import os, time
from megatron_ft.core.saving import Saves
from megatron_ft.runtime.collecting import Checkpoints
hear, boundary, ask, missed, left = Checkpoints.hear, Checkpoints.boundary, Checkpoints._ask, [], [-1]
group = os.environ["MEGATRON_FT_GROUP"]
def hear_late(self, word):
    misses = isinstance(word, Saves) and word.last and not missed and group == "2"
    if not misses:
        hear(self, word)
    if isinstance(word, Saves):
        (HERE / f"{word.attempt}-{group}").touch()
    if misses:
        missed.append(word)
        while left[0] < word.at:
            time.sleep(0.001)
        hear(self, word)
def leave(self, state, step_s):
    boundary(self, state, step_s)
    left[0] = state.step
def ask_in_time(self, *arguments):
    ask(self, *arguments)
    while not all((HERE / f"{self._heard.attempt}-{other}").exists() for other in (1, 2)):
        time.sleep(0.001)
Checkpoints.hear, Checkpoints.boundary, Checkpoints._ask = hear_late, leave, ask_in_time
"""
"""Nobody else does, nor that one again: who gives an order waits until it is there, before its next step."""
ONE_WRITER = "from megatron_ft.core import saving; saving.MOST_PARTS = 1"


@pytest.mark.parametrize("more", ["", ONE_WRITER], ids=["a writer", "no writer"])
def test_a_group_that_hears_too_late_that_all_stop_takes_them_along(tmp_path, data_dir, more):
    """It is in the next step by then, and waits there for those that stand."""
    script = script_here(tmp_path, f"{MISSED}{more}\n")
    run = start(tmp_path / "run", data_dir, tmp_path / "saved", script=script, steps=100_000, groups=3)
    support.wait_for_step(run, 3)
    run.process.send_signal(signal.SIGTERM)
    stops_with_a_checkpoint(run, tmp_path / "saved")
    assert [line["live"] for line in run.events("view")] == [[0, 1, 2], [0, 1, 2]]
    assert "group 2: it did not hear in time that all were to stop" in run.events("view")[1]["reason"]


@pytest.mark.parametrize("group", [0, 2])
def test_who_dies_while_all_wait_for_the_last_checkpoint_is_waited_for_by_nobody(tmp_path, data_dir, group):
    """Who has given the order, and one that has not."""
    script = script_here(tmp_path, SLOW)
    run = start(tmp_path / "run", data_dir, tmp_path / "saved", script=script, steps=100_000, groups=3)
    support.wait_for_step(run, 3)
    pid = inject.pid_of(run.directory, group)
    run.process.send_signal(signal.SIGTERM)
    await_writing(run, tmp_path)
    support.kill([pid])
    (tmp_path / "go").touch()
    stops_with_a_checkpoint(run, tmp_path / "saved")
    assert run.events("view")[-1]["live"] == [other for other in range(3) if other != group]


def test_a_group_that_comes_back_gives_the_orders_again(tmp_path, data_dir):
    """Group 0: the others save without it meanwhile, and the lock of the directory goes there and back."""
    saved = tmp_path / "saved"
    options = {"steps": 100_000, "groups": 2, "rejoin": {"enabled": True}}
    run = start(tmp_path / "run", data_dir, saved, 0.2, holds=[Hold(0, None, "warm", incarnation=1)], **options)
    support.wait_for(lambda: bool(run.events("checkpoint")), run)
    os.kill(inject.pid_of(run.directory, 0), signal.SIGKILL)
    frozen = support.await_held(run, 0)
    support.wait_for(lambda: any(line["writers"] == [1] for line in run.events("checkpoint")), run)
    os.kill(frozen, signal.SIGCONT)
    support.wait_for(lambda: bool(run.events("rejoined")), run)
    back = run.events("rejoined")[-1]["step"]
    support.wait_for(lambda: any(line["step"] > back and 0 in line["writers"] for line in run.events("checkpoint")), run)
    run.process.send_signal(signal.SIGTERM)
    said = " ".join(run.finish().split())
    last = run.events("step")[-1]["step"]
    assert f"the checkpoint of step {last + 1} is complete" in said and complete(saved)[0] == last + 1


def test_two_jobs_cannot_have_one_directory(tmp_path, data_dir):
    saved = tmp_path / "saved"
    first = start(tmp_path / "first", data_dir, saved, steps=100_000, groups=2)
    support.wait_for_step(first, 1)
    second = start(tmp_path / "second", data_dir, saved, groups=2)
    said = " ".join(second.finish().split())
    assert second.process.returncode == 2 and "is in use by run" in said and not second.history
    support.kill([first.process.pid, *pids_of(first)])
    first.finish()
    third = start(tmp_path / "first", data_dir, saved, steps=1, groups=2)  # a dead one is in nobody's way
    went_well(third)


def test_a_directory_that_cannot_be_one_is_refused_before_anything_starts(tmp_path, data_dir):
    (tmp_path / "file").write_text("")
    run = start(tmp_path / "run", data_dir, tmp_path / "file" / "saved")
    said = " ".join(run.finish().split())
    assert run.process.returncode == 2 and "something on its way is a file" in said and not run.history


def test_what_would_learn_something_else_is_refused_before_training(tmp_path, data_dir, saved):
    own = ("--layers", 2, "--seq-len", 32, "--width", 32)
    for options, words in (
        ({"own": own}, "is a tensor of shape"),
        ({"own": ("--layers", 2, "--seq-len", 32, "--width", 64, "--seed", 7)}, "fault_tolerance.seed is 7"),
        ({"nonfinite": "stop"}, "fault_tolerance.nonfinite is 'stop'"),
        ({"extra": ["--ranks-per-group", "2"]}, "was saved with 1"),
        ({"extra": ["--resume", "never"]}, "holds checkpoints of another run"),
    ):
        run = start(tmp_path / "run", data_dir, saved, groups=2, **options)
        said = " ".join(run.finish().split())
        assert run.process.returncode == 2 and words in said, said
        assert not run.events("step") and complete(saved) == [4]


def test_a_wipe_out_says_from_where_a_later_start_goes_on(tmp_path, data_dir):
    saved = tmp_path / "saved"
    run = start(tmp_path / "run", data_dir, saved, OFTEN, steps=100_000, groups=2, rejoin={"enabled": False})
    support.wait_for(lambda: bool(run.events("checkpoint")), run)
    support.kill(pids_of(run))
    said = " ".join(run.finish().split())
    assert run.process.returncode == WIPED_OUT
    last = run.events("checkpoint")[-1]["step"]  # the next one may have been made by then, and nobody has said so
    assert "no group is left" in said and f"the checkpoint of step {last} is complete" in said and last in complete(saved)


def test_with_rejoin_a_wiped_out_job_is_started_again_by_its_launcher(tmp_path, data_dir):
    saved, gate = tmp_path / "saved", support.Gate(tmp_path, slowly=60)
    options = {"steps": 60, "groups": 2, "script": gate.script}
    run = start(tmp_path / "run", data_dir, saved, OFTEN, rejoin={"enabled": True}, **options)
    support.wait_for(lambda: bool(run.events("checkpoint")), run)
    run.process.send_signal(signal.SIGSTOP)  # no group is started again before all are dead
    support.kill(pids_of(run))
    gate.open()
    run.process.send_signal(signal.SIGCONT)
    said = went_well(run)
    assert "the whole job is started again" in said
    both = checkers.joined([_earlier(run), run.history])
    assert not checkers.check_history(both, 2 * support.PER_GROUP)


@pytest.fixture
def agents(tmp_path, data_dir):
    agents = Agents(tmp_path, data_dir)
    yield agents
    agents.kill()


def test_several_hosts_stop_and_go_on_together(tmp_path, agents, reference):
    """All agents are told; then two hosts with other groups go on, and only the first one chooses."""
    changes = {"checkpoint": {"directory": str(tmp_path / "saved"), "period_s": ONCE}, "min_groups": 1}
    # No host is lost: a busy one must not be taken for that.
    detector = {"straggler_factor": 0, "heartbeat_timeout_s": support.TIMEOUT_S}
    agents.config = support.write_config(tmp_path / "config.json", **changes, detector=detector)
    before, steps = _hosts(agents, 100_000, groups=4)
    support.wait_for_step(before, 2)
    for agent in agents.agents.values():
        agent.send_signal(signal.SIGTERM)
    said = [" ".join(agents.said(host).split()) for host in steps]
    at = before.events("step")[-1]["step"] + 1
    assert all(f"the checkpoint of step {at} is complete" in line for line in said), said
    assert [agent.returncode for agent in agents.agents.values()] == [128 + signal.SIGTERM] * 2
    after, _ = _hosts(agents, at + 2, groups=2)
    said = [agents.said(host) for host in steps]
    assert [agent.returncode for agent in agents.agents.values()] == [0, 0], said
    assert [line["step"] for line in after.events("step")] == [at, at + 1]
    assert {line["microbatches"] for line in after.events("step")} == {MICROBATCHES}
    assert checkers.largest_loss_difference(_earlier(after), reference.history) <= checkers.LOSS_TOLERANCE


def _hosts(agents: Agents, steps: int, groups: int) -> tuple[support.Run, range]:
    agents.own[3] = steps
    for host in range(2):
        agents.start(host, hosts=2, groups=groups)
    return support.Run(agents.directory / "run", agents.agents[0], groups), range(2)
