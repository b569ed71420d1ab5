"""Mistakes of a user: one clear line, a non-zero exit code, no process left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from pathlib import Path

import pytest

from megatron_ft.host.forkserver import AGENT_VARIABLE
from megatron_ft.record import history
from megatron_ft.run.injection_points import Breakpoint
from tests import support
from tests.support import ft
from tools import proc

ABOUT_THE_STORE = re.compile(
    "control store .*a recovery waits for one|the control store answers again|goes on without the control store"
)


def launch(run_dir: Path, script: Path, *own: object, config: Path | None = None, groups: int = 2, extra=()) -> tuple:
    """Run the launcher to its end; return (exit code, its output on stderr)."""
    config = config or support.write_config(run_dir.with_suffix(".json"))
    words = ["launch", "--groups", groups, "--config", config, "--run-dir", run_dir, *extra, script, "--", *own]
    agent = support.Command(*words)
    done = agent.finish()
    assert not living_ranks(agent.process.pid)
    # On a busy machine the store may not answer for a while; the line that reports it is no mistake of the user.
    said = [line for line in done.stderr.splitlines() if not ABOUT_THE_STORE.search(line)]
    return done.returncode, "\n".join(said)


def living_ranks(agent: int) -> list[int]:
    """Return the processes whose environment names that agent: a forked rank has its own values in memory only."""
    return [pid for pid in proc.pids() if f"{AGENT_VARIABLE}={agent}" in proc.environment(pid)]


def script(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def one_line(stderr: str, *words: str) -> None:
    """Check that there is exactly one line, with every word, and no traceback."""
    lines = stderr.strip().splitlines()
    assert len(lines) == 1, stderr
    for word in words:
        assert word in lines[0], stderr


IDLE = "import megatron_ft\nmegatron_ft.init()\n"


def test_no_corpus(tmp_path):
    code, said = launch(tmp_path / "run", support.SCRIPT, "--data", tmp_path / "nothing")
    assert code == 2
    one_line(said, str(tmp_path / "nothing"), "megatron-ft prepare --out", "before the first step")


def test_empty_file(tmp_path):
    (tmp_path / "empty.txt").touch()
    done = ft("prepare", "--out", tmp_path / "out", "--text", tmp_path / "empty.txt")
    assert done.returncode == 2
    one_line(done.stderr, "empty.txt")
    assert not (tmp_path / "out" / "meta.json").exists()


def test_vocabulary_larger_than_the_text_allows(tmp_path):
    (tmp_path / "small.txt").write_text("a few words and no more " * 20)
    done = ft("prepare", "--out", tmp_path / "out", "--text", tmp_path / "small.txt", "--vocab-size", 40000)
    assert done.returncode == 2
    one_line(done.stderr, "40000", "--vocab-size")


def test_more_groups_than_the_batch_divides(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"train_batch_size": 6, "train_micro_batch_size_per_gpu": 2}))
    code, said = launch(tmp_path / "run", script(tmp_path / "s.py", IDLE), config=config, groups=4)
    assert code == 2
    one_line(said, "train_batch_size 6", "4 groups", "multiple of 8")
    assert not (tmp_path / "run").exists()


def test_a_port_in_use(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, said = launch(tmp_path / "run", script(tmp_path / "s.py", IDLE), extra=("--port", port))
    assert code == 2
    one_line(said, f"port {port} is in use", "--port")


def test_a_run_directory_that_holds_a_finished_run(reference, tmp_path):
    before = (reference.directory / history.FILE).read_bytes()
    done = ft(
        *("launch", "--groups", 2, "--config", support.write_config(tmp_path / "c.json")),
        *("--run-dir", reference.directory, script(tmp_path / "s.py", IDLE)),
    )
    assert done.returncode == 2
    one_line(done.stderr, "finished run", f"last step {support.STEPS - 1}", "--overwrite")
    assert (reference.directory / history.FILE).read_bytes() == before


def test_a_run_directory_whose_run_is_alive(tmp_path, data_dir):
    """The directory is refused even with --overwrite."""
    gate = support.Gate(tmp_path, 2)
    run = support.start(tmp_path / "run", data_dir, groups=2, script=gate.script)
    support.wait_for(lambda: gate.waiting(2) == 2, run)
    before = run.history
    extra = ("--overwrite", "--no-preload")
    code, said = launch(run.directory, gate.script, config=run.directory.with_suffix(".json"), extra=extra)
    assert code == 2 and run.history == before
    one_line(said, f"{run.directory} is in use by run", f"pid {run.process.pid} on {socket.gethostname()}", ", for ")
    assert "--overwrite" not in said
    support.kill([run.process.pid])


def test_a_script_that_raises_at_import(tmp_path):
    bad = script(tmp_path / "bad.py", "import sys\nimport no_such_module\n")
    code, said = launch(tmp_path / "run", bad)
    assert code == 1
    one_line(said, "bad.py", "ModuleNotFoundError", "no_such_module", "line 2")


@pytest.mark.long
def test_a_script_with_a_syntax_error(tmp_path):
    code, said = launch(tmp_path / "run", script(tmp_path / "bad.py", "def f(:\n"))
    assert code == 1
    one_line(said, "SyntaxError", "line 1")


def test_a_script_that_does_not_exist(tmp_path):
    code, said = launch(tmp_path / "run", tmp_path / "nope.py")
    assert code == 2
    one_line(said, "nope.py does not exist")


def test_a_script_that_ends_without_training(tmp_path):
    code, said = launch(tmp_path / "run", script(tmp_path / "s.py", IDLE))
    assert code == 1
    one_line(said, "ended by itself before the first step", "session.steps")


def test_a_script_that_skips_train_step(tmp_path):
    lazy = "import megatron_ft\nfor step in megatron_ft.init().steps(3):\n    pass\n"
    code, said = launch(tmp_path / "run", script(tmp_path / "s.py", lazy))
    assert code == 2
    one_line(said, "train_step")


def test_an_unknown_setting(tmp_path):
    config = support.write_config(tmp_path / "c.json", polcy="stacked_quota")
    code, said = launch(tmp_path / "run", script(tmp_path / "s.py", IDLE), config=config)
    assert code == 2
    one_line(said, "fault_tolerance.polcy", "did you mean 'policy'")


def test_an_unknown_tracker(tmp_path):
    code, said = launch(tmp_path / "run", script(tmp_path / "s.py", IDLE), extra=("--track", "tensorbord"))
    assert code == 2
    one_line(said, "tensorbord", "tensorboard")


DISAGREE = """
import os
import torch
import megatron_ft
session = megatron_ft.init()
model = torch.nn.Linear(4, 4)
engine = session.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, batch: model(batch).square().mean())
for step in session.steps({"0": 3, "1": OTHER}[os.environ["DIFFERS"]]):
    session.train_step(engine, lambda microbatch: torch.ones(2, 4))
"""


@pytest.mark.parametrize(
    ("differs", "other"), [("RANK", 2), pytest.param("MEGATRON_FT_GROUP", 4, marks=pytest.mark.long)]
)
def test_ranks_or_groups_that_disagree_on_the_number_of_steps_make_no_step(tmp_path, differs, other):
    path = script(tmp_path / "s.py", DISAGREE.replace("OTHER", str(other)).replace("DIFFERS", differs))
    code, said = launch(tmp_path / "run", path, extra=("--ranks-per-group", 1 + (differs == "RANK")))
    assert code == (3 if differs == "RANK" else 2) and "Traceback" not in said, said
    assert "step" not in {line["event"] for line in history.read(tmp_path / "run")}
    for word in ("number of steps (session.steps) is ", "trains with ", " of group 0 ", " 3 ", f" {other} "):
        assert word in " ".join(said.replace(";", " ").split()), said


def test_fewer_groups_than_the_least_stop_cleanly(tmp_path, data_dir):
    holds = [Breakpoint(1, 2, "backward"), Breakpoint(2, 4, "backward")]
    run = support.start(tmp_path / "run", data_dir, holds, min_groups=3)
    run.strike(holds[0])
    support.wait_for_step(
        run, 3
    )  # otherwise group 0 may still be in it when it hears of the second loss, and has to stop there
    run.strike(holds[1])
    said = run.finish()
    assert run.process.returncode == 3, said
    assert "min_groups is 3" in said
    assert [line["step"] for line in run.events("step")] == [0, 1, 2, 3]
    (stop,) = run.events("stop")
    assert "min_groups is 3" in stop["reason"]
    assert not living_ranks(run.process.pid)


PARENT = """
import multiprocessing, subprocess, time

multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,)).start()
subprocess.Popen(["sh", "-c", "sleep 1000 & wait"])
"""


def started_by(rank: int) -> list[int]:
    """Return the processes that a rank has started, and those that they have started."""
    return [pid for pid in proc.pids() if pid != rank and proc.group(pid) == rank]


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.long), signal.SIGINT])
def test_a_signal_to_the_agent_ends_every_rank(tmp_path, data_dir, number):
    """And what they have started, as it does that of a rank that was killed before."""
    parent = support.changed_script(tmp_path / "parent.py", PARENT)
    run = support.start(tmp_path / "run", data_dir, steps=100_000, script=parent)
    support.wait_for_step(run, 2)
    assert len(living_ranks(run.process.pid)) >= support.GROUPS
    ranks = {rank["group"]: rank["pid"] for rank in json.loads((run.directory / "ranks.json").read_text())}
    assert all(len(started_by(rank)) >= 3 for rank in ranks.values())
    os.kill(ranks[3], signal.SIGKILL)
    support.wait_for(lambda: run.events("fault") and not started_by(ranks[3]), run)
    assert len(started_by(ranks[2])) >= 3
    support.wait_for(lambda: run.events("step")[-1]["live"] == [0, 1, 2], run)
    run.process.send_signal(number)
    said = run.finish()
    assert run.process.returncode == 128 + number, said
    assert f"stopped by {number.name} after step" in said
    assert len(run.events("fault")) == 1 and not run.events("leave")
    assert not living_ranks(run.process.pid) and not any(map(started_by, ranks.values()))


def test_no_rank_survives_its_agent(tmp_path, data_dir):
    """Nor what it has started."""
    parent = support.changed_script(tmp_path / "parent.py", PARENT)
    run = support.start(tmp_path / "run", data_dir, steps=100_000, script=parent)
    support.wait_for_step(run, 2)
    pids = [rank["pid"] for rank in json.loads((run.directory / "ranks.json").read_text())]
    pids += [pid for rank in pids for pid in started_by(rank)]
    assert len(pids) >= 4 * support.GROUPS
    watches = [os.pidfd_open(pid) for pid in pids]
    run.process.kill()
    run.process.wait()
    support.await_ends(watches, "a rank outlived its agent")


def test_a_library_that_finds_no_world(tmp_path):
    own = "import torch\ntorch.distributed.init_process_group('gloo')\n"
    code, said = launch(tmp_path / "run", script(tmp_path / "s.py", IDLE + own))
    assert code == 1 and "call session.init_distributed() after megatron_ft.init()" in said.splitlines()[-1]


def test_a_scheduler_that_needs_a_metric(tmp_path):
    own = (
        "import torch\nmodel = torch.nn.Linear(1, 1)\noptimizer = torch.optim.SGD(model.parameters())\n"
        "scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)\n"
        "session.wrap(model, optimizer, lambda model, batch: None, scheduler)\n"
    )
    code, said = launch(
        tmp_path / "run",
        script(tmp_path / "s.py", IDLE.replace("megatron_ft.init", "session = megatron_ft.init") + own),
    )
    assert code == 2
    one_line(said, "ReduceLROnPlateau", "give another scheduler")


@pytest.mark.parametrize("tee", ["0", "none"])
def test_groups_that_fail_alike_show_one_traceback_that_begins_in_the_script(tee, tmp_path):
    """Which may be a module, here in the working directory."""
    script(tmp_path / "bad.py", "import sys\nraise ValueError(__name__, sys.argv[1:])")
    what = ["bad.py"] if tee == "0" else ["-m", "bad"]
    options = ("launch", "--groups", 3, "--run-dir", tmp_path / tee, "--tee", tee)
    shown = support.Command(*options, *what, "--", "--steps", 3, cwd=tmp_path).finish().stdout
    assert shown.count("Traceback") == 1 and 'bad.py", line 2' in shown
    assert "rank_bootstrap" not in shown and "runpy" not in shown
    fault = next(line for line in history.read(tmp_path / tee) if line["event"] == "fault")
    assert fault["detail"] == f"{what[-1]} raised ValueError: ('__main__', ['--steps', '3']) (line 2)"
