"""``recovery.py --hogs MINUTES``: count the groups that are given up for nothing on a busy machine.

Four groups train the example with default settings while two processes burn CPU, on one host and, where network namespaces
can be made, on four (there, heartbeats can be late as well). Nothing is injected, so every group that leaves is a mistake.
Then torchft trains its tiny model beside the hogs with ever tighter settings: each attempt that is discarded, or committed
without all replicas, is a false alarm. Its tightest usable settings are those without any.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import common
import recovery_ours
import recovery_torchft

from megatron_ft.record import history
from tests import netlab

HOGS = 2
TORCHFT_MS = (1000, 500, 200)
TORCHFT_MINUTES = 3.0  # at most, each
_ENDLESS = 1_000_000


def main(minutes: float, no_hosts: str, beside: bool) -> None:
    """Run the benchmark. ``beside``: torchft has its turn, too."""
    data = common.prepare_data(common.ROOT / "data" / "sotu")
    results = {"one host": run(minutes, data, None)}
    if no_hosts:
        print(f"four hosts: skipped, {no_hosts}")
    else:
        lab = netlab.Lab(recovery_ours.GROUPS)
        try:
            results["four hosts"] = run(minutes, data, lab)
        finally:
            lab.close()
    for where, result in results.items():
        word = "ok  " if result["steps"] and not result["evictions"] else "MISS"
        print(
            f"{word} {where}: {result['evictions']} evictions in {result['minutes']:.1f} min and {result['steps']} steps "
            f"with {HOGS} hogs, load average up to {result['load_largest']:.1f}"
        )
    limits = TORCHFT_MS if beside else ()
    torchft = {str(limit): endure(min(minutes, TORCHFT_MINUTES), limit) for limit in limits}
    for limit, result in torchft.items():
        print(f"     torchft, {limit} ms: {result['false_alarms']} false alarms in {result['attempts']} attempts")
    found = {"hogs": HOGS, "skipped": no_hosts, "results": results, "torchft_by_ms": torchft}
    print(f"raw numbers in {common.save('hogs', found)}")


@contextmanager
def hogs():
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(HOGS)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def endure(minutes: float, limit_ms: int) -> dict:
    with tempfile.TemporaryDirectory() as directory, hogs():
        try:
            found = recovery_torchft.endure(Path(directory), 4, recovery_torchft.tight(limit_ms), minutes)
        except RuntimeError as error:  # a replica ended, or never trained
            found = {"attempts": 0, "false_alarms": None, "error": str(error)}
        return {**found, "load": os.getloadavg()[0]}


def run(minutes: float, data: Path, lab) -> dict:
    """Make one run beside the hogs; return what its record shows."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        config = directory / "config.json"
        config.write_text(json.dumps({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4}))
        script = common.ROOT / "examples" / "pretrain_gpt" / "train.py"
        job = [str(script), "--", "--data", str(data), "--steps", str(_ENDLESS)]
        loads = []
        with hogs():
            agents = recovery_ours.launch(directory / "run", config, job, lab)
            try:
                deadline = time.monotonic() + 60 * minutes
                while time.monotonic() < deadline and all(agent.poll() is None for agent in agents):
                    time.sleep(1)
                    loads.append(os.getloadavg()[0])
                lines = history.read(directory / "run")  # before it is stopped: that is no eviction
            finally:
                recovery_ours.stop(agents)
        return judge(lines, loads, config.with_suffix(".log").read_text())


def judge(lines: list[dict], loads: list[float], log: str) -> dict:
    steps = common.of(lines, "step")
    lost = [view["lost"] for view in common.of(lines, "view") if view["lost"]]
    if not steps:
        print(log[-4000:], file=sys.stderr)
    return {
        "minutes": (lines[-1]["t"] - lines[0]["t"]) / 60 if lines else 0.0,
        "steps": len(steps),
        "evictions": sum(map(len, lost)),
        "why": lost,
        "silences": len(common.of(lines, "silence")),
        "longest_step_s": max((step["duration_s"] for step in steps), default=None),
        "load_largest": max(loads),
    }
