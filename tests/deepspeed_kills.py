"""Runs of the DeepSpeed example, and what their timelines show: who computed what again, how often pipelines ran empty."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ft.run.injection_points import Breakpoint
from tests import support

if TYPE_CHECKING:
    from tests.engine_kills import Case

SCRIPT = support.ROOT / "examples" / "pretrain_gpt_deepspeed" / "train.py"
MODEL = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 32}
STEPS, STEP = 4, 2
"""The length of a run, and the step in which a rank is killed."""


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


PLAIN = """
from megatron_ft.run.session import Session
import deepspeed

def wrap(self, model, optimizer, loss_fn, scheduler):
    return self.deepspeed(model, loss_fn=loss_fn, optimizer=optimizer, lr_scheduler=scheduler)

Session.wrap = wrap
"""
"""What makes plain PyTorch's example one of a ``DeepSpeedEngine``."""


def zero(
    directory: Path, data_dir: Path, holds: Sequence[Breakpoint] = (), *, stage: int, shards: int = 2, **options
) -> support.Run:
    """Start plain PyTorch's example with ZeRO-2 or 3 inside groups of ``shards`` ranks."""
    script = support.changed_script(directory.with_suffix(".py"), PLAIN)
    engine = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 100}}
    known = {"steps": STEPS, "script": script, "extra": ["--preload", "deepspeed"], "engine": engine}
    return support.start(directory, data_dir, holds, **{**known, "inner_shards": shards, **options})


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
    lost = {hold.group for hold in case.holds}
    if case.holds[0].step != STEP or any(line["step"] < STEP for line in run.events("recovery")):
        return []  # the survivors still committed the step before, and planned this one without the lost groups
    kept = [group for group in range(case.groups) if group not in lost]
    first = {group: kinds(run, group, 0) for group in kept}
    found = []
    if any(done.count("forward") != support.PER_GROUP for done in first.values()):
        found.append("a group has not computed exactly its own part once")
    again = sum(done.count("patch_forward") for done in first.values())
    if again not in (0, support.PER_GROUP * len(lost)):  # a rank that died with everything reduced had given all
        found.append(f"{again} microbatches were computed again, {support.PER_GROUP * len(lost)} were lost")
    for group in kept:
        positions = len(list((run.directory / "timeline").glob(f"g{group}.p*.jsonl")))
        for position in range(positions):
            done = kinds(run, group, position)
            if {done.count(f"patch_{way}") for way in ("forward", "backward")} != {first[group].count("patch_forward")}:
                found.append(f"rank {position} of group {group} patched otherwise than rank 0")
        if flushes(first[group]) > 1 + len(lost):
            found.append(f"the pipeline of group {group} was filled {flushes(first[group])} times")
    return found
