"""What the ranks of a group compute together next: position 0 decides, and tells the other ranks.

For engines whose ranks pass through the same microbatches together. (In a DeepSpeed pipeline a stage may learn of a
microbatch while others compute: ``run.engines.pipeline_flush``.) A round ends before the next one is decided, so
microbatches that were lost elsewhere join in the next round.

Failures it assumes: a rank that vanishes; ``control`` then raises.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megatron_ft.run.engines.layout import Layout
from megatron_ft.run.engines.port import Control, Listed, Work
from megatron_ft.types import Microbatch

ALL = 1 << 20
"""More microbatches than a group has in a step."""


class Round(NamedTuple):
    """Microbatches to compute together, in order. ``last``: the group has no others in this step, as far as is known, so
    that complete buckets may be sent (``Work.ready``)."""

    listed: tuple[Listed, ...]
    last: bool


def peers(layout: Layout) -> tuple[int, ...]:
    """Return the positions with which a rank exchanges messages."""
    return (0,) if layout.position else tuple(range(1, layout.size))


def rounds(layout: Layout, control: Control, work: Work, most: int) -> Iterator[Round]:
    """Yield rounds of at most ``most`` microbatches until none is left. All ranks of the group iterate alike."""
    yield from _decided(layout, control, work, most) if layout.position == 0 else _told(control)


def _decided(layout: Layout, control: Control, work: Work, most: int) -> Iterator[Round]:
    begun: set[Microbatch] = set()
    while True:
        todo = [one for one in work.listed() if one.microbatch not in begun]
        listed = tuple(todo[:most])
        found = Round(listed, bool(listed) and len(listed) == len(todo) and work.closes(listed))
        for position in peers(layout):
            control.send_words(position, (len(listed), found.last))
            for one in listed:
                control.send_words(position, words(one))
        if not listed:
            return
        begun |= {one.microbatch for one in listed}
        yield found


def _told(control: Control) -> Iterator[Round]:
    while True:
        count, last, *_ = control.receive_words(0)
        if not count:
            return
        yield Round(tuple(parse(control.receive_words(0)) for _ in range(count)), bool(last))


def words(listed: Listed) -> tuple[int, ...]:
    """Return a microbatch as it travels."""
    return listed.patch + 2 * listed.digest, listed.part, *listed.microbatch


def parse(words: Sequence[int]) -> Listed:
    """Inverse of :func:`words`."""
    flags, part, *microbatch = words[:5]
    return Listed(Microbatch(*microbatch), bool(flags % 2), part, flags >= 2)
