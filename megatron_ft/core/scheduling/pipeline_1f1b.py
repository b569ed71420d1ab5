"""The order of microbatches inside a pipeline group: 1F1B over any number of them, growing while it runs.

Intuition: 1F1B needs no table. A stage that has w stages behind it keeps at most w+1 microbatches in flight; below that
it takes the next forward, at it the oldest backward. The rule looks only at what the stage has done so far, so the list
of microbatches may grow at any moment: taken-over ones are appended to the running flush, and the pipeline drains and
refills only once. Only when the first stage has no backward left to do has the flush ended, and a patch needs its own.

Assumes: stages run the same list in the same order; a death inside the group takes the whole group out, so only other
groups' losses make the list grow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from megatron_ft.types import Microbatch


class Instruction(NamedTuple):
    """Forward or backward of the microbatch at ``index`` of the group's list."""

    kind: Literal["forward", "backward"]
    index: int


class Progress(NamedTuple):
    """How many forwards and backwards a stage has done."""

    forwards: int = 0
    backwards: int = 0


def next_instruction(stage: int, stages: int, done: Progress, count: int) -> Instruction | None:
    """What ``stage`` (of ``stages``, 0 first) does next when the list has ``count`` microbatches; None when it is through.

    Raises ``ValueError`` for a stage that does not exist or progress that cannot be.
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


def remaining(stage: int, stages: int, done: Progress, count: int) -> tuple[Instruction, ...]:
    """Everything ``stage`` still has to do, in order; the whole 1F1B schedule when ``done`` is nothing."""
    found: list[Instruction] = []
    while (instruction := next_instruction(stage, stages, done, count)) is not None:
        found.append(instruction)
        forward = instruction.kind == "forward"
        done = Progress(done.forwards + forward, done.backwards + (not forward))
    return tuple(found)


def fits_running_flush(first_stage: Progress, count: int) -> bool:
    """Whether microbatches appended now join the running flush of ``count``, given what the *first* stage has done.

    The first stage finishes last: as long as it has a backward to do, the pipeline is not empty.
    """
    return first_stage.backwards < count


def order(own: Sequence[Microbatch], patched: Sequence[Microbatch]) -> tuple[Microbatch, ...]:
    """The group's list: its own share first, in ascending order, then what it has taken over, as it came.

    What is already in the list never moves, so every stage can go on from where it is. Raises ``ValueError`` for a
    microbatch that is in it twice.
    """
    listed = (*sorted(own), *patched)
    if len(set(listed)) != len(listed):
        twice = sorted({microbatch for microbatch in listed if listed.count(microbatch) > 1})
        raise ValueError(f"microbatches listed twice: {' '.join(map(str, twice))}")
    return listed
