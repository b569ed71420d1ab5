"""Runs that save and continue: jobs that are killed or told to stop; damaged checkpoints, other numbers of groups,
disks that fail."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import random
import shutil
import signal
import subprocess
import termios
from pathlib import Path

import pytest

from megatron_ft.cluster.faults import kill, process_lookup
from megatron_ft.errors import NOT_SAVED, WIPED_OUT
from megatron_ft.record import invariants
from megatron_ft.run import checkpoint
from megatron_ft.run.checkpoint.memory_copies import ReplicaCache
from megatron_ft.run.injection_points import Breakpoint
from tests import checkpoint_kills, support
from tests.integration.test_hosts import Agents
from tools import proc

MICROBATCHES = support.GROUPS * support.PER_GROUP
OFTEN, ONCE = 0.05, 1e6
"""Seconds between two saves: nearly always, and only at the end."""


def start(directory: Path, data_dir: Path, saved: Path, period_s: float = ONCE, **options) -> support.Run:
    return support.start(directory, data_dir, checkpoint={"directory": str(saved), "period_s": period_s}, **options)


def pids_of(run: support.Run) -> list[int]:
    return [rank.pid for rank in process_lookup.ranks(run.directory)]


def complete(saved: Path) -> list[int]:
    """Return the steps of the complete checkpoints, newest first; all of their files are read."""
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
    """The checkpoints of the reference's job, ended after four steps."""
    root = tmp_path_factory.mktemp("halfway")
    went_well(start(root / "run", data_dir, root / "saved", steps=4))
    assert complete(root / "saved") == [4]
    return root / "saved"


@pytest.fixture
def saved(tmp_path, halfway):
    return Path(shutil.copytree(halfway, tmp_path / "saved"))


def equals_the_rest(run: support.Run, reference: support.Run, tolerance: float) -> None:
    """Check that the run makes from step 4 on what the uninterrupted run has made: the same samples in every step."""
    lines = run.events("step")
    assert [line["step"] for line in lines] == [4, 5, 6, 7]
    assert {line["microbatches"] for line in lines} == {MICROBATCHES}
    theirs = {line["step"]: line["loss"] for line in reference.events("step")}
    assert [line["loss"] for line in lines] == pytest.approx([theirs[line["step"]] for line in lines], rel=tolerance)


def test_a_job_that_is_killed_repeatedly_equals_an_uninterrupted_one(tmp_path, data_dir):
    alone = checkpoint_kills.start(tmp_path / "alone", data_dir, steps=40)
    alone.check()
    played = checkpoint_kills.play(tmp_path / "run", data_dir, 2, random.Random(5), steps=40)
    assert not checkpoint_kills.judge(played, alone.history, checkpoint_kills.GROUPS * support.PER_GROUP)
    assert checkpoint_kills.off(played, alone.history) <= invariants.LOSS_TOLERANCE


@pytest.mark.parametrize(
    "groups", [pytest.param(2, marks=pytest.mark.long), pytest.param(3, marks=pytest.mark.long), 5]
)
def test_another_number_of_groups_trains_the_same_batches(tmp_path, data_dir, reference, saved, groups):
    run = start(tmp_path / "run", data_dir, saved, groups=groups)
    went_well(run)
    equals_the_rest(run, reference, 1e-4)
    assert {len(line["live"]) for line in run.events("step")} == {groups}
    assert complete(saved) == [8, 4]


@pytest.mark.long
def test_a_group_that_dies_after_a_start_from_a_checkpoint_is_recovered_from(tmp_path, data_dir, reference, saved):
    """Group 0 dies at the first barrier: every group has read the checkpoint, so no group needs group 0 for the
    model."""
    hold = Breakpoint(0, 4, "connect")
    run = start(tmp_path / "run", data_dir, saved, holds=[hold])
    run.strike(hold)
    went_well(run)
    equals_the_rest(run, reference, invariants.LOSS_TOLERANCE)
    (begin,) = run.events("resume")
    assert begin["step"] == 4 and begin["checkpoint"].startswith(str(saved))


@pytest.mark.long
def test_a_start_after_a_finished_run_reports_that_it_is_finished(tmp_path, data_dir, saved):
    run = start(tmp_path / "run", data_dir, saved, steps=4)
    assert "all 4 steps are done" in went_well(run)
    assert not run.events("step") and len(run.events("end")) == 1
    assert len({line["params_sha256"] for line in run.events("survivor")}) == 1


@pytest.mark.long
def test_a_damaged_checkpoint_is_reported_and_the_one_before_is_taken(tmp_path, data_dir):
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
    assert invariants.losses(again.history)[steps[0] - 1] == invariants.losses(_earlier(again))[steps[0] - 1]


@pytest.mark.long
def test_what_is_in_memory_need_not_be_read_from_disk(tmp_path, data_dir):
    """The files on disk are damaged, so a read would fail. Where all steps are done the copies are not needed any
    more."""
    saved = tmp_path / "saved"
    options = {"checkpoint": {"directory": str(saved), "period_s": ONCE, "memory_gb": 1.0}, "groups": 2}
    run = support.start(tmp_path / "run", data_dir, steps=100_000, **options)
    support.wait_for_step(run, 2)
    run.process.send_signal(signal.SIGTERM)
    run.finish()
    (step,) = complete(saved)
    shelf = ReplicaCache(saved, 1e9)
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
    """The record of the previous start, which was moved aside."""
    return support.history.read(run.directory / "earlier" / "0001")


def test_a_job_that_is_told_to_stop_saves_first(tmp_path, data_dir):
    """Each group has two ranks. Every process of the job gets the signal, as with Slurm's ``--signal``."""
    options = {"groups": 2, "extra": ["--ranks-per-group", "2"]}
    alone = support.start(tmp_path / "alone", data_dir, steps=12, **options)
    alone.check()
    run = start(tmp_path / "run", data_dir, tmp_path / "saved", steps=100_000, **options)
    support.wait_for_step(run, 3)
    for pid in sorted(proc.with_descendants({run.process.pid}), reverse=True):
        os.kill(pid, signal.SIGUSR1)
    said = " ".join(run.finish().split())
    assert run.process.returncode == 128 + signal.SIGUSR1, said
    last = run.events("step")[-1]["step"]
    assert f"stopped by SIGUSR1 after step {last}; the checkpoint of step {last + 1} is complete" in said
    assert complete(tmp_path / "saved") == [last + 1] and not run.events("fault")
    again = start(tmp_path / "run", data_dir, tmp_path / "saved", steps=max(12, last + 2), **options)
    went_well(again)
    both = invariants.joined([_earlier(again), again.history])
    assert list(invariants.losses(both)) == list(range(max(12, last + 2)))
    assert invariants.largest_loss_difference(both, alone.history) <= invariants.LOSS_TOLERANCE


@pytest.mark.long
def test_a_closed_terminal_ends_the_run_with_a_last_checkpoint(tmp_path, data_dir):
    """The launcher leads a session on a pseudo-terminal of its own; closing that makes the kernel send SIGHUP. A
    second SIGHUP, which a shell may send, does not cut the last save short."""
    ours, theirs = pty.openpty()

    def take_terminal() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # it is ignored where these tests run under nohup
        os.setsid()
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)
        for fd in (0, 1, 2):
            os.dup2(theirs, fd)

    options = {"preexec_fn": take_terminal, "groups": 2, "steps": 100_000}
    run = start(tmp_path / "run", data_dir, tmp_path / "saved", **options)
    os.close(theirs)
    os.set_blocking(ours, False)

    def reads_until_step_3() -> bool:
        with contextlib.suppress(BlockingIOError):
            os.read(ours, 65536)
        return any(line["step"] >= 3 for line in run.events("step"))

    support.wait_for(reads_until_step_3, run)
    os.close(ours)
    run.process.send_signal(signal.SIGHUP)
    run.process.wait(support.TIMEOUT_S)
    last = run.events("step")[-1]["step"]
    (stop,) = run.events("stop")
    assert f"stopped by SIGHUP after step {last}; the checkpoint of step {last + 1} is complete" in stop["reason"]
    assert run.process.returncode == 128 + signal.SIGHUP
    assert complete(tmp_path / "saved") == [last + 1] and not run.events("fault")


def test_a_disk_that_is_full_costs_the_checkpoint_and_nothing_else(tmp_path, data_dir, reference):
    small = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))"
    script = support.changed_script(tmp_path / "train.py", small)
    run = start(tmp_path / "run", data_dir, tmp_path / "saved", OFTEN, script=script)
    said = run.check(reference, code=NOT_SAVED)
    assert said.splitlines()[-1].endswith(
        "step 8 is not saved; no checkpoint is complete, a later start begins anew"
    ), said
    failed = [line["reason"] for line in run.events("checkpoint_failed")]
    # Other groups may have been reported too late; the last save, with all steps done, cannot be.
    assert any("the limit on the size of files is too low" in reason for reason in failed), failed
    assert not run.events("checkpoint") and not complete(tmp_path / "saved")


@pytest.fixture
def small_disk(tmp_path):
    """A real file system that can be filled."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("a tmpfs cannot be mounted here: needs root")
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


@pytest.mark.long
def test_a_run_that_ends_on_a_full_disk_says_which_checkpoint_is_the_newest(tmp_path, data_dir, small_disk):
    """The exit code and the last line say from which checkpoint a later start continues."""
    saved, gate = small_disk / "saved", support.Gate(tmp_path, 6)
    run = start(tmp_path / "run", data_dir, saved, 1e-3, script=gate.script, groups=2)
    support.wait_for(lambda: gate.waiting(6) == 2 and bool(complete(saved)), run)
    with contextlib.suppress(OSError), (small_disk / "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(2**16))
    gate.open()
    said = run.check(code=NOT_SAVED)
    (newest,) = complete(saved)[:1]
    assert newest < support.STEPS
    why = "all 8 steps are done, but step 8 is not saved; "
    why += f"the newest checkpoint is of step {newest}: start again to go on from there"
    assert said.splitlines()[-1].removeprefix("megatron_ft: ") == why, said
    assert run.events("end")[0]["saved"] == newest
    assert run.events("not_saved")[0]["reason"] == why
    (small_disk / "filler").unlink()
    again = start(tmp_path / "run", data_dir, saved, ONCE, groups=2)
    assert f"; step 8 is saved in {saved}/step-00000008-" in went_well(again)
    assert [line["step"] for line in again.events("step")] == list(range(newest, 8))


@pytest.mark.parametrize(
    "ending, words",
    [
        pytest.param(
            'raise OSError(28, "No space left on device", "model.pt")',
            "train.py raised OSError: [Errno 28] No space left on device: 'model.pt' (line",
            id="exception",
        ),
        pytest.param(
            "os.kill(os.getpid(), signal.SIGKILL)", "ended with SIGKILL", id="out of memory", marks=pytest.mark.long
        ),
        pytest.param("sys.exit(2)", "ended with exit code 2", id="exit code 2", marks=pytest.mark.long),
        pytest.param(
            'raise CheckpointError("model.pt is not written")',
            "model.pt is not written",
            id="FTError",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_script_that_fails_to_write_its_final_model_is_no_success(tmp_path, data_dir, ending, words):
    script = support.changed_script(tmp_path / "train.py", "")
    with script.open("a") as file:
        file.write(f"import os, signal\nfrom megatron_ft.errors import CheckpointError\n{ending}\n")
    run = support.start(tmp_path / "run", data_dir, script=script, groups=1, steps=2)
    said = run.check(code=NOT_SAVED)
    last = said.splitlines()[-1]
    assert "all 2 steps are done, but after that the script of group 0 failed: " in last, said
    assert words in last and "output in" in last
    assert run.events("not_saved")[0]["reason"] in last


def slow_to_write(here: Path) -> tuple[Path, Path]:
    """Return a script that writes its final model until a file exists, and that file."""
    written, script = here / "written", support.changed_script(here / "train.py", "")
    with script.open("a") as file:
        file.write(
            f"import time\nwhile not __import__('pathlib').Path({str(written)!r}).exists():\n    time.sleep(0.01)\n"
        )
    return script, written


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGTERM, id="SIGTERM"), pytest.param(signal.SIGINT, id="SIGINT", marks=pytest.mark.long)],
)
def test_a_run_that_is_stopped_while_its_script_writes_its_final_model_is_no_success(tmp_path, data_dir, number):
    script, _ = slow_to_write(tmp_path)
    run = support.start(tmp_path / "run", data_dir, script=script, groups=2, steps=2)
    support.wait_for(lambda: run.events("closing"), run)
    run.process.send_signal(number)
    said = run.check(code=NOT_SAVED)
    last = said.splitlines()[-1]
    assert f"all 2 steps are done, but {number.name} stopped the run before the script of group" in last, said
    assert "had ended: its final model may be missing [output in" in last
    assert run.events("not_saved")[0]["reason"] in last and run.events("not_saved")[0]["exit_code"] == NOT_SAVED


@pytest.mark.long
def test_a_script_that_writes_its_final_model_within_the_time_after_a_stop_is_a_success(tmp_path, data_dir):
    """A second signal would stop the script at once."""
    script, written = slow_to_write(tmp_path)
    run = start(tmp_path / "run", data_dir, tmp_path / "saved", script=script, groups=1, steps=2)
    support.wait_for(lambda: run.events("closing"), run)
    run.process.send_signal(signal.SIGTERM)
    written.touch()
    run.check()
    assert not run.events("not_saved")


@pytest.mark.long
def test_an_agent_says_that_a_script_still_writes_its_final_model(tmp_path, data_dir):
    """A process that watches the agent (a Slurm job, ssh) would otherwise end the agent some time after the last
    step."""
    script, written = slow_to_write(tmp_path)
    run = support.start(tmp_path / "run", data_dir, script=script, groups=1, steps=2)
    support.wait_for(lambda: run.events("closing"), run)
    written.touch()
    run.check()
    assert run.events("closing")[0]["groups"] == [0]


SLOW = """
import os, time
from megatron_ft.run import checkpoint
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


@pytest.mark.long
def test_a_slow_disk_delays_no_step_and_a_group_that_dies_meanwhile_costs_that_checkpoint_only(tmp_path, data_dir):
    """Group 0 gave the order and dies while all groups write: group 1 gives the next one."""
    saves = {"directory": str(tmp_path / "saved"), "period_s": OFTEN, "keep": 100_000}
    options = {"script": script_here(tmp_path, SLOW), "steps": 100_000, "groups": 3}
    run = support.start(tmp_path / "run", data_dir, checkpoint=saves, **options)
    await_writing(run, tmp_path)
    support.wait_for_step(run, len(run.events("step")) + 8)
    assert not run.events("checkpoint")
    support.kill([kill.pid_of(run.directory, 0)])
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
    """Check that the run stops with a complete checkpoint after its last step, and that every step had all
    microbatches."""
    said = " ".join(run.finish().split())
    last = run.events("step")[-1]["step"]
    assert f"stopped by SIGTERM after step {last}; the checkpoint of step {last + 1} is complete" in said, run.logs()
    assert run.process.returncode == 128 + signal.SIGTERM and complete(saved)[0] == last + 1
    assert [line["step"] for line in run.events("step")] == list(range(last + 1))
    assert {line["microbatches"] for line in run.events("step")} == {groups * support.PER_GROUP}


LATE = """
import time
from megatron_ft.core.lifecycle.checkpoint_protocol import Saves
from megatron_ft.run.store import watcher
from megatron_ft.run.saves.coordinator import CheckpointCoordinator
announce, boundary, at = watcher.announce, CheckpointCoordinator.boundary, [0]
def announce_late(store, signal, by=None):
    said = at[0]
    while isinstance(signal, Saves) and not signal.last and at[0] < said + 6:
        time.sleep(0.001)
    announce(store, signal, by)
def begin(self, state, step_s):
    at[0] = state.step
    boundary(self, state, step_s)
watcher.announce, CheckpointCoordinator.boundary = announce_late, begin
"""


@pytest.mark.long
def test_an_order_that_is_heard_too_late_is_given_earlier_the_next_time(tmp_path, data_dir):
    """The order reaches a group after six steps: for orders two and four steps ahead that is too late, however fast
    the steps are. A group that was late is not asked to write the next time, but is asked again after that."""
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
from megatron_ft.core.lifecycle.checkpoint_protocol import Saves
from megatron_ft.run.saves.coordinator import CheckpointCoordinator as Coordinator
hear, boundary, ask, missed, left = Coordinator.on_signal, Coordinator.boundary, Coordinator._ask, [], [-1]
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
Coordinator.on_signal, Coordinator.boundary, Coordinator._ask = hear_late, leave, ask_in_time
"""
"""No other group can give this order, or give it again: the group that gives an order waits until the order is stored,
before its next step."""
ONE_WRITER = "from megatron_ft.core.lifecycle import checkpoint_protocol; checkpoint_protocol.MOST_PARTS = 1"


@pytest.mark.long
@pytest.mark.parametrize("more", ["", ONE_WRITER], ids=["a writer", "no writer"])
def test_a_group_that_learns_too_late_of_the_stop_takes_the_others_along(tmp_path, data_dir, more):
    """The late group is in the next step by then, and waits there for the groups that have stopped."""
    script = script_here(tmp_path, f"{MISSED}{more}\n")
    run = start(tmp_path / "run", data_dir, tmp_path / "saved", script=script, steps=100_000, groups=3)
    support.wait_for_step(run, 3)
    run.process.send_signal(signal.SIGTERM)
    stops_with_a_checkpoint(run, tmp_path / "saved")
    assert [line["live"] for line in run.events("view")] == [[0, 1, 2], [0, 1, 2]]
    assert "group 2 reports: it did not hear in time that all were to stop" in run.events("view")[1]["reason"]


@pytest.mark.parametrize("group", [0, pytest.param(2, marks=pytest.mark.long)])
def test_a_group_that_dies_while_all_wait_for_the_last_checkpoint_is_not_waited_for(tmp_path, data_dir, group):
    """The group that has given the order dies in one case, another group in the other."""
    script = script_here(tmp_path, SLOW)
    run = start(tmp_path / "run", data_dir, tmp_path / "saved", script=script, steps=100_000, groups=3)
    support.wait_for_step(run, 3)
    pid = kill.pid_of(run.directory, group)
    run.process.send_signal(signal.SIGTERM)
    await_writing(run, tmp_path)
    support.kill([pid])
    (tmp_path / "go").touch()
    stops_with_a_checkpoint(run, tmp_path / "saved")
    assert run.events("view")[-1]["live"] == [other for other in range(3) if other != group]


@pytest.mark.long
def test_a_group_that_comes_back_gives_the_orders_again(tmp_path, data_dir):
    """Group 0 comes back: the others save without it meanwhile, and the lock of the directory moves there and back."""
    saved = tmp_path / "saved"
    options = {"steps": 100_000, "groups": 2, "rejoin": {"enabled": True}}
    run = start(tmp_path / "run", data_dir, saved, 0.2, holds=[Breakpoint(0, None, "warm", incarnation=1)], **options)
    support.wait_for(lambda: bool(run.events("checkpoint")), run)
    os.kill(kill.pid_of(run.directory, 0), signal.SIGKILL)
    frozen = support.await_held(run, 0)
    support.wait_for(lambda: any(line["writers"] == [1] for line in run.events("checkpoint")), run)
    os.kill(frozen, signal.SIGCONT)
    support.wait_for(lambda: bool(run.events("rejoined")), run)
    back = run.events("rejoined")[-1]["step"]
    support.wait_for(
        lambda: any(line["step"] > back and 0 in line["writers"] for line in run.events("checkpoint")), run
    )
    run.process.send_signal(signal.SIGTERM)
    said = " ".join(run.finish().split())
    last = run.events("step")[-1]["step"]
    assert f"the checkpoint of step {last + 1} is complete" in said and complete(saved)[0] == last + 1


@pytest.mark.long
def test_two_jobs_cannot_have_one_directory(tmp_path, data_dir):
    saved = tmp_path / "saved"
    first = start(tmp_path / "first", data_dir, saved, steps=100_000, groups=2)
    support.wait_for_step(first, 1)
    second = start(tmp_path / "second", data_dir, saved, groups=2)
    said = " ".join(second.finish().split())
    assert second.process.returncode == 2 and "is in use by run" in said and not second.history
    support.kill([first.process.pid, *pids_of(first)])
    first.finish()
    third = start(tmp_path / "first", data_dir, saved, steps=1, groups=2)  # a dead job does not hold the directory
    went_well(third)


def test_a_directory_that_cannot_be_one_is_refused_before_anything_starts(tmp_path, data_dir):
    (tmp_path / "file").write_text("")
    run = start(tmp_path / "run", data_dir, tmp_path / "file" / "saved")
    said = " ".join(run.finish().split())
    assert run.process.returncode == 2 and "a part of its path is a file" in said and not run.history


@pytest.mark.long
def test_a_start_that_would_learn_something_else_is_refused_before_training(tmp_path, data_dir, saved):
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


def test_a_wipe_out_reports_from_where_a_later_start_continues(tmp_path, data_dir):
    saved = tmp_path / "saved"
    run = start(tmp_path / "run", data_dir, saved, OFTEN, steps=100_000, groups=2, rejoin={"enabled": False})
    support.wait_for(lambda: bool(run.events("checkpoint")), run)
    support.kill(pids_of(run))
    said = " ".join(run.finish().split())
    assert run.process.returncode == WIPED_OUT
    last = run.events("checkpoint")[-1]["step"]  # the next one may have been made by then, without a report of it
    assert (
        "no group is left" in said and f"the checkpoint of step {last} is complete" in said and last in complete(saved)
    )


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_job_whose_last_complete_state_is_lost_while_a_group_enters_is_started_again_by_its_launcher(
    tmp_path, data_dir, ranks
):
    """The group that has its seat ends last, because the donor of its state is dead. It saves what it holds, and the job
    goes on from there, not from a checkpoint: there was none. No step is lost, and with exact sums no bit differs."""
    options = {"steps": 60, "groups": 2, "reduction": "exact", "extra": ("--ranks-per-group", ranks)}
    alone = support.start(tmp_path / "alone", data_dir, **options)
    saved, gate = tmp_path / "saved", support.Gate(tmp_path, slowly=60)
    enters = Breakpoint(1, None, "connect", incarnation=1)
    options |= {"script": gate.script, "holds": [enters], "rejoin": {"enabled": True}}
    run = start(tmp_path / "run", data_dir, saved, **options)
    support.wait_for_step(run, 2)
    support.kill([kill.pid_of(run.directory, 1)])
    entering = support.await_held(run, 1)
    support.wait_for(lambda: run.live == [0, 1], run)
    admitted = run.events("view")[-1]["step"]
    support.kill([last := kill.pid_of(run.directory, 0)])
    os.kill(entering, signal.SIGCONT)
    gate.open()
    said = went_well(run)
    assert "the last with the complete state was group 0: rank 0" in said and f"(pid {last}) ended with SIGKILL" in said
    (begin,) = run.events("resume")
    # The donor may have been killed while it sent its last step.
    assert begin["step"] in (admitted - 1, admitted) and begin["checkpoint"].endswith(".f1.1")
    assert f"the checkpoint of step {begin['step']} is complete" in said and "the whole job is started again" in said
    both = invariants.joined([_earlier(run), run.history])
    went_well(alone)
    assert not invariants.check_history(both, 2 * support.PER_GROUP, alone.history, exact=True)


@pytest.fixture
def agents(tmp_path, data_dir):
    agents = Agents(tmp_path, data_dir)
    yield agents
    agents.kill()


@pytest.mark.long
def test_several_hosts_stop_and_go_on_together(tmp_path, agents, reference):
    """All agents are told to stop; then two hosts with other groups continue, and only the first one chooses the
    checkpoint."""
    changes = {"checkpoint": {"directory": str(tmp_path / "saved"), "period_s": ONCE}, "min_groups": 1}
    # No host is lost: a busy host must not be taken for a lost one.
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
    assert invariants.largest_loss_difference(_earlier(after), reference.history) <= invariants.LOSS_TOLERANCE


def _hosts(agents: Agents, steps: int, groups: int) -> tuple[support.Run, range]:
    agents.own[3] = steps
    for host in range(2):
        agents.start(host, hosts=2, groups=groups)
    return support.Run(agents.directory / "run", agents.agents[0], groups), range(2)
