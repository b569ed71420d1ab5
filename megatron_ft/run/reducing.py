"""What one rank does together with the ranks of equal position in the other groups: it sums the gradients of a step, and
hands over or takes what a view says.

In a group of several ranks each operation ends at all of them alike: complete, or with ``Broken``.

Failures it assumes: any operation may fail (``Broken``: the epoch is over) or, inside the group, end the group
(``Lost``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch

from megatron_ft.core.detection import state_divergence
from megatron_ft.errors import InvariantBroken
from megatron_ft.run.collectives import state_transfer
from megatron_ft.run.collectives.base import Broken, Communicator, sweep
from megatron_ft.run.collectives.bucket_allreduce import Changed, Reduction
from megatron_ft.run.collectives.intra_group_gradients import OwnGradients, SharedGradients
from megatron_ft.run.computing import Computing
from megatron_ft.run.engines.port import Gradients, Ready
from megatron_ft.run.orders import Reduce
from megatron_ft.run.rank import LONG_S
from megatron_ft.run.rank_state import RankState
from megatron_ft.run.state_guard import StateGuard
from megatron_ft.types import Bucket, Microbatch, View, given
from megatron_ft.utils import heap

T = TypeVar("T")


class Reducing:
    """The job to sum gradients over the groups. ``gradients``: of the whole group. ``collected``: the time at
    which the group's ranks had last summed up their results."""

    def __init__(self, computing: Computing, state: RankState, guard: StateGuard) -> None:
        rank, self.collected = computing.rank, 0.0
        self._rank, self._computing, self._state, self._guard = rank, computing, state, guard
        self._shared: SharedGradients | OwnGradients | None = None
        if rank.inner is not None:
            of_group = computing.engine, rank.inner
            self._shared = SharedGradients(*of_group) if computing.joint is None else OwnGradients(*of_group)
        self.gradients: Gradients = self._shared or computing.engine
        settings = rank.env.config.fault_tolerance
        alone = self._shared is None or computing.joint is not None
        overlap = settings.overlap and alone and settings.nonfinite != "recompute"
        self._reduction = Reduction(self.gradients, rank.points, dtype=settings.reduce_dtype, overlap=overlap)
        self._swept = False  # whether the last sweep destroyed a process group

    # --- gradients ----------------------------------------------------------------------------------------------------

    def ahead(self, step: int, buckets: Sequence[Bucket], digests: Sequence[Microbatch]) -> Ready | None:
        """Return the function to call with each bucket that is complete before the last microbatch is, or None."""
        self._state.settle(state=False)
        self._say_digests(digests)
        # The check of the gradient uses the buckets that will hold the sums; what is compared is known when all is computed.
        view, computing = given(self._rank.link.view), self._computing
        first = computing.unchecked or self._rank.points.corrupts(step)
        if first or state_divergence.compares_all(view, step) or computing.batches.due(view):
            return None
        return self._reduction.ahead(given(self._rank.link.outer), step, buckets)

    def ahead_together(self) -> Ready | None:
        """Return :meth:`ahead` for all buckets of a rank that computes together with the others of its group."""
        shared, step = self._shared, self._computing.step
        if shared is None:
            return self.ahead(step, range(self.gradients.num_buckets), ())
        assert isinstance(shared, OwnGradients)
        ready = self.ahead(step, shared.mine(range(shared.num_buckets)), ())
        return None if ready is None else lambda bucket: ready(shared.number(bucket))

    def _say_digests(self, digests: Sequence[Microbatch]) -> None:
        if digests:
            known = self._computing.digests, self._computing.earlier
            self._guard.slots.say_digests(*([each.get(one, 0) for one in digests] for each in known))

    def reduce(self, order: Reduce) -> None:
        """Sum buckets over the members of the epoch. A part is added to the local gradients once in a step.

        Raises ``Broken``; in a group of several ranks only after all of them have ended their operations."""
        outer, step, timeline = given(self._rank.link.outer), order.step, self._rank.timeline
        timeline.assign(step, outer.epoch)
        self._state.settle(state=False)
        self._computing.batches.say(order.batches)
        self._say_digests(order.digests)
        if state_divergence.compares_all(given(self._rank.link.view), step):
            self._guard.say_all(step)  # here, where no forward pass has changed a buffer
        self._computing.contribute(order.parts)
        with timeline.span("reduce"):
            if self._shared is None:
                self._reduce(outer, step, order.buckets, order.done)
            else:
                self._reduce_together(self._shared, outer, order)

    def _reduce(
        self, outer: Communicator, step: int, buckets: Sequence[Bucket], done: Callable[[Bucket], None]
    ) -> None:
        with self._telling_changes(step):
            self._reduction.reduce(outer, step, buckets, done, self.meanwhile)

    @contextmanager
    def _telling_changes(self, step: int) -> Iterator[None]:
        group, position = self._rank.group, self._rank.position
        try:
            yield
        except Changed as error:
            self._rank.history.note("bucket_changed", group=group, position=position, step=step, bucket=error.bucket)
            raise
        except InvariantBroken as error:
            self._guard.halt(step, f"group {group}, rank {position}: {error}")

    def _reduce_together(self, shared: SharedGradients | OwnGradients, outer: Communicator, order: Reduce) -> None:
        inner, step, buckets = given(self._rank.inner), order.step, order.buckets
        shared.collect(buckets)
        self.collected = time.monotonic()
        mine, final = shared.mine(buckets), set[Bucket]()
        if outer.confirms:
            # By this rank only for all ranks of the group, whose computation the abort of one may have spoilt.
            self._together(lambda: self._complete(outer, step, mine))
        try:
            self._reduce(outer, step, mine, final.add)
        except Broken as error:
            self._say_broken(error)
        flags = torch.tensor([bucket in final for bucket in buckets], dtype=torch.int64)
        inner.sum(flags)
        for bucket, flag in zip(buckets, flags.tolist(), strict=True):
            if flag:
                shared.broadcast(bucket)
                order.done(bucket)
        if not flags.all():
            raise Broken("a rank of the group could not finish its reductions")

    def _complete(self, outer: Communicator, step: int, mine: Sequence[Bucket]) -> None:
        with self._telling_changes(step):
            self._reduction.complete(outer, step, mine, self.meanwhile)

    def meanwhile(self) -> None:
        """Do minor work while reductions run."""
        if self._swept:
            heap.give_back()  # one reduction later: the recovery is over
        self._swept = sweep()  # destroying a process group takes 10 ms and more: not in the middle of a recovery
        self._rank.write_down(LONG_S)

    def drop(self) -> None:
        """Drop all operations of an epoch that is over."""
        self._reduction.drop()

    # --- what a view hands over ---------------------------------------------------------------------------------------

    def transfer(self) -> None:
        """Send or receive the transfers of the present view, in an order that cannot deadlock: state first, buckets
        ascending.

        All ranks of a group put what they received in place, or none of them does. Raises ``Broken``.
        """
        view = given(self._rank.link.view)
        self._state.settle(state=True)
        received = self._together(lambda: self._exchange(view))
        if self._shared is not None:
            for bucket, lacking in view.missing.items():
                if self._rank.group in lacking:
                    self._shared.broadcast(bucket)
        if received is not None:
            self._state.load(received)

    def _exchange(self, view: View) -> Mapping[str, Any] | None:
        outer, me, received = given(self._rank.link.outer), self._rank.group, None
        if me == view.source:
            for group in view.behind:
                state_transfer.send_state(outer, self._state.full(), group)
        elif me in view.behind:
            received = state_transfer.receive_state(outer, given(view.source))
        for bucket, lacking in view.missing.items():
            if self._shared is not None and self._shared.owner(bucket) != self._rank.position:
                continue
            if me == view.final[bucket]:
                for group in lacking:
                    # no limit: detector.collective_timeout_s between groups; an abort ends it when a rank is lost
                    outer.send(self.gradients.reduced(bucket), group, bucket).wait()
            elif me in lacking:
                self._receive_bucket(bucket, view.final[bucket])
        return received

    def _receive_bucket(self, bucket: Bucket, owner: int) -> None:
        try:
            # no limit: detector.collective_timeout_s between groups; an abort ends it when a rank is lost
            given(self._rank.link.outer).receive(self.gradients.reduced(bucket), owner, bucket).wait()
        except Broken:
            self.gradients.replace_reduced(bucket)  # late data may still arrive in the old one
            raise

    # --- all ranks of the group alike ---------------------------------------------------------------------------------

    def _together(self, operation: Callable[[], T]) -> T:
        """Run an operation between groups. Raises ``Broken`` at all ranks of the group if it broke at one, after all of them
        have ended theirs."""
        result, complete, inner = None, True, self._rank.inner
        try:
            result = operation()
        except Broken as error:
            if inner is None:
                raise
            self._say_broken(error)
            complete = False
        if inner is not None and not inner.all_reduce_min(complete):
            raise Broken("a rank of the group could not finish its part")
        return cast(T, result)

    def _say_broken(self, error: Broken) -> None:
        """Tell the other groups, whose ranks at this position may wait for this one; the leader learns of it later."""
        link = self._rank.link
        view = given(link.view)
        if not link.concerned(view):
            link.tell_broken(view.epoch, f"rank {self._rank.position}: {error}", detail=error.detail)
