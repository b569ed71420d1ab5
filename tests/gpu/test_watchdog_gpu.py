"""The hook on NCCL's real watchdog, with one GPU: a one-rank communicator behind a kernel that spins.

Each story runs in a process of its own, because the environment must be set before torch reads it, and because the test
is that the process survives.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_ft.run.collectives.nccl_watchdog import environment

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and dist.is_nccl_available()),
        reason="needs a CUDA device and a torch with NCCL; tests/unit/test_nccl_watchdog.py runs against a fake",
    ),
]

ROOT = Path(__file__).parent.parent.parent

COMMON = """
import json, os, time
from datetime import timedelta
import torch, torch.distributed as dist
from megatron_ft.run.collectives import flight_recorder
from megatron_ft.run.collectives.nccl_watchdog import abort_all, failure

STORE = dist.HashStore()
torch.cuda.set_device(0)

def build(name):
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=2)
    options.group_name, options.global_ranks_in_group = name, [0]
    return dist.ProcessGroupNCCL(dist.PrefixStore(name, STORE), 0, 1, options)

def total(backend):
    tensor = torch.ones(1000, device="cuda")
    backend.allreduce([tensor]).wait()
    torch.cuda.synchronize()
    return tensor.sum().item()

first = build("first")
answer = {"before": total(first)}
"""

TIMEOUT = """
torch.cuda._sleep(20_000_000_000)  # about 10 s: much longer than the timeout, and then the abort need not wait
tensor = torch.ones(1000, device="cuda")
work = first.allreduce([tensor])
"""

REMOTE_ERROR = """
# What the watchdog of a peer leaves in the group's store: its rank, an int.
dist.PrefixStore("first", STORE).set("remote_error:first", chr(1) + 3 * chr(0))
"""

AFTERWARDS = """
until = time.monotonic() + 60
while (found := failure(first)) is None and time.monotonic() < until:
    time.sleep(0.02)
answer["failure"] = found
answer["calls"] = [entry["profiling_name"] for entry in flight_recorder.entries(30)]
errors, answer["left"] = abort_all({"first": first}, deadline_s=120)
second = build("second")
answer["after"] = total(second)
answer["error_after"] = second.get_error().name
print("ANSWER " + json.dumps(answer), flush=True)
os._exit(0)
"""


def tell(story: str) -> dict:
    """Run a story in a process whose NCCL watchdog only reports; return its output."""
    env = {**os.environ, **environment(os.environ), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", COMMON + story + AFTERWARDS], env=env, capture_output=True, text=True, timeout=280
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    assert done.returncode == 0 and lines, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr[-6000:]}"
    return json.loads(lines[0].removeprefix("ANSWER "))


def check_everything_but_the_failure(answer: dict) -> None:
    assert answer["before"] == answer["after"] == 1000.0
    assert answer["left"] == [] and answer["error_after"] == "SUCCESS"


def test_a_collective_behind_a_spinning_kernel_is_a_timeout_and_the_process_goes_on():
    answer = tell(TIMEOUT)
    check_everything_but_the_failure(answer)
    assert answer["failure"] == ["timeout", "the NCCL watchdog reports TIMEOUT"]
    assert "nccl:all_reduce" in answer["calls"], answer["calls"]


def test_a_report_of_a_peer_is_a_remote_error_and_the_process_goes_on():
    answer = tell(REMOTE_ERROR)
    check_everything_but_the_failure(answer)
    assert answer["failure"][0] == "remote_error"
