"""What a launcher and `megatron-ft status` say of a run, from the lines of its record."""

from __future__ import annotations

import argparse
import json
import os
import socket
import time

import pytest
from rich.console import Console

from megatron_ft import cli
from megatron_ft.commands import status_command
from megatron_ft.errors import LaunchError
from megatron_ft.record import follow, history
from megatron_ft.record.progress import Progress
from megatron_ft.utils import directory_lock, steady_clock
from megatron_ft.utils.process_status import start_of


def step(number: int, t: float, seconds: float = 1.0, **fields) -> dict:
    return {"event": "step", "t": t, "step": number, "loss": 2.0 - number / 10, "duration_s": seconds, **fields}


def view(epoch: int, live: list[int], joined=(), lost=()) -> dict:
    return {
        "event": "view",
        "epoch": epoch,
        "live": live,
        "joined": list(joined),
        "lost": dict.fromkeys(lost, "x"),
        "step": 3,
    }


def recovery(epoch: int, patched: int = 0, stall_s: float = 0.5) -> dict:
    by = {"0": patched} if patched else {}
    return {"event": "recovery", "epoch": epoch, "step": 3, "patched": patched, "patched_by": by, "stall_s": stall_s}


def test_the_line_has_speed_remaining_time_groups_and_goodput():
    progress = Progress(2)
    assert progress.line() == "step 0  live 2/2"
    progress.take({"event": "begin", "t": 100.0, "steps": 100})
    for number in range(3):
        progress.take(step(number, 101.0 + number, tokens=1000))
    progress.take(recovery(1, 4, stall_s=0.75))
    progress.take(step(3, 104.0, tokens=1000))
    assert progress.line() == "step 4/100  loss 1.7000  1 s/step  1,000 tokens/s  ETA 0:01:36  live 2/2  goodput 81.2%"


def test_live_groups_are_never_more_than_there_are_members():
    progress = Progress(2)
    for event in (view(1, [0, 1, 2], joined=[2]), view(2, [0, 1], lost=[2]), view(3, [0, 1, 2], joined=[2])):
        progress.take(event)
        assert len(progress.state.live) <= len(progress.state.ever) == 3


def test_a_group_whose_host_is_cut_off_is_lost_in_a_line_of_its_own():
    """No agent is left there to report how its ranks ended; of other losses an agent has said so."""
    progress = Progress(3)
    progress.take(view(0, [0, 1, 2]))
    assert progress.take(view(1, [0, 2], lost=[1])) is None
    silent = view(2, [0], lost=[2]) | {"lost": {"2": "cut off: host 0 (a) has heard nothing of host 2 (c) for 0.8 s"}}
    assert progress.take(silent) == "group 2 lost: cut off: host 0 (a) has heard nothing of host 2 (c) for 0.8 s"
    assert progress.state.failures == 1


def test_a_group_that_is_added_joins_and_one_that_was_lost_is_back():
    progress = Progress(2)
    start = {"event": "restart", "incarnation": 1, "after_s": 0.5, "pids": [7], "host": "h"}
    assert progress.take({**start, "group": 2}) == "group 2 is started on h (incarnation 1, pid 7)"
    assert progress.take({**start, "group": 1}).startswith("group 1 is started again on h")
    progress.take(view(1, [0, 1, 2], joined=[2]))
    assert progress.take(recovery(1)) == "group 2 joins in step 3; the others waited 0.50 s"
    progress.take(view(2, [0, 2], lost=[1]))
    assert progress.take(recovery(2, 4)) == "step 3 goes on: 4 microbatches taken over by groups 0; stalled 0.50 s"
    stood_by = "8 microbatches contributed by groups that stood by"
    assert progress.take(recovery(2) | {"promoted": 8}) == f"step 3 goes on: {stood_by}; stalled 0.50 s"
    progress.take(view(3, [0, 1, 2], joined=[1]))
    assert progress.take(recovery(3)) == "group 1 is back in step 3; the others waited 0.50 s"
    assert progress.take({"event": "leave", "group": 2, "after": 7, "reason": "SIGTERM"}) == (
        "group 2 leaves after step 7: SIGTERM"
    )


def test_without_a_terminal_there_is_a_line_each_minute(tmp_path, capsys):
    shown = follow.ProgressView(2, follow.Outputs(tmp_path, 1, "none"), Console(force_terminal=False, width=40))
    for number in range(200):
        shown.update(step(number, 1000.0 + number))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["1", "61", "121", "181"], "nothing is wrapped"


def fault(**fields) -> dict:
    who = {"group": 1, "position": 0, "pid": 7, "host": "h", "signal": None, "detail": ""}
    return {"event": "fault", "code": 2, **who, **fields}


def test_the_last_lines_of_a_rank_that_ended_by_itself_are_shown(tmp_path, capsys):
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "g1.p0.log"
    log.write_text("".join(f"line {number}\n" for number in range(30)) + "train.py: error: argument --lr: invalid\n")
    for tee, expected in (("none", True), ("0", True), ("2", False), ("all", False)):
        console = Console(force_terminal=False, width=40)
        shown = follow.ProgressView(2, follow.Outputs(tmp_path, 2, tee), console)
        shown.update(fault())
        said = capsys.readouterr().out
        assert ("  train.py: error: argument --lr: invalid" in said) == expected
        assert "line 5\n" not in said
        shown.update(fault(code=None, signal="SIGKILL"))
        assert "error" not in capsys.readouterr().out, "it was killed: its output says nothing about that"


def test_the_output_of_the_ranks_is_shown_in_whole_lines_as_it_comes(tmp_path):
    (tmp_path / "logs").mkdir()
    logs = [tmp_path / "logs" / name for name in ("g0.p0.log", "g0.p1.log", "g1.p0.log")]
    own, every, none = (follow.Outputs(tmp_path, 2, tee) for tee in ("1", "all", "none"))
    assert list(own.new()) == []
    for log in logs:
        log.write_text(f"{log.stem} begins\nhalf")
    assert list(own.new()) == ["g0.p1 begins"]
    with logs[1].open("a") as file:
        file.write(" a line\n")
    assert list(own.new()) == ["half a line"] and list(own.new()) == []
    with logs[1].open("a") as file:
        file.write("last words")
    assert list(own.new()) == [] and list(own.new(last=True)) == ["last words"] and list(own.new(last=True)) == []
    lines = list(every.new())
    assert lines == ["[g0.p0] g0.p0 begins", "[g0.p1] g0.p1 begins", "[g0.p1] half a line", "[g1.p0] g1.p0 begins"]
    assert list(none.new()) == []


def test_status_shows_where_a_run_stands_and_how_it_ended(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"run_id": "abc", "groups": 2}))
    (tmp_path / "ranks.json").write_text(json.dumps([{"host": "a"}, {"host": "b"}]))
    history.append(tmp_path, "begin", steps=10)
    history.append(tmp_path, "step", step=3, loss=1.5, duration_s=0.5, live=[0, 1])
    history.append(tmp_path, "fault", **{name: value for name, value in fault().items() if name != "event"})
    assert cli.main(["status", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert f"run abc in {tmp_path}: 2 ranks live on 2 hosts" in said
    assert "step 4/10  loss 1.5000  0.5 s/step" in said
    assert "1 failures, the last events:" in said and "group 1 lost: rank 0 on h (pid 7)" in said
    history.append(tmp_path, "stop", reason="no group is left", exit_code=7)
    assert status_command.run(argparse.Namespace(run_dir=tmp_path, once=False)) == 0
    assert "ended with exit code 7: no group is left" in capsys.readouterr().out


def test_status_of_a_killed_run_says_so(tmp_path):
    """Its record has no last line, its list of ranks is not emptied."""
    held = directory_lock.take(tmp_path, "abc", kind=directory_lock.RUN, heartbeats=False)
    (tmp_path / "config.json").write_text(json.dumps({"run_id": "abc", "groups": 2}))
    history.append(tmp_path, "begin", t=steady_clock.now() - 7300, steps=10)
    history.append(tmp_path, "step", t=steady_clock.now() - 7200, step=3, loss=1.5, duration_s=0.5, live=[0, 1])
    mine = {"group": 0, "position": 0, "pid": os.getpid(), "host": socket.gethostname(), "start": start_of(os.getpid())}
    (tmp_path / "ranks.json").write_text(json.dumps([mine, {**mine, "start": 1}]))
    status = status_command.Status(tmp_path)
    assert status.look()
    told = " ".join(status.lines())
    assert "1 ranks live on 1 host, but the last line of its record is 2:00:00 old; a process holds its lock" in told, (
        told
    )
    os.close(held._fd)  # as the kernel does for a process that is killed
    held._fd = -1
    assert not status.look()
    told = " ".join(status.lines())
    assert "it was killed, for no process holds its lock; the last line of its record is 2:00:00 old" in told, told
    assert f"ranks of it live on: pids {os.getpid()}" in told and "ETA" not in told and "  live " not in told
    assert directory_lock.lives(tmp_path / "nothing", directory_lock.RUN) is None


def test_a_clock_that_is_set_changes_no_duration(tmp_path, monkeypatch):
    monkeypatch.delenv(steady_clock.VARIABLE, raising=False)
    monkeypatch.setattr(steady_clock, "_booted", None)
    history.append(tmp_path, "begin", steps=10)
    wall = time.time
    for hours in (5, -5):
        monkeypatch.setattr(time, "time", lambda hours=hours: wall() + 3600 * hours)
        history.append(tmp_path, "step", step=0, loss=1.0, duration_s=0.01, live=[0])
    times = [line["t"] for line in history.read(tmp_path)]
    assert times == sorted(times) and times[-1] - times[0] < 1800
    steady_clock.begin()  # an agent that starts now has the present time, and so do its processes
    assert float(os.environ[steady_clock.VARIABLE]) == steady_clock._booted and steady_clock.now() < times[0] - 3600
    monkeypatch.delenv(steady_clock.VARIABLE)


def test_the_output_of_a_writer_that_has_moved_is_named(tmp_path, capsys):
    display = follow.ProgressView(3, follow.Outputs(tmp_path, 1, "0"), Console(force_terminal=False, width=400))
    for event in (
        view(0, [0, 1, 2]),
        view(1, [0, 1], lost=["2"]),
        view(2, [1], lost=["0"]),
        view(3, [0, 1], joined=[0]),
    ):
        display.update(event)
    said = [line for line in capsys.readouterr().out.splitlines() if "writer" in line]
    assert said == [
        f"group 1 is the writer now (session.is_writer): its output is in {tmp_path}/logs/g1.p0.log",
        "group 0 is the writer now (session.is_writer): its output is shown here",
    ]


def test_the_output_of_a_writer_that_is_followed_is_shown_from_then_on(tmp_path):
    (tmp_path / "logs").mkdir()
    logs = [tmp_path / "logs" / f"g{group}.p{position}.log" for group in (0, 1) for position in (0, 1)]
    outputs = follow.Outputs(tmp_path, 2, "0,1", follows=True)
    display = follow.ProgressView(2, outputs, Console(force_terminal=False, width=400))
    display.update(view(0, [0, 1]))

    def say(what: str) -> list[str]:
        for log in logs:
            with log.open("a") as file:
                file.write(f"{log.stem} {what}\n")
        return list(outputs.new())

    assert say("one") == ["g0.p0 one", "g0.p1 one"]
    display.update(view(1, [1], lost=["0"]))
    assert say("two") == ["g1.p0 two", "g1.p1 two"]
    display.update(view(2, [0, 1], joined=[0]))
    assert say("three") == ["g0.p0 three", "g0.p1 three"]


def test_status_of_no_run_says_so(tmp_path):
    with pytest.raises(LaunchError, match=r"is not the directory of a run: config\.json cannot be read"):
        status_command.Status(tmp_path)


@pytest.mark.parametrize("wrong", ["-1", "first", "", "0,", "0,all"])
def test_a_wrong_tee_is_refused(wrong, capsys):
    with pytest.raises(SystemExit):
        cli.main(["launch", "--groups", "1", "--run-dir", "x", f"--tee={wrong}", "train.py"])
    assert "is no number of a rank; give one or several as 0,3, all or none" in capsys.readouterr().err


def test_a_run_that_starts_again_has_live_groups_again():
    progress = Progress(2)
    for event in ({"event": "start", "t": 1.0}, {"event": "stop", "t": 2.0, "reason": "", "exit_code": 3}):
        progress.take(event)
    assert progress.line() == "step 0"
    progress.take({"event": "start", "t": 3.0})
    assert progress.line() == "step 0  live 2/2"
