"""Ranks over many kills and returns: memory, threads, open descriptors and the time of a step.

    python benchmarks/soak.py [--kills 200] [--groups 4]

A real run of one-rank groups with an embedded store. All but group 0 are killed with SIGKILL in turn, each when it has
been back for long enough to be started again at once. Before each kill, with all groups there, the process of group 0,
which is never killed, and the agent are looked at; ``step_s`` is the median of the last 50 steps with all groups. Compute
is a sleep, so that a step's time shows what the layer adds. Writes results/soak.json and results/soak.png.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import common

from megatron_ft.cluster.faults import kill as inject
from megatron_ft.record import history

MEGABYTES, COMPUTE_S = 1, 0.03
STEPS = 50
WELL = 4.0
"""A group that was a member for this multiple of its return time is started again without a pause
(``core.lifecycle.restart_policy``)."""
PATIENCE_S = 120.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--groups", type=int, default=4)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as directory:
        soak = Soak(Path(directory), options.groups)
        began = time.monotonic()
        try:
            for kill in range(options.kills + 1):
                soak.look(kill)
                if kill < options.kills:
                    soak.kill(1 + kill % (options.groups - 1))
        finally:
            soak.end()
    rows = soak.rows
    summary = {
        who: {key: {"after_10": rows[10][who][key], "at_the_end": rows[-1][who][key]} for key in rows[0][who]}
        for who in ("rank", "agent")
    }
    about = {"kills": rows[-1]["kills"], "groups": options.groups, "seconds": round(time.monotonic() - began, 1)}
    about |= {"load_average_1m_before": load, "load_average_1m_after": os.getloadavg()[0]}
    print(json.dumps(summary, indent=1))
    path = common.save("soak", {**about, "summary": summary, "rows": rows})
    plot(rows, path.with_suffix(".png"))
    print(path)


class Soak:
    """The run, and the measurements of it."""

    def __init__(self, directory: Path, groups: int) -> None:
        self.rows: list[dict[str, Any]] = []
        self._groups, self._run_dir = groups, directory / "run"
        settings = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
        rejoin = {"enabled": True, "restarts_per_hour": 10_000}
        settings["fault_tolerance"] = {"rejoin": rejoin, "detector": {"straggler_factor": 0}}
        (directory / "config.json").write_text(json.dumps(settings))
        command = common.launch(groups, directory / "config.json", self._run_dir, __file__, "--", "train")
        with (directory / "log").open("wb") as log:
            self._agent = subprocess.Popen(command, cwd=common.ROOT, stdout=log, stderr=subprocess.STDOUT)
        self._log = directory / "log"
        self._tail = history.Tail(self._run_dir)
        self._live: list[int] = []
        self._steps: deque[float] = deque(maxlen=STEPS)
        self._lost: dict[int, float] = {}
        self._well: dict[int, float] = {}
        self._since = 0

    def look(self, kills: int) -> None:
        """Wait until all groups are there and have been for a while, then record the measurements."""
        deadline = time.monotonic() + PATIENCE_S
        victim = 1 + kills % (self._groups - 1)
        while len(self._live) < self._groups or time.time() < self._well.get(victim, 0.0) or self._since < STEPS // 5:
            if self._agent.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"the run is not whole again after {kills} kills:\n{self._log.read_text()[-3000:]}")
            self._hear()
            time.sleep(0.02)
        row = {"kills": kills, "t": round(time.time(), 3), "step_s": round(statistics.median(self._steps), 6)}
        rank = inject.pid_of(self._run_dir, 0)
        row |= {"rank": {**_process(rank), "step_s": row.pop("step_s")}, "agent": _process(self._agent.pid)}
        self.rows.append(row)
        if kills % 10 == 0:
            print(row, flush=True)

    def kill(self, group: int) -> None:
        self._hear()
        self._lost[group] = time.time()
        self._live, self._since = [], 0
        os.kill(inject.pid_of(self._run_dir, group), signal.SIGKILL)

    def _hear(self) -> None:
        for line in self._tail.each():
            if line["event"] == "view":
                self._live = line["live"]
                for group in line["joined"]:
                    lost = self._lost.get(group, line["t"])
                    self._well[group] = line["t"] + WELL * 1.1 * (line["t"] - lost) + 0.2
            elif line["event"] == "step" and len(line["live"]) == self._groups:
                self._steps.append(line["duration_s"])
                self._since += 1

    def end(self) -> None:
        self._agent.terminate()
        try:
            self._agent.wait(30.0)
        except subprocess.TimeoutExpired:
            self._agent.kill()
            self._agent.wait()


def _process(pid: int) -> dict[str, float]:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    megabytes = round(int(status["VmRSS"].split()[0]) / 1024, 2)
    return {"rss_mb": megabytes, "threads": int(status["Threads"]), "descriptors": len(os.listdir(f"/proc/{pid}/fd"))}


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Plot all four measurements of the rank, over the kills."""
    import matplotlib.pyplot as plt

    names = {
        "rss_mb": "memory, MB",
        "threads": "threads",
        "descriptors": "open descriptors",
        "step_s": "median step, s",
    }
    figure, axes = plt.subplots(2, 2, figsize=(9, 5), sharex=True)
    for axis, (key, name) in zip(axes.flat, names.items(), strict=True):
        axis.plot([row["kills"] for row in rows], [row["rank"][key] for row in rows], linewidth=1.2)
        axis.set_title(f"{name} of a rank that is never killed", fontsize=9)
        axis.set_ylim(0, 1.1 * max(row["rank"][key] for row in rows))
        axis.grid(alpha=0.25)
    for axis in axes[1]:
        axis.set_xlabel("kills so far")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def train() -> None:
    import recovery_model
    import torch

    adam = partial(torch.optim.Adam, lr=1e-6)
    recovery_model.train(10_000_000, MEGABYTES, adam, recovery_model.slowly(COMPUTE_S))


if __name__ == "__main__":
    train() if sys.argv[1:2] == ["train"] else main()
