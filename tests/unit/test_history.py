"""One line per step whichever group writes; torn lines, takeovers, a disk that is full."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import socket
from collections import deque
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_ft.record import history, run_state
from megatron_ft.record.history import History


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


@pytest.mark.parametrize("cut", [25, 1, 10**6], ids=["a half line", "a newline", "the whole record"])
def test_a_record_that_is_shortened_has_every_step_once(tmp_path, cut):
    writer, watched = History(tmp_path), history.Tail(tmp_path)
    writer.set_writer(True)
    writer.record("begin", steps=9)
    for step in range(9):
        if step in (5, 7):
            watched.new()
            path = tmp_path / history.FILE
            os.truncate(path, max(0, path.stat().st_size - cut))
        writer.record("step", step=step, epoch=0)
    assert steps(tmp_path) == list(range(9))
    assert [line["event"] for line in history.read(tmp_path)].count("begin") == 1
    assert [line["step"] for line in watched.new()][-1] == 8


def test_a_record_that_is_removed_begins_again_with_what_it_needs(tmp_path):
    """Its directory may be away for a while; the newest steps are kept meanwhile."""
    writer = History(tmp_path / "run")
    (tmp_path / "run").mkdir()
    writer.set_writer(True)
    writer.record("begin", steps=9)
    for epoch in range(2):
        writer.record("view", epoch=epoch, live=[0, 1])
    for step in range(200):
        writer.record("step", step=step, epoch=1)
    shutil.rmtree(tmp_path / "run")
    for step in range(200, 400):
        writer.record("step", step=step, epoch=1)
    (tmp_path / "run").mkdir()
    writer.record("step", step=400, epoch=1)
    found = history.read(tmp_path / "run")
    assert [line["event"] for line in found[:2]] == ["begin", "view"] and found[1]["epoch"] == 1
    assert steps(tmp_path / "run")[-201:] == list(range(200, 401)) and len(found) < 300


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


def test_the_last_line_is_tried_again_until_there_is_room(tmp_path, monkeypatch):
    writer = History(tmp_path)
    writer.set_writer(True)
    real, failures = history._write, iter(range(3))

    def full(file, data):
        if next(failures, None) is not None:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data)

    monkeypatch.setattr(history, "_write", full)
    monkeypatch.setattr(history, "_AGAIN_S", 0.0)
    writer.record("end", step=9)
    writer.write_last(60.0)
    assert [line["event"] for line in history.read(tmp_path)] == ["end"]
    failures = iter(range(10**9))
    writer.record("end", step=10)
    writer.write_last(0.01)  # it gives up
    assert len(history.read(tmp_path)) == 1


def test_an_event_that_one_group_alone_knows_is_written_whichever_group_is_the_writer(tmp_path, monkeypatch, capsys):
    """The line waits for room on the disk like any other line, without holding up the steps."""
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


def as_host(monkeypatch, host: int) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    history.write_as(host)


def test_each_host_writes_a_file_of_its_own_and_readers_see_one_record(tmp_path, monkeypatch):
    """The writer moves to host 1 when group 0 is lost; both know the last steps of the other."""
    as_host(monkeypatch, 0)
    first = History(tmp_path)
    first.set_writer(True)
    tail, seen = history.Tail(tmp_path), []
    as_host(monkeypatch, 1)
    second = History(tmp_path)
    for step in range(6):
        writer = first if step < 4 else second
        if step == 4:
            second.set_writer(True)
        for group in (first, second):
            group.record("step", step=step, epoch=int(step >= 4))
        writer.note("fault", group=step)
        seen += tail.new()
    first.record("step", step=4, epoch=1)  # the frozen writer does not know that others have written that
    seen += tail.new()
    assert {path.name for path in history.files(tmp_path)} == {"history.jsonl", "history.host1.jsonl"}
    assert steps(tmp_path) == list(range(6)) == [line["step"] for line in seen if line["event"] == "step"]
    assert sorted(line["group"] for line in history.lines(tmp_path) if line["event"] == "fault") == list(range(6))
    assert run_state.read(tmp_path).last_step == 5


@given(skew=st.floats(-100, 100), cut=st.lists(st.integers(1, 12), max_size=4), seed=st.integers(0, 3))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_steps_and_views_are_read_in_order_whatever_the_clocks_of_the_hosts(tmp_path_factory, skew, cut, seed):
    """Two hosts write in turn, with some lines of each other; every reader gets the same order."""
    run_dir = tmp_path_factory.mktemp("run")
    turns = sorted({0, *cut, 13})
    lines: tuple[list, list] = ([], [])
    for number, (begin, end) in enumerate(pairwise(turns)):
        host = (number + seed) % 2
        own = lines[host]
        begun = max(0, begin - 2)  # the lines that it had remembered
        for step in range(begun, end):
            t = step + skew * host
            if step in turns:
                own.append({"t": t, "event": "view", "epoch": turns.index(step), "live": [0]})
            own.append({"t": t, "event": "step", "step": step, "epoch": number, "live": [0]})
        own.append({"t": end + skew * host, "event": "fault", "group": number})
    for name, own in zip((history.FILE, "history.host1.jsonl"), lines, strict=True):
        (run_dir / name).write_text("".join(json.dumps(line) + "\n" for line in own))
    found = history.read(run_dir)
    assert [line["step"] for line in found if line["event"] == "step"] == list(range(13))
    assert [line["epoch"] for line in found if line["event"] == "view"] == list(range(len(turns) - 1))
    assert sorted(line["group"] for line in found if line["event"] == "fault") == list(range(len(turns) - 1))
    assert history.read(run_dir) == found


def test_a_step_that_is_missing_holds_nothing_back_for_ever(tmp_path):
    for name, steps_ in ((history.FILE, (0, 1, 3)), ("history.host1.jsonl", (4, 5))):
        (tmp_path / name).write_text("".join(json.dumps({"t": s, "event": "step", "step": s}) + "\n" for s in steps_))
    assert steps(tmp_path) == [0, 1, 3, 4, 5]


def test_a_tool_beside_a_run_of_several_hosts_has_a_file_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "environ", {name: value for name, value in os.environ.items() if name != history.VARIABLE})
    history.append(tmp_path, "inject")
    assert [path.name for path in tmp_path.iterdir()] == [history.FILE]
    (tmp_path / "config.json").write_text('{"hosts": 2}')
    history.append(tmp_path, "inject")
    assert len(list(tmp_path.glob("history*.jsonl"))) == 2 and len(history.read(tmp_path)) == 2


def test_a_tool_on_another_host_than_that_of_the_run_has_a_file_of_its_own(tmp_path, monkeypatch):
    """The run's host appends to its file at the same time, and on NFS one of the lines would be lost."""
    monkeypatch.setattr(os, "environ", {name: value for name, value in os.environ.items() if name != history.VARIABLE})
    for host, files in ((socket.gethostname(), 1), (f"{socket.gethostname()}-other", 2)):
        (tmp_path / "config.json").write_text(json.dumps({"hosts": 1, "host": host}))
        history.append(tmp_path, "inject")
        assert len(list(tmp_path.glob("history*.jsonl"))) == files
    assert len((tmp_path / history.FILE).read_bytes().splitlines()) == 1 and len(history.read(tmp_path)) == 2


def test_a_look_at_a_growing_record_reads_only_what_was_added(tmp_path, monkeypatch):
    """An agent looks several times per second, and a month's record has millions of lines."""
    read = []

    def counting(path, *arguments, **named):
        file = io.FileIO(path)
        monkeypatch.setattr(file, "read", lambda size: (read.append(io.FileIO.read(file, size)), read[-1])[1])
        return file

    watched = run_state.Watched(tmp_path)
    for step in range(1000):
        history.append(tmp_path, "step", step=step, epoch=0)
    assert watched.poll().last_step == 999
    monkeypatch.setattr(history.shared_file, "open_record", counting)
    before = (tmp_path / history.FILE).stat().st_size
    history.append(tmp_path, "step", step=1000, epoch=0)
    assert watched.poll().last_step == 1000
    assert sum(map(len, read)) == (tmp_path / history.FILE).stat().st_size - before < 100
    read.clear()
    assert watched.poll().last_step == 1000 and b"".join(read) == b""


def test_a_line_of_many_groups_is_short_and_comes_back_whole(tmp_path):
    live = [group for group in range(2000) if group != 7]
    history.append(tmp_path, "step", step=0, live=live)
    assert len((tmp_path / history.FILE).read_bytes()) < 100
    assert history.read(tmp_path)[0]["live"] == live


@given(st.data())
@settings(max_examples=100)
def test_a_summary_equals_one_of_all_lines_together(data):
    """The summary is compared with a pass over the whole record."""
    event = st.sampled_from(["start", "begin", "step", "view", "end", "stop", "checkpoint", "inject"])
    made = [{"event": data.draw(event), "t": float(n)} for n in range(data.draw(st.integers(0, 20)))]
    seats: dict[int, tuple[list, dict]] = {}
    committed, epochs, number = set(), 0, -1
    for line in made:
        match line["event"]:
            case "view":
                live, starts = data.draw(st.sampled_from([[0], [0, 1]])), {"1": data.draw(st.integers(0, 3))}
                line |= {"epoch": epochs, "live": live, "incarnations": starts}
                seats[epochs], epochs = (live, starts), epochs + 1
            case "step":
                number += 1
                line |= {"step": number, "epoch": epochs - 1}
                live, starts = seats.get(epochs - 1, ([], {}))
                committed |= {(group, starts.get(str(group), 0)) for group in live}
            case "end" | "checkpoint":
                line["step"] = number
            case "inject":
                line |= {
                    "pid": data.draw(st.integers(1, 3)),
                    "kind": data.draw(st.sampled_from(["kill", "slow", None])),
                }
    found = run_state.RunState()
    for line in made:
        found.take(line)
    events = {line["event"] for line in made}
    assert (found.begun, found.end is not None) == tuple(name in events for name in ("begin", "end"))
    newest = next((line for line in reversed(made) if line["event"] in ("start", "end", "stop")), {"event": "start"})
    assert found.closing == (None if newest["event"] == "start" else newest) and found.over == bool(found.closing)
    assert found.empty == (not made) and found.last_step == (number if number >= 0 else None)
    for pid in (1, 2, 3):
        sent = [
            line["t"] for line in made if line["event"] == "inject" and line["pid"] == pid and line["kind"] != "slow"
        ]
        assert found.injected(pid) == (sent[-1] if sent else None)
    for group in (0, 1):
        for start in range(4):
            assert found.has_committed(group, start) == ((group, start) in committed)
