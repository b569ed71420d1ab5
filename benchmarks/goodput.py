"""The goodput of training when a group is lost every 20 steps: four policies, the same trace of failures.

    python benchmarks/goodput.py [--steps 200] [--every 20] [--trials 3] [--systems NAME ...] [--quick]

Four groups of one rank train a small GPT for 200 steps of 8 microbatches each. A trace says when which group is killed with
SIGKILL: one in every ``every`` failure-free steps' time, at a random moment, drawn from a seed; it is the same for
all systems, and goes on until the steps are done. A killed group is started again at once. A microbatch computes, and sleeps
until it has taken ``MICROBATCH_S``, as if its group had a device of its own: without that, the others compute faster on the
shared cores while a group is lost, and runs differ by more than is lost.

- ``stacked_quota``: ours; the others take the lost work over, the group comes back;
- ``drop``: ours, without taking over: the batch shrinks until the group is back;
- ``restart``: ours as checkpoint-restart, with several periods; the best one counts;
- ``torchft``: 0.2.0 with the tightest timeouts of ``recovery.py``; its batch shrinks as well.

*Goodput* is committed microbatches per second over those of the same system's failure-free run of the same trial, which
is made right before; every second trial plays the systems in the opposite order. The summary has medians, the worst and
the best. ``loss``: the final model's on the same 256 held-out samples. Writes results/goodput.json. Takes about 70 minutes
with five trials, 22 with three of 100 steps.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import common
import goodput_torchft
import recovery_model

sys.path.insert(0, str(common.ROOT))
from megatron_ft.cluster.faults import kill as inject
from megatron_ft.errors import LaunchError
from megatron_ft.record import history, run_directory, run_state

GROUPS, PER_GROUP, MEGABYTES, SEED = 4, 8, 4, 1
RATE = 1e-3
MICROBATCH_S = 0.05
"""About twice what a microbatch takes while all groups share two cores."""
PERIODS_S = (1.0, 2.0)
ASKED = {"over_restart": 2.23, "over_torchft": 1.3}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=20)
    names = ["stacked_quota", "drop", *(f"restart_{period}" for period in PERIODS_S), "torchft"]
    parser.add_argument("--systems", nargs="+", default=names, choices=names)
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="40 steps once, without writing results")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.trials = 40, 1
    os.environ[recovery_model.COMPUTE], os.environ[recovery_model.PACE] = "gpt", str(MICROBATCH_S)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    found: dict[str, list[dict]] = {}
    step_s = 0.0
    for number in range(options.trials):
        free = ["failure_free", *(["failure_free_torchft"] if "torchft" in options.systems else [])]
        for name in (*free, *(options.systems if number % 2 == 0 else reversed(options.systems))):
            trace = [] if name.startswith("failure_free") else failures(options.every * step_s)
            with tempfile.TemporaryDirectory() as directory:
                one = (torchft if name.endswith("torchft") else ours)(Path(directory), name, options.steps, trace)
            found.setdefault(name, []).append(one)
            if name == "failure_free" and not number:
                step_s = one["seconds"] / (options.steps - 1)
            whole = found["failure_free_torchft" if name.endswith("torchft") else "failure_free"][number]
            one["goodput"] = round(one["microbatches_per_s"] / whole["microbatches_per_s"], 4)
            print(name, {key: value for key, value in one.items() if key != "struck"}, flush=True)
    summary: dict[str, object] = {name: _summary(trials) for name, trials in found.items()}
    restarts = [_median(trials) for name, trials in found.items() if name.startswith("restart")]
    if "stacked_quota" in found and restarts:
        summary["over_restart"] = round(_median(found["stacked_quota"]) / max(restarts), 3)
    if "stacked_quota" in found and "torchft" in found:
        pairs = zip(found["stacked_quota"], found["torchft"], strict=True)
        summary["over_torchft"] = round(statistics.median(a["goodput"] / b["goodput"] for a, b in pairs), 3)
    print(json.dumps(summary, indent=1))
    if not options.quick:
        settings = {"groups": GROUPS, "per_group": PER_GROUP, "compute": "gpt", "gradients_mb": MEGABYTES}
        settings["microbatch_s"] = MICROBATCH_S
        result = {"asked": ASKED, **settings, "every_s": options.every * step_s, "summary": summary, "runs": found}
        print(f"raw numbers in {common.save('goodput', result)}")


def _median(trials: list[dict]) -> float:
    return statistics.median(trial["goodput"] for trial in trials)


def _summary(trials: list[dict]) -> dict:
    found = [trial["goodput"] for trial in trials]
    spread = {"worst": min(found), "best": max(found)}
    return {"goodput": round(_median(trials), 4), **spread, "loss": trials[0]["loss"], "runs": len(trials)}


def failures(every_s: float) -> list[tuple[float, int]]:
    """Return (seconds since the first step, group), far more than any run needs. One in each interval."""
    draw = random.Random(SEED)
    return [((number + draw.random()) * every_s, draw.randrange(GROUPS)) for number in range(1000)]


def strike(
    trace: list[tuple[float, int]], begun: float, over: Callable[[], bool], kill: Callable[[int], bool]
) -> list[dict]:
    """Kill groups at the times of the trace until ``over``. Return the outcome of each kill: a group that is not there
    cannot be killed."""
    struck = []
    for after_s, group in trace:
        while (rest := begun + after_s - time.time()) > 0:
            if over():
                return struck
            time.sleep(min(rest, 0.05))
        if over():
            return struck
        struck.append({"after_s": round(after_s, 3), "group": group, "was_there": kill(group)})
    while not over():
        time.sleep(0.05)
    return struck


def result(microbatches: int, seconds: float, loss: float, struck: list[dict]) -> dict:
    return {
        "seconds": round(seconds, 3),
        "microbatches": microbatches,
        "microbatches_per_s": round(microbatches / seconds, 4),
        "loss": loss,
        "killed": sum(each["was_there"] for each in struck),
        "struck": struck,
    }


# --- ours -------------------------------------------------------------------------------------------------------------


def play(
    directory: Path,
    section: dict,
    groups: int,
    per_group: int,
    script: str,
    steps: int,
    trace: list[tuple[float, int]],
) -> tuple[list[dict], float]:
    """Launch ``script`` with that section, in ``directory/run``, and kill groups as the trace says until the run has ended;
    the script writes the final loss to ``directory/loss``. Return the kills, and the time of the first step."""
    run_dir, config = directory / "run", directory / "config.json"
    batch = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": per_group}
    config.write_text(json.dumps({**batch, "fault_tolerance": section}))
    log = config.with_suffix(".log")
    with log.open("w") as output:
        options = {"cwd": common.ROOT, "env": common.environment(), "stdout": output, "stderr": subprocess.STDOUT}
        command = common.launch(groups, config, run_dir, script, "--", "train", steps, directory / "loss")
        agent = subprocess.Popen(command, **options)
    watched = run_state.Watched(run_dir)

    def over() -> bool:
        if agent.poll():
            raise RuntimeError(f"{section} ended with {agent.returncode}\n{log.read_text()[-3000:]}")
        # A group that is killed after the last step, while its script writes the loss, is no loss of training.
        return agent.poll() is not None or watched.poll().end is not None

    try:
        while not (begun := common.of(history.read(run_dir), "step")):
            over()
            time.sleep(0.02)
        first = min(line["t"] for line in begun)
        struck = strike(trace, first, over, lambda group: _kill(run_dir, group))
        agent.wait(60)
        over()
    finally:
        if agent.poll() is None:
            agent.terminate()
            agent.wait()
    return struck, first


def ours(directory: Path, name: str, steps: int, trace: list[tuple[float, int]]) -> dict:
    """Make one run of ours under the policy of that name."""
    section = {"rejoin": {"restarts_per_hour": 1000}, "detector": {"straggler_factor": 0}}
    if name.startswith("restart"):
        saved = {"directory": str(directory / "saved"), "period_s": float(name.partition("_")[2])}
        section |= {"policy": "restart", "checkpoint": saved}
    elif name == "drop":
        section["policy"] = name
    struck, first = play(directory, section, GROUPS, PER_GROUP, __file__, steps, trace)
    run_dir = directory / "run"
    # Steps that were repeated after a restart are counted once, by their last end.
    starts = run_directory.starts_of(run_dir)
    lines = [line for start in starts for line in common.of(history.read(start), "step")]
    last = {line["step"]: line for line in lines}
    count = sum(line["microbatches"] for step, line in last.items() if step > 0)
    return result(count, last[steps - 1]["t"] - first, float((directory / "loss").read_text()), struck)


def _kill(run_dir: Path, group: int) -> bool:
    try:
        inject.kill(run_dir, group, "anywhere")
    except (OSError, LaunchError):
        return False
    return True


def train(steps: int, evaluated: Path, megabytes: int = MEGABYTES) -> None:
    """Train one group, and write the final model's loss."""
    import torch

    model = recovery_model.train(steps, megabytes, partial(torch.optim.Adam, lr=RATE))
    part = evaluated.with_suffix(f".{os.getpid()}")
    part.write_text(str(goodput_torchft.evaluate(model)))
    part.replace(evaluated)


# --- torchft ----------------------------------------------------------------------------------------------------------


def torchft(directory: Path, name: str, steps: int, trace: list[tuple[float, int]]) -> dict:
    settings = {"groups": GROUPS, "per_group": PER_GROUP, "megabytes": MEGABYTES, "rate": RATE}
    count, seconds, loss, struck = goodput_torchft.run(directory, settings, steps, lambda *rest: strike(trace, *rest))
    return result(count, seconds, loss, struck)


if __name__ == "__main__":
    train(int(sys.argv[2]), Path(sys.argv[3])) if sys.argv[1:2] == ["train"] else main()
