"""``megatron-ft inject`` against real runs: each fault happens at its point, once; and the run keeps its promises."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_ft.cluster.faults import host_faults, mix, process_lookup
from megatron_ft.cluster.faults.injector import Injector
from megatron_ft.cluster.faults.schedule import Fault, Schedule
from megatron_ft.record import history
from megatron_ft.run import injection_points
from tests import support
from tests.stores import store_of

STEPS = 20
FIRST, LATE = 1, 12
"""Where the runs wait for their injector: before any fault's step, until its orders are there, and after the last."""


@pytest.fixture(scope="module")
def long_reference(tmp_path_factory, data_dir) -> support.Run:
    run = support.start(tmp_path_factory.mktemp("long") / "run", data_dir, steps=STEPS)
    run.check()
    return run


def start(tmp_path, data_dir, *gates: int, **options) -> tuple[support.Run, support.Gate]:
    """Start a run that waits before these steps: an injector is as slow to start as the run."""
    gate = support.Gate(tmp_path, *gates)
    return support.start(tmp_path / "run", data_dir, steps=STEPS, script=gate.script, **options), gate


def write(path, *faults) -> str:
    path.write_text(json.dumps({"faults": list(faults)}))
    return str(path)


def test_a_kill_at_a_point_an_exception_and_a_kill_by_step(tmp_path, data_dir, long_reference):
    """Three of four groups fail, each by another way; the same schedule again does nothing."""
    schedule = write(
        tmp_path / "schedule.json",
        {"kind": "kill", "group": 2, "step": 3, "point": "reduce", "bucket": 1},
        {"kind": "exception", "group": 1, "step": 6, "point": "backward"},
        {"kind": "kill", "group": 0, "step": 8},
        {"kind": "oom", "group": 3, "step": STEPS - 1},
    )
    run, gate = start(tmp_path, data_dir, FIRST, LATE)
    done = support.inject_when_ready(run, gate, FIRST, schedule, orders=(1, 2))
    gate.open(LATE)
    run.check(long_reference)
    assert "3 of 4 faults injected" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 1
    assert "it would leave 0 groups, --min-survivors is 1" in done.stdout
    injected = run.events("inject")
    assert [(line["group"], line["kind"]) for line in injected] == [(2, "kill"), (1, "exception"), (0, "kill")], (
        done.stdout
    )
    assert injected[0]["point"] == "reduce 1, step 3"
    assert injected[1]["point"] == "backward, step 6"
    assert {line["group"] for line in run.events("fault")} == {0, 1, 2}
    assert next(line for line in run.events("fault") if line["group"] == 1)["detail"].startswith(
        "train.py raised Injected"
    )
    again = support.ft("inject", run.directory, schedule)
    assert (again.returncode, again.stderr.count("\n")) == (2, 1)
    assert "is over, and no fault was injected" in again.stderr
    assert run.events("inject") == injected


@pytest.mark.long
def test_an_injector_that_is_killed_and_started_again_strikes_nothing_twice(tmp_path, data_dir):
    """The first injector dies after its first strike; group 0 is held at a point meanwhile, and struck by the
    second."""
    faults = (
        Fault(kind="terminate", group=2, step=1),
        Fault(kind="kill", group=0, step=4, point="begin"),
    )
    schedule = write(tmp_path / "schedule.json", *(fault.to_json() for fault in faults))
    run, gate = start(tmp_path, data_dir, 3)
    first = subprocess.Popen(support.command("inject", run.directory, schedule), cwd=support.ROOT)
    support.wait_for(
        lambda: len(run.events("inject")) == 1 and injection_points.mailbox(run.directory, 0, 0).exists(), run
    )
    first.kill()
    first.wait()
    gate.open(3)
    support.await_held(run, 0)
    second = support.ft("inject", run.directory, schedule)
    run.check()
    assert second.returncode == 0, second.stdout + second.stderr
    assert "injected before" in second.stdout
    assert [(line["group"], line["signal"]) for line in run.events("inject")] == [(2, "SIGTERM"), (0, "SIGKILL")]


@pytest.mark.long
def test_a_stop_ends_again_and_a_fault_of_a_step_long_past_is_not_reached(tmp_path, data_dir):
    """Agent and store are frozen; the steps go on without them, and both resume when their time is up."""
    run, gate = start(tmp_path, data_dir, LATE)
    support.wait_for_step(run, 4)
    schedule = Schedule((
        Fault(kind="agent", how="stop", duration_s=0.2, step=4),
        Fault(kind="store", how="stop", duration_s=0.2, step=4),
        Fault(kind="exception", group=1, step=1),
    ))  # fmt: skip
    store = store_of(run.directory)
    said: list[str] = []
    injector = Injector(run.directory, schedule, support.GROUPS, 1, say=said.append)
    assert [case.state for case in injector.run()] == ["injected", "injected", "missed"]
    gate.open(LATE)
    run.check()
    assert {line.partition(":")[2][:2] for line in said if line.startswith("undone")} == {" 1", " 2"}
    stopped = [(line["pid"], line["signal"]) for line in run.events("inject")]
    assert stopped == [(run.process.pid, "SIGSTOP"), (store, "SIGSTOP")]
    assert not run.events("store") and not run.events("fault")


@pytest.mark.long
def test_a_store_that_is_killed_costs_no_group(tmp_path, data_dir, long_reference):
    """The store is killed twice, and each time a rank dies afterwards; the last group must not be struck, the store
    may be."""
    schedule = write(
        tmp_path / "schedule.json",
        {"kind": "store", "step": 2},
        {"kind": "kill", "group": 2, "step": 6, "point": "reduce", "bucket": 1},
        {"kind": "store", "wait_s": 0},
        {"kind": "kill", "group": 0, "step": 10, "point": "backward"},
    )
    run, gate = start(tmp_path, data_dir, FIRST, LATE)
    done = support.inject_when_ready(run, gate, FIRST, schedule, "--min-survivors", 2, orders=(0, 2))
    support.wait_for(lambda: [line["what"] for line in run.events("store")].count("restarted") == 2, run)
    gate.open(LATE)
    run.check(long_reference)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line["kind"] for line in run.events("inject")] == ["store", "kill", "store", "kill"]
    assert [line["what"] for line in run.events("store")] == ["died", "restarted"] * 2
    assert sorted(line["group"] for line in run.events("fault")) == [0, 2]


@pytest.mark.long
def test_a_rank_that_is_held_for_a_fault_that_is_not_reached_resumes(tmp_path, data_dir):
    """Both ranks of group 1 are to die at bucket 0, which one of them owns: that rank freezes there, the other one
    never comes."""
    detector = {"stopped_timeout_s": 0.5}
    run, gate = start(tmp_path, data_dir, FIRST, LATE, groups=3, extra=["--ranks-per-group", "2"], detector=detector)
    fault = {"kind": "kill", "group": 1, "position": "all", "step": 3, "point": "bucket", "bucket": 0}
    done = support.inject_when_ready(run, gate, FIRST, write(tmp_path / "schedule.json", fault), orders=(1,))
    gate.open(LATE)
    run.check()
    assert "not reached" in done.stdout, done.stdout
    assert not run.events("inject")
    assert "is stopped" in (run.directory / "logs" / "g1.p0.log").read_text(), "it could say so itself, later"


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_an_injector_that_is_told_to_end_withdraws_its_orders(tmp_path, data_dir, number):
    run, gate = start(tmp_path, data_dir, LATE)
    schedule = write(tmp_path / "schedule.json", {"kind": "kill", "group": 1, "step": STEPS - 1, "point": "gate"})
    injector = subprocess.Popen(
        support.command("inject", run.directory, schedule),
        stdout=subprocess.PIPE,
        text=True,
        cwd=support.ROOT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job ignores it
    )
    assert injector.stdout.readline().startswith("armed: 1 kill group 1")
    mailbox = injection_points.mailbox(run.directory, 1, 0)
    support.wait_for(mailbox.exists, run)
    injector.send_signal(number)
    said, _ = injector.communicate()
    assert injector.returncode == 130
    assert "0 of 1 faults injected" in said and "the injector was ended" in said
    assert json.loads(mailbox.read_text())["orders"] == []
    gate.open(LATE)
    run.check()
    assert not run.events("fault")


@pytest.mark.long
def test_a_slow_group_is_not_lost(tmp_path, data_dir, long_reference):
    schedule = write(tmp_path / "schedule.json", {"kind": "slow", "group": 1, "after_s": 0, "factor": 1.5, "steps": 2})
    run, gate = start(tmp_path, data_dir, FIRST)
    done = support.inject_when_ready(run, gate, FIRST, schedule, orders=(1,))
    run.check(long_reference)
    assert done.returncode == 0, done.stdout
    assert not run.events("fault")
    assert [line["kind"] for line in run.events("inject")] == ["slow"]


# --- before anything is touched ---------------------------------------------------------------------------------------


def test_a_dry_run_shows_all_and_needs_no_run(tmp_path):
    out = tmp_path / "drawn.json"
    done = support.ft("inject", tmp_path / "none", "--mix", 5, "--seed", 3, "--groups", 4, "--dry-run", "--write", out)
    assert done.returncode == 0, done.stderr
    assert "dry run: 5 faults, 4 groups" in done.stdout
    assert Schedule.from_json(json.loads(out.read_text())) == mix.draw(5, 3, 4)
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize(
    "arguments, said",
    [
        ([], "give either a schedule or --mix N"),
        (["--mix", "2", "--min-survivors", "-1"], "--min-survivors is -1"),
        (["--mix", "0"], "--mix is 0"),
        (["--mix", "2", "--every-s", "0"], "--every-s is 0"),
        (["--mix", "2", "--groups", "3"], "--groups needs --dry-run"),
        (["missing.json"], "schedule missing.json does not exist"),
        (["--mix", "2", "--start-timeout-s", "0.1"], "no live run in"),
    ],
)
def test_misuse_gets_one_line(tmp_path, arguments, said):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "config.json").write_text(json.dumps({"groups": 2, "ranks_per_group": 1}))
    done = support.ft("inject", run_dir, *arguments)
    assert done.returncode == 2
    assert said in done.stderr and done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr


def test_two_injectors_do_not_work_on_one_run(tmp_path):
    """The second is refused while the first waits for the run to start."""
    (tmp_path / "config.json").write_text(json.dumps({"groups": 2, "ranks_per_group": 1}))
    first = subprocess.Popen(support.command("inject", tmp_path, "--mix", 1), cwd=support.ROOT)
    try:
        while not _is_locked_by(first.pid):
            assert first.poll() is None
            time.sleep(0.01)
        second = support.ft("inject", tmp_path, "--mix", 1)
    finally:
        first.kill()
        first.wait()
    assert second.returncode == 2
    assert "another injector works on" in second.stderr


def _is_locked_by(pid: int) -> bool:
    """Check who holds the lock without trying to take it: the first injector might find the lock taken in that
    moment."""
    locks = (line.split() for line in Path("/proc/locks").read_text().splitlines())
    return any((words[1], words[4]) == ("FLOCK", str(pid)) for words in locks)


# --- which processes may be signalled ---------------------------------------------------------------------------------


@pytest.fixture
def bystander():
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def listed(run_dir, pid: int, later: int = 0, **more: str) -> None:
    (run_dir / "config.json").write_text(json.dumps({"run_id": "abc", "groups": 1, "ranks_per_group": 1}))
    start, host = injection_points.start_of(pid) + later, socket.gethostname()
    entry = {"group": 0, "position": 0, "pid": pid, "start": start, "host": host, **more}
    (run_dir / "ranks.json").write_text(json.dumps([entry]))


@pytest.mark.parametrize(
    "changes, found",
    [
        ({}, True),
        ({"MEGATRON_FT_AGENT_PID": "1"}, False),
        ({"MEGATRON_FT_AGENT_PID": ""}, False),
        ({"later": 1}, False),
        ({"later": -1}, False),
        ({"host": f"{socket.gethostname()}(10.99.0.2)"}, True),
        ({"host": f"{socket.gethostname()}2"}, False),
    ],
    ids=[
        "it is",
        "somebody else's child",
        "no rank: the file is old, and another process has its pid",
        "earlier than the file says",
        "later",
        "one of hosts of one name",
        "elsewhere",
    ],
)
def test_a_rank_is_identified_by_its_command_line(tmp_path, changes, found):
    own = {"MEGATRON_FT_AGENT_PID": str(os.getpid())}
    later, host = changes.pop("later", 0), changes.pop("host", socket.gethostname())
    code = "import sys; sys.stdout.write('x'); sys.stdout.flush(); sys.stdin.read()"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **own, **changes},
    )
    try:
        process.stdout.read(1)
        listed(tmp_path, process.pid, later, host=host)
        assert bool(process_lookup.ranks(tmp_path)) is found
    finally:
        process.kill()
        process.communicate()


def test_a_signal_reaches_the_process_that_was_checked_or_none(bystander):
    process = process_lookup.Process(bystander.pid, injection_points.start_of(bystander.pid))
    assert not process_lookup.Process(process.pid, process.start + 1).send(signal.SIGKILL)
    assert process.send(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    assert process.is_stopped and process.lives
    assert process.send(signal.SIGCONT)
    os.waitid(os.P_PID, process.pid, os.WCONTINUED)
    assert not process.is_stopped
    assert process.send(signal.SIGKILL)
    bystander.wait()
    assert not process.lives
    assert not process.send(signal.SIGKILL)


# --- a full disk ------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("a tmpfs cannot be mounted here: needs root")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_file_system_is_filled_and_freed(small_disk):
    fault = Fault(kind="disk_full", directory=str(small_disk), after_s=0, duration_s=1)
    host_faults.check(fault)
    host_faults.strike(fault, "k/1")
    with pytest.raises(OSError), (small_disk / "more").open("wb") as file:
        file.write(bytes(8192))
        file.flush()
    host_faults.undo(fault, "k/1")
    host_faults.undo(fault, "k/1")
    assert history.read(small_disk) == []
    history.append(small_disk, "note")


def test_orders_that_find_no_room_are_given_when_there_is_some(tmp_path, monkeypatch):
    """The disk of the run directory is full, perhaps by a fault of the same schedule: the injector goes on."""
    schedule = Schedule((Fault(kind="slow", group=0, factor=2, step=3),))
    injector = Injector(tmp_path, schedule, 1, 1, say=lambda line: None)
    (case,) = injector.cases
    case.state, case.armed = "armed", {(0, 0): process_lookup.Rank(1, 2, 0, 0)}
    box = injection_points.mailbox(tmp_path, 0, 0)
    with monkeypatch.context() as full:
        full.setattr(
            injection_points, "post", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device"))
        )
        injector._post()
    assert not box.exists()
    injector._post()
    assert [order["action"] for order in json.loads(box.read_text())["orders"]] == ["slow"]
