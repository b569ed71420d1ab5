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

from megatron_ft.collectives.nccl_watchdog import environment

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and dist.is_nccl_available()),
        reason="needs a CUDA device and a torch with NCCL; tests/unit/test_nccl_watchdog.py runs against a fake",
    ),
]

ROOT = Path(__file__).parent.parent.parent

COMMON = """
import json, os, threading
from datetime import timedelta
import torch, torch.distributed as dist
from megatron_ft.collectives.nccl_watchdog import Watchdog, abort

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

def on_event(event):
    EVENTS.append(event)
    HEARD.set()

EVENTS, HEARD = [], threading.Event()
first = build("first")
answer = {"before": total(first)}
watchdog = Watchdog(7, {"outer": first}, on_event, timeout_s=600)
"""

TIMEOUT = """
torch.cuda._sleep(20_000_000_000)  # about 10 s: much longer than the timeout, and then the abort need not wait
tensor = torch.ones(1000, device="cuda")
work = first.allreduce([tensor])
watchdog.watch(work, "bucket 0")
"""

REMOTE_ERROR = """
# What the watchdog of a peer leaves in the group's store: its rank, an int.
dist.PrefixStore("first", STORE).set("remote_error:first", chr(1) + 3 * chr(0))
"""

AFTERWARDS = """
answer["heard"] = HEARD.wait(60)
answer["closed"] = watchdog.close(10)
answer["events"] = [vars(event) for event in EVENTS]
answer["detail"] = abort(first, deadline_s=120)
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


def check_everything_but_the_event(answer: dict) -> None:
    assert answer["before"] == answer["after"] == 1000.0
    assert answer["heard"] and answer["closed"] and len(answer["events"]) == 1
    # torch reports an error when the abort takes longer than the group's timeout (2 s), but returns only when it is done.
    assert "left behind" not in answer["detail"]
    assert answer["error_after"] == "SUCCESS"


def test_a_collective_behind_a_spinning_kernel_is_a_timeout_and_the_process_goes_on():
    answer = tell(TIMEOUT)
    check_everything_but_the_event(answer)
    [event] = answer["events"]
    assert (event["kind"], event["epoch"]) == ("timeout", 7)
    assert "the NCCL watchdog reports TIMEOUT" in event["message"]
    assert any("nccl:all_reduce" in words for words in event["collectives"]), event["collectives"]


def test_a_report_of_a_peer_is_a_remote_error_and_the_process_goes_on():
    answer = tell(REMOTE_ERROR)
    check_everything_but_the_event(answer)
    [event] = answer["events"]
    assert event["kind"] == "remote_error"
