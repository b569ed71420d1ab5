"""kill -9 of a process that saves and prunes: at every call to the operating system, and at random moments."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import shutil
import signal
from pathlib import Path

import pytest

from megatron_ft.run import checkpoint
from tests.unit.test_checkpoint import POSITIONS, same, save, state_of

KILLS = 15
SEED = 0
CALLS = ("open", "write", "fsync", "replace", "mkdir", "unlink", "rmdir")


processes = multiprocessing.get_context("fork")


def newest_step(directory: Path, said: list[str]) -> int | None:
    """Return the step of the newest checkpoint, after a check that its contents are those that were saved for the
    step."""
    found = checkpoint.newest(directory, said.append)
    for position in range(POSITIONS) if found else ():
        assert same(checkpoint.load(found, position), state_of(found.step, position))
    return found.step if found else None


# --- at every call ----------------------------------------------------------------------------------------------------


def save_and_die(directory: str, at_call: int) -> None:
    """Save step 2, delete step 1; the ``at_call``-th call to the operating system is never made."""
    calls = itertools.count(1)

    def counted(call):
        def instead(*args, **kwargs):
            if next(calls) == at_call:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return instead

    # Before any is replaced: shutil asks which of them take a directory's descriptor.
    supported = {name: getattr(os, name) in os.supports_dir_fd for name in CALLS}
    for name in CALLS:
        replacement = counted(getattr(os, name))
        setattr(os, name, replacement)
        if supported[name]:
            os.supports_dir_fd.add(replacement)
    save(Path(directory), 2, "second")
    checkpoint.prune(Path(directory), 1)
    os._exit(0)


@pytest.mark.slow
@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.long)])
def test_killed_at_every_call_there_is_always_a_whole_checkpoint(tmp_path, every):
    before, steps = tmp_path / "before", []
    before.mkdir()
    save(before, 1, "first")
    for at_call in itertools.count(1, every):
        directory = shutil.copytree(before, tmp_path / str(at_call))
        process = processes.Process(target=save_and_die, args=(str(directory), at_call))
        process.start()
        process.join()
        steps.append(newest_step(directory, []))
        assert process.exitcode in (0, -signal.SIGKILL)
        if process.exitcode == 0:
            break
        if len(steps) % 5 == 0:  # the run goes on, and no leftover stays
            save(directory, 3, "third")
            checkpoint.prune(directory, 1)
            assert [path.name for path in directory.iterdir()] == ["step-00000003-third"]
        shutil.rmtree(directory)
    assert steps == sorted(steps) and set(steps) == {1, 2}
    print(f"killed at {len(steps) - 1} calls: {steps.count(1)} times step 1 was left, {steps.count(2)} times step 2")
    assert at_call > 60, "fewer calls than files: they were not counted"


# --- at random moments ------------------------------------------------------------------------------------------------


def save_for_ever(directory: str, first: int, attempt: str, tell) -> None:
    for step in itertools.count(first):
        save(Path(directory), step, attempt)
        tell.send(step)
        checkpoint.prune(Path(directory), 2)


@pytest.mark.slow
def test_killed_at_random_the_last_save_that_was_reported_complete_is_there(tmp_path):
    draw, newest, left, said = random.Random(SEED), 0, 0, []
    for kill in range(KILLS):
        hear, tell = processes.Pipe(duplex=False)
        process = processes.Process(target=save_for_ever, args=(str(tmp_path), newest + 1, f"kill-{kill}", tell))
        process.start()
        tell.close()
        told = hear.recv()
        process.join(draw.uniform(0, 0.05))
        process.kill()
        process.join()
        while hear.poll():  # the end of the pipe is readable too
            try:
                told = hear.recv()
            except EOFError:
                break
        step = newest_step(tmp_path, said)
        assert step is not None and step in (told, told + 1), (
            f"seed {SEED}, kill {kill}: {told} was complete, {step} found"
        )
        newest = step
        left += any(not found.complete for found in checkpoint.find(tmp_path))
    print(f"{KILLS} kills with seed {SEED}: {newest} saves, {left} kills left something unfinished behind")
    assert all("its save was not finished" in reason for reason in said)
    assert left, "no kill was inside a save: nothing was tested"
