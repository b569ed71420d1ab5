"""Judge any run's history: what must hold whatever died. Used by tests, the demo and anybody who doubts a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

LOSS_TOLERANCE = 1e-5
NORM_TOLERANCE = 1e-6

Lines = Sequence[Mapping[str, Any]]


def check_history(lines: Lines, microbatches: int, reference: Lines | None = None) -> list[str]:
    """The violations of a finished run, in words; empty when all is well.

    Args:
        lines: its ``history.jsonl``, parsed.
        microbatches: N*G.
        reference: the history of a failure-free run of the same job and seed.
    """
    ends = [line for line in lines if line["event"] == "end"]
    if len(ends) != 1:
        return [f"{len(ends)} end lines, there must be 1"]
    found = _check_steps(lines, ends[0]["step"], microbatches)
    found += _check_views(lines)
    found += _check_survivors(lines)
    if reference is not None:
        found += _check_reference(lines, reference)
    return found


def losses(lines: Lines) -> dict[int, float]:
    """Loss by step."""
    return {line["step"]: line["loss"] for line in lines if line["event"] == "step"}


def largest_loss_difference(lines: Lines, reference: Lines) -> float:
    """Largest relative difference over the steps both have; infinite when they have none in common."""
    mine, theirs = losses(lines), losses(reference)
    common = mine.keys() & theirs.keys()
    return max((abs(mine[step] - theirs[step]) / abs(theirs[step]) for step in common), default=float("inf"))


def _check_steps(lines: Lines, last: int, microbatches: int) -> list[str]:
    counts = Counter(line["step"] for line in lines if line["event"] == "step")
    found = [f"step {step} has {counts[step]} lines" for step in range(last + 1) if counts[step] != 1]
    found += [f"step {step} is after the end" for step in counts if step > last]
    found += [
        f"step {line['step']} counts {line['microbatches']} microbatches, not {microbatches}"
        for line in lines
        if line["event"] == "step" and line["microbatches"] != microbatches
    ]
    return found


def _check_views(lines: Lines) -> list[str]:
    epochs = [line["epoch"] for line in lines if line["event"] == "view"]
    return [] if epochs == list(range(len(epochs))) else [f"views are {epochs}, not one each in order"]


def _check_survivors(lines: Lines) -> list[str]:
    prints = {line["group"]: line["params_sha256"] for line in lines if line["event"] == "survivor"}
    return [] if len(set(prints.values())) == 1 else [f"the survivors' parameters differ: {prints}"]


def _check_reference(lines: Lines, reference: Lines) -> list[str]:
    found = []
    if losses(lines).keys() != losses(reference).keys():
        found.append("the steps are not those of the reference")
    loss = largest_loss_difference(lines, reference)
    if loss > LOSS_TOLERANCE:
        found.append(f"the loss differs by {loss:.2e} from the reference, more than {LOSS_TOLERANCE:g}")
    mine, theirs = (next(line["params_norm"] for line in side if line["event"] == "end") for side in (lines, reference))
    if abs(mine - theirs) / theirs > NORM_TOLERANCE:
        found.append(f"params_norm is {mine!r}, the reference has {theirs!r}: more than {NORM_TOLERANCE:g} apart")
    return found
