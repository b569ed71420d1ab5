"""The agent's side of a group that comes back: real agents and real processes, with scripts that do not train.

These tests do not cover the work of a rank in its new life. They cover its start: one for every loss, under the right
identity, within the limits of the settings, and without anything left behind.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from megatron_ft.cluster.faults import kill as inject
from megatron_ft.cluster.faults import process_lookup
from megatron_ft.errors import WIPED_OUT
from megatron_ft.host import forkserver
from tests import support, warm
from tests.stores import await_, held_port

GROUPS = 3
SCRIPT = """
import json, os, signal, sys, threading
from pathlib import Path
from megatron_ft.record import history
from megatron_ft.config.rank_env import RankEnvironment
from megatron_ft.run.store import ControlStore

env = RankEnvironment.from_env()
print(f"rank {env.position} of {env.seat} is here", flush=True)
names = ("MEGATRON_FT_INCARNATION", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MEGATRON_FT_ERROR_FILE")
said = {"pid": os.getpid(), "parent": os.getppid(), **{name: os.environ[name] for name in names}}
here = env.run_dir / "said"
here.mkdir(exist_ok=True)

def say(name):
    (here / "part").with_suffix(f".{os.getpid()}").write_text(json.dumps(said))
    os.replace((here / "part").with_suffix(f".{os.getpid()}"), here / name)

def forever():
    say(f"{env.seat}-{env.position}")
    while not (env.run_dir / "over").exists():
        threading.Event().wait(0.05)
    os._exit(0)

def end_the_run():
    store = ControlStore(env.store, env.run_id, 10.0)
    history.append(env.run_dir, "end", step=0, loss=0.0, params_norm=0.0, params_sha256="")
    store.set("ended", True)
    (env.run_dir / "over").touch()
    os._exit(0)
"""

WAITS = """
if (env.group, env.position, env.incarnation) == (0, 0, 0):
    say("0-0")
    while not (env.run_dir / "enough").exists():
        threading.Event().wait(0.02)
    end_the_run()
"""


def script(path: Path, text: str) -> Path:
    """Return a script in which group 0 ends the run when it is told to; the others run ``rest``, then wait."""
    path.write_text(SCRIPT + WAITS + text + "\nforever()\n")
    return path


class Agents(support.Run):
    """One agent, and the messages of its ranks."""

    def said(self, group: int, incarnation: int = 0, position: int = 0) -> dict:
        """Wait until that start of the rank has reported."""
        name = f"{group}.{incarnation}-{position}" if incarnation else f"{group}-{position}"
        path = self.directory / "said" / name
        support.wait_for(path.exists, self)
        return json.loads(path.read_text())

    def kill(self, group: int, incarnation: int = 0, position: int = 0, number: signal.Signals = signal.SIGKILL) -> int:
        """Kill that start of the rank, once it is listed; return its pid."""
        pid = self.said(group, incarnation, position)["pid"]
        support.wait_for(lambda: inject.pid_of(self.directory, group, position) == pid, self)
        inject.kill(self.directory, group, "of a test", number, position)
        return pid

    def enough(self) -> str:
        """Let group 0 end the run; return what the launcher printed."""
        (self.directory / "enough").touch()
        return self.finish()


def start(tmp_path: Path, text: str = "", per_group: int = 1, per_hour: int = 6, **settings) -> Agents:
    run = support.start(
        tmp_path / "run",
        tmp_path,
        groups=GROUPS,
        script=script(tmp_path / "script.py", text),
        own=(),
        extra=["--ranks-per-group", per_group],
        rejoin={"enabled": True, "restarts_per_hour": per_hour},
        **settings,
    )
    return Agents(run.directory, run.process, GROUPS)


def listed(run: support.Run) -> list[dict]:
    return json.loads((run.directory / "ranks.json").read_text())


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.long
def test_a_group_that_is_killed_twice_is_started_twice(tmp_path):
    run = start(tmp_path, per_group=2)
    before = [run.said(group, position=position) for group in range(GROUPS) for position in range(2)]
    forks = set(children(run.process.pid)) - {said["pid"] for said in before}
    for incarnation in (1, 2):
        older = [run.said(1, incarnation - 1, position) for position in range(2)]
        run.kill(1, incarnation - 1, position=incarnation - 1)
        new = [run.said(1, incarnation, position) for position in range(2)]
        for old, rank in zip(older, new, strict=True):
            same = ("parent", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
            assert [rank[name] for name in same] == [old[name] for name in same]
            assert rank["MEGATRON_FT_INCARNATION"] == str(incarnation) and rank["pid"] != old["pid"]
            assert not Path(f"/proc/{old['pid']}").exists(), "neither the dead nor the one that was left, nor a zombie"
        pids = [rank["pid"] for rank in new]
        support.wait_for(lambda pids=pids: [inject.pid_of(run.directory, 1, p) for p in range(2)] == pids, run)
        numbers = sorted((rank["group"], rank["incarnation"]) for rank in listed(run))
        assert numbers == [(0, 0), (0, 0), (1, incarnation), (1, incarnation), (2, 0), (2, 0)]
    assert forks <= set(children(run.process.pid)), "ranks are still forked from the same process"
    last = [process_lookup.Process(rank["pid"], rank["start"]) for rank in listed(run)]
    output = run.enough()
    assert run.process.returncode == 0, output + run.logs()
    assert not any(process.lives for process in last)

    restarts = run.events("restart")
    assert [(line["group"], line["incarnation"], line["attempt"]) for line in restarts] == [(1, 1, 1), (1, 2, 2)]
    assert all(len(line["pids"]) == 2 and line["after_s"] >= 0 for line in restarts)
    faults = [(line["group"], line["position"], line["incarnation"], line["signal"]) for line in run.events("fault")]
    assert faults == [(1, 0, 0, "SIGKILL"), (1, 1, 1, "SIGKILL")], "who made room for the new ones is no fault"
    log = (run.directory / "logs" / "g1.p0.log").read_text()
    said = ["rank 0 of 1 is", "incarnation 1 ---", "rank 0 of 1.1 is", "incarnation 2 ---", "rank 0 of 1.2 is"]
    assert [log.index(part) for part in said] == sorted(log.index(part) for part in said)
    assert "group 1 is started again" in output and "incarnation 2" in output


DIES = """
if env.group == 1:
    os.kill(os.getpid(), signal.SIGKILL)
"""
FAILS = """
if env.group == 1:
    raise OSError("no such file")
"""


@pytest.mark.parametrize(
    ("text", "starts", "words"),
    [
        (DIES, 2, ["started again 2 times within an hour", "restarts_per_hour is 2", "SIGKILL"]),
        pytest.param(
            FAILS,
            1,
            ["failed before its first step twice, in the same words", "OSError: no such file"],
            marks=pytest.mark.long,
        ),
    ],
    ids=["killed", "by an exception"],
)
def test_a_group_that_ends_at_once_every_time_is_given_up(tmp_path, text, starts, words):
    run = start(tmp_path, text, per_hour=2)
    support.wait_for(lambda: run.events("given_up"), run)
    output = run.enough()
    assert run.process.returncode == 0, output
    (line,) = run.events("given_up")
    assert (line["group"], line["incarnation"]) == (1, starts)
    assert all(word in line["reason"] and word in " ".join(output.split()) for word in words), output
    assert [line["incarnation"] for line in run.events("restart")] == list(range(1, starts + 1))
    assert len(run.events("fault")) == starts + 1


STAYS = """
def forever():
    say(f"{env.seat}-{env.position}")
    threading.Event().wait()
"""


@pytest.mark.long
def test_a_stopped_group_makes_room_for_its_next_start(tmp_path):
    """A process that is still there long after the run's end is ended, too."""
    run = start(tmp_path, STAYS, detector={"stopped_timeout_s": 0.5})
    old = run.said(1)["pid"]
    os.kill(old, signal.SIGSTOP)
    assert run.said(1, 1)["pid"] != old and not Path(f"/proc/{old}").exists()
    output = run.enough()
    assert run.process.returncode == 0, output
    assert [line["how"] for line in run.events("fault")] == ["agent's look at the process"]


LEFT_OUT = """
from megatron_ft.errors import RunStopped
from megatron_ft.types import View

if env.incarnation == 0 and env.group == 1:
    view = View(1, (0, 2), "the others heard nothing of group 1")  # as one of them would have written it
    ControlStore(env.store, env.run_id, 10.0).create("view/1", view.to_json())
    raise RunStopped("group 1 is outside view 1")
if env.group == 2:
    while not (here / "1.1-0").exists():
        threading.Event().wait(0.02)
    raise RunStopped("what stops everybody")
"""


@pytest.mark.long
def test_a_group_that_was_left_out_while_it_lived_comes_back_and_one_that_stopped_with_the_run_does_not(tmp_path):
    run = start(tmp_path, LEFT_OUT)
    run.said(1, 1)
    support.wait_for(lambda: len(run.events("fault")) == 2, run)
    output = run.enough()
    assert run.process.returncode == 0, output
    assert [(line["group"], line["incarnation"]) for line in run.events("restart")] == [(1, 1)]
    assert [(line["group"], line["code"]) for line in run.events("fault")] == [(1, 3), (2, 3)]
    assert not run.events("given_up")


@pytest.mark.long
def test_without_the_process_it_is_forked_from_a_rank_starts_all_the_same(tmp_path):
    run = start(tmp_path, warm_start=False)
    ranks = {run.said(group)["pid"] for group in range(GROUPS)}
    (forks,) = [
        pid for pid in children(run.process.pid) if pid not in ranks and forkserver.FORKS_NAME in arguments_of(pid)
    ]
    os.kill(forks, signal.SIGKILL)
    await_(lambda: not Path(f"/proc/{forks}").exists(), "it is gone, and buried")
    run.kill(1)
    assert run.said(1, 1)["parent"] == run.process.pid
    output = run.enough()
    assert run.process.returncode == 0 and "every rank imports torch by itself" in output


def arguments_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


@pytest.mark.long
def test_when_the_last_member_dies_groups_that_wait_for_a_seat_end_with_it(tmp_path):
    """These groups have no seat yet: the real cause is reported, not that they found no member."""
    run = start(tmp_path)
    for group in (1, 2):
        run.kill(group)
        run.said(group, 1)
    last = run.kill(0)
    output = run.finish()
    assert run.process.returncode == WIPED_OUT
    (stop,) = run.events("stop")
    assert "no group is left" in stop["reason"] and f"(pid {last}) ended with SIGKILL" in stop["reason"], stop
    assert stop["reason"] in " ".join(output.split()) and not run.events("given_up")
    assert [line["group"] for line in run.events("restart")] == [1, 2]


@pytest.mark.long
def test_a_script_that_fails_everywhere_ends_the_run_as_it_does_without_rejoin(tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("import no_such_module\n")
    run = support.start(tmp_path / "bad", tmp_path, script=bad, own=(), groups=2, rejoin={"enabled": True})
    output = run.finish()
    assert (
        run.process.returncode == 1
        and "ModuleNotFoundError" in output
        and "all groups, before the first step" in output
    )


def test_a_group_that_was_told_to_end_stays_away_and_a_stopped_agent_waits_for_none(tmp_path):
    run = start(tmp_path, DIES)
    run.kill(2, number=signal.SIGTERM)
    support.wait_for(lambda: any(line["group"] == 2 for line in run.events("given_up")), run)
    support.wait_for(lambda: len(run.events("restart")) >= 2, run)  # the next pause is one of seconds
    run.process.send_signal(signal.SIGTERM)
    output = run.finish()
    assert run.process.returncode == 128 + signal.SIGTERM, output
    assert {line["group"] for line in run.events("restart")} == {1}


HOSTS = 4


@pytest.fixture
def several(tmp_path):
    """Two groups of two ranks on four hosts, each an agent with a loopback address of its own."""
    held = held_port()
    detector = {"heartbeat_timeout_s": support.TIMEOUT_S}  # no host is lost: a busy one must not be given up
    config = support.write_config(
        tmp_path / "config.json", rejoin={"enabled": True}, detector=detector, store="embedded"
    )
    text = script(tmp_path / "script.py", "")
    agents = []
    for host in range(HOSTS):
        flags = ["--groups", 2, "--ranks-per-group", 2, "--config", config, "--run-dir", tmp_path / "run"]
        where = ["--hosts", HOSTS, "--host-rank", host, "--store", f"127.0.0.1:{held.getsockname()[1]}"]
        where += ["--address", f"127.0.0.{host + 1}"]
        agents.append(warm.launch("launch", *flags, *where, text, env=os.environ))
    yield agents, Agents(tmp_path / "run", agents[0], 2)
    for agent in agents:
        agent.kill()
        agent.communicate()
    held.close()


@pytest.mark.long
def test_hosts_that_share_a_group_start_it_again_as_one(several):
    agents, run = several
    for incarnation, position in ((1, 1), (2, 0)):  # the host of position 0 decides when
        older = [run.said(1, incarnation - 1, rank)["pid"] for rank in range(2)]
        run.kill(1, incarnation - 1, position)
        new = [run.said(1, incarnation, rank) for rank in range(2)]
        assert not {rank["pid"] for rank in new} & set(older)
        assert not any(Path(f"/proc/{pid}").exists() for pid in older)
    run.enough()
    said = [agent.communicate(timeout=support.TIMEOUT_S)[0] for agent in agents[1:]]
    assert [agent.returncode for agent in agents] == [0] * HOSTS, said
    restarts = sorted((line["incarnation"], line["host"].partition("(")[2]) for line in run.events("restart"))
    assert restarts == [(number, f"127.0.0.{host})") for number in (1, 2) for host in (3, 4)]
    assert [(line["position"], line["incarnation"]) for line in run.events("fault")] == [(1, 0), (0, 1)]
