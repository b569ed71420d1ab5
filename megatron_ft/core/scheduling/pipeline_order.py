"""The order of what remains in a running flush, chosen anew when ranks die, and the time that an order takes.

Intuition: all microbatches of a pipeline take equally long, so an order matters in two ways only. The group's
contribution is complete when the last microbatch that it contributes is through: standby work goes last, patches before
it. And the first stage must not wait for samples while others are at hand: what has to be fetched goes behind what is in
memory, and is fetched meanwhile. No other order is better where all samples are in memory, or where no standby work is
left. Where standby work could begin while the samples of a contribution are fetched, another order can be better, by less
than one microbatch takes through all stages (``tests/unit/test_pipeline_order.py`` compares with all orders).

The rule of each stage (``pipeline_1f1b``, ``pipeline_interleaved``) stays: forward first below the limit, which feeds the
slowest stage behind it as early as its memory allows, else the oldest backward. A microbatch whose forward pass has begun
keeps its place: later stages know it already.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_ft.core.scheduling.pipeline_1f1b import Progress, next_instruction
from megatron_ft.core.scheduling.pipeline_interleaved import next_chunk_instruction, rounds_of


class Waiting(NamedTuple):
    """A microbatch that has not begun.

    Attributes:
        standby: the group does not contribute it.
        at_hand: its samples are in memory.
    """

    standby: bool = False
    at_hand: bool = True


def reorder(waiting: Sequence[Waiting]) -> list[int]:
    """Return the places of ``waiting`` in the order in which they should begin: equal ones as they were listed."""
    return sorted(range(len(waiting)), key=lambda place: (waiting[place].standby, not waiting[place].at_hand))


class Costs(NamedTuple):
    """Seconds of a forward and of a backward pass of one stage."""

    forward: float = 1.0
    backward: float = 2.0


def ends(ready: Sequence[float], costs: Sequence[Costs], chunks: int = 1) -> list[float]:
    """Return when each microbatch's backward pass is through at the first stage, in the order of the list.

    Args:
        ready: seconds at which the first stage has the samples of each microbatch, in the order in which they begin.
        costs: the costs of the ranks, the first one first; of all its chunks together.
        chunks: number of chunks of a rank; 1: 1F1B, more: the interleaved order.
    """
    ranks, last = len(costs), len(costs) * chunks - 1
    todo = [_instructions(rank, ranks, chunks, len(ready)) for rank in range(ranks)]
    free, through = [0.0] * ranks, dict[tuple[str, int, int], float]()  # (kind, microbatch, stage) -> when it is done
    while any(todo):
        for rank, own in enumerate(costs):
            while todo[rank]:
                kind, index, chunk = todo[rank][0]
                stage = chunk * ranks + rank
                before = stage - 1 if kind == "forward" else stage + 1
                comes = through.get((kind, index, before)) if 0 <= before <= last else ready[index]
                if comes is None:
                    break
                cost = (own.forward if kind == "forward" else own.backward) / chunks
                free[rank] = through[kind, index, stage] = max(free[rank], comes) + cost
                todo[rank].pop(0)
    return [through["backward", index, 0] for index in range(len(ready))]


def _instructions(rank: int, ranks: int, chunks: int, count: int) -> list[tuple[str, int, int]]:
    """Return all that a rank does, in order: kind, microbatch and chunk."""
    found, done, rounds = list[tuple[str, int, int]](), Progress(), rounds_of(count, ranks)
    if chunks == 1:
        while (plain := next_instruction(rank, ranks, done, count)) is not None:
            found.append((*plain, 0))
            forward = plain.kind == "forward"
            done = Progress(done.forwards + forward, done.backwards + (not forward))
    while chunks > 1 and (move := next_chunk_instruction(rank, ranks, chunks, done, rounds)) is not None:
        found.append((move.kind, move.index, move.chunk))
        done = move.after
    return found
