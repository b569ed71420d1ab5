"""Computing together: one rank's services to an engine whose ranks compute every microbatch jointly (``JointEngine``).

Failures it assumes: another rank of the group vanishes in the middle of a flush. What waits for it raises ``Lost``, or
whatever torch makes of a broken connection (:func:`lost_inside`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from megatron_ft.data.order import microbatch_seed
from megatron_ft.engines.base import Listed
from megatron_ft.runtime.inner import Lost
from megatron_ft.types import Microbatch

if TYPE_CHECKING:
    from megatron_ft.runtime.rank import Rank


class JointWork:
    """The ``Work`` of one flush. ``listed`` is asked at position 0 only; ``finished`` hears of each microbatch there."""

    def __init__(
        self, rank: Rank, seed: int, listed: Callable[[], Sequence[Listed]], finished: Callable[[Microbatch, bool], None]
    ) -> None:
        self._rank, self._seed = rank, seed
        self.listed, self._finished = listed, finished
        self._prefetched: dict[Microbatch, bool] = {}

    def batch(self, microbatch: Microbatch) -> Any:
        batch, self._prefetched[microbatch] = self._rank.samples(microbatch)
        return batch

    def seed(self, microbatch: Microbatch) -> int:
        return microbatch_seed(self._seed, microbatch)

    @contextmanager
    def span(self, kind: str, listed: Listed) -> Iterator[None]:
        rank, (microbatch, patch) = self._rank, listed
        if patch and kind == "forward":
            rank.points.reach("patch", microbatch.step)
        rank.points.reach(kind, microbatch.step)
        rank.pulse.enter("working")
        with rank.timeline.span(f"patch_{kind}" if patch else kind), rank.blame(microbatch):
            yield
        rank.pulse.advance()
        rank.pulse.enter("waiting")  # for the stages before and after this one

    def computed(self, microbatch: Microbatch) -> None:
        self._rank.points.corrupt(microbatch.step, self._rank.engine)
        self._finished(microbatch, self._prefetched.pop(microbatch, False))


@contextmanager
def lost_inside(lost_because: Callable[[], str]) -> Iterator[None]:
    """What breaks inside the group because another rank is gone, or has been cut off, is ``Lost``, not an error of ours."""
    try:
        yield
    except RuntimeError as error:
        if not (broken_inside(error) or lost_because()):
            raise
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise Lost(lost_because() or f"a collective inside the group broke: {first}") from None


def broken_inside(error: Exception) -> bool:
    """Whether it came from a collective. gloo's errors have no type of their own; they name its source files."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
