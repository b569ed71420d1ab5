"""Two jobs on one directory: who lives is not disturbed, who is dead is in nobody's way."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading

import pytest

from megatron_ft.errors import CheckpointError
from megatron_ft.runtime import checkpoint

BEAT_S = 0.01
PATIENT_S = 60.0  # a beat that goes on is seen at once; only who waits for one that does not come waits for all of it


def take(directory, run_id, patience_s=0.3):
    return checkpoint.lock(directory, run_id, beat_s=BEAT_S, patience_s=patience_s)


def hold(directory, run_id, holding):
    take(directory, run_id)
    holding.set()
    threading.Event().wait()


@pytest.fixture
def other(tmp_path):
    """A job that holds the directory, in a process of its own."""
    context = multiprocessing.get_context("fork")
    holding = context.Event()
    process = context.Process(target=hold, args=(str(tmp_path), "first", holding), daemon=True)
    process.start()
    assert holding.wait(60)
    yield process
    process.kill()
    process.join()


def written(tmp_path, **changes):
    """In place, as a beat is: who finds the file empty takes it for nobody's."""
    before = (tmp_path / "lock").read_text()
    text = json.dumps(json.loads(before) | changes).ljust(len(before))
    with (tmp_path / "lock").open("r+b", buffering=0) as file:
        file.write(text.encode())


def test_a_second_job_is_told_who_has_it_until_that_is_killed(tmp_path, other):
    with pytest.raises(CheckpointError, match=rf"in use by run first \(pid {other.pid} on .*If you know that it is dead"):
        take(tmp_path, "second")
    other.kill()
    other.join()
    with take(tmp_path, "second") as lock:
        lock.check()


def test_another_leader_of_the_same_run_takes_over_and_the_old_one_notices(tmp_path):
    old = take(tmp_path, "run")
    new = take(tmp_path, "run")
    old._thread.join()  # its next beat is its last
    with pytest.raises(CheckpointError, match="taken over by another process of this run"):
        old.check()
    new.check()
    old.release()
    new.release()


def test_a_last_beat_of_the_old_leader_does_not_take_the_lock_back(tmp_path):
    old = take(tmp_path, "run")
    before = (tmp_path / "lock").read_bytes()
    with take(tmp_path, "run") as new:
        old._thread.join()
        with (tmp_path / "lock").open("r+b", buffering=0) as file:  # as a beat is written: in place, never empty in between
            file.write(before)
        looked = threading.Event()
        while json.loads(before)["token"] in (tmp_path / "lock").read_text():
            looked.wait(BEAT_S)
        new.check()
    old.release()


def test_who_took_over_gets_the_kernels_lock_when_the_old_leader_is_gone(tmp_path, other):
    """Or a third job on this host would believe that nobody has the directory."""
    with take(tmp_path, "first") as lock:
        other.kill()
        other.join()
        seen = threading.Event()
        while not lock._flocked:
            seen.wait(BEAT_S)
        with pytest.raises(CheckpointError, match="in use by run first"):
            take(tmp_path, "third")
        lock.check()


def test_after_a_release_it_is_free_at_once(tmp_path):
    take(tmp_path, "first").release()
    written(tmp_path, boot="another host")  # even where the kernel cannot tell
    take(tmp_path, "second").release()


def test_a_holder_on_another_host_is_alive_while_its_beat_goes_on(tmp_path):
    take(tmp_path, "far").release()
    stop = threading.Event()

    def far_away():
        beat = 0
        while not stop.wait(BEAT_S):
            beat += 1
            written(tmp_path, boot="another host", released=False, beat=beat)

    written(tmp_path, boot="another host", released=False)
    thread = threading.Thread(target=far_away)
    thread.start()
    try:
        with pytest.raises(CheckpointError, match="in use by .*its beat goes on"):
            take(tmp_path, "second", PATIENT_S)
    finally:
        stop.set()
        thread.join()
    with take(tmp_path, "second") as lock:  # and dead when it does not
        lock.check()


@pytest.mark.parametrize("content", [b"", b"\0" * 1024, b"{}", b"[1]", b'{"run_id": "x'])
def test_a_lock_file_that_says_nothing_keeps_nobody_out(tmp_path, content):
    (tmp_path / "lock").write_bytes(content)
    with take(tmp_path, "run") as lock:
        lock.check()


@pytest.mark.parametrize("change", [lambda path: os.unlink(path), lambda path: path.write_text("mine")])
def test_a_lock_file_that_somebody_removed_is_noticed(tmp_path, change):
    lock = take(tmp_path, "run")
    change(tmp_path / "lock")
    lock._thread.join()
    with pytest.raises(CheckpointError, match="removed or overwritten"):
        lock.check()
    lock.release()
    take(tmp_path, "next").release()


def test_where_files_cannot_be_locked_the_beat_decides(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_ft.runtime.checkpoint.locking._flock", lambda fd: None)
    with take(tmp_path, "first"), pytest.raises(CheckpointError, match="its beat goes on"):
        take(tmp_path, "second", PATIENT_S)
    with take(tmp_path, "second") as lock:
        lock.check()


def test_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="something on its way is a file"):
        take(tmp_path / "file" / "below", "run")
    with take(tmp_path / "a" / "b", "run"):
        assert (tmp_path / "a" / "b" / "lock").is_file()
