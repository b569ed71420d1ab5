"""A group comes back with a state of 1 GB while three others train: what it costs them, beside torchft 0.2.0.

    python benchmarks/rejoin.py [--trials 2] [--state-mb 1024] [--systems ours torchft] [--quick]

Four groups of one rank, Adam, fp32: the state is three times the gradients. One is killed and started again. Its new process
is built up and then held still for some steps; these are what the others need *without* anybody who comes back, in the same
run, with the same number of groups. Then it goes on: *during* are the survivors' steps from there until the first that all
four take part in, as their run record (torchft: each attempt at a step) has them. ``slower`` compares the medians.
``longest_s`` is how much longer the longest of these steps was than the median without; ``entry_s`` how long the last of the
others to have computed its share waited in the step of the entry (torchft does not tell that: the same as ``longest_s``).

A group computes on a device of its own: it sleeps, and computes hardly anything. 12 microbatches of 2.5 s in a step, 4 of
each of three groups, 3 of each of four; torchft's batch shrinks instead. Gradients are reduced, and the optimizer works, on
the two cores that all groups share, who comes back included: its optimizer alone makes a step longer than it was without.

Writes results/rejoin.json. Takes about fifteen minutes.
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
from pathlib import Path

import common
import recovery_ours
import rejoin_torchft

sys.path.insert(0, str(common.ROOT))
from megatron_ft.faults import inject
from megatron_ft.runtime import history, points

VICTIM, COMPUTE_S, PER_GROUP = 2, 2.5, 3
WITHOUT = 5
"""Steps that are looked at without anybody who comes back."""
SLOWER, ENTRY_S = 1.10, 0.2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=2)
    parser.add_argument("--state-mb", type=int, default=1024)
    parser.add_argument("--compute-s", type=float, default=COMPUTE_S)
    parser.add_argument("--systems", nargs="+", default=["ours", "torchft"], choices=["ours", "torchft"])
    parser.add_argument("--quick", action="store_true", help="one trial of 48 MB, without writing results")
    options = parser.parse_args()
    if options.quick:
        options.trials, options.state_mb, options.compute_s = 1, 48, 0.15
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    measured: dict[str, list[dict]] = {}
    for number in range(options.trials):
        for system in options.systems:
            with tempfile.TemporaryDirectory() as directory:
                trial = {"ours": ours, "torchft": rejoin_torchft.trial}[system]
                found = trial(Path(directory), options.state_mb // 3, options.compute_s, VICTIM, WITHOUT)
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
        asked = {"slower_at_most": SLOWER, "entry_s_at_most": ENTRY_S, "compute_s": options.compute_s}
        print(f"raw numbers in {common.save('rejoin', {'asked': asked, 'summary': summary, 'trials': measured})}")


def _judged(found: dict) -> dict:
    """From durations of steps to what is asked for."""
    usual = statistics.median(found["without_s"])
    return {
        "usual_s": usual,
        "slower": statistics.median(found["during_s"]) / usual,
        "longest_s": max(found["during_s"]) - usual,
        # The last of the others to have computed its share has waited for nobody but the one that enters.
        "entry_s": min(found.get("waited_s", [max(found["during_s"]) - usual])),
    }


def _summary(trials: list[dict]) -> dict:
    names = ("usual_s", "slower", "longest_s", "entry_s", "back_s")
    back = [trial for trial in trials if "failed" not in trial]
    summary = {name: round(statistics.median(trial[name] for trial in back), 4) for name in names} if back else {}
    return {"came_back": f"{len(back)} of {len(trials)}", **summary}


# --- ours -------------------------------------------------------------------------------------------------------------


def ours(directory: Path, megabytes: int, compute_s: float, victim: int, without: int) -> dict:
    """One trial: durations of the survivors' steps, and the seconds from going on to having a part."""
    run_dir, config = directory / "run", directory / "config.json"
    settings = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": PER_GROUP}
    settings["fault_tolerance"] = {"rejoin": {"enabled": True}}
    settings["fault_tolerance"]["detector"] = {"stopped_timeout_s": 600.0, "straggler_factor": 0}
    config.write_text(json.dumps(settings))
    os.environ.update(points.to_env([points.Hold(victim, None, "warm", incarnation=1)]))
    agents = recovery_ours.launch(run_dir, config, [__file__, "--", "train", str(megabytes), str(compute_s)])
    try:
        recovery_ours._await(run_dir, agents[0], lambda lines: len(_steps(lines)) >= 3)
        inject.kill(run_dir, victim, "anywhere")
        recovery_ours._await(run_dir, agents[0], lambda lines: _frozen(run_dir, victim))
        first = _steps(history.read(run_dir))[-1]["step"] + 1  # the step that is under way saw the new process start
        recovery_ours._await(run_dir, agents[0], lambda lines: _steps(lines)[-1]["step"] >= first + without)
        going_on = time.time()
        os.kill(inject.pid_of(run_dir, victim), signal.SIGCONT)
        recovery_ours._await(run_dir, agents[0], lambda lines: _steps(lines)[-1]["live"] == [0, 1, 2, 3])
        lines = history.read(run_dir)
    except Exception:
        print(config.with_suffix(".log").read_text()[-3000:], file=sys.stderr)
        raise
    finally:
        recovery_ours.stop(agents)
    steps = _steps(lines)
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
    """How long that group had nothing to do in the step, from its share until it could reduce."""
    lines = map(json.loads, (run_dir / "timeline" / f"g{group}.p0.jsonl").read_text().splitlines())
    spans = [span for line in lines if line["step"] == step for span in line["spans"]]
    return sum(end - start for phase, start, end in spans if phase == "recover")


def _steps(lines: list[dict]) -> list[dict]:
    return [line for line in lines if line["event"] == "step"]


def _frozen(run_dir: Path, victim: int) -> bool:
    pid = inject.pid_of(run_dir, victim)
    return pid is not None and inject.is_stopped(pid)


def train(megabytes: int, compute_s: float) -> None:
    """One group of ours."""
    import recovery_model
    import torch

    import megatron_ft

    session = megatron_ft.init(seed=1)
    model = recovery_model.build(megabytes)
    engine = session.wrap(model, torch.optim.Adam(model.parameters(), lr=1e-6), recovery_model.slowly(compute_s))
    for _ in session.steps(10_000):
        session.train_step(engine, lambda number: recovery_model.batch(*number))


if __name__ == "__main__":
    train(int(sys.argv[2]), float(sys.argv[3])) if sys.argv[1:2] == ["train"] else main()
