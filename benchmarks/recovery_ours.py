"""One trial of ``recovery.py`` with this project: run four groups, strike one of them, read the cost from the run record.

Started by the launcher, this file is the training script as well.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from signal import Signals

import common
import recovery_model
import torch
from common import of

from megatron_ft.cluster.faults import kill
from megatron_ft.record import history
from megatron_ft.record.run_record import RunRecord

GROUPS = 4
WARMUP = 10
TIMEOUT_S = 120.0
_PORT = 29500
_SETTINGS = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
_SETTINGS["fault_tolerance"] = {"rejoin": {"enabled": False}}
"""A lost group would start again on the survivors' own cores; torchft has nothing that starts it again."""


def trial(directory: Path, fault: str, megabytes: int, victim: int, seed: int, lab=None) -> dict:
    """Strike with one fault (``kill``, ``stop``, ``cut``) in the middle of training; return its cost. ``lab``: one
    host per group."""
    run_dir = directory / "run"
    steps = WARMUP + (60 if megabytes < 16 else 15)
    with _running(directory, run_dir, [__file__, "--", str(megabytes), str(steps)], lab) as agent:
        _await(run_dir, agent, lambda lines: any(line["step"] >= WARMUP for line in of(lines, "step")))
        durations = [line["duration_s"] for line in of(history.read(run_dir), "step")]
        usual = statistics.median_high(durations)
        time.sleep(random.Random(seed).uniform(0, 2 * usual))
        _strike(run_dir, fault, victim, lab)
        _await(run_dir, agent, lambda lines: _recovered(lines) is not None)
        _await(run_dir, agent, lambda lines: of(lines, "end"))
        lines = history.read(run_dir)
        struck = of(lines, "inject")[0]["t"]
        recovery, committed = _recovered(lines)
        before = [line["t"] for line in of(lines, "step") if line["step"] == recovery["step"] - 1]
        patch_s = patch_seconds(run_dir, recovery["step"])
        lost = [group for view in of(lines, "view") for group in view["lost"]]
        return {
            "group": victim,
            "step": recovery["step"],
            "fault_to_commit_s": committed["t"] - struck,
            "patch_s": patch_s,
            "beyond_patch_s": committed["t"] - struck - patch_s,
            "stall_s": recovery["stall_s"],
            "delay_s": committed["t"] - before[0] - usual,
            "microbatches": committed["microbatches"],
            "of_microbatches": GROUPS,
            "lost": sorted(set(map(int, lost))),
            "fault_free_step_s": usual,
        }


def patch_seconds(run_dir: Path, step: int) -> float:
    """Time the slowest survivor spent on patched microbatches of a step."""
    record = RunRecord.load(run_dir)
    return max(
        sum(span.end - span.start for span in record.spans(rank) if (span.phase, span.step) == ("patch", step))
        for rank in record.timelines
    )


def launch(run_dir: Path, config: Path, job: list[str], lab=None) -> list[subprocess.Popen]:
    """Start the job: one agent, or one on each host of the lab."""
    output = config.with_suffix(".log").open("w")
    options = {"cwd": common.ROOT, "env": common.environment(), "stdout": output, "stderr": subprocess.STDOUT}
    if lab is None:
        return [subprocess.Popen(common.launch(GROUPS, config, run_dir, *job), **options)]
    agents = []
    for host in lab.hosts:
        where = ["--hosts", GROUPS, "--host-rank", host, "--store", f"{lab.address(0)}:{_PORT}"]
        command = common.launch(GROUPS, config, run_dir, *where, *job)
        agents.append(subprocess.Popen(lab.inside(host, command), **options))
    return agents


def stop(agents: list[subprocess.Popen]) -> None:
    """End what still runs; an agent takes its ranks along when it is asked to end."""
    for agent in agents:
        agent.terminate()
    for agent in agents:
        try:
            agent.wait(timeout=10)
        except subprocess.TimeoutExpired:
            agent.kill()
            agent.wait()


@contextmanager
def _running(directory: Path, run_dir: Path, job: list[str], lab):
    config = directory / "config.json"
    config.write_text(json.dumps(_SETTINGS))
    agents = launch(run_dir, config, job, lab)
    try:
        yield agents[0]
    except Exception:
        print(config.with_suffix(".log").read_text()[-4000:], file=sys.stderr)
        raise
    finally:
        stop(agents)


def _await(run_dir: Path, agent: subprocess.Popen, condition) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        ended = agent.poll() is not None  # before reading: its last lines count
        if condition(history.read(run_dir)):
            return
        if ended or time.monotonic() > deadline:
            raise RuntimeError(f"the run in {run_dir} {'ended' if ended else 'went on'} without what was waited for")
        time.sleep(0.005)


def _strike(run_dir: Path, fault: str, victim: int, lab) -> None:
    """Strike. The ``inject`` line of the record is written right before the fault."""
    if fault == "cut":
        history.append(
            run_dir, "inject", group=victim, position=0, pid=None, signal=None, point="its host's link is cut"
        )
        lab.cut(victim)
    else:
        number = {"kill": Signals.SIGKILL, "stop": Signals.SIGSTOP}[fault]
        kill.kill(run_dir, victim, "in the middle of training", number)


def _recovered(lines: list[dict]) -> tuple[dict, dict] | None:
    """Return the first recovery, and the commit of the step that it went on with."""
    for recovery in of(lines, "recovery")[:1]:
        for line in of(lines, "step"):
            if line["step"] == recovery["step"]:
                return recovery, line
    return None


if __name__ == "__main__":
    recovery_model.train(int(sys.argv[2]), int(sys.argv[1]), partial(torch.optim.SGD, lr=recovery_model.LEARNING_RATE))
