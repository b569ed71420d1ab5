"""``launch --ssh``: what is passed on, what is told about a host, and the far side, with real processes and without ssh."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft import cli
from megatron_ft.core import ready
from megatron_ft.errors import LaunchError
from megatron_ft.launch import everywhere, far, hostfile, ssh
from tests.stores import await_

WANTED = ready.Wanted({"megatron_ft": "1", "torch": "2"}, "/home/a", "/home/a/runs/a", "train.py", "ds.json")
FINE = {
    "versions": {"megatron_ft": "1", "torch": "2"},
    "directory": True,
    "files": ["train.py", "ds.json"],
    "shared": True,
    "address": "10.0.0.1",
    "tried": ["10.0.0.1"],
}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, ""),
        ({"versions": {"megatron_ft": "0.9", "torch": "2"}}, "megatron_ft 0.9, not 1; install the same"),
        ({"versions": {"megatron_ft": "1"}}, "torch None, not 2"),
        ({"directory": False, "files": []}, "no directory /home/a"),
        ({"files": ["ds.json"]}, "no train.py in /home/a"),
        ({"files": ["train.py"]}, "no ds.json in /home/a"),
        ({"shared": False}, "--run-dir /home/a/runs/a"),
        ({"address": None, "tried": ["127.0.1.1"]}, "n1 stands for 127.0.1.1; write address=ADDR"),
    ],
)
def test_what_a_host_lacks_is_told_with_the_remedy(changed, words):
    said = ready.lacks(WANTED, {**FINE, **changed}, "n1")
    assert words in said and bool(said) == bool(changed)


@pytest.mark.parametrize(
    ("code", "said", "words"),
    [
        (None, "", "within 60 s"),
        (255, "Warning: x\nroot@n1: Permission denied (publickey,password).\n", "ssh-copy-id me@n1"),
        (255, "@@@\nHost key verification failed.\n", "`ssh me@n1` once by hand"),
        (255, "ssh: Could not resolve hostname n1: Name or service not known\n", "correct the hostfile"),
        (255, "ssh: connect to host n1 port 22: No route to host\n", "is it up"),
        (255, "something new\n", "something new; try `ssh me@n1 true`"),
        (127, "env: /venv/bin/python: No such file or directory\n", "cannot run /venv/bin/python"),
        (1, "/venv/bin/python: No module named megatron_ft.launch.far\n", "no megatron_ft like this one"),
        (1, "", "it says nothing, exit code 1"),
    ],
)
def test_why_a_host_does_not_answer_is_told_with_the_remedy(code, said, words):
    assert words in ready.unreachable(code, said, "me@n1", "/venv/bin/python", 60.0)


@given(st.none() | st.integers(0, 255), st.text())
def test_whatever_ssh_says_there_is_one_line(code, said):
    told = ready.unreachable(code, said, "n1", "python", 60.0)
    assert len(told.splitlines()) == 1


def test_what_is_passed_of_the_environment():
    environ = {"NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "eth1", "TORCH_X": "1", "MEGATRON_FT_Y": "2", "A": "a b"}
    environ["HOME"] = "/home/me"
    found = ssh.environment({**environ, "PYTHONPATH": f"/x{os.pathsep}.{os.pathsep}", "PATH": "/bin"}, ["A", "B=1=2"])
    assert found.pop("PYTHONPATH") == f"/x{os.pathsep}{os.getcwd()}"
    assert found == {**{key: value for key, value in environ.items() if key != "HOME"}, "B": "1=2"}
    for wrong, words in (("C", "--export C: it is not set here; write C=VALUE"), ("x y=1", "no variable")):
        with pytest.raises(LaunchError, match=words):
            ssh.environment(environ, [wrong])


def parsed(*words: str):
    return cli._parser().parse_args(["launch", *words])


NEEDED = ["--groups", "3", "--config", "ds.json", "--run-dir", "runs/a"]


def test_each_option_of_launch_is_the_same_everywhere_or_the_starters_own():
    """Whoever adds an option to ``launch`` decides which of both it is."""
    options = [*NEEDED, "--ranks-per-group", "2", "--port", "7", "--resume", "never", "--overwrite", "--no-preload"]
    options += ["--failure-domains", "a,b,c", "--track", "tensorboard", "--preload", "x,y"]
    mine = ["--ssh", "--ssh-command", "ssh -F x", "--export", "A", "--hostfile", "hosts", "--spare-hosts", "1"]
    asked = parsed(*options, *mine, "train.py", "--", "--steps", "5", "two words", "")
    theirs = parsed(*everywhere._same_for_all(asked, "etcd"))
    own = {"ssh", "ssh_command", "export", "hostfile", "spare_hosts"}
    differ = {name for name, value in vars(asked).items() if value != vars(theirs)[name]}
    assert differ == own | {"store"}, "which the starter has taken in"
    found_with_ssh = {"hosts", "host_rank", "store", "job_id", "address"}
    default = vars(parsed(*NEEDED, "train.py"))
    said = {name for name, value in vars(asked).items() if value != default[name]}
    assert set(default) - said == found_with_ssh | {"command", "run", "groups", "config", "run_dir", "script"}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "--hostfile is missing"),
        (["--hostfile", "hosts", "--hosts", "3"], "--hosts is found with --ssh"),
        (["--hostfile", "hosts", "--store", "a:1"], "--store is found with --ssh"),
    ],
)
def test_what_makes_no_sense_with_ssh_is_told(words, told):
    with pytest.raises(LaunchError, match=told):
        everywhere.asked(parsed(*NEEDED, "--ssh", *words, "train.py"), None)


def test_without_ssh_there_is_a_line():
    connections = ssh.Connections("/no/such/ssh", {})
    with pytest.raises(LaunchError, match="--ssh-command"):
        connections.ask(hostfile.Host("n1"), far.request("look"))
    connections.close()


# --- the far side -----------------------------------------------------------------------------------------------------


def ask(what: str, **fields) -> dict:
    """As ssh runs it."""
    command = [sys.executable, "-m", "megatron_ft.launch.far"]
    done = subprocess.run(command, input=far.request(what, **fields), capture_output=True, text=True, timeout=60)
    found = far.answer(f"Welcome!\n{done.stdout}bye\n")
    assert found is not None, done.stderr
    return found


@pytest.fixture
def agent(tmp_path):
    """Starts a program as an agent; ended by its own far side."""
    states = []

    def start(code: str, name: str = "a", before=(), **environment) -> Path:
        states.append(tmp_path / f"{name}.json")
        command = [sys.executable, "-c", code]
        files = {"log": str(tmp_path / "log"), "state": str(states[-1]), "before": list(map(str, before))}
        return Path(ask("start", directory=str(tmp_path), command=command, environment=environment, **files)["runs"])

    yield start
    for state in filter(Path.exists, states):
        ask("end", state=str(state), patience_s=0.0)


def said(state: Path) -> dict:
    return far.read(state) or {"code": None, "pid": 0}


FOREVER = "import signal; print('here', flush=True); signal.pause()"


def test_an_agent_says_how_it_ends_in_its_own_session_directory_and_environment(agent, tmp_path):
    code = "import os, sys; print(os.getcwd(), os.environ['X'], os.getsid(0), file=sys.stderr); sys.exit(7)"
    state = agent(code, X="x y")
    await_(lambda: said(state)["code"] is not None, "it has ended")
    assert said(state)["code"] == 7
    where, x, y, session = (tmp_path / "log").read_text().split()
    assert (where, x, y) == (str(tmp_path.resolve()), "x", "y") and int(session) != os.getsid(0)


def test_an_agent_that_lives_is_not_started_twice_and_ends_when_told(agent, tmp_path):
    first = agent(FOREVER)
    await_(lambda: said(first)["pid"], "it runs")
    assert agent(FOREVER, "b", before=[first]) == first and not (tmp_path / "b.json").exists()
    beat = said(first)["beat"]
    await_(lambda: said(first)["beat"] > beat, "it is said that it lives")
    ask("end", state=str(first), patience_s=30.0)
    await_(lambda: said(first)["code"] is not None, "it has ended")
    assert said(first)["code"] == 128 + signal.SIGTERM
    second = agent(FOREVER, "b", before=[first])
    assert second == tmp_path / "b.json"
    await_(lambda: said(second)["pid"], "it runs, and can be ended")


def test_one_that_does_not_listen_is_killed(agent, tmp_path):
    state = agent("import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); open('on', 'w'); time.sleep(600)")
    await_(lambda: (tmp_path / "on").exists(), "it does not listen")
    await_(lambda: said(state)["pid"], "it is known")
    assert ask("end", state=str(state), patience_s=0.0) == {"killed": True}
    await_(lambda: said(state)["code"] == 128 + signal.SIGKILL, "it has ended")


def test_one_that_cannot_be_started_has_ended(tmp_path):
    state = tmp_path / "state.json"
    files = {"log": str(tmp_path / "log"), "state": str(state), "before": []}
    ask("start", directory=str(tmp_path), command=["/no/such/program"], environment={}, **files)
    await_(lambda: said(state)["code"] == 1, "it has ended")
    assert "/no/such/program" in (tmp_path / "log").read_text()


def test_another_process_with_the_number_of_an_agent_is_not_taken_for_it(tmp_path):
    state = tmp_path / "state.json"
    me = {"pid": os.getpid(), "start": far.started(os.getpid()) - 1, "host": os.uname().nodename, "beat": 0, "code": None}
    state.write_text(json.dumps(me))
    assert ask("end", state=str(state), patience_s=0.0) == {"killed": False}


@pytest.mark.parametrize(
    ("name", "seen", "address", "found"),
    [
        ("127.0.0.3", [], None, "127.0.0.3"),
        ("n1.invalid", ["127.0.1.1"], None, None),
        ("n1.invalid", ["192.0.2.1"], None, None),
        ("n1.invalid", ["192.0.2.1"], "127.0.0.2", "127.0.0.2"),
        ("n1.invalid", [], "192.0.2.1", None),
    ],
)
def test_a_host_is_reached_by_an_address_that_is_its_own(tmp_path, name, seen, address, found):
    here = {"directory": str(tmp_path), "files": ["x"], "token": str(tmp_path)}
    answer = ask("look", **here, name=name, seen=seen, address=address)
    assert answer["address"] == found and answer["versions"] == far.versions()
    assert answer["directory"] and answer["shared"] and answer["files"] == []
