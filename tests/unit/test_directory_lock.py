"""Two jobs with one directory: a living job is not disturbed, and a dead one does not hold the directory."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
from unittest import mock

import pytest

from megatron_ft.errors import CheckpointError
from megatron_ft.utils import directory_lock

BEAT_S = 0.01
PATIENT_S = 60.0  # a heartbeat that goes on is seen at once; only a heartbeat that does not come takes all of this time


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(directory_lock, "BEAT_S", BEAT_S)


def take(directory, run_id, patience_s=0.3, dying_s=0.0, **options):
    with mock.patch.multiple(directory_lock, PATIENCE_S=patience_s, DYING_S=dying_s):
        return directory_lock.lock(directory, run_id, **options)


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
    """Write in place, as a heartbeat does: an empty file would count as a lock without a holder."""
    before = (tmp_path / "lock").read_text()
    text = json.dumps(json.loads(before) | changes).ljust(len(before))
    with (tmp_path / "lock").open("r+b", buffering=0) as file:
        file.write(text.encode())


def test_a_second_job_is_told_the_holder_until_that_is_killed(tmp_path, other):
    with pytest.raises(
        CheckpointError, match=rf"in use by run first \(pid {other.pid} on .*If you know that it is dead"
    ):
        take(tmp_path, "second")
    other.kill()
    other.join()
    with take(tmp_path, "second") as lock:
        lock.check()


def test_a_holder_that_is_killed_in_this_moment_is_waited_for(tmp_path, other):
    """A job that is started again at once must not be refused because the kernel has not ended the old one yet."""
    ends = threading.Timer(0.2, other.kill)
    ends.start()
    with take(tmp_path, "second", dying_s=PATIENT_S) as lock:
        lock.check()
    ends.join()


def test_a_child_does_not_keep_the_lock_of_a_holder_that_has_ended(tmp_path):
    """The agent forks the store's keeper, which may live for a moment longer, while it holds the run directory."""
    context = multiprocessing.get_context("fork")
    held, ends = take(tmp_path, "first", heartbeats=False), context.Event()
    child = context.Process(target=ends.wait, daemon=True)
    child.start()
    held.begin()
    not_closed_yet = os.dup(held._fd)  # a child that was forked but has not run has this descriptor, too
    held.release()
    try:
        with take(tmp_path, "second") as lock:
            lock.check()
    finally:
        os.close(not_closed_yet)
        ends.set()
        child.join()


def test_a_run_whose_other_hosts_go_on_is_not_dead_with_its_first(tmp_path, other):
    """On this host the kernel frees the lock; the next host needs a moment until it takes over and heartbeats."""
    other.kill()
    other.join()
    written(tmp_path, others=True)
    takes_over = threading.Timer(0.2, lambda: written(tmp_path, boot="another host", heartbeat=1))
    takes_over.start()
    with pytest.raises(CheckpointError, match="its heartbeat goes on"):
        take(tmp_path, "second", PATIENT_S)
    takes_over.join()
    with take(tmp_path, "second") as lock:
        lock.check()


def test_a_run_that_is_known_to_be_over_is_not_waited_for(tmp_path):
    """Its heartbeat on another host was waited for once already, at the run directory."""
    take(tmp_path, "first").release()
    written(tmp_path, boot="another host", released=False)
    with take(tmp_path, "second", patience_s=PATIENT_S, dead="first") as lock:
        assert lock.former == "first"


def test_a_directory_can_be_checked_without_taking_it(tmp_path, other):
    with pytest.raises(CheckpointError, match="checkpoint directory .* is in use .* another checkpoint.directory"):
        directory_lock.check_free(tmp_path)
    other.kill()
    other.join()
    before = (tmp_path / "lock").read_bytes()
    directory_lock.check_free(tmp_path)
    directory_lock.check_free(tmp_path / "nothing")
    assert (tmp_path / "lock").read_bytes() == before and not (tmp_path / "nothing").exists()


def test_another_leader_of_the_same_run_takes_over_and_the_old_one_notices(tmp_path):
    old = take(tmp_path, "run")
    new = take(tmp_path, "run")
    old._thread.join()  # its next heartbeat is its last
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
        with (tmp_path / "lock").open(
            "r+b", buffering=0
        ) as file:  # as a heartbeat is written: in place, never empty in between
            file.write(before)
        looked = threading.Event()
        while json.loads(before)["token"] in (tmp_path / "lock").read_text():
            looked.wait(BEAT_S)
        new.check()
    old.release()


def test_a_leader_that_took_over_gets_the_kernels_lock_when_the_old_leader_is_gone(tmp_path, other):
    """Otherwise a third job on this host would believe that the directory is free."""
    with take(tmp_path, "first") as lock:
        other.kill()
        other.join()
        seen = threading.Event()
        while not lock._flocked:
            seen.wait(BEAT_S)
        with pytest.raises(CheckpointError, match="in use by run first"):
            take(tmp_path, "third")
        lock.check()


def test_after_a_release_the_directory_is_free_at_once(tmp_path):
    take(tmp_path, "first").release()
    written(tmp_path, boot="another host")  # even where the kernel cannot tell
    with take(tmp_path, "second") as lock:
        lock.check()
        with pytest.raises(CheckpointError, match="in use by run second"):
            take(tmp_path, "third")


def test_a_release_waits_for_a_beat_that_is_being_written(tmp_path, monkeypatch):
    """On a busy machine that takes longer than some heartbeats."""
    writing, done, write = threading.Event(), threading.Event(), directory_lock._write

    def slow(*arguments):
        writing.set()
        done.wait()
        write(*arguments)

    held = take(tmp_path, "first")
    monkeypatch.setattr(directory_lock, "_write", slow)
    assert writing.wait(60)
    threading.Timer(10 * BEAT_S, done.set).start()
    held.release()
    assert json.loads((tmp_path / "lock").read_text())["released"]
    take(tmp_path, "second").release()


def test_a_holder_on_another_host_is_alive_while_its_beat_goes_on(tmp_path):
    take(tmp_path, "far").release()
    stop = threading.Event()

    def far_away():
        heartbeat = 0
        while not stop.wait(BEAT_S):
            heartbeat += 1
            written(tmp_path, boot="another host", released=False, heartbeat=heartbeat)

    written(tmp_path, boot="another host", released=False)
    thread = threading.Thread(target=far_away)
    thread.start()
    try:
        with pytest.raises(CheckpointError, match="in use by .*its heartbeat goes on"):
            take(tmp_path, "second", PATIENT_S)
    finally:
        stop.set()
        thread.join()
    with take(tmp_path, "second") as lock:  # and dead when it does not
        lock.check()


@pytest.mark.parametrize("content", [b"", b"\0" * 1024, b"{}", b"[1]", b'{"run_id": "x'])
def test_a_lock_file_without_contents_does_not_lock(tmp_path, content):
    (tmp_path / "lock").write_bytes(content)
    with take(tmp_path, "run") as lock:
        lock.check()


@pytest.mark.parametrize("change", [lambda path: os.unlink(path), lambda path: path.write_text("mine")])
def test_a_lock_file_that_was_removed_is_noticed(tmp_path, change):
    lock = take(tmp_path, "run")
    change(tmp_path / "lock")
    lock._thread.join()
    with pytest.raises(CheckpointError, match="removed or overwritten"):
        lock.check()
    lock.release()
    take(tmp_path, "next").release()


def test_where_files_cannot_be_locked_the_beat_decides(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_ft.utils.directory_lock.shared_file.lock", lambda fd: None)
    with take(tmp_path, "first"), pytest.raises(CheckpointError, match="its heartbeat goes on"):
        take(tmp_path, "second", PATIENT_S)
    with take(tmp_path, "second") as lock:
        lock.check()


def test_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="a part of its path is a file"):
        take(tmp_path / "file" / "below", "run")
    with take(tmp_path / "a" / "b", "run"):
        assert (tmp_path / "a" / "b" / "lock").is_file()


def test_a_lock_whose_thread_ends_by_a_bug_is_lost(tmp_path, monkeypatch):
    """Without heartbeats another job takes the directory; this one must not write there any more."""

    def fails(fd, record) -> None:
        raise ZeroDivisionError("of a test")

    with take(tmp_path, "first") as lock:
        monkeypatch.setattr(directory_lock, "_write", fails)
        lock._thread.join(PATIENT_S)
        with pytest.raises(CheckpointError, match="is not kept any more: its thread raised ZeroDivisionError: of a"):
            lock.check()
