"""Bits that flip in real runs: each has to be found in its step, and the run has to end in the bits of the healthy one.

    python -m tests.corruption [--runs 67] [--first 0]

Each run has five groups, of one rank or, every third time, of a DeepSpeed pipeline's two, and three flips in three of them,
at drawn steps, in a drawn bit of a gradient, an activation, a reduced bucket, a parameter or an optimizer moment. All
microbatches are verified. Raw numbers: benchmarks/results/corruption.json.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks import common
from megatron_ft.data import prepare
from megatron_ft.run.injection_points import CORRUPTIBLE_BY
from tests import deepspeed_kills, support

GROUPS, STEPS, FLIPS = 5, 14, 3
WHAT = tuple(what for what in CORRUPTIBLE_BY["bitflip"] if what != "buffer")  # the example has no buffers that change
SECTION = {
    "reduction": "exact",
    "verify": {"microbatches_per_step": GROUPS * support.PER_GROUP},
    "detector": {"state_check_steps": 8},
}


def start(directory: Path, data: Path, pipeline: bool, script: Path | None = None) -> support.Run:
    options: dict[str, Any] = {"steps": STEPS, "groups": GROUPS, **SECTION}
    options |= {} if script is None else {"script": script}
    return deepspeed_kills.start(directory, data, **options) if pipeline else support.start(directory, data, **options)


def flips(seed: int, pipeline: bool) -> list[dict[str, Any]]:
    """Draw the flips of a run, each in a group of its own, two or more steps apart."""
    draw = random.Random(seed)
    groups, steps = draw.sample(range(GROUPS), FLIPS), sorted(draw.sample(range(3, STEPS - 1, 3), FLIPS))
    return [
        {
            "kind": "bitflip",
            "group": group,
            "position": draw.randrange(2 if pipeline else 1),
            "step": step,
            "what": draw.choice(WHAT),
            "bit": draw.choice([*range(12, 31), 31]),
        }
        for group, step in zip(groups, steps, strict=True)
    ]


def play(seed: int, root: Path, data: Path, healthy: dict[bool, tuple[list[float], str]]) -> dict[str, Any]:
    """Play one run, and return what came of each flip."""
    pipeline = seed % 3 == 2
    if pipeline not in healthy:
        alone = start(root / f"healthy{pipeline:d}", data, pipeline)
        alone.finish()
        healthy[pipeline] = support.outcome(alone)
    where = root / f"run{seed}"
    where.mkdir()
    asked = flips(seed, pipeline)
    (where / "faults.json").write_text(json.dumps({"seed": seed, "faults": asked}))
    inner = deepspeed_kills.SCRIPT if pipeline else support.SCRIPT
    gate = support.Gate(where, 1, script=inner)
    run = start(where / "run", data, pipeline, gate.script)
    orders = {flip["group"] for flip in asked if not flip["position"]}
    done = support.inject_when_ready(run, gate, 1, where / "faults.json", orders=orders)
    said = run.finish()
    found: list[str] = (
        [] if run.process.returncode == 0 and done.returncode == 0 else [f"exit code: {said}{run.logs()}"]
    )
    bits = not found and support.outcome(run) == healthy[pipeline]
    if not found and not bits:
        found.append("the final bits are not those of the healthy run")
    struck = {flip["group"] for flip in asked}
    lost = {int(group): view["step"] for view in run.events("view") for group in view["lost"]}
    found += [f"group {group} was accused and is healthy" for group in lost if group not in struck]
    outcomes = []
    for flip in asked:
        group = flip["group"]
        named = {line["step"] for line in run.events("discarded") if str(group) in line["guilty"]}
        named |= {line["step"] for line in run.events("divergence") if line.get("group") == group}
        changed = {line["step"] for line in run.events("bucket_changed") if line["group"] == group}
        when = min(named | changed, default=None)
        injected = any(line["event"] == "inject" and line["group"] == group for line in run.history)
        outcomes.append({**flip, "injected": injected, "found_in_step": when, "lost_in_step": lost.get(group)})
    return {"seed": seed, "engine": "pipeline" if pipeline else "plain", "violations": found, "flips": outcomes}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=67)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    results, healthy = [], {}
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        prepare(root / "data", [support.ROOT / "megatron_ft/data/addresses.txt"], vocab_size=512, log=lambda line: None)
        for seed in range(options.first, options.first + options.runs):
            results.append(play(seed, root, root / "data", healthy))
            told = ", ".join(
                f"{one['what']} in step {one['step']}: "
                + ("not struck" if not one["injected"] else f"found in {one['found_in_step']}")
                for one in results[-1]["flips"]
            )
            print(f"seed {seed}, {results[-1]['engine']}: {told}; {results[-1]['violations'] or 'ok'}", flush=True)
    struck = [one for result in results for one in result["flips"] if one["injected"]]
    late = [one["found_in_step"] - one["step"] for one in struck if one["found_in_step"] is not None]
    summary = {
        "flips": len(struck),
        "by_kind": Counter(one["what"] for one in struck),
        "found_after_steps": Counter(late),
        "without_effect": Counter(one["what"] for one in struck if one["found_in_step"] is None),
        "violations": sum(bool(result["violations"]) for result in results),
    }
    print(summary)
    print(f"raw results in {common.save('corruption', {'summary': summary, 'runs': results})}")
    return 1 if summary["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
