"""From kill -9 to the commit of the interrupted step: 4 groups, killed in the middle of an all-reduce.

    python benchmarks/kill_to_commit.py [--runs 4]

Each run kills three of four groups, one after the other, each frozen inside an all-reduce of another bucket. Measured is
the time from sending the signal until the writer records the step, less the time the slowest survivor spent computing
the patched microbatches: what remains is detection, agreement, the new communicator, the reduction and the update.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import common

from megatron_ft.faults import inject
from megatron_ft.runtime import history
from megatron_ft.runtime.points import Hold, to_env


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=4)
    options = parser.parse_args()
    data = common.prepare_data(common.ROOT / "data" / "sotu")
    samples = []
    for run in range(options.runs):
        holds = [Hold((run + i) % 4, 4 + 3 * i, "reduce", (run + i) % 5) for i in range(3)]
        with tempfile.TemporaryDirectory() as directory:
            samples += measure(Path(directory) / "run", data, holds)
    beyond = [sample["kill_to_commit_s"] - sample["patch_s"] for sample in samples]
    path = common.save(
        "kill_to_commit", {"median_s": statistics.median(beyond), "largest_s": max(beyond), "samples": samples}
    )
    print(
        f"kill to commit, less patch compute, over {len(beyond)} kills: median {statistics.median(beyond):.3f} s, "
        f"largest {max(beyond):.3f} s; raw numbers in {path}"
    )


def measure(run_dir: Path, data: Path, holds: list[Hold]) -> list[dict]:
    """One run with these kills; what each cost."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "megatron_ft.cli", "launch", "--groups", "4"),
            *("--config", "examples/pretrain_gpt/ds_config.json", "--run-dir", str(run_dir)),
            *("examples/pretrain_gpt/train.py", "--", "--data", str(data), "--steps", "13"),
        ],
        cwd=common.ROOT,
        env={**os.environ, **to_env(holds)},
        stdout=sys.stderr,
    )
    sent = inject.strike(run_dir, holds, 120.0, lambda: process.poll() is None)
    if process.wait(timeout=120):
        raise SystemExit(f"the run failed with exit code {process.returncode}")
    lines = history.read(run_dir)
    committed = {line["step"]: line["t"] for line in lines if line["event"] == "step"}
    patched = {line["step"]: line["patched"] for line in lines if line["event"] == "recovery"}
    return [
        {
            "group": hold.group,
            "step": hold.step,
            "bucket": hold.bucket,
            "kill_to_commit_s": committed[hold.step] - killed,
            "patched": patched[hold.step],
            "patch_s": patch_seconds(run_dir, hold.step),
        }
        for hold, killed in zip(holds, sent, strict=True)
    ]


def patch_seconds(run_dir: Path, step: int) -> float:
    """Time the slowest survivor spent on patched microbatches of a step."""
    seconds = [0.0]
    for path in (run_dir / "timeline").glob("*.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            if line["step"] == step:
                seconds.append(sum(end - start for phase, start, end in line["spans"] if phase == "patch"))
    return max(seconds)


if __name__ == "__main__":
    main()
