"""The main job, and its proof: train a GPT while two of four groups are killed, and compare with a run without failures.

    python examples/pretrain_gpt/demo.py --data data/sotu --run-dir runs/demo

It launches the very commands a user would, and sends real SIGKILLs: to group 2 frozen in the middle of an all-reduce, and
to group 1 in the middle of a backward pass. The reference run of the same seed goes first, into RUN_DIR/reference.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
from pathlib import Path

from rich.console import Console

from megatron_ft.cluster.faults import kill
from megatron_ft.errors import LaunchError
from megatron_ft.record import invariants, run_plots, run_summary, run_tables
from megatron_ft.record.run_record import RunRecord
from megatron_ft.run.injection_points import Breakpoint, to_env
from megatron_ft.utils import terminal

HERE = Path(__file__).parent
GROUPS, MICROBATCHES = 4, 16


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, default=Path("data/sotu"))
    parser.add_argument("--run-dir", type=Path, default=Path("runs/demo"))
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    console = terminal.console()
    if options.steps < 10:
        console.print("demo: --steps must be at least 10, so that both failures find their step")
        return 2
    holds = [Breakpoint(2, options.steps // 4, "reduce", bucket=1), Breakpoint(1, options.steps * 3 // 5, "backward")]

    run_dir, reference_dir = options.run_dir, options.run_dir / "reference"
    console.rule("failure-free reference")
    code = launch(options, reference_dir, [])
    console.rule("the same run, two groups killed")
    code = code or launch(options, run_dir, holds)
    if code:
        console.print(f"demo: a run failed with exit code {code}; its record is in {run_dir}")
        return code
    return judge(console, RunRecord.load(run_dir), RunRecord.load(reference_dir))


def launch(options: argparse.Namespace, run_dir: Path, holds: list[Breakpoint]) -> int:
    """Run ``megatron-ft launch``; kill each held group when it has got to its point."""
    command = [sys.executable, "-m", "megatron_ft.cli", "launch", "--groups", str(GROUPS), "--overwrite"]
    command += ["--config", str(HERE / "ds_config.json"), "--run-dir", str(run_dir), str(HERE / "train.py"), "--"]
    command += ["--data", str(options.data), "--steps", str(options.steps), "--seed", "1"]
    process = subprocess.Popen(command, env={**os.environ, **to_env(holds)})
    killer = threading.Thread(target=strike, args=(run_dir, holds, process), daemon=True)
    killer.start()
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.wait()  # the launcher got the same Ctrl-C and ends its ranks
        return 130


def strike(run_dir: Path, holds: list[Breakpoint], process: subprocess.Popen) -> None:
    try:
        kill.strike(run_dir, holds, 600.0, lambda: process.poll() is None)
    except (LaunchError, TimeoutError) as error:
        print(terminal.printable(f"demo: {error}"), file=sys.stderr)


def judge(console: Console, record: RunRecord, reference: RunRecord) -> int:
    """Print what happened, draw it, and return 0 only if every promise was kept."""
    run_tables.failures_table(record).show(console)
    run_tables.summary_table(run_summary.summary(record), run_tables.compare(record, reference)).show(console)
    run_plots.loss_plot(record, reference, record.run_dir / "loss.png")
    run_plots.timeline_plot(record, record.run_dir / "timeline.png")
    console.print(f"pictures: {record.run_dir / 'loss.png'}  {record.run_dir / 'timeline.png'}")
    violations = invariants.check_history(record.lines, MICROBATCHES, reference.lines)
    if len(record.failures) != 2:
        violations.append(f"{len(record.failures)} groups were lost, 2 should have been")
    for violation in violations:
        console.print(f"[red]violated:[/] {violation}")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
