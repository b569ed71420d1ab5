"""The core decides the records of real runs with real kills again in the same way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from megatron_ft.cluster.faults import kill
from megatron_ft.proof.replay import replay
from megatron_ft.record.protocol_trace import Record
from megatron_ft.run.injection_points import Breakpoint
from tests import support

STORIES = {
    "before the models are equal, then inside an all-reduce": [
        Breakpoint(0, 0, "connect"),
        Breakpoint(2, 3, "reduce", 3),
    ],
    "with three buckets final, then before the gate": [Breakpoint(1, 2, "bucket", 2), Breakpoint(3, 5, "gate")],
    "the writer inside its update, then the next one": [Breakpoint(0, 3, "update"), Breakpoint(1, 5, "bucket", 0)],
    "the second while it patches for the first": [Breakpoint(2, 3, "backward"), Breakpoint(1, 3, "patch")],
    "the second after its report on the first": [Breakpoint(2, 3, "reduce", 1), Breakpoint(0, 3, "recover")],
}


def killed(tmp_path, data_dir, holds: list[Breakpoint]) -> support.Run:
    run = support.start(tmp_path / "run", data_dir, holds)
    if begun := holds[0].step:
        # Otherwise group 0 may still be in the step before when the first one dies, and the second never comes there.
        support.wait_for_step(run, begun - 1)
    run.strike(*holds)
    run.check()
    return run


@pytest.mark.parametrize(
    "holds",
    support.first_of(STORIES, "the second after its report on the first"),
)
def test_core_decides_a_real_run_again(tmp_path, data_dir, holds):
    run = killed(tmp_path, data_dir, holds)
    command = [sys.executable, "tools/replay.py", str(run.directory), "--json"]
    done = subprocess.run(command, cwd=support.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{run.history}"
    told = json.loads(done.stdout)
    assert told["same"] and told["ended"] and not told["stopped"]
    kinds = [decision["kind"] for decision in told["decisions"]]
    assert all(kinds.count(kind) == len(run.events(kind)) for kind in ("view", "recovery", "step"))
    lost = {group for line in run.events("view") for group in line["lost"]}
    assert lost == {str(hold.group) for hold in holds}


ONE_BUCKET = """
import time
from megatron_ft.run.injection_points import InjectionPoints

reach = InjectionPoints.reach

def waits(self, point, step, bucket=None):
    reach(self, point, step, bucket)
    while (self._group, point, step, bucket) == (2, "reduce", 3, 0):
        time.sleep(1)  # until it is killed

InjectionPoints.reach = waits
"""
"""Group 2 begins to reduce bucket 0 and no other. Its training thread waits; if the thread were frozen, bucket 0 would
not finish."""


def test_a_replayed_run_has_every_kind_of_decision(tmp_path, data_dir):
    """State handed over, buckets kept, buckets reduced again, microbatches taken over: without all of these the other
    tests prove little.

    Group 1 has seen a bucket finished, and is held until group 2 is dead: otherwise it is possible that no group has
    seen one by then. And group 2 has not begun with the others, or all buckets may be finished by then.
    """
    first, witness = Breakpoint(0, 0, "connect"), Breakpoint(1, 3, "bucket", 0)
    script = support.changed_script(tmp_path / "train.py", ONE_BUCKET)
    run = support.start(tmp_path / "run", data_dir, [first, witness], script=script)
    run.strike(first)
    frozen = support.await_held(run, witness.group)
    kill.kill(run.directory, 2, "while the others reduce")
    os.kill(frozen, signal.SIGCONT)
    run.check()
    record = Record.load(run.directory)
    result = replay(record)
    assert not result.different and not result.stopped
    views = [line.view for line in record.views[1:]]
    recoveries = [line.fields for line in record.recoveries]
    assert any(view.source is not None and view.behind for view in views)
    assert any(view.final for view in views)
    assert any(line["state_from"] is not None for line in recoveries)
    assert any(line["buckets_kept"] and line["buckets_redone"] for line in recoveries)
    assert all(line["patched"] for line in recoveries)
