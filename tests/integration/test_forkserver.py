"""Forked ranks: children of the agent like any others, with the environment and arguments that a new interpreter would
get."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ft.cluster.faults import process_lookup
from megatron_ft.errors import LaunchError
from megatron_ft.host import forkserver
from megatron_ft.run.injection_points import start_of
from tests import support
from tests.stores import await_

SAY = """
import json, os, sys, torch
from pathlib import Path
said = {"pid": os.getpid(), "parent": os.getppid(), "session": os.getsid(0), "arguments": sys.argv, "own": os.environ["OWN"],
        "left": "LEFT" in os.environ, "imported": "torch" in sys.modules, "stdin": sys.stdin.read()}
Path(sys.argv[1]).write_text(json.dumps(said))
print("to the log")
if len(sys.argv) > 2:
    os.kill(os.getpid(), int(sys.argv[2]))
"""


@pytest.fixture(scope="module")
def server():
    made = forkserver.ForkServer({**os.environ, "LEFT": "to the server"}, ["fractions"])
    yield made
    made.close()
    ctypes.CDLL(None).prctl(36, 0)  # an orphan of another test must not become a child of this process


@pytest.fixture
def script(tmp_path) -> Path:
    path = tmp_path / "say.py"
    path.write_text(SAY)
    return path


def environment(agent: int) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "LEFT"}
    return {**kept, "OWN": "of this rank", forkserver.AGENT_VARIABLE: str(agent)}


def test_a_forked_rank_is_a_child_with_an_environment_arguments_and_output_of_its_own(tmp_path, server, script):
    with (tmp_path / "log").open("wb") as output:
        ranks = [
            server.start([str(script), str(tmp_path / f"said.{number}")], environment(os.getpid()), output)
            for number in range(3)
        ]
    assert [rank.wait() for rank in ranks] == [0, 0, 0]
    for number, rank in enumerate(ranks):
        said = json.loads((tmp_path / f"said.{number}").read_text())
        assert (said["pid"], said["parent"], said["session"]) == (rank.pid, os.getpid(), rank.pid)
        assert said["arguments"] == [str(script), str(tmp_path / f"said.{number}")]
        assert (said["own"], said["left"], said["imported"], said["stdin"]) == ("of this rank", False, True, "")
    assert (tmp_path / "log").read_text() == 3 * "to the log\n"


def test_the_death_of_a_forked_rank_is_seen_like_that_of_any_child(tmp_path, server, script):
    with (tmp_path / "log").open("wb") as output:
        rank = server.start([str(script), str(tmp_path / "said"), "9"], environment(os.getpid()), output)
    assert rank.wait() == rank.poll() == -signal.SIGKILL
    rank.kill()  # has no effect on any process


def test_a_rank_that_is_forked_too_late_does_not_begin(tmp_path, script, monkeypatch):
    """The agent has started the rank in another way by then."""
    monkeypatch.setattr(forkserver, "_ANSWER_S", 0.2)
    server, own = forkserver.ForkServer(os.environ), environment(os.getpid())
    with (tmp_path / "log").open("wb") as output:
        assert server.start([str(script), str(tmp_path / "said")], own, output).wait() == 0
        os.kill(server.pid, signal.SIGSTOP)
        with pytest.raises(forkserver.NotForked, match="does not answer"):
            server.start([str(script), str(tmp_path / "late")], own, output)
        os.kill(server.pid, signal.SIGCONT)
    while (ended := os.waitid(os.P_ALL, 0, os.WEXITED)).si_code == os.CLD_KILLED:
        continue  # the process that ended with the first rank
    server.close()
    ctypes.CDLL(None).prctl(36, 0)
    assert ended.si_pid != server.pid and (ended.si_code, ended.si_status) == (os.CLD_EXITED, 1)
    assert not (tmp_path / "late").exists()


AGENT = """
import os, sys, time
from megatron_ft.host import forkserver
from megatron_ft.errors import LaunchError
server = forkserver.ForkServer(os.environ)
own = {**os.environ, forkserver.AGENT_VARIABLE: str(os.getpid())}
print(server.start([sys.argv[1]], own, open(os.devnull, "wb")).pid, server.pid, flush=True)
time.sleep(600)
"""


def test_a_forked_rank_ends_with_its_agent(tmp_path):
    script = tmp_path / "sleep.py"
    script.write_text("import time; time.sleep(600)")
    agent = subprocess.Popen([sys.executable, "-c", AGENT, str(script)], stdout=subprocess.PIPE, text=True)
    started = [process_lookup.Process(pid, start_of(pid)) for pid in map(int, agent.stdout.readline().split())]
    agent.kill()
    agent.communicate()
    await_(lambda: not any(process.lives for process in started), "rank and server have ended with the agent")


def test_a_server_that_is_gone_is_reported(tmp_path, script):
    server = forkserver.ForkServer(os.environ, ["no_such_module"])
    with (tmp_path / "log").open("wb") as output, pytest.raises(forkserver.NotForked, match="no_such_module"):
        server.start([str(script)], environment(os.getpid()), output)
    server.close()


INITIALISES = "import torch; torch.cuda._initialized = True"
ASKS_THE_DRIVER = """
import os, torch
parent = os.getpid()
torch.cuda._is_compiled = lambda: True
torch.cuda._is_in_bad_fork = lambda: os.getpid() != parent
"""


TOUCHES = {"initialises CUDA": INITIALISES, "asks CUDA's driver": ASKS_THE_DRIVER}


@pytest.mark.parametrize("module", support.first_of(TOUCHES, "initialises CUDA"))
def test_a_module_after_whose_import_forked_ranks_could_not_use_a_gpu_is_refused_by_name(tmp_path, script, module):
    (tmp_path / "touches_cuda.py").write_text(module)
    server = forkserver.ForkServer(
        {**os.environ, "PYTHONPATH": f"{support.ROOT}:{tmp_path}"}, ["fractions", "touches_cuda"]
    )
    with (tmp_path / "log").open("wb") as output:
        for _ in range(2):
            with pytest.raises(LaunchError, match="importing touches_cuda initialises CUDA.*leave touches_cuda out"):
                server.start([str(script), str(tmp_path / "said")], environment(os.getpid()), output)
    server.close()
    assert not (tmp_path / "said").exists()


@pytest.mark.parametrize("started", ["forked", pytest.param("--no-preload", marks=pytest.mark.long)])
def test_processes_are_named_after_their_place_in_the_run(tmp_path, started):
    """In ``ps -f`` and ``ps``; the environment that /proc shows is still the process's own."""
    script = tmp_path / "idle.py"
    script.write_text(
        "import os, pathlib\n"
        "me = pathlib.Path('/proc/self')\n"
        "words = [(me / name).read_bytes().split(b'\\0')[0].decode().strip() for name in ('cmdline', 'comm')]\n"
        "kept = b'KEPT=1' in (me / 'environ').read_bytes().split(b'\\0')\n"
        f"pathlib.Path({str(tmp_path)!r}, os.environ['MEGATRON_FT_GROUP']).write_text(repr((*words, kept)))\n"
    )
    extra = [started] if started.startswith("--") else []
    words = ("launch", "--groups", 2, "--run-dir", tmp_path / "run", *extra, script)
    subprocess.run(support.command(*words), cwd=support.ROOT, env=os.environ | {"KEPT": "1"}, timeout=support.TIMEOUT_S)
    for group in range(2):
        found = (tmp_path / str(group)).read_text()
        assert found == repr((f"megatron-ft: group {group} rank 0 idle.py", f"ft-g{group}-r0", True))
