"""``megatron-ft qualify`` on this machine's CPU: the whole command, a check that fails, and its end by SIGKILL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from megatron_ft.cluster.qualify.outcomes import CHECKS, FAILED, NOT_HERE, PROVEN
from tests import support

WHOLE_S = 600.0
"""The command takes a minute on two quiet cores, and other tests use them as well."""
NO_TRAINING = """
import sys
from megatron_ft.cluster.qualify import host_part, training_checks
training_checks.TrainingChecks.run = lambda self, qualification: qualification.skip("training", "left out by the test")
"""
WRONG_SUM = """
import runpy
from megatron_ft.run.collectives.gloo_communicator import GlooCommunicator
right = GlooCommunicator._all_reduce
def wrong(self, tensor):
    work = right(self, tensor)
    if self._place == 1 and tensor.numel() > 1 << 20:
        work.wait()
        tensor[tensor.numel() // 2] += 1
    return work
GlooCommunicator._all_reduce = wrong
runpy.run_module("megatron_ft.cluster.qualify.member_process", run_name="__main__")
"""


@pytest.fixture
def qualify():
    started: list[subprocess.Popen] = []

    def start(*options: object, change: str = "", **env: str) -> subprocess.Popen:
        started.append(command(options, change, env))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def command(options: Sequence[object], change: str, env: Mapping[str, str]) -> subprocess.Popen:
    code = f"{change}\nfrom megatron_ft.cli import run_and_exit\nrun_and_exit()"
    words = [sys.executable, "-c", code, "qualify", "--gpus", "0", *map(str, options)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(words, cwd=support.ROOT, env={**os.environ, **env}, **pipes)


@pytest.mark.long
@pytest.mark.timeout(WHOLE_S)
def test_every_check_is_listed_and_none_fails_on_a_cpu(tmp_path, qualify):
    process = qualify("--json", "-", TMPDIR=str(tmp_path))
    output, errors = process.communicate(timeout=WHOLE_S - 20)
    document = json.loads(output)
    assert process.returncode == 0, f"{document['verdict']}\n{errors}\n{output}"
    assert document["schema"] == 1 and document["failed"] == [] and document["groups"] == 3
    assert document["command"][0] == "megatron-ft" and document["hosts"][0]["torch"] and document["seconds"] > 0
    checks = {row["name"]: row for row in document["checks"]}
    assert list(checks) == list(CHECKS)
    assert {name for name, row in checks.items() if row["outcome"] == NOT_HERE} == {
        *("environment.gpus", "environment.nccl", "environment.watchdog", "training.memory"),
        *(name for name in CHECKS if name.startswith("nccl.")),
    }
    assert checks["nccl.init"]["reason"] == "no GPU" and checks["environment.communicator"]["reason"].startswith(
        "gloo: "
    )
    assert all(row["outcome"] in (PROVEN, NOT_HERE) and row["reason"] for row in checks.values())
    numbers = {(name, one["what"]): one["value"] for name, row in checks.items() for one in row["measured"]}
    assert numbers["gloo.all_reduce", "bus bandwidth"] > 0 and numbers["training.losses", "largest difference"] <= 1e-5
    assert list(tmp_path.glob("megatron-ft-*")) == [], "nothing is left"


@pytest.mark.long
@pytest.mark.timeout(WHOLE_S)
def test_a_sum_that_is_wrong_fails_its_check_and_the_command(tmp_path, qualify):
    member = tmp_path / "member.py"
    member.write_text(WRONG_SUM)
    change = f"{NO_TRAINING}host_part.MEMBER = [sys.executable, {str(member)!r}]"
    process = qualify("--json", tmp_path / "out.json", change=change, COLUMNS="300", TMPDIR=str(tmp_path))
    output, errors = process.communicate(timeout=WHOLE_S - 20)
    assert process.returncode == 1, output + errors
    document = json.loads((tmp_path / "out.json").read_text())
    (check,) = [row for row in document["checks"] if row["name"] == "gloo.all_reduce"]
    assert check["outcome"] == FAILED and check["reason"] == "wrong sums: group 1: 1 of 4194304"
    assert check["reason"] in output and output.strip().splitlines()[-1] == document["verdict"]
    assert "gloo.all_reduce" in document["failed"] and "gloo.init" not in document["failed"]


@pytest.mark.long
def test_its_processes_end_when_it_is_killed(tmp_path, qualify):
    process = qualify(change=NO_TRAINING, TMPDIR=str(tmp_path))
    try:
        found: list[int] = []
        deadline = time.monotonic() + support.TIMEOUT_S
        while not found and time.monotonic() < deadline:
            found = [pid for pid in children(process.pid) if b"member_process" in cmdline(pid)]
            time.sleep(0.02)
        assert found
        ends = [os.pidfd_open(pid) for pid in found]
    finally:
        process.kill()
    support.await_ends(ends, "a process is left")


def children(pid: int) -> list[int]:
    return [int(child) for task in Path(f"/proc/{pid}/task").glob("*/children") for child in task.read_text().split()]


def cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
