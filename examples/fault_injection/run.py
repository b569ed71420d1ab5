"""Start a small run, inject a schedule into it with the real commands, and judge it against a run without failures.

    python examples/fault_injection/run.py --data data/sotu --schedule examples/fault_injection/two_lost.json

Exit code 0: all was injected, and every promise kept. The reference of the same seed goes first, into RUN_DIR/reference.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from megatron_ft.record import history, invariants

HERE = Path(__file__).parent
TRAINING = HERE.parent / "pretrain_gpt"
GROUPS, MICROBATCHES = 4, 16


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, default=Path("data/sotu"), help="made by `megatron-ft prepare`")
    parser.add_argument("--schedule", type=Path, default=HERE / "two_lost.json")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/fault_injection"))
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    reference_dir, run_dir = options.run_dir / "reference", options.run_dir / options.schedule.stem

    print("== a run without failures", flush=True)
    code = launch(options, reference_dir).wait()
    if code:
        return code
    (run_dir / "config.json").unlink(missing_ok=True)  # the injector waits for the new run's, not for an old one
    (run_dir / history.FILE).unlink(missing_ok=True)
    print(f"== the same run, with {options.schedule}", flush=True)
    run = launch(options, run_dir)
    injected = subprocess.run([*COMMAND, "inject", str(run_dir), str(options.schedule)]).returncode
    code = run.wait()
    if code or injected:
        print(f"the run ended with exit code {code}, the injector with {injected}; the record is in {run_dir}")
        return code or injected
    return judge(run_dir, reference_dir)


COMMAND = [sys.executable, "-m", "megatron_ft.cli"]


def launch(options: argparse.Namespace, run_dir: Path) -> subprocess.Popen:
    command = [*COMMAND, "launch", "--groups", str(GROUPS), "--overwrite", "--run-dir", str(run_dir)]
    command += ["--config", str(TRAINING / "ds_config.json"), str(TRAINING / "train.py"), "--"]
    command += ["--data", str(options.data), "--steps", str(options.steps), "--seed", "1"]
    return subprocess.Popen([*command, "--layers", "2", "--width", "64", "--seq-len", "64"])


def judge(run_dir: Path, reference_dir: Path) -> int:
    lines, reference = history.read(run_dir), history.read(reference_dir)
    violations = invariants.check_history(lines, MICROBATCHES, reference)
    for violation in violations:
        print(f"violated: {violation}")
    lost = [int(group) for line in lines if line["event"] == "view" for group in line["lost"]]
    difference = invariants.largest_loss_difference(lines, reference)
    print(f"groups lost: {lost}; largest relative difference of a loss from the reference: {difference:.1e}")
    print("verdict: " + (f"{len(violations)} promises broken" if violations else "every promise kept"))
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
