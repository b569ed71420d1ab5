"""The file system is away for 120 s under a run with default settings.

    python benchmarks/storage_outage.py [--away 120] [--groups 3]

Each call of the dataset takes a shared lock of a file. While storage is "away", this program holds the exclusive one, and
the call blocks in the kernel. Three runs of one-rank groups: storage is away for all groups of one host, for all groups of
two hosts (two agents on this machine), and for one group alone, which shows that 120 s are longer than what a rank is
allowed. Storage goes away after ``STEPS`` steps, and comes back for as many. Compute is a sleep.

Writes results/storage_outage.json, and ends with code 1 when a run that lost the storage of all groups has lost a group, a
step or a microbatch, or has other losses than a run that was not disturbed.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common

from megatron_ft.record import history

STEPS, MICROBATCHES, COMPUTE_S = 40, 2, 0.1
PATIENCE_S = 60.0
DISK = "STORAGE_OUTAGE_DISK"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--away", type=float, default=120.0, help="seconds")
    parser.add_argument("--groups", type=int, default=3)
    options = parser.parse_args()
    load, every = os.getloadavg()[0], list(range(options.groups))
    undisturbed = play(options.groups, 1, [], 0.0)
    cases = {
        "one host, all groups": play(options.groups, 1, every, options.away),
        "two hosts, all groups": play(2, 2, [0, 1], options.away),
        "one host, group 1 alone": play(options.groups, 1, [1], options.away),
    }
    wrong = []
    for name, case in list(cases.items())[:2]:
        case["as_if_nothing_had_happened"] = not (found := _violations(case, options.away))
        wrong += [f"{name}: {what}" for what in found]
    if cases["one host, all groups"]["losses"] != undisturbed["losses"]:
        wrong.append("one host, all groups: the losses are not those of the run that was not disturbed")
    if not any(1 in view["lost"] for view in cases["one host, group 1 alone"]["views"]):
        wrong.append("one group alone was not given up: the outage was shorter than the limit")
    about = {"away_s": options.away, "settings": "defaults", "steps": 2 * STEPS, "violations": wrong}
    about |= {"load_average_1m_before": load, "load_average_1m_after": os.getloadavg()[0]}
    print(common.save("storage_outage", {**about, "cases": {"undisturbed": undisturbed, **cases}}))
    print("\n".join(wrong))
    return 1 if wrong else 0


def play(groups: int, hosts: int, struck: list[int], away_s: float) -> dict[str, Any]:
    """Make one run; the storage of the groups ``struck`` is away for ``away_s``."""
    with tempfile.TemporaryDirectory() as directory:
        here = Path(directory)
        for group in range(groups):
            (here / f"disk-{group}").touch()
        port = common.free_port()
        agents = [_launch(here, groups, hosts, host, port) for host in range(hosts)]
        try:
            tail, lines = history.Tail(here / "run"), []

            def made() -> int:
                lines.extend(tail.each())
                return sum(line["event"] == "step" for line in lines)

            _until(lambda: made() >= STEPS, agents, here)
            disks = [(here / f"disk-{group}").open("r+") for group in struck]
            for disk in disks:
                fcntl.flock(disk, fcntl.LOCK_EX)
            began = time.time()
            time.sleep(away_s if struck else 0.0)
            for disk in disks:
                disk.close()
            back = time.time()
            _until(lambda: made() < 0 or any(line["event"] == "end" for line in lines), agents, here)
            codes = [agent.wait(PATIENCE_S) for agent in agents]
            made()
        finally:
            for agent in agents:
                agent.kill()
                agent.wait()
        return _row(lines, codes, began, back, groups)


def _launch(here: Path, groups: int, hosts: int, host: int, port: int) -> subprocess.Popen:
    settings = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": MICROBATCHES}
    (here / "config.json").write_text(json.dumps(settings))
    where: list[object] = []
    if hosts > 1:
        where = ["--hosts", hosts, "--host-rank", host, "--address", f"127.0.0.{host + 1}"]
        where += ["--store", f"127.0.0.1:{port}"]
    with (here / f"log-{host}").open("wb") as log:
        return subprocess.Popen(
            common.launch(groups, here / "config.json", here / "run", *where, __file__, "--", "train"),
            cwd=common.ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, DISK: str(here), "OMP_NUM_THREADS": "1"},
        )


def _until(condition: Callable[[], bool], agents: list[subprocess.Popen], here: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline or any(agent.poll() not in (None, 0) for agent in agents):
            logs = "\n".join(path.read_text() for path in [*here.glob("log-*"), *here.glob("run/logs/*")])
            sys.exit(f"the run does not get on:\n{logs[-5000:]}")
        time.sleep(0.05)


def _row(lines: list[dict], codes: list[int], began: float, back: float, groups: int) -> dict[str, Any]:
    steps = [line for line in lines if line["event"] == "step"]
    sides = {
        "before": [line["duration_s"] for line in steps if line["t"] < began],
        "after": [line["duration_s"] for line in steps if line["t"] - line["duration_s"] > back],
    }
    views = [line for line in lines if line["event"] == "view"]
    return {
        "exit_codes": codes,
        "away_s": round(back - began, 3),
        "longest_step_s": max(line["duration_s"] for line in steps),
        "median_step_s": {name: round(statistics.median(times), 4) for name, times in sides.items() if times},
        "steps_made": len(steps),
        "microbatches": sorted({line["microbatches"] for line in steps}),
        "expected_microbatches": groups * MICROBATCHES,
        "views": [
            {"after_s": round(line["t"] - began, 3), "live": line["live"], "lost": list(map(int, line["lost"]))}
            for line in views
        ],
        "faults": [line for line in lines if line["event"] == "fault"],
        "stalls": [line for line in lines if line["event"] == "stall"],
        "losses": [line["loss"] for line in steps],
    }


def _violations(case: dict[str, Any], away_s: float) -> list[str]:
    found = [f"exit codes {case['exit_codes']}"] if any(case["exit_codes"]) else []
    found += [f"views {case['views']}"] if len(case["views"]) > 1 else []
    found += [f"faults {case['faults']}"] if case["faults"] else []
    found += [f"{case['steps_made']} steps"] if case["steps_made"] != 2 * STEPS else []
    found += ["microbatches"] if case["microbatches"] != [case["expected_microbatches"]] else []
    return found + (["no step was held"] if case["longest_step_s"] < 0.9 * away_s else [])


def train() -> None:
    import recovery_model
    import torch

    import megatron_ft

    session = megatron_ft.init(seed=1)
    model = recovery_model.build(1)
    engine = session.wrap(model, torch.optim.Adam(model.parameters(), lr=1e-6), recovery_model.slowly(COMPUTE_S))
    disk = (Path(os.environ[DISK]) / f"disk-{session.group}").open()

    def read(number: Any) -> torch.Tensor:
        fcntl.flock(disk, fcntl.LOCK_SH)
        fcntl.flock(disk, fcntl.LOCK_UN)
        return recovery_model.batch(*number)

    for _ in session.steps(2 * STEPS):
        session.train_step(engine, read)


if __name__ == "__main__":
    train() if sys.argv[1:2] == ["train"] else sys.exit(main())
