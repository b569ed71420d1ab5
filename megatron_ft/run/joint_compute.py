"""Joint computation: one rank's services to an engine whose ranks compute every microbatch together (``JointEngine``).

Failures it assumes: another rank of the group vanishes in the middle of a flush. An operation that waits for it raises
``Lost``, or torch's error for a broken connection (:meth:`.Rank.inside`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from megatron_ft.run.engines.gradient_check import kept
from megatron_ft.run.engines.port import OWN, Listed, Ready
from megatron_ft.run.injection_points import Corruptible
from megatron_ft.types import Microbatch

if TYPE_CHECKING:
    from megatron_ft.run.computing import Computing
    from megatron_ft.run.orders import Flush
    from megatron_ft.run.rank import Rank


class FirstMicrobatch:
    """The ``Work`` of flushes of the group's first microbatch alone, for ``JointEngine.check_by_flushes``."""

    def __init__(self, computing: Computing, listed: Callable[[], Sequence[Listed]]) -> None:
        self._computing, self._listed = computing, listed
        self.seed = computing.seed
        self.batches: dict[Microbatch, Any] = {}

    @cached_property
    def _first(self) -> Sequence[Listed]:
        return [Listed(one.microbatch, False) for one in self._listed()[:1]]

    def listed(self) -> Sequence[Listed]:
        return self._first

    def closes(self, listed: Sequence[Listed]) -> bool:
        return False

    def ready(self) -> Ready | None:
        return None

    def batch(self, microbatch: Microbatch) -> Any:
        if microbatch not in self.batches:
            self.batches[microbatch] = self._computing.load(microbatch)
        return kept(self.batches[microbatch])

    @contextmanager
    def span(self, kind: str, listed: Listed) -> Iterator[None]:
        with _pulsing(self._computing.rank, listed.microbatch):
            yield

    def computed(self, listed: Listed) -> None:
        self._computing.engine.collect()


class JointWork:
    """The ``Work`` of one flush. Position 0 calls ``listed``, ``closes``, and the order's ``finished`` with each
    microbatch."""

    def __init__(self, computing: Computing, flush: Flush, ready: Callable[[], Ready | None]) -> None:
        self._computing, self.seed, self.ready = computing, computing.seed, ready
        self.listed, self._finished, self.closes = flush.listed, flush.finished, flush.closes
        self._prefetched: dict[Microbatch, bool] = {}

    def batch(self, microbatch: Microbatch) -> Any:
        batch, self._prefetched[microbatch] = self._computing.samples(microbatch)
        return batch

    @contextmanager
    def span(self, kind: str, listed: Listed) -> Iterator[None]:
        rank, (microbatch, patch, *_) = self._computing.rank, listed
        if patch and kind == "forward":
            rank.points.reach("patch", microbatch.step)
        rank.points.reach(kind, microbatch.step)
        if kind == "forward":
            rank.points.corrupt_activation(microbatch.step, cast(Corruptible, self._computing.engine))
        with rank.timeline.span(f"patch_{kind}" if patch else kind), _pulsing(rank, microbatch):
            yield

    def computed(self, listed: Listed) -> None:
        microbatch, computing = listed.microbatch, self._computing
        if listed.part == OWN:
            computing.rank.points.corrupt(microbatch.step, cast(Corruptible, computing.engine))
        computing.collect(microbatch, listed.digest)
        self._finished(listed, self._prefetched.pop(microbatch, False))


@contextmanager
def _pulsing(rank: Rank, microbatch: Microbatch) -> Iterator[None]:
    """Surround one pass of a microbatch."""
    rank.progress.enter("working")
    with rank.blame(microbatch):
        yield
    rank.progress.advance()
    rank.progress.enter("waiting")  # for the stages before and after this one
