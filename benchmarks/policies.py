"""All policies side by side: the same losses, real processes, a small GPT; with and without groups that come back.

    python benchmarks/policies.py [--steps 120] [--every 20] [--systems NAME ...] [--quick]

Eight groups of one rank train a small GPT with 4 microbatches each. One group is killed with SIGKILL in every ``every``
failure-free steps' time, at a random moment, drawn from a seed: the same moments and groups for all systems. *Without
rejoin*, six groups are lost one after the other, and none comes back; *with rejoin*, a killed group starts again at once.
A microbatch computes, and sleeps until it has taken ``MICROBATCH_S``, as if its group had a device of its own: this machine
has fewer cores than groups. So a group that computes more is slower by that, as on devices, and standby work in a group's
slack costs nothing.

The failure-free run is made twice, at the beginning and at the end. Of each run: steps per second, the stall of all
recoveries, microbatches that were computed anew after a loss (of ``restart`` and after wipe-outs: those of the steps that
were made again), standby microbatches computed, wipe-outs or restarts, the loss of the final model on held-out samples, and
the largest relative difference of a step's loss from the failure-free run's. Each run is also simulated, with its own
times, losses and policy (``megatron-ft simulate --like``): ``predicted_s`` beside ``measured_s``.
torchft: 0.2.0 with the tightest timeouts of ``recovery.py``; its groups always come back, and its batch shrinks.

Writes results/policies.json and docs/results/policies.png. Takes about 15 minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import common
import goodput
import goodput_torchft
import recovery_model

sys.path.insert(0, str(common.ROOT))
from megatron_ft.core.scheduling.policies import POLICIES
from megatron_ft.plan import like_run
from megatron_ft.record import history, invariants, run_directory

GROUPS, PER_GROUP, MEGABYTES, SEED = 8, 4, 1, 1
MICROBATCH_S = 0.1
LOSSES = 6
"""Groups that are lost without rejoin."""
RULES: dict[str, dict[str, Any]] = {
    "stacked_quota": {},
    "slack": {"standby": "slack"},
    "spare": {"policy": "spare", "redundancy": 3},
    "recover": {"policy": "recover"},
    "replication": {"policy": "replication"},
    "drop": {"policy": "drop"},
    "restart": {"policy": "restart"},
}
CHECKPOINT_S = 5.0


def main() -> None:
    assert set(POLICIES) <= set(RULES)
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--systems", nargs="+", default=[*RULES, "torchft"], choices=[*RULES, "torchft"])
    parser.add_argument("--quick", action="store_true", help="40 steps, without writing results")
    options = parser.parse_args()
    options.steps = 40 if options.quick else options.steps
    os.environ[recovery_model.COMPUTE], os.environ[recovery_model.PACE] = "small_gpt", str(MICROBATCH_S)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    free, lines = ours("stacked_quota", options.steps, [], rejoin=False)
    every_s = options.every * free["seconds"] / (options.steps - 1)
    found: dict[str, dict[str, dict]] = {"failure_free": {"without": free}}
    print("failure-free", free, flush=True)
    for name in options.systems:
        for way in ("without", "with"):
            trace = failures(every_s, way == "with")
            if name == "torchft":
                one = torchft(options.steps, trace) if way == "with" else None
            elif name == "restart" and way == "with":
                one = None  # the whole job comes back in any case
            else:
                one, _ = ours(name, options.steps, trace, rejoin=way == "with", reference=lines)
            if one is not None:
                one["relative_speed"] = round(one["steps_per_s"] / free["steps_per_s"], 4)
                found.setdefault(name, {})[way] = one
                print(
                    name, way, {key: value for key, value in one.items() if key not in ("struck", "like")}, flush=True
                )
    found["failure_free"]["again"], _ = ours("stacked_quota", options.steps, [], rejoin=False, reference=lines)
    print(table(found))
    if not options.quick:
        settings = {"groups": GROUPS, "per_group": PER_GROUP, "microbatch_s": MICROBATCH_S, "rules": RULES}
        result = {**settings, "steps": options.steps, "every_s": every_s, "runs": found}
        print(f"raw numbers in {common.save('policies', result)}")
        draw(found, common.ROOT / "docs" / "results" / "policies.png")


def failures(every_s: float, rejoin: bool) -> list[tuple[float, int]]:
    """Return (seconds since the first step, group): one loss in each interval."""
    dice = random.Random(SEED)
    order = dice.sample(range(GROUPS), LOSSES)
    if not rejoin:
        return [((number + dice.random()) * every_s, group) for number, group in enumerate(order)]
    return [((number + dice.random()) * every_s, dice.randrange(GROUPS)) for number in range(1000)]


def ours(
    name: str, steps: int, trace: list[tuple[float, int]], rejoin: bool, reference: list[dict] | None = None
) -> tuple[dict, list[dict]]:
    """Make one run; return its numbers and its record, with steps that were made again once."""
    with tempfile.TemporaryDirectory() as directory:
        run_dir, saved = Path(directory, "run"), str(Path(directory, "saved"))
        section = {"rejoin": {"enabled": rejoin, "restarts_per_hour": 1000}, **RULES[name]}
        section["checkpoint"] = {"directory": saved, "period_s": CHECKPOINT_S}
        struck, first = goodput.play(Path(directory), section, GROUPS, PER_GROUP, __file__, steps, trace)
        starts = [history.read(start) for start in run_directory.starts_of(run_dir)]
        lines = invariants.joined(starts)
        numbers = _numbers(starts, lines, first, struck, run_dir, float(Path(directory, "loss").read_text()), reference)
        like = like_run.compare(run_dir)
        numbers |= {"measured_s": round(like.seconds, 3), "predicted_s": round(like.predicted.time_s, 3)}
        return {**numbers, "like": like.to_json()}, lines


def _numbers(
    starts: list[list[dict]],
    lines: list[dict],
    first: float,
    struck: list[dict],
    run_dir: Path,
    loss: float,
    reference: list[dict] | None,
) -> dict:
    steps, recoveries = common.of(lines, "step"), [line for start in starts for line in common.of(start, "recovery")]
    made = sum(len(common.of(start, "step")) for start in starts)
    seconds = steps[-1]["t"] - first
    found = {
        "seconds": round(seconds, 3),
        "steps_per_s": round((len(steps) - 1) / seconds, 4),
        "stall_s": round(sum(line["stall_s"] for line in recoveries), 3),
        "recoveries": len(recoveries),
        "patched": sum(line["patched"] for line in recoveries),
        "promoted": sum(line["promoted"] for line in recoveries),
        "made_again": (made - len(steps)) * GROUPS * PER_GROUP,
        "standby": sum(_spans(start) for start in run_directory.starts_of(run_dir)),
        "starts_again": len(starts) - 1,
        "held_out_loss": loss,
        "killed": sum(each["was_there"] for each in struck),
        "struck": struck,
    }
    if reference is not None:
        found["largest_loss_difference"] = invariants.largest_loss_difference(lines, reference)
    return found


def _spans(run_dir: Path) -> int:
    """Return the number of standby microbatches that all ranks have computed."""
    files = (run_dir / "timeline").glob("*.jsonl")
    lines = (json.loads(line) for path in files for line in path.read_text().splitlines() if line.endswith("}"))
    return sum(span[0] == "standby" for line in lines for span in line["spans"])


def torchft(steps: int, trace: list[tuple[float, int]]) -> dict:
    settings = {"groups": GROUPS, "per_group": PER_GROUP, "megabytes": MEGABYTES, "rate": goodput.RATE}
    with tempfile.TemporaryDirectory() as directory:
        strike = lambda *rest: goodput.strike(trace, *rest)  # noqa: E731
        count, seconds, loss, struck = goodput_torchft.run(Path(directory), settings, steps, strike)
    return {
        "seconds": round(seconds, 3),
        "steps_per_s": round((steps - 1) / seconds, 4),
        "microbatches": count,
        "of_microbatches": (steps - 1) * GROUPS * PER_GROUP,
        "held_out_loss": loss,
        "killed": sum(each["was_there"] for each in struck),
        "struck": struck,
    }


def table(found: dict[str, dict[str, dict]]) -> str:
    names = (
        "relative_speed",
        "stall_s",
        "patched",
        "promoted",
        "standby",
        "made_again",
        "starts_again",
        "measured_s",
        "predicted_s",
        "held_out_loss",
    )
    rows = [
        "| policy | rejoin | killed | " + " | ".join(names) + " | loss differs by |",
        "|---" * (len(names) + 4) + "|",
    ]
    for name, ways in found.items():
        for way, one in ways.items():
            cells = [f"{one[key]:.4g}" if key in one else "-" for key in names]
            differs = one.get("largest_loss_difference")
            said = "-" if differs is None else f"{differs:.1e}"
            rows.append(f"| `{name}` | {way} | {one['killed']} | {' | '.join(cells)} | {said} |")
    return "\n".join(rows)


def draw(found: dict[str, dict[str, dict]], path: Path) -> None:
    """Draw the speed of each policy relative to the failure-free run, and its cost."""
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    names = [name for name in found if name != "failure_free"]
    figure, axis = plt.subplots(figsize=(8, 3.6), layout="constrained")
    for offset, way in ((-0.2, "without"), (0.2, "with")):
        there = [(place, found[name][way]) for place, name in enumerate(names) if way in found[name]]
        speeds = [one["relative_speed"] for _, one in there]
        bars = axis.bar([place + offset for place, _ in there], speeds, 0.38, label=f"{way} rejoin")
        for bar, (_, one) in zip(bars, there, strict=True):
            bar.set_hatch("//" if one.get("starts_again") else "")
        axis.bar_label(bars, fmt="%.2f", fontsize=8)
    axis.set_xticks(range(len(names)), names, rotation=15)
    axis.set_ylabel("steps per second,\nfailure-free = 1")
    axis.set_ylim(0, 1.25)
    handles, labels = axis.get_legend_handles_labels()
    again = Patch(facecolor="white", edgecolor="black", hatch="//")
    axis.legend([*handles, again], [*labels, "all groups came back at a restart"], frameon=False, ncols=3, fontsize=8)
    axis.set_title("one run each", fontsize=9, loc="left")
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    goodput.train(int(sys.argv[2]), Path(sys.argv[3]), MEGABYTES) if sys.argv[1:2] == ["train"] else main()
