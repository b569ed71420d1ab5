"""The holder of a run directory, as agents see it."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading

import pytest

from megatron_ft.config.schema import RunConfig, resolve
from megatron_ft.errors import LaunchError
from megatron_ft.host import run_lock
from megatron_ft.utils import directory_lock, shared_file

HERE = os.uname().nodename


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    for name, value in (("BEAT_S", 0.01), ("DYING_S", 0.0), ("PATIENCE_S", 0.3)):
        monkeypatch.setattr(directory_lock, name, value)


def config(**settings) -> RunConfig:
    return resolve({"fault_tolerance": settings}, groups=4)


def test_a_second_run_is_told_the_holder_of_the_directory_and_for_how_long(tmp_path):
    first = run_lock.Claims(tmp_path / "run", config(), "first", others=False)
    first.take()
    first.begin()
    path = tmp_path / "run" / directory_lock.RUN.file
    taken = json.loads(path.read_text())["taken"]
    with pytest.raises(LaunchError) as told:
        run_lock.Claims(tmp_path / "run", config(), "second", others=False).take()
    for words in (
        f"run directory {path.parent} is in use",
        f"pid {os.getpid()} on {HERE}",
        f"since {taken}, for ",
        "another --run-dir",
    ):
        assert words in str(told.value)
    assert "--overwrite" not in str(told.value)
    first.release()
    run_lock.Claims(tmp_path / "run", config(), "second", others=False).take()


def test_the_foremost_host_that_is_left_holds_both_directories(tmp_path):
    saved = tmp_path / "saved"
    settings = config(checkpoint={"directory": str(saved)})
    host_0, host_1 = (run_lock.Claims(tmp_path / "run", settings, "run", others=True) for _ in range(2))
    host_0.take()
    host_0.begin()
    host_1.check(foremost=False)
    files = (tmp_path / "run" / directory_lock.RUN.file, saved / directory_lock.CHECKPOINTS.file)
    assert [json.loads(path.read_text())["turn"] for path in files] == [0, 0]
    host_1.check(foremost=True)
    for path in files:
        record = json.loads(path.read_text())
        assert record["turn"] == 1
        while json.loads(path.read_text())["heartbeat"] <= record["heartbeat"] + 1:
            threading.Event().wait(0.01)
    host_1.check(foremost=True)
    host_0.check(foremost=True)  # the host was only cut off, and its own run has the directory: no reason to end
    assert not host_0.usurped
    host_0.release()
    host_1.release()


def test_a_run_that_finds_another_one_in_its_directory_ends(tmp_path):
    """The host of the run was suspended for an hour, and the run was taken for dead."""
    old = run_lock.Claims(tmp_path, config(), "old", others=False)
    old.take()
    path = tmp_path / directory_lock.RUN.file
    text = json.dumps(json.loads(path.read_text()) | {"run_id": "new"}).ljust(1024)
    with path.open("r+b", buffering=0) as file:
        file.write(text.encode())
    old.begin()
    old._locks[0]._thread.join()
    with pytest.raises(LaunchError, match="was taken over by run new"):
        old.check(foremost=True)


def test_a_directory_that_is_removed_under_a_run_is_made_and_locked_again(tmp_path, capsys):
    lives = run_lock.Claims(tmp_path / "runs" / "run", config(), "run", others=False)
    lives.take()
    lives.begin()
    assert not lives.check(foremost=True)
    shutil.rmtree(tmp_path / "runs" / "run")
    lives._locks[0]._thread.join()  # it ends with the look that finds no file
    assert lives.check(foremost=True) and not lives.check(foremost=True)
    with pytest.raises(LaunchError, match="in use by run run"):
        run_lock.Claims(tmp_path / "runs" / "run", config(), "other", others=False).take()
    shutil.rmtree(tmp_path / "runs")
    lives._locks[0]._thread.join()
    assert not lives.check(foremost=True) and not (tmp_path / "runs").exists()
    said = " ".join("".join(capsys.readouterr()).split())
    assert "was removed, and cannot be made again: No such file" in said and "lost groups are not started again" in said


def test_a_job_does_not_start_agents_on_the_directory_of_another_one(tmp_path):
    """Its spare agents would join a run that is not its own. A supervisor of the same job may come at any time."""
    lives = run_lock.Claims(tmp_path, config(), "run", others=False)
    lives.take()
    (tmp_path / "config.json").write_text(json.dumps({"job": "41.0.0.7"}))
    run_lock.check_free(tmp_path, "41.0.")
    with pytest.raises(LaunchError, match="in use by run run"):
        run_lock.check_free(tmp_path, "4.0.")
    lives.release()
    run_lock.check_free(tmp_path, "4.0.")


def test_a_run_directory_whose_lock_cannot_be_read_is_not_called_a_checkpoint_directory(tmp_path, monkeypatch):
    def stale(path, flags):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(shared_file, "open_file", stale)
    with pytest.raises(LaunchError, match="looking at the lock .*, or name another --run-dir"):
        run_lock.check_free(tmp_path, "4.0.")


def test_a_run_directory_that_cannot_be_locked_is_refused_with_the_remedy(tmp_path, monkeypatch):
    def read_only(path):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(shared_file, "open_to_lock", read_only)
    with pytest.raises(LaunchError, match="read-only: mount it for writing, or name another --run-dir$"):
        directory_lock.lock(tmp_path, "run", directory_lock.RUN)
    with pytest.raises(LaunchError, match="^taking the lock .*/run.lock failed"):
        run_lock.Claims(tmp_path, config(), "run", others=False).take()
