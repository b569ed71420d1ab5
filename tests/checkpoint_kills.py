"""Kill whole jobs at random moments and start them again (``make checkpoint-kills``; RUNS and SEED as for
``make chaos``).

All processes (agent, control store, ranks) are killed at once, as in a power cut, while the job saves almost all the
time; then the same command starts the job again. The result must be that of the uninterrupted job, step for step.

``python -m tests.checkpoint_kills RUNS SEED restart``: with the policy ``restart``, single ranks are killed or frozen, and
the launcher starts the job again by itself.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGKILL, SIGSTOP

from benchmarks import common
from megatron_ft.cluster.faults import kill
from megatron_ft.data import prepare
from megatron_ft.errors import WIPED_OUT, LaunchError
from megatron_ft.record import history, invariants, run_directory
from megatron_ft.run import checkpoint
from tests import support

GROUPS, STEPS, PERIOD_S = 2, 80, 0.05
MOMENT_S = (0.0, 0.8)
"""The least and largest time from the first step of a start to its kill; all steps that are left may have been made by
then."""
EARLY, EARLY_S = 0.2, 3.0
"""The share of kills that come soon after the start itself, and the latest time of such a kill: while processes start,
or a checkpoint is loaded."""


@dataclass
class Played:
    """A job that was killed several times. ``at``: the step after which each kill came; ``torn``: the number of kills
    that came during a save, or after an attempt to save that followed the last complete save."""

    starts: list[list[dict]]
    at: list[int] = field(default_factory=list)
    torn: int = 0
    violations: list[str] = field(default_factory=list)

    @property
    def lines(self) -> list[dict]:
        return invariants.joined(self.starts)


def start(directory: Path, data_dir: Path, saved: Path | None = None, groups: int = GROUPS, **options) -> support.Run:
    checkpoints = {"checkpoint": {"directory": str(saved), "period_s": PERIOD_S}} if saved is not None else {}
    return support.start(directory, data_dir, **{"steps": STEPS, "groups": groups, **checkpoints, **options})


def play(directory: Path, data_dir: Path, kills: int, rng: random.Random, **options) -> Played:
    """Start the job, kill it ``kills`` times, let it end."""
    saved = directory.with_name(f"{directory.name}-checkpoints")
    played = Played([])
    for number in range(kills + 1):
        run = start(directory.with_name(f"{directory.name}-{number}"), data_dir, saved, **options)
        if number < kills and rng.random() < EARLY:
            _kill_all(run, rng.uniform(0.0, EARLY_S))
        elif number < kills:
            _await_step(run)
            _kill_all(run, rng.uniform(*MOMENT_S))
        said = run.finish()
        played.starts.append(run.history)
        steps = [line["step"] for line in run.events("step")]
        begins = invariants.first_step(run.history)
        if number < kills:
            played.at.append(max(steps, default=begins - 1))
            played.torn += any(found.unfinished for found in checkpoint.find(saved))
        if steps != list(range(begins, begins + len(steps))):
            played.violations.append(f"start {number} goes on with step {begins} and made the steps {steps}")
        if number == kills and run.process.returncode:
            played.violations.append(f"exit code {run.process.returncode}: {said}\n{run.logs()}")
    return played


def play_restarts(directory: Path, data_dir: Path, losses: int, rng: random.Random) -> Played:
    """Start the job with the policy ``restart``, strike a rank in ``losses`` of its starts, let it end."""
    saved, played = directory.with_name(f"{directory.name}-checkpoints"), Played([])
    run = start(directory, data_dir, saved, policy="restart", detector={"stopped_timeout_s": 0.5})
    aside = directory / run_directory.EARLIER
    for number in range(1, losses + 1):
        _await_step(run)
        time.sleep(rng.uniform(*MOMENT_S))
        with contextlib.suppress(LaunchError):  # all steps have been made
            kill.kill(directory, rng.randrange(GROUPS), "anywhere", rng.choice((SIGKILL, SIGKILL, SIGSTOP)))
        support.wait_for(lambda n=number: (aside / f"{n:04d}" / "ranks.json").exists() or over(run), run)
    said = run.finish()
    played.starts = [history.read(path) for path in run_directory.starts_of(directory)]
    played.at = [max(invariants.losses(lines), default=-1) for lines in played.starts[:-1]]
    if run.process.returncode:
        played.violations.append(f"exit code {run.process.returncode}: {said}\n{run.logs()}")
    for lines in played.starts[:-1]:
        if WIPED_OUT not in [line["exit_code"] for line in lines if line["event"] == "stop"]:
            played.violations.append("a start that is followed by another one does not say that it is wiped out")
    return played


def over(run: support.Run) -> bool:
    return run.process.poll() is not None


def _await_step(run: support.Run) -> None:
    """Wait for the first step of the job, or for its end: there may be no step left to make."""
    while run.process.poll() is None and not run.events("step"):
        time.sleep(0.005)


def _kill_all(run: support.Run, after_s: float) -> None:
    time.sleep(after_s)
    pids = []
    with contextlib.suppress(OSError):  # the history does not exist yet
        pids += [rank["pid"] for rank in json.loads((run.directory / "ranks.json").read_text())]
        pids += [json.loads((run.directory / "store.json").read_text())["pid"]]
    support.kill((run.process.pid, *pids))  # the next start must not find them dying


def judge(played: Played, reference: list[dict], microbatches: int) -> list[str]:
    return played.violations + invariants.check_history(played.lines, microbatches, reference)


def off(played: Played, reference: list[dict]) -> float:
    """Return the largest difference of the losses, over the steps of all starts, repeated steps included."""
    return max(
        invariants.largest_loss_difference(lines, reference) for lines in played.starts if invariants.losses(lines)
    )


def main(runs: int, seed: int, restarts: bool = False) -> int:
    results, kills = [], 3 if restarts else 5
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        text = support.ROOT / "megatron_ft" / "data" / "addresses.txt"
        prepare(root / "data", [text], vocab_size=512, log=lambda line: None)
        alone = start(root / "alone", root / "data")
        alone.check()
        for number in range(runs):
            rng = random.Random(f"{seed}/{number}")
            played = (play_restarts if restarts else play)(root / f"run{number}", root / "data", kills, rng)
            found = judge(played, alone.history, GROUPS * support.PER_GROUP)
            resumed = [invariants.first_step(lines) for lines in played.starts]
            largest = off(played, alone.history)
            result = {"seed": f"{seed}/{number}", "killed_after_step": played.at, "began_with_step": resumed}
            results.append({**result, "unfinished_checkpoints": played.torn, "violations": found, "off": largest})
            came_out = "; ".join(found) or f"ok, losses off by {largest:.1e}"
            print(f"{number + 1}/{runs} killed after {played.at}, began with {resumed}: {came_out}", flush=True)
    bad = sum(bool(result["violations"]) for result in results)
    if restarts:
        print(f"{runs} jobs with the policy restart; {bad} broke a promise")
        return 1 if bad else 0
    path = common.save("checkpoint_kills", {"kills_each": kills, "seed": seed, "results": results})
    torn = sum(result["unfinished_checkpoints"] for result in results)
    worst = max(result["off"] for result in results)
    print(f"{runs} jobs, {runs * kills} kills, {torn} with an unfinished save on the disk; {bad} jobs broke a promise")
    print(f"losses off by up to {worst:.1e}; raw results in {path}")
    return 1 if bad else 0


if __name__ == "__main__":
    given = sys.argv[1:]
    sys.exit(main(int(given[0]) if given else 10, int(given[1]) if given[1:] else 0, "restart" in given))
