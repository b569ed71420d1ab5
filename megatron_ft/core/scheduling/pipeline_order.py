"""The order of what remains in a running flush, chosen anew when ranks die, and the time that an order takes.

Intuition: all microbatches of a pipeline take equally long, so an order matters in two ways only. The group's
contribution is complete when the last microbatch that it contributes is through: standby work goes last, patches before
it. And the first stage must not wait for samples while others are at hand: what has to be fetched goes behind what is in
memory, and is fetched meanwhile. No other order is better where all samples are in memory, or where no standby work is
left. Where standby work could begin while the samples of a contribution are fetched, another order can be better, by less
than one microbatch takes through all stages (``tests/unit/test_pipeline_order.py`` compares with all orders).

The rule of each stage (``pipeline_1f1b``) stays: forward first below the limit, which feeds the slowest stage behind it as
early as its memory allows, else the oldest backward. A microbatch whose forward pass has begun keeps its place: later
stages know it already.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_ft.core.scheduling.pipeline_1f1b import Progress, next_instruction


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


def ends(ready: Sequence[float], costs: Sequence[Costs]) -> list[float]:
    """Return when each microbatch's backward pass is through at the first stage, in the order of the list.

    Args:
        ready: seconds at which the first stage has the samples of each microbatch, in the order in which they begin.
        costs: the stages' costs, the first stage first.
    """
    stages, count = len(costs), len(ready)
    done, free = [Progress() for _ in costs], [0.0] * stages
    forward = [[0.0] * count for _ in costs]
    backward = [[0.0] * count for _ in costs]
    while done[0].backwards < count:
        for stage, own in enumerate(costs):
            while (move := next_instruction(stage, stages, done[stage], count)) is not None:
                index = move.index
                if move.kind == "forward":
                    if stage and done[stage - 1].forwards <= index:
                        break
                    comes = forward[stage - 1][index] if stage else ready[index]
                    free[stage] = forward[stage][index] = max(free[stage], comes) + own.forward
                    done[stage] = done[stage]._replace(forwards=index + 1)
                else:
                    if stage + 1 < stages and done[stage + 1].backwards <= index:
                        break
                    comes = backward[stage + 1][index] if stage + 1 < stages else 0.0
                    free[stage] = backward[stage][index] = max(free[stage], comes) + own.backward
                    done[stage] = done[stage]._replace(backwards=index + 1)
    return backward[0]
