"""A group comes back with a state of 1 GB while three others train: what it costs them, beside torchft 0.2.0.

    python benchmarks/rejoin.py [--trials 2] [--state-mb 1024] [--systems ours torchft] [--quick]

Four groups of one rank, Adam, fp32: the state is three times the gradients. One is killed and started again. Its new process
is built up and then held still for some steps; these are what the others need *without* a group that comes back, in the same
run, with the same number of groups. Then it goes on: *during* are the survivors' steps from there until the first that all
four take part in, as their run record (torchft: each attempt at a step) has them. ``slower`` compares the medians.
``longest_s`` is how much longer the longest of these steps was than the median without, of both systems alike; only ours
tells ``entry_s``, too: how long the last of the others to have computed its share waited in the step of the entry.

Each group trains a small GPT, 12 microbatches in a step: 4 of each of three groups, 3 of each of four; torchft's batch
shrinks instead. All groups share this machine's cores, the one that comes back included, so its work slows the others down,
which it would not on a device of its own.

Writes results/rejoin.json. Takes about half an hour.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import common
import recovery_model
import recovery_ours
import rejoin_torchft
from common import of

sys.path.insert(0, str(common.ROOT))
from megatron_ft.cluster.faults import kill
from megatron_ft.record import history
from megatron_ft.run import injection_points

VICTIM, PER_GROUP = 2, 3
WITHOUT = 5
"""The number of steps that are measured without a returning group."""
SLOWER, ENTRY_S = 1.10, 0.2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=2)
    parser.add_argument("--state-mb", type=int, default=1024)
    parser.add_argument("--systems", nargs="+", default=["ours", "torchft"], choices=["ours", "torchft"])
    parser.add_argument("--quick", action="store_true", help="one trial of 48 MB, without writing results")
    options = parser.parse_args()
    if options.quick:
        options.trials, options.state_mb = 1, 48
    os.environ[recovery_model.COMPUTE] = "gpt"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    measured: dict[str, list[dict]] = {}
    for number in range(options.trials):
        for system in options.systems:
            with tempfile.TemporaryDirectory() as directory:
                trial = {"ours": ours, "torchft": rejoin_torchft.trial}[system]
                found = trial(Path(directory), options.state_mb // 3, VICTIM, WITHOUT)
            if "failed" in found:
                print(f"{number + 1}/{options.trials} {system}: {found['failed']}", flush=True)
                measured.setdefault(system, []).append(found)
                continue
            measured.setdefault(system, []).append({**found, **_judged(found)})
            shown = {name: round(value, 3) for name, value in measured[system][-1].items() if isinstance(value, float)}
            print(f"{number + 1}/{options.trials} {system}: {shown}", flush=True)
    summary = {system: _summary(trials) for system, trials in measured.items()}
    for system, values in summary.items():
        print(f"{system}: {values}")
    if not options.quick:
        asked = {"slower_at_most": SLOWER, "entry_s_at_most": ENTRY_S, "compute": "gpt"}
        print(f"raw numbers in {common.save('rejoin', {'asked': asked, 'summary': summary, 'trials': measured})}")


def _judged(found: dict) -> dict:
    """Compute the required numbers from durations of steps."""
    usual = statistics.median(found["without_s"])
    during = found["during_s"]
    slower, longest = statistics.median(during) / usual, max(during) - usual
    # The last of the others to have computed its share has waited for the entering group alone.
    entry = {"entry_s": min(found["waited_s"])} if "waited_s" in found else {}
    return {"usual_s": usual, "slower": slower, "longest_s": longest, **entry}


def _summary(trials: list[dict]) -> dict:
    back = [trial for trial in trials if "failed" not in trial]
    names = [
        name for name in ("usual_s", "slower", "longest_s", "entry_s", "back_s") if all(name in trial for trial in back)
    ]
    summary = {name: round(statistics.median(trial[name] for trial in back), 4) for name in names} if back else {}
    return {"came_back": f"{len(back)} of {len(trials)}", **summary}


# --- ours -------------------------------------------------------------------------------------------------------------


def ours(directory: Path, megabytes: int, victim: int, without: int) -> dict:
    """Run one trial; return durations of the survivors' steps, and the seconds from going on to having a part."""
    run_dir, config = directory / "run", directory / "config.json"
    settings = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": PER_GROUP}
    settings["fault_tolerance"] = {"rejoin": {"enabled": True}}
    settings["fault_tolerance"]["detector"] = {"stopped_timeout_s": 600.0, "straggler_factor": 0}
    config.write_text(json.dumps(settings))
    os.environ.update(injection_points.to_env([injection_points.Breakpoint(victim, None, "warm", incarnation=1)]))
    agents = recovery_ours.launch(run_dir, config, [__file__, "--", "train", str(megabytes)])
    try:
        recovery_ours._await(run_dir, agents[0], lambda lines: len(of(lines, "step")) >= 3)
        kill.kill(run_dir, victim, "anywhere")
        recovery_ours._await(run_dir, agents[0], lambda lines: kill.is_frozen(run_dir, victim))
        first = (
            of(history.read(run_dir), "step")[-1]["step"] + 1
        )  # the step that is under way saw the new process start
        recovery_ours._await(run_dir, agents[0], lambda lines: of(lines, "step")[-1]["step"] >= first + without)
        going_on = time.time()
        os.kill(kill.pid_of(run_dir, victim), signal.SIGCONT)
        recovery_ours._await(run_dir, agents[0], lambda lines: of(lines, "step")[-1]["live"] == [0, 1, 2, 3])
        lines = history.read(run_dir)
    except Exception:
        print(config.with_suffix(".log").read_text()[-3000:], file=sys.stderr)
        raise
    finally:
        recovery_ours.stop(agents)
    steps = of(lines, "step")
    before = [line["duration_s"] for line in steps if line["step"] > first and line["t"] < going_on]
    during = [line["duration_s"] for line in steps if line["t"] > going_on]
    (entry,) = [line for line in lines if line["event"] == "rejoined"]
    waited = [_waited_s(run_dir, group, entry["step"]) for group in range(4) if group != victim]
    return {
        "without_s": before,
        "during_s": during,
        "back_s": steps[-1]["t"] - going_on,
        "received_bytes": entry["received_bytes"],
        "waited_s": waited,
    }


def _waited_s(run_dir: Path, group: int, step: int) -> float:
    """Return the idle time of that group in the step, from its share until it could reduce."""
    lines = map(json.loads, (run_dir / "timeline" / f"g{group}.p0.jsonl").read_text().splitlines())
    spans = [span for line in lines if line["step"] == step for span in line["spans"]]
    return sum(end - start for phase, start, end in spans if phase == "recover")


def train(megabytes: int) -> None:
    import torch

    recovery_model.train(10_000, megabytes, partial(torch.optim.Adam, lr=1e-6))


if __name__ == "__main__":
    train(int(sys.argv[2])) if sys.argv[1:2] == ["train"] else main()
