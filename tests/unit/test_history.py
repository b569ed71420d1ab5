"""One line per step whoever writes, torn lines, takeovers, a disk that is full."""

from __future__ import annotations

import errno
from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.runtime import history
from megatron_ft.runtime.history import History


def steps(run_dir) -> list[int]:
    return [line["step"] for line in history.read(run_dir) if line["event"] == "step"]


def test_only_the_writer_writes(tmp_path):
    writer, other = History(tmp_path), History(tmp_path)
    writer.set_writer(True)
    for step in range(3):
        writer.record("step", step=step)
        other.record("step", step=step)
    assert steps(tmp_path) == [0, 1, 2]


@given(died_after=st.integers(0, 4), committed=st.integers(0, 4))
@settings(max_examples=25)
def test_a_takeover_neither_loses_nor_repeats_a_step(tmp_path_factory, died_after, committed):
    """The writer wrote ``died_after`` steps; its successor knows of ``committed``, one less or more, and goes on."""
    run_dir = tmp_path_factory.mktemp("run")
    first, second = History(run_dir), History(run_dir)
    first.set_writer(True)
    for step in range(died_after):
        first.record("step", step=step)
    for step in range(committed):
        second.record("step", step=step)
    second.set_writer(True)
    for step in range(committed, 6):
        second.record("step", step=step)
    assert sorted(steps(run_dir)) == list(range(6))


def test_a_writer_that_was_frozen_does_not_repeat_what_others_wrote_meanwhile(tmp_path):
    """Hard case 18, for the history: the old writer commits step 1, freezes before its line, and wakes up much later."""
    old, new = History(tmp_path), History(tmp_path)
    old.set_writer(True)
    old.record("step", step=0)
    new.record("step", step=0)
    new.set_writer(True)
    for step in (1, 2):
        new.record("step", step=step)
    old.record("step", step=1)
    assert steps(tmp_path) == [0, 1, 2]


def test_a_long_record_is_not_read_from_its_beginning(tmp_path, monkeypatch):
    monkeypatch.setattr(history, "_TAIL_BYTES", 300)
    first, second = History(tmp_path), History(tmp_path)
    first.set_writer(True)
    for step in range(50):
        first.record("step", step=step)
        second.record("step", step=step)
    second.record("step", step=50)
    second._remembered = deque(list(second._remembered)[-3:])
    second.set_writer(True)
    assert steps(tmp_path) == list(range(51))


def test_a_torn_line_is_skipped_and_does_not_swallow_the_next(tmp_path):
    history.append(tmp_path, "step", step=0)
    with (tmp_path / history.FILE).open("a") as file:
        file.write('{"t": 1, "event": "st')
    assert steps(tmp_path) == [0]
    successor = History(tmp_path)
    successor.record("step", step=0)
    successor.record("step", step=1)
    successor.set_writer(True)
    assert steps(tmp_path) == [0, 1]


def test_a_full_disk_stops_nothing_and_loses_nothing(tmp_path, monkeypatch, capsys):
    writer = History(tmp_path)
    writer.set_writer(True)
    real = history._write

    def full(path, line):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(history, "_write", full)
    for step in range(100):
        writer.record("step", step=step)
    monkeypatch.setattr(history, "_write", real)
    writer.record("step", step=100)
    assert steps(tmp_path) == list(range(101))
    assert capsys.readouterr().err.count("No space left") == 1


def test_what_a_group_alone_knows_is_written_whoever_the_writer_is(tmp_path, monkeypatch, capsys):
    """And it waits for room on the disk like any other line, without holding up the steps."""
    other = History(tmp_path)
    other.note("patch", group=1)
    real = history._write

    def full(path, line):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(history, "_write", full)
    other.note("patch", group=2)
    monkeypatch.setattr(history, "_write", real)
    other.record("step", step=0)
    assert [line["group"] for line in history.read(tmp_path)] == [1, 2]
    other.set_writer(True)
    assert steps(tmp_path) == [0]
    assert "No space left" in capsys.readouterr().err
