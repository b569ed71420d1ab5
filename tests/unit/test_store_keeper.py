"""An agent's view of its store's process: one that cannot serve is seen at once, with its own words."""

import json
import subprocess
import sys

import pytest

PROGRAM = """
import json, os, pathlib, sys
import setproctitle
from megatron_ft.host import store_keeper
from megatron_ft.errors import LaunchError
from megatron_ft.utils import directory_lock

run_dir = pathlib.Path(sys.argv[1])

def fail(error):
    raise error

def outcome(place, name, error):
    setattr(place, name, lambda *_: fail(error))
    try:
        keeper = store_keeper.StoreSupervisor("127.0.0.1", 0, run_dir)
    except LaunchError as refused:
        return str(refused)
    keeper.close()
    return "serves"

def beside_a_lock():
    held = directory_lock.lock(run_dir / "saved", "run")
    keeper = store_keeper.StoreSupervisor("127.0.0.1", 0, run_dir)
    title = pathlib.Path(f"/proc/{keeper.pid}/cmdline").read_text()
    keeper.close()
    held.release()
    return title

for case in (
    lambda: outcome(store_keeper.store, "serve_on", LaunchError("no interface")),
    lambda: outcome(store_keeper.lifeline, "end_with", OSError("no prctl")),
    lambda: outcome(setproctitle, "setproctitle", OSError()),
    beside_a_lock,
):
    if os.fork() == 0:  # as the agent, each has one thread, and breaks its own modules
        print(json.dumps(case()), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """An agent's words where something raises in the processes that it starts. An agent forks, so it has a process."""
    program = [sys.executable, "-c", PROGRAM, tmp_path_factory.mktemp("run")]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120)
    cases = ("store", "keeper", "title", "beside a lock")
    return dict(zip(cases, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize(
    ("broken", "words"),
    [("store", "it served: no interface"), ("keeper", "it served: raised OSError: no prctl (<string>, line")],
)
def test_a_store_that_ends_before_it_serves_is_noticed_at_once_with_its_words(outcomes, broken, words):
    assert words in outcomes[broken]


def test_a_title_that_cannot_be_set_is_no_reason_to_have_no_store(outcomes):
    assert outcomes["title"] == "serves"


def test_beside_the_beat_of_the_checkpoints_lock_the_keeper_is_forked_too(outcomes):
    """A new interpreter would import torch before there is a store."""
    assert outcomes["beside a lock"].startswith("megatron-ft: keeper of the control")
