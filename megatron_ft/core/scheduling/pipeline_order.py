"""The order of what remains in a running flush, chosen anew when ranks die.

Intuition: all microbatches of a pipeline take equally long, so an order matters in two ways only. The group's
contribution is complete when the last microbatch that it contributes is through: standby work goes last, patches before
it. And the first stage must not wait for samples while others are at hand: what has to be fetched goes behind what is in
memory, and is fetched meanwhile. No other order is better where all samples are in memory, or where no standby work is
left. Where standby work could begin while the samples of a contribution are fetched, another order can be better, by less
than one microbatch takes through all stages (``tests/unit/test_pipeline_order.py`` compares with all orders).

The rule of each stage (``pipeline_1f1b``) stays: forward first below the limit, which feeds the
slowest stage behind it as early as its memory allows, else the oldest backward. A microbatch whose forward pass has begun
keeps its place: later stages know it already.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from megatron_ft.types import Microbatch


def reorder(
    waiting: Iterable[Microbatch], standby: Collection[Microbatch], at_hand: Collection[Microbatch]
) -> list[Microbatch]:
    """Return the microbatches that have not begun in the order in which they should begin: equal ones as they were listed.

    ``standby``: those that the group does not contribute; ``at_hand``: those whose samples are in memory.
    """
    return sorted(waiting, key=lambda one: (one in standby, one not in at_hand))
