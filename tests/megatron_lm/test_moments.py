"""An unchanged script of Megatron-LM goes on, and logs what plain Megatron logs, when a process dies within Megatron's own
work between two iterations, or when a checkpoint cannot be written."""

from __future__ import annotations

import pytest

from megatron_ft.cluster.faults import kill as inject
from megatron_ft.config import megatron_lm_arguments
from megatron_ft.utils import shared_file
from tests import support
from tests.megatron_lm import runs

OWN = (*runs.MOCK, "--save-interval", 5, "--ckpt-format", "torch_dist")
BACKGROUND = ("--async-save", "--use-persistent-ckpt-worker", "--async-strategy", "mcore")
WRITES = "filesystem_async.FileSystemWriterAsync, 'write_preloaded_data_multithread', staticmethod"
"""A rank that writes its part of a checkpoint itself calls it."""
BEGINS = "checkpointing, 'schedule_async_save', same"
"""A rank calls it that hands its part to its process in the background."""
LARGEST = 1 << 19
"""Bytes of a file that can still be written when checkpoints cannot."""
_ONCE = """
import os, signal
from megatron.core.datasets import gpt_dataset
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.models.gpt import gpt_model
from megatron.training import checkpointing
def once(owner, name, kind, act, when=lambda *_: True):
    passes = getattr(owner, name)
    def call(*arguments, **options):
        if when(*arguments):
            try:
                os.close(os.open({marker!r}, os.O_CREAT | os.O_EXCL))
                act()
            except FileExistsError:
                pass
        return passes(*arguments, **options)
    setattr(owner, name, kind(call))
def same(function):
    return function
def kill(pid):
    os.kill(pid, signal.SIGKILL)
"""
_CANNOT_WRITE = f"""
import resource
from megatron_ft.run.session import Session
from megatron.core.dist_checkpointing.strategies import filesystem_async
def limit(most):
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
writes, steps, first = filesystem_async.FileSystemWriterAsync.write_preloaded_data, Session.train_step, [True]
def write(*arguments, **options):
    if first:
        first.clear()
        limit({LARGEST})
    return writes(*arguments, **options)
def train_step(*arguments, **options):
    limit(resource.RLIM_INFINITY)
    return steps(*arguments, **options)
filesystem_async.FileSystemWriterAsync.write_preloaded_data = staticmethod(write)
Session.train_step = train_step
"""
_CLOCK = """
import time
from pathlib import Path
from types import SimpleNamespace
from megatron.training import training
from megatron_ft.integrations.megatron_lm import loop
def now():
    return time.time() + float(Path({clock!r}).read_text())
loop.time = SimpleNamespace(time=now)
training._TRAIN_START_TIME = now()
"""
"""The clock of ``--exit-duration-in-mins`` is ahead by the seconds in a file."""
KILLS = {
    "a rank that writes": (f"once({WRITES}, lambda: kill(os.getpid()))", ()),
    "a rank whose checkpoint is written in the background": (f"once({BEGINS}, lambda: kill(os.getpid()))", BACKGROUND),
    "a process that writes in the background": (
        f"import multiprocessing; once({BEGINS}, lambda: [kill(one.pid) for one in multiprocessing.active_children()])",
        BACKGROUND,
    ),
    "a rank that builds index caches": (
        "once(gpt_dataset.MockGPTDataset, '__init__', same, lambda: kill(os.getpid()))",
        (),
    ),
    "a rank that evaluates": (
        "once(gpt_model.GPTModel, 'forward', same, lambda: kill(os.getpid()), lambda model, *_: not model.training)",
        (),
    ),
}


@pytest.fixture(scope="module")
def reference(megatron):
    return runs.plain(megatron, 2, *runs.MOCK)


def _start(tmp_path, megatron, change, *own):
    script = support.changed_script(tmp_path / "train.py", change, runs.SCRIPT)
    return runs.start(tmp_path / "run", megatron, 1, *OWN, "--save", tmp_path / "saved", *own, script=script)


def _saved(tmp_path):
    """Return the iteration that is named as the newest one, and all that lies there."""
    saved = tmp_path / "saved"
    found = sorted(path.name for path in saved.iterdir() if path.name != megatron_lm_arguments.NEWEST)
    return megatron_lm_arguments.newest(str(saved)), found


@pytest.mark.long
@pytest.mark.parametrize("kill", KILLS)
def test_a_process_dies_between_two_iterations(tmp_path, megatron, reference, kill):
    change, own = KILLS[kill]
    run = _start(tmp_path, megatron, _ONCE.format(marker=str(tmp_path / "killed")) + change, *own)
    said = runs.said(run)
    assert (tmp_path / "killed").exists()
    assert runs.differences(reference, said) == [], run.logs()
    newest, found = _saved(tmp_path)
    assert (len(run.live), run.events("checkpoint_failed")) == (1, [])
    assert newest == "12" and found[-2:] == ["iter_0000010", "iter_0000012"]


@pytest.mark.long
def test_the_minutes_of_a_run_count_from_its_start_whichever_groups_are_left(tmp_path, megatron):
    steps, minutes, clock = 60, 120, tmp_path / "clock"
    shared_file.write(clock, "0")
    script = support.changed_script(tmp_path / "clock.py", _CLOCK.format(clock=str(clock)), runs.SCRIPT)
    gate = support.Gate(tmp_path, slowly=steps, script=script)
    own = ("--train-iters", steps, "--exit-duration-in-mins", minutes, "--save", tmp_path / "saved")
    rejoin = {"enabled": True, "restarts_per_hour": 100}
    run = runs.start(tmp_path / "run", megatron, 1, *OWN, *own, script=gate.script, rejoin=rejoin)
    support.wait_for_step(run, 1)
    for count, group in enumerate((1, 0), 1):
        shared_file.write(clock, str(count * 60 * minutes / 3))
        support.kill([inject.pid_of(run.directory, group, 0)])
        support.wait_for(lambda count=count: len(run.events("rejoined")) == count and run.live == [0, 1], run)
    shared_file.write(clock, str(60 * minutes + 1))  # since both groups were started again it is less
    said = runs.said(run)
    last = max(said.iterations)
    assert last < steps and run.live == [0, 1] and f"stopped after step {last} of {steps}" in said.printed
    assert _saved(tmp_path)[0] == str(last)
    ends = [log for log in said.logs if "exiting program after" in log]
    assert len(ends) == 2, "both groups say it"


@pytest.mark.long
def test_training_goes_on_when_no_group_can_write_and_the_cause_is_said(tmp_path, megatron, reference):
    run = _start(tmp_path, megatron, _CANNOT_WRITE)
    said = runs.said(run)
    assert runs.differences(reference, said) == [], run.logs()
    (failed,) = run.events("checkpoint_failed")
    assert (
        failed["step"] == 5 and "iteration 5: writing to " in failed["reason"] and "File too large" in failed["reason"]
    )
    assert run.live == [0, 1] and _saved(tmp_path) == ("12", ["iter_0000010", "iter_0000012"])


@pytest.mark.long
def test_a_run_whose_last_checkpoint_cannot_be_written_says_so_at_its_end(tmp_path, megatron):
    (tmp_path / "saved").write_text("a file where a directory should be")
    run = _start(tmp_path, megatron, "", "--save-interval", 1000)
    shown = run.finish()
    assert run.process.returncode == 2, shown
    last = shown.strip().splitlines()[-1]
    assert "iteration 12 is not saved: " in last and "give the same command again" in last
