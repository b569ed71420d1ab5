"""An unchanged script of Megatron-LM goes on, and logs what plain Megatron logs, when a process dies within Megatron's own
work between two iterations, or when a checkpoint cannot be written."""

from __future__ import annotations

import pytest

from megatron_ft.config import megatron_lm_arguments
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
from megatron_ft.worker.session import Session
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
