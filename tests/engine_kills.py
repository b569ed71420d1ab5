"""Kills of single ranks of groups whose ranks compute together, at every moment of a step and in every engine. Some run in
CI, all of them by

    make engine-kills        (python -m tests.engine_kills [--seed S] [NAME ...])

which compares each run with a failure-free one, bit by bit where gradients are reduced exactly, and writes what came out to
benchmarks/results/engine_kills.json. A NAME chooses all cases that contain it.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks import common
from megatron_ft.data import prepare
from megatron_ft.record import invariants
from megatron_ft.run.injection_points import Breakpoint
from tests import deepspeed_kills, support

STEPS, STEP = deepspeed_kills.STEPS, deepspeed_kills.STEP
LAST = support.PER_GROUP - 1
EXAMPLES = support.ROOT / "examples"
SMALL = ("--width", 64, "--seq-len", 32)
MEGATRON_SMALL = ("--num-layers", 2, "--hidden-size", 64, "--seq-length", 32)
"""The same model in Megatron's words."""
RECOMPUTATION = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", 1)
EXPERTS = (
    *("--num-experts", 4, "--moe-aux-loss-coeff", 0.01, "--moe-router-score-function", "sigmoid"),
    *("--moe-router-enable-expert-bias", "--moe-token-dispatcher-type", "alltoall", "--disable-bias-linear"),
)

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
"""The points of a step in the order in which a rank of group 1 passes them. Each rank has buckets of its own."""
TWICE = {
    "as the others report": "recover",
    "as the others build a communicator": "connect",
    "as another group takes a microbatch over": "patch",
}
"""When a second group dies, in the middle of a recovery (three groups)."""


@dataclass(frozen=True)
class Kit:
    """An engine in real runs: ``start`` of a run with ``groups`` groups of ``ranks`` ranks, and what is checked besides
    the promises of all runs."""

    groups: int
    ranks: int
    start: Callable[..., support.Run]
    options: Mapping[str, Any] = field(default_factory=dict)
    check: Callable[[support.Run, Case], list[str]] = lambda run, case: []


@dataclass(frozen=True)
class Case:
    """One kill: which ranks are killed, when, and in which run."""

    kit: str
    moment: str
    holds: tuple[Breakpoint, ...]

    @property
    def name(self) -> str:
        positions = ", ".join(f"rank {hold.position} of group {hold.group}" for hold in self.holds)
        return f"{self.kit}: {positions} {self.moment}"

    @property
    def groups(self) -> int:
        return KITS[self.kit].groups


def _example(
    name: str,
    directory: Path,
    data_dir: Path,
    holds: Sequence[Breakpoint] = (),
    *,
    stages: int = 1,
    slices: int = 1,
    shards: int = 1,
    small: Sequence[object] = SMALL,
    own: Sequence[object] = (),
    **options: Any,
) -> support.Run:
    split = {"pipeline": {"stages": stages}, "tensor_parallel": {"autotp_size": slices}}
    known = {
        "steps": STEPS,
        "script": EXAMPLES / name / "train.py",
        "own": (*small, *own),
        "engine": split,
        "inner_shards": shards,
    }
    return support.start(directory, data_dir, holds, **{**known, **options})


def fsdp(*arguments: Any, **options: Any) -> support.Run:
    return _example("pretrain_gpt_fsdp", *arguments, **{"own": ("--layers", 2), **options})


def native(*arguments: Any, schedule: str = "1f1b", **options: Any) -> support.Run:
    own = ("--layers", 4 if schedule != "1f1b" else 2, "--schedule", schedule)
    return _example("pretrain_gpt_native3d", *arguments, **{"own": own, **options})


def megatron(*arguments: Any, own: Sequence[object] = (), **options: Any) -> support.Run:
    extra = ["--preload", "megatron.core.models.gpt,megatron.core.optimizer"]
    own = (*MEGATRON_SMALL, *own)
    return _example("pretrain_gpt_megatron", *arguments, small=(), **{"own": own, "extra": extra, **options})


KITS = {
    "3 x FSDP2": Kit(3, 2, fsdp, {"shards": 2}),
    "3 x FSDP2, reduced with the last": Kit(3, 2, fsdp, {"shards": 2, "inner_shards_reduce": "last"}),
    "2 x TP2 x FSDP2": Kit(2, 4, native, {"slices": 2, "shards": 2}),
    "3 x torch PP2": Kit(3, 2, native, {"stages": 2}),
    "2 x torch PP2 interleaved": Kit(2, 2, native, {"stages": 2, "schedule": "interleaved"}),
    "2 x torch PP2 zero bubble": Kit(2, 2, native, {"stages": 2, "schedule": "zero-bubble"}),
    "2 x torch PP2 x TP2": Kit(2, 4, native, {"stages": 2, "slices": 2}),
    "2 x torch PP2 x FSDP2": Kit(2, 4, native, {"stages": 2, "shards": 2}),
    "2 x Megatron PP2 x TP2": Kit(2, 4, megatron, {"stages": 2, "slices": 2, "own": ("--sequence-parallel",)}),
    "2 x Megatron EP2": Kit(2, 2, megatron, {"shards": 2, "own": EXPERTS}),
    "2 x Megatron PP2, recomputation": Kit(2, 2, megatron, {"stages": 2, "own": RECOMPUTATION}),
    "3 x Megatron DP2, distributed optimizer": Kit(
        3, 2, megatron, {"shards": 2, "own": ("--use-distributed-optimizer",)}
    ),
    "2 x ZeRO-2": Kit(2, 2, deepspeed_kills.zero, {"stage": 2}),
    "2 x ZeRO-3": Kit(2, 2, deepspeed_kills.zero, {"stage": 3}),
    "3 x PP2": Kit(3, 2, deepspeed_kills.start, {"stages": 2}, deepspeed_kills.patch_violations),
    "2 x PP2 x TP2": Kit(2, 4, deepspeed_kills.start, {"stages": 2, "slices": 2}, deepspeed_kills.patch_violations),
}


def cases(kit: str) -> list[Case]:
    """Return a case for every moment at two of the ranks, which take turns, and for each moment of a recovery."""
    found, size = [], KITS[kit].ranks
    for number, (moment, what) in enumerate(MOMENTS.items()):
        for half in range(2):
            position = half * size // 2 + (number + half) % max(size // 2, 1)
            found.append(Case(kit, moment, (Breakpoint(1, STEP, position=position, **what),)))
    first = Breakpoint(1, STEP, "backward", position=1)
    for moment, point in TWICE.items() if KITS[kit].groups > 2 else ():
        found.append(Case(kit, moment, (first, Breakpoint(2, STEP, point))))
    return found


def drawn(kit: str, count: int, seed: int) -> list[Case]:
    """Return kills of any rank of any group at any moment of any step."""
    rng, found = random.Random(f"{kit} {seed}"), []
    for number in range(count):
        moment, what = rng.choice(sorted(MOMENTS.items()))
        where = {"position": rng.randrange(KITS[kit].ranks), **what}
        hold = Breakpoint(rng.randrange(KITS[kit].groups), rng.randrange(1, STEPS), **where)
        found.append(Case(kit, f"{moment} of step {hold.step} (draw {number} of seed {seed})", (hold,)))
    return found


def start(kit: str, directory: Path, data_dir: Path, holds: Sequence[Breakpoint] = (), **options: Any) -> support.Run:
    one = KITS[kit]
    return one.start(directory, data_dir, holds, groups=one.groups, **{**one.options, **options})


def play(case: Case, directory: Path, data_dir: Path, **options: Any) -> support.Run:
    """Play the run of a case to its end.

    A rank that is to die in a recovery from the first death has to be in that step by then. If it were still in the
    step before, the recovery would be of that step, and the rank would never get to its point.
    """
    first, *later = case.holds
    begins = [replace(hold, point="begin") for hold in later]
    run = start(case.kit, directory, data_dir, [*case.holds, *begins], **options)
    for hold in begins:
        os.kill(support.await_held(run, hold.group, hold.position), signal.SIGCONT)
    run.strike(first)
    run.strike(*later)
    return run


def judge(run: support.Run, case: Case, reference: support.Run, exact: bool) -> tuple[list[str], float]:
    """Return what a run broke, and by how much its losses differ from those of the failure-free run."""
    said = run.finish()
    found = invariants.check_history(run.history, case.groups * support.PER_GROUP, reference.history)
    found += KITS[case.kit].check(run, case)
    found += [] if run.process.returncode == 0 else [f"exit code {run.process.returncode}: {said}"]
    losses = [[line["loss"] for line in one.events("step")] for one in (run, reference)]
    off = max((abs(mine - theirs) / abs(theirs) for mine, theirs in zip(*losses, strict=False)), default=0.0)
    if exact and not found and support.outcome(run) != support.outcome(reference):
        found.append("the bits differ from those of the failure-free run")
    return found, off


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.engine_kills", description="Kill ranks at every moment.")
    parser.add_argument("names", nargs="*", help="parts of the names of the cases to play (default: all)")
    parser.add_argument("--seed", type=int, help="draw 20 kills for each engine in place of the listed ones")
    options = parser.parse_args()
    known = [one for kit in KITS for one in (cases(kit) if options.seed is None else drawn(kit, 20, options.seed))]
    chosen = [case for case in known if not options.names or any(name in case.name for name in options.names)]
    results, references = [], {}
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        text = support.ROOT / "megatron_ft" / "data" / "addresses.txt"
        prepare(root / "data", [text], vocab_size=512, log=lambda line: None)
        for number, case in enumerate(chosen):
            exact = "inner_shards_reduce" not in KITS[case.kit].options
            settings = {"reduction": "exact"} if exact else {}
            if case.kit not in references:
                references[case.kit] = start(case.kit, root / f"alone{len(references)}", root / "data", **settings)
                references[case.kit].check()
            run = play(case, root / f"run{number}", root / "data", **settings)
            found, off = judge(run, case, references[case.kit], exact)
            results.append(
                {"case": case.name, "exact": exact, "violations": found, "largest_relative_difference_of_a_loss": off}
            )
            came_out = "; ".join(found) or f"ok, losses off by {off:.1e}"
            print(f"{number + 1}/{len(chosen)} {case.name}: {came_out}", flush=True)
    bad = sum(bool(result["violations"]) for result in results)
    off = max((result["largest_relative_difference_of_a_loss"] for result in results), default=0.0)
    if not options.names and options.seed is None:
        print(f"raw results in {common.save('engine_kills', {'moments': {**MOMENTS, **TWICE}, 'results': results})}")
    print(f"{len(results)} runs, {bad} of them broke a promise; losses off by up to {off:.1e}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
