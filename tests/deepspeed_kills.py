"""Kills inside DeepSpeed pipelines: a rank of any stage, at any moment of a flush. Some run in CI, all of them by

    make deepspeed-kills        (python -m tests.deepspeed_kills [NAME ...])

which looks into the timelines as well (who computed what again, how often pipelines ran empty) and writes what came out to
benchmarks/results/deepspeed_kills.json.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import common
from megatron_ft.data import prepare
from megatron_ft.faults.injection_points import Breakpoint
from megatron_ft.runlog import invariants
from tests import support

SCRIPT = support.ROOT / "examples" / "pretrain_gpt_deepspeed" / "train.py"
MODEL = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 32}
STEPS, STEP = 4, 2
LAST = support.PER_GROUP - 1

MOMENTS = {
    "as the step begins": {"point": "begin"},
    "in the first forward pass": {"point": "forward"},
    "in the second forward pass": {"point": "forward", "after": 1},
    "in the last forward pass": {"point": "forward", "after": LAST},
    "in the first backward pass": {"point": "backward"},
    "in the last backward pass": {"point": "backward", "after": LAST},
    "in the all-reduce of the first bucket": {"point": "reduce"},
    "with the first bucket reduced": {"point": "bucket"},
    "with all buckets reduced": {"point": "gate"},
    "in the optimizer's update": {"point": "update"},
}
"""The points of a flush and of what follows it, in the order in which a rank of group 1 passes them. Each rank has
buckets of its own."""
TWICE = {
    "as the others report": "recover",
    "as the others build a communicator": "connect",
    "as another group takes a microbatch over": "patch",
}
"""When a second group dies, in the middle of a recovery (three groups)."""


@dataclass(frozen=True)
class Case:
    """One kill: which rank is killed, when, and in which run."""

    groups: int
    stages: int
    slices: int
    moment: str
    holds: tuple[Breakpoint, ...]

    @property
    def name(self) -> str:
        positions = ", ".join(f"rank {hold.position} of group {hold.group}" for hold in self.holds)
        return f"{self.groups} x PP{self.stages} x TP{self.slices}: {positions} {self.moment}"

    @property
    def whole(self) -> tuple[int, int, int]:
        return self.groups, self.stages, self.slices


def cases() -> list[Case]:
    """Return a case for every moment at every stage; with two slices the slices take turns."""
    found = []
    for groups, stages, slices in ((3, 2, 1), (2, 2, 2)):
        for number, (moment, what) in enumerate(MOMENTS.items()):
            for stage in range(stages):
                position = stage * slices + (number + stage) % slices
                found.append(Case(groups, stages, slices, moment, (Breakpoint(1, STEP, position=position, **what),)))
    first = Breakpoint(1, STEP, "backward")
    for moment, point in TWICE.items():
        found.append(Case(3, 2, 1, moment, (replace(first, position=1), Breakpoint(2, STEP, point))))
    return found


def start(
    directory: Path,
    data_dir: Path,
    holds: Sequence[Breakpoint] = (),
    *,
    stages: int = 2,
    slices: int = 1,
    model: dict | None = None,
    engine: dict | None = None,
    **options,
) -> support.Run:
    """Start the example; ``engine``: other settings of DeepSpeed."""
    split = {"pipeline": {"stages": stages}, "tensor_parallel": {"autotp_size": slices}}
    known = {"steps": STEPS, "script": SCRIPT, "groups": 2, "own": (), "extra": ["--preload", "deepspeed"]}
    known |= {"model": model or MODEL, "engine": {**split, **(engine or {})}}
    return support.start(directory, data_dir, holds, **{**known, **options})


def play(case: Case, directory: Path, data_dir: Path) -> support.Run:
    """Play the run of a case to its end.

    A rank that is to die in a recovery from the first death has to be in that step by then. If it were still in the
    step before, the recovery would be of that step, and the rank would never get to its point.
    """
    groups, stages, slices = case.whole
    first, *later = case.holds
    begins = [replace(hold, point="begin") for hold in later]
    run = start(directory, data_dir, [*case.holds, *begins], groups=groups, stages=stages, slices=slices)
    for hold in begins:
        os.kill(support.await_held(run, hold.group, hold.position), signal.SIGCONT)
    run.strike(first)
    run.strike(*later)
    return run


def kinds(run: support.Run, group: int, position: int) -> list[str]:
    """Return what a rank did in the step of the (first) death, in order."""
    lines = (run.directory / "timeline" / f"g{group}.p{position}.jsonl").read_text().splitlines()
    return [kind for line in map(json.loads, lines) if line["step"] == STEP for kind, *_ in line["spans"]]


def flushes(found: Sequence[str]) -> int:
    """Return the number of times that a first stage has begun with nothing in flight: each time the pipeline has to
    fill again."""
    in_flight = begun = 0
    for kind in found:
        begun += kind.endswith("forward") and not in_flight
        in_flight += kind.endswith("forward") - kind.endswith("backward")
    return begun


def patch_violations(run: support.Run, case: Case) -> list[str]:
    """Check that the lost work was computed again, once, and in at most one more flush of each group for each death."""
    if any(line["step"] < STEP for line in run.events("recovery")):
        return []  # the survivors still committed the step before, and planned this one without the lost groups
    lost = {hold.group for hold in case.holds}
    kept = [group for group in range(case.groups) if group not in lost]
    first = {group: kinds(run, group, 0) for group in kept}
    found = []
    if any(done.count("forward") != support.PER_GROUP for done in first.values()):
        found.append("a group has not computed exactly its own part once")
    again = sum(done.count("patch_forward") for done in first.values())
    if again not in (0, support.PER_GROUP * len(lost)):  # a rank that died with everything reduced had given all
        found.append(f"{again} microbatches were computed again, {support.PER_GROUP * len(lost)} were lost")
    for group in kept:
        for position in range(case.stages * case.slices):
            done = kinds(run, group, position)
            if {done.count(f"patch_{way}") for way in ("forward", "backward")} != {first[group].count("patch_forward")}:
                found.append(f"rank {position} of group {group} patched otherwise than rank 0")
        if flushes(first[group]) > 1 + len(lost):
            found.append(f"the pipeline of group {group} was filled {flushes(first[group])} times")
    return found


def main(names: Sequence[str]) -> int:
    chosen = [case for case in cases() if not names or any(name in case.name for name in names)]
    results, references = [], {}
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        text = support.ROOT / "megatron_ft" / "data" / "fallback.txt"
        prepare(root / "data", [text], vocab_size=512, log=lambda line: None)
        for number, case in enumerate(chosen):
            if case.whole not in references:
                groups, stages, slices = case.whole
                directory = root / f"reference{len(references)}"
                alone = start(directory, root / "data", groups=groups, stages=stages, slices=slices)
                alone.check()
                references[case.whole] = alone.history
            run = play(case, root / f"run{number}", root / "data")
            said = run.finish()
            reference = references[case.whole]
            found = invariants.check_history(run.history, case.groups * support.PER_GROUP, reference)
            found += patch_violations(run, case)
            found += [] if run.process.returncode == 0 else [f"exit code {run.process.returncode}: {said}"]
            losses = [[line["loss"] for line in lines if line["event"] == "step"] for lines in (run.history, reference)]
            off = max((abs(mine - theirs) / abs(theirs) for mine, theirs in zip(*losses, strict=False)), default=0.0)
            results.append({"case": case.name, "violations": found, "largest_relative_difference_of_a_loss": off})
            came_out = "; ".join(found) or f"ok, losses off by {off:.1e}"
            print(f"{number + 1}/{len(chosen)} {case.name}: {came_out}", flush=True)
    bad = sum(bool(result["violations"]) for result in results)
    off = max((result["largest_relative_difference_of_a_loss"] for result in results), default=0.0)
    if not names:
        path = common.save("deepspeed_kills", {"moments": {**MOMENTS, **TWICE}, "results": results})
        print(f"raw results in {path}")
    print(f"{len(results)} runs, {bad} of them broke a promise; losses off by up to {off:.1e}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
