"""The order of microbatches inside a pipeline group: 1F1B over any number of them, growing while it runs.

Intuition: 1F1B needs no table. A stage that has w stages behind it keeps at most w+1 microbatches in flight; below that
limit it takes the next forward, at the limit the oldest backward. The rule depends only on the stage's progress, so the
list of microbatches may grow at any moment: microbatches of lost groups are appended to the running flush, and the
pipeline drains and refills only once. When the first stage has no backward left to do, the flush has ended; a patch
needs its own.

Assumes: stages run the same list in the same order; a death inside the group takes the whole group out, so only the
losses of other groups make the list grow.
"""

from __future__ import annotations

from typing import Literal, NamedTuple


class Instruction(NamedTuple):
    """The forward or the backward of the microbatch at ``index`` of the group's list."""

    kind: Literal["forward", "backward"]
    index: int  # type: ignore[assignment]  # in place of tuple.index, which is not used


class Progress(NamedTuple):
    """The numbers of forwards and backwards that a stage has done."""

    forwards: int = 0
    backwards: int = 0


def next_instruction(stage: int, stages: int, done: Progress, count: int) -> Instruction | None:
    """Return the next instruction of ``stage`` (of ``stages``, 0 first) when the list has ``count`` microbatches; None
    when it has done all. Raises ``ValueError`` for a stage that does not exist or impossible progress.
    """
    if not 0 <= stage < stages:
        raise ValueError(f"stage {stage} does not exist in a pipeline of {stages}")
    if not 0 <= done.backwards <= done.forwards <= count:
        raise ValueError(f"progress {done} cannot be with {count} microbatches")
    in_flight = done.forwards - done.backwards
    if done.forwards < count and in_flight < stages - stage:
        return Instruction("forward", done.forwards)
    if in_flight:
        return Instruction("backward", done.backwards)
    return None
