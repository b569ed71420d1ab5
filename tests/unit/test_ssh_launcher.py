"""``launch --ssh``: environment, options, error messages, and the program on each host, without ssh itself."""

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
from megatron_ft.cluster.launchers import hostfile
from megatron_ft.cluster.launchers.ssh import connection, launcher, remote
from megatron_ft.errors import LaunchError
from megatron_ft.utils import shared_file
from tests.stores import await_


@pytest.mark.parametrize(
    ("code", "said", "words"),
    [
        (None, "", "within 60 s"),
        (255, "Warning: x\nroot@n1: Permission denied (publickey,password).\n", "ssh-copy-id me@n1"),
        (255, "@@@\nHost key verification failed.\n", "run `ssh me@n1` once"),
        (255, "ssh: Could not resolve hostname n1: Name or service not known\n", "correct its name in the hostfile"),
        (255, "ssh: connect to host n1 port 22: No route to host\n", "check that the host is up"),
        (255, "something new\n", "something new; check that the host is up, and try `ssh me@n1 true`"),
        (127, "env: /venv/bin/python: No such file or directory\n", "cannot run /venv/bin/python"),
        (
            1,
            "/venv/bin/python: No module named megatron_ft.cluster.launchers.ssh.remote\n",
            "lacks this megatron_ft for",
        ),
        (1, "", "no message, exit code 1"),
    ],
)
def test_the_reason_for_a_missing_answer_has_a_remedy(code, said, words):
    assert words in connection.failure(code, said, "me@n1", "/venv/bin/python", 60.0)


@given(st.none() | st.integers(0, 255), st.text())
def test_any_output_of_ssh_gives_one_line(code, said):
    told = connection.failure(code, said, "n1", "python", 60.0)
    assert len(told.splitlines()) == 1


def test_agents_get_selected_and_exported_variables():
    environ = {"NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "eth1", "TORCH_X": "1", "MEGATRON_FT_Y": "2", "A": "a b"}
    environ["HOME"] = "/home/me"
    found = connection.environment(
        {**environ, "PYTHONPATH": f"/x{os.pathsep}.{os.pathsep}", "PATH": "/bin"}, ["A", "B=1=2"]
    )
    assert found.pop("PYTHONPATH") == f"/x{os.pathsep}{os.getcwd()}"
    assert found == {**{key: value for key, value in environ.items() if key != "HOME"}, "B": "1=2"}
    for wrong, words in (
        ("C", "--export C: the variable is not set here; write C=VALUE"),
        ("x y=1", "is not a variable"),
    ):
        with pytest.raises(LaunchError, match=words):
            connection.environment(environ, [wrong])


def test_secrets_come_from_a_file_that_no_other_user_may_read(tmp_path):
    secrets = tmp_path / "secrets"
    secrets.write_text("# of the tracker\n\nKEY=a=b c\nPORT=7\n")
    secrets.chmod(0o640)
    with pytest.raises(LaunchError, match="chmod 600"):
        connection.environment({}, [f"@{secrets}"])
    secrets.chmod(0o600)
    assert connection.environment({}, [f"@{secrets}", "PORT=8"]) == {"KEY": "a=b c", "PORT": "8"}
    with pytest.raises(LaunchError, match="cannot be read"):
        connection.environment({}, ["@nothing"])


SSH = """
import json, sys
from pathlib import Path
from megatron_ft.cluster.launchers.ssh import remote as far
Path(sys.argv[1]).write_text(json.dumps([" ".join(sys.argv[2:]), sys.stdin.read()]))
print(far.MARK + "{}")
"""


def test_the_values_of_variables_are_in_no_process_list(tmp_path):
    """They go through the standard input of ssh."""
    (tmp_path / "ssh.py").write_text(SSH)
    connections = connection.Connections(f"{sys.executable} {tmp_path}/ssh.py {tmp_path}/said", {})
    environ = connection.environment({"TOKEN": "s3cret"}, ["TOKEN"])
    assert connections.ask(hostfile.Host("n1"), remote.request("start", environment=environ)).content == {}
    connections.close()
    argv, stdin = json.loads((tmp_path / "said").read_text())
    assert "megatron_ft.cluster.launchers.ssh.remote" in argv and "s3cret" not in argv and "s3cret" in stdin


def parsed(*words: str):
    return cli._parser().parse_args(["launch", *words])


NEEDED = ["--groups", "3", "--config", "ds.json", "--run-dir", "runs/a"]


def test_each_option_of_launch_is_for_all_hosts_or_for_the_launcher_alone():
    """A new option of ``launch`` must be added to one of both."""
    options = [*NEEDED, "--ranks-per-group", "2", "--port", "7", "--resume", "never", "--overwrite", "--no-preload"]
    options += ["--megatron", "--private", "--tee", "all", "--module"]
    options += ["--failure-domains", "a,b,c", "--track", "tensorboard", "--preload", "x,y"]
    mine = ["--ssh", "--ssh-command", "ssh -F x", "--export", "A", "--hostfile", "hosts", "--spare-hosts", "1"]
    asked = parsed(*options, *mine, "train.py", "--", "--steps", "5", "two words", "")
    theirs = parsed(*launcher._common_arguments(asked, "etcd://a:1"))
    own = {"ssh", "ssh_command", "export", "hostfile", "spare_hosts"}
    differ = {name for name, value in vars(asked).items() if value != vars(theirs)[name]}
    assert differ == own | {"store"}, "the launcher has resolved them"
    found_with_ssh = {"hosts", "host_rank", "store", "job_id", "address"}
    default = vars(parsed(*NEEDED, "train.py"))
    said = {name for name, value in vars(asked).items() if value != default[name]}
    assert set(default) - said == found_with_ssh | {
        "command",
        "run",
        "groups",
        "config",
        "run_dir",
        "script",
        "megatron_lm",
    }
    instead = parsed(*NEEDED, "--megatron-lm", "pretrain_gpt.py")
    assert parsed(*launcher._common_arguments(instead, "embedded")).megatron_lm and "--tee" not in str(instead)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "--hostfile is missing"),
        (["--hostfile", "hosts", "--hosts", "3"], "--hosts cannot be combined with --ssh"),
        (["--hostfile", "hosts", "--store", "a:1"], "--store cannot be combined with --ssh"),
    ],
)
def test_options_that_contradict_ssh_are_refused(words, told):
    with pytest.raises(LaunchError, match=told):
        launcher.SshLauncher(parsed(*NEEDED, "--ssh", *words, "train.py"), None)


def test_a_missing_ssh_program_gets_one_line():
    connections = connection.Connections("/no/such/ssh", {})
    with pytest.raises(LaunchError, match="--ssh-command"):
        connections.ask(hostfile.Host("n1"), remote.request("check"))
    connections.close()


# --- on each host -----------------------------------------------------------------------------------------------------


def ask(do: str, **fields) -> dict:
    """Run the program as ssh does."""
    command = [sys.executable, "-m", "megatron_ft.cluster.launchers.ssh.remote"]
    done = subprocess.run(command, input=remote.request(do, **fields), capture_output=True, text=True, timeout=60)
    found = remote.answer(f"Welcome!\n{done.stdout}bye\n")
    assert found is not None, done.stderr
    return found


@pytest.fixture
def agent(tmp_path):
    """Start a program as an agent, and end it after the test."""
    states = []

    def start(code: str, name: str = "a", before=(), **environment) -> Path:
        states.append(tmp_path / f"{name}.json")
        command = [sys.executable, "-c", code]
        files = {"log": str(tmp_path / "log"), "state": str(states[-1]), "before": list(map(str, before))}
        return Path(ask("start", directory=str(tmp_path), command=command, environment=environment, **files)["state"])

    yield start
    for state in filter(Path.exists, states):
        ask("end", state=str(state), patience_s=0.0)


def said(state: Path) -> dict:
    return shared_file.read_json(state) or {"code": None, "pid": 0}


FOREVER = "import signal; print('here', flush=True); signal.pause()"


def test_an_agent_has_its_session_directory_and_environment_and_leaves_its_exit_code(agent, tmp_path):
    code = "import os, sys; print(os.getcwd(), os.environ['X'], os.getsid(0), file=sys.stderr); sys.exit(7)"
    state = agent(code, X="x y")
    await_(lambda: said(state)["code"] is not None, "it has ended")
    assert said(state)["code"] == 7
    where, x, y, session = (tmp_path / "log").read_text().split()
    assert (where, x, y) == (str(tmp_path.resolve()), "x", "y") and int(session) != os.getsid(0)


@pytest.mark.slow
def test_a_living_agent_is_not_started_twice_and_ends_on_request(agent, tmp_path):
    first = agent(FOREVER)
    await_(lambda: said(first)["pid"], "it runs")
    assert agent(FOREVER, "b", before=[first]) == first and not (tmp_path / "b.json").exists()
    heartbeat = said(first)["heartbeat"]
    await_(lambda: said(first)["heartbeat"] > heartbeat, "the heartbeat grows")
    ask("end", state=str(first), patience_s=30.0)
    await_(lambda: said(first)["code"] is not None, "it has ended")
    assert said(first)["code"] == 128 + signal.SIGTERM
    second = agent(FOREVER, "b", before=[first])
    assert second == tmp_path / "b.json"
    await_(lambda: said(second)["pid"], "it runs, and can be ended")


def test_an_agent_that_ignores_sigterm_is_killed(agent, tmp_path):
    state = agent(
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); open('on', 'w'); time.sleep(600)"
    )
    await_(lambda: (tmp_path / "on").exists(), "it does not listen")
    await_(lambda: said(state)["pid"], "it is known")
    assert ask("end", state=str(state), patience_s=0.0) == {"killed": True}
    await_(lambda: said(state)["code"] == 128 + signal.SIGKILL, "it has ended")


def test_an_agent_that_cannot_be_started_has_ended(tmp_path):
    state = tmp_path / "state.json"
    files = {"log": str(tmp_path / "log"), "state": str(state), "before": []}
    ask("start", directory=str(tmp_path), command=["/no/such/program"], environment={}, **files)
    await_(lambda: said(state)["code"] == 1, "it has ended")
    assert "/no/such/program" in (tmp_path / "log").read_text()


def test_another_process_with_the_pid_of_an_agent_is_not_killed(tmp_path):
    state = tmp_path / "state.json"
    me = {
        "pid": os.getpid(),
        "start": remote.started(os.getpid()) - 1,
        "host": os.uname().nodename,
        "heartbeat": 0,
        "code": None,
    }
    state.write_text(json.dumps(me))
    assert ask("end", state=str(state), patience_s=0.0) == {"killed": False}


@pytest.fixture
def check(tmp_path):
    """Check this host, which lacks nothing, with other fields."""
    for name in ("train.py", "ds.json", "token"):
        (tmp_path / name).touch()
    fields = {"directory": str(tmp_path), "files": ["train.py", "ds.json"], "run_dir": "runs/a", "seen": []}
    fields |= {"token": str(tmp_path / "token"), "name": "127.0.0.3", "address": None, "wanted": remote.versions()}
    return lambda **changed: remote._check(**{**fields, **changed})


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
def test_a_host_is_reached_by_an_address_of_its_own(check, name, seen, address, found):
    answer = check(name=name, seen=seen, address=address)
    assert answer["address"] == found and bool(answer["lacks"]) == (found is None)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, ""),
        ({"wanted": {"megatron_ft": "0.9"}}, ", not 0.9; install the same on all hosts"),
        ({"wanted": {"cuda": "12"}}, "has cuda None, not 12"),
        ({"directory": "/no/such"}, "has no directory /no/such; start from one that all hosts have"),
        ({"files": ["train.py", "other.json"]}, "has no other.json in "),
        ({"token": "/no/such"}, "does not see the files of --run-dir runs/a; choose a directory that all hosts share"),
        ({"name": "n1.invalid", "seen": ["127.0.1.1"]}, "n1.invalid resolves to 127.0.1.1; add address=ADDR"),
    ],
)
def test_a_host_reports_its_missing_requirements_with_a_remedy(check, changed, words):
    said = check(**changed)["lacks"]
    assert words in said and bool(said) == bool(changed)


def test_a_check_is_answered_in_json(tmp_path):
    fields = {"directory": str(tmp_path), "files": [], "run_dir": "a", "token": str(tmp_path), "name": "127.0.0.1"}
    assert ask("check", **fields, seen=[], address=None, wanted={}) == {"lacks": "", "address": "127.0.0.1"}
