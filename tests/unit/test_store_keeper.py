"""An agent's view of its store's process: one that cannot serve is seen at once, with its own words."""

import json
import subprocess
import sys

import pytest

PROGRAM = """
import json, os, pathlib, sys
import setproctitle
from megatron_ft.agent import store_keeper
from megatron_ft.errors import LaunchError

def fail(error):
    raise error

def outcome(place, name, error):
    setattr(place, name, lambda *_: fail(error))
    try:
        keeper = store_keeper.StoreSupervisor("127.0.0.1", 0, pathlib.Path(sys.argv[1]))
    except LaunchError as refused:
        return str(refused)
    keeper.close()
    return "serves"

for case in (
    (store_keeper.store, "serve_on", LaunchError("no interface")),
    (store_keeper.lifeline, "end_with", OSError("no prctl")),
    (setproctitle, "setproctitle", OSError()),
):
    if os.fork() == 0:  # as the agent, each has one thread, and breaks its own modules
        print(json.dumps(outcome(*case)), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """An agent's words where something raises in the processes that it starts. An agent forks, so it has a process."""
    program = [sys.executable, "-c", PROGRAM, tmp_path_factory.mktemp("run")]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120)
    return dict(zip(("store", "keeper", "title"), map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize(
    ("broken", "words"),
    [("store", "it served: no interface"), ("keeper", "it served: raised OSError: no prctl (<string>, line")],
)
def test_a_store_that_ends_before_it_serves_is_noticed_at_once_with_its_words(outcomes, broken, words):
    assert words in outcomes[broken]


def test_a_title_that_cannot_be_set_is_no_reason_to_have_no_store(outcomes):
    assert outcomes["title"] == "serves"


WITH_CHECKPOINTS = """
import pathlib, sys
from megatron_ft.agent import store_keeper
from megatron_ft.utils import directory_lock

held = directory_lock.lock(pathlib.Path(sys.argv[1], "saved"), "run")
keeper = store_keeper.StoreSupervisor("127.0.0.1", 0, pathlib.Path(sys.argv[1]))
print(pathlib.Path(f"/proc/{keeper.pid}/cmdline").read_text())
keeper.close()
held.release()
"""


def test_beside_the_beat_of_the_checkpoints_lock_the_keeper_is_forked_too(tmp_path):
    """A new interpreter would import torch before there is a store."""
    program = [sys.executable, "-c", WITH_CHECKPOINTS, tmp_path]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("megatron-ft: keeper of the control"), done.stderr
