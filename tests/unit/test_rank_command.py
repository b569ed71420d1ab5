"""What a rank runs: a script, a module, or a script of Megatron-LM."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from megatron_ft import cli
from megatron_ft.config import rank_command
from megatron_ft.errors import LaunchError
from megatron_ft.host.forkserver import AGENT_VARIABLE
from tests import support


@pytest.fixture
def jobs(tmp_path, monkeypatch):
    """A package in the working directory, whose import fails; directories without __init__.py are packages, too."""
    monkeypatch.chdir(tmp_path)
    for place in ("jobs", "jobs/gpt", "plain", "plain/inner"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "train.py").write_text("raise SystemExit(1)")
    for place in ("jobs", "jobs/gpt"):
        (tmp_path / place / "__init__.py").write_text("raise SystemExit(1)")
    (tmp_path / "jobs/gpt/__main__.py").write_text("")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    return tmp_path


@pytest.mark.parametrize(
    ("module", "file"),
    [
        ("jobs.train", "jobs/train.py"),
        ("jobs.gpt.train", "jobs/gpt/train.py"),
        ("jobs.gpt", "jobs/gpt/__main__.py"),
        ("plain.train", "plain/train.py"),
        ("plain.inner.train", "plain/inner/train.py"),
    ],
)
def test_a_module_is_found_without_running_anything(module, file, jobs):
    command = rank_command.of(module, ["--steps", "3"], module=True)
    rank_command.check(command)
    assert rank_command.file_of(command) == str(jobs / file)
    assert rank_command.shown(command) == module
    assert rank_command.launch_words(command) == ["-m", "--", module, "--steps", "3"]


@pytest.mark.parametrize("module", ["jobs", "jobs.none", "jobs.train.more", "none.train", "plain"])
def test_a_module_that_cannot_be_run_is_refused(module, jobs):
    with pytest.raises(LaunchError, match=f"^module {re.escape(module)} is neither in this directory"):
        rank_command.check(["-m", module])


def test_a_script_of_megatron_lm_that_would_train_alone_in_each_rank_is_refused(tmp_path):
    script = tmp_path / "pretrain_gpt.py"
    script.write_text("import torch\nfrom megatron.training import pretrain\n")
    with pytest.raises(LaunchError, match="start it with launch --megatron-lm"):
        rank_command.check(rank_command.of(str(script), []))
    rank_command.check(rank_command.of(str(script), [], megatron_lm=True))
    script.write_text("from megatron.training import get_args\nimport megatron_ft\n")
    rank_command.check(rank_command.of(str(script), []))


def test_a_script_of_megatron_lm_is_the_one_that_messages_name(jobs):
    command = rank_command.of("jobs/train.py", ["--lr", "1"], megatron_lm=True)
    rank_command.check(command)
    assert (rank_command.file_of(command), rank_command.shown(command)) == ("jobs/train.py", "train.py")
    with pytest.raises(LaunchError, match=r"^script jobs/none.py does not exist"):
        rank_command.check(rank_command.of("jobs/none.py", [], megatron_lm=True))


@pytest.mark.parametrize(("more", "said"), [("-m", "-m and --megatron-lm cannot"), ("--megatron", "not allowed with")])
def test_what_excludes_an_unchanged_script(more, said, capsys):
    words = ["launch", "--groups", "2", "--run-dir", "x", "--megatron-lm", more, "train.py"]
    try:
        assert cli.main(words) == 2
    except SystemExit as refused:
        assert refused.code == 2
    assert said in capsys.readouterr().err


UPLOADS = """
import multiprocessing
from pathlib import Path


def upload():
    Path("model").write_text(str(sum(range(10_000_000))))


multiprocessing.get_context("fork").Process(target=upload).start()
"""


def test_a_rank_that_ends_well_waits_for_what_its_script_has_not_waited_for(tmp_path):
    """As Python does; what is left then ends with the rank."""
    (tmp_path / "train.py").write_text(UPLOADS)
    env = {name: value for name, value in os.environ.items() if name != AGENT_VARIABLE}
    command = [sys.executable, "-m", "megatron_ft.host.rank_bootstrap", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, env=env, timeout=support.TIMEOUT_S, start_new_session=True)
    assert done.returncode == 0 and (tmp_path / "model").read_text() == "49999995000000"
