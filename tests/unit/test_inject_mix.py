"""``megatron-ft inject --mix`` on a run of some age with lost groups."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time

import pytest

from megatron_ft.host.forkserver import AGENT_VARIABLE
from megatron_ft.record import history
from megatron_ft.run import injection_points
from tests import support
from tests.stores import await_

AGE_S, LIVING = 25.0, (1, 3)
MIX = ("--mix", 3, "--seed", 2, "--every-s", 1000)


@pytest.fixture
def run_dir(tmp_path):
    """A run with four groups, two of them alive (waiting processes); this process is its agent."""
    own = {**os.environ, AGENT_VARIABLE: str(os.getpid())}
    ranks = {group: subprocess.Popen(["sleep", "600"], env=own) for group in LIVING}
    listed = [
        {
            "group": group,
            "position": 0,
            "incarnation": 0,
            "pid": rank.pid,
            "host": socket.gethostname(),
            "start": injection_points.start_of(rank.pid),
        }
        for group, rank in ranks.items()
    ]
    (tmp_path / "ranks.json").write_text(json.dumps(listed))
    (tmp_path / "config.json").write_text(json.dumps({"run_id": "run", "groups": 4, "ranks_per_group": 1}))
    history.append(tmp_path, "start", run_id="run")
    lines = history.read(tmp_path)
    (tmp_path / history.FILE).write_text(json.dumps(lines[0] | {"t": time.time() - AGE_S}) + "\n")
    history.append(tmp_path, "begin", steps=100)
    yield tmp_path
    for rank in ranks.values():
        rank.kill()
        rank.wait()


def test_times_count_from_now_targets_are_alive_and_a_restart_continues(run_dir):
    kept = run_dir / injection_points.DIRECTORY / "mix.3.2.1000.json"
    first = subprocess.Popen(support.command("inject", run_dir, *MIX), cwd=support.ROOT, stdout=subprocess.DEVNULL)
    await_(kept.exists, "the mix is drawn")
    first.kill()
    first.wait()
    drawn = json.loads(kept.read_text())["schedule"]
    for fault in drawn["faults"]:
        assert fault["after_s"] > AGE_S
        assert {fault.get("group"), *fault.get("groups", ())} - {None} <= set(LIVING)
    written = run_dir / "written.json"
    again = subprocess.Popen(support.command("inject", run_dir, *MIX, "--write", written), cwd=support.ROOT)
    await_(written.exists, "the second injector has its schedule")
    history.append(run_dir, "stop", reason="", exit_code=1)
    again.wait(support.TIMEOUT_S)
    assert json.loads(written.read_text()) == drawn
