"""The reductions of one rank: when a bucket is sent, in which data type, and its fate when the epoch ends.

**Overlap.** In the backward pass of the last microbatch that this group has to compute in a step, a bucket is sent as
soon as its gradients are complete, if the communicator of the present view stands. All groups send the buckets in the
same, ascending order, because gloo matches operations by their order: a bucket that is complete early waits for those
before it, and one that never becomes complete (a parameter without a gradient) is sent after backward with all that
follow. The result is bitwise the same either way. The protocol core is not told of it: Computed comes first, then
Reduced for each bucket. If the epoch ends in between, the sent buckets are forgotten. That loses nothing: a group that
holds the finished bucket hands it over, with this group's part in it, and if no group does it is summed again from the
local gradients.

**What is copied when** (per bucket and step, b bytes of fp32 gradients):

- several live groups, fp32: local -> reduced, b read and b written; the all-reduce works in place on the copy, because
  one that fails leaves garbage, and the local gradients are what it is repeated from;
- the same in a group whose ranks share microbatches: nothing more. Its local gradients are summed inside the group in the
  reduced buffer, before each attempt;
- several live groups, bf16: local -> wire, b read and b/2 written; after the all-reduce wire -> reduced, b/2 and b;
- one live group: nothing. Its local gradients are the sum, in fp32 whatever was asked for, and ``Engine.update`` divides
  and clips them in place: it is the first to change them, and the step cannot be asked for again after it.

**Exact reduction**: the buffers are fp64. They are summed in place like fp32, or as int32 with few ``exact_bits``, then as
for bf16. Each group sends a checksum of its part with it, and the sum has to have the sum of these checksums: a bucket
that was changed on its way ends the epoch, and is reduced again.

**bf16** halves what is sent. Local gradients stay fp32. Each group rounds its sum once (2^-8 of it); communicators add in
fp32 and round the total once, and before it the sum of each host whose groups share it. So an element of the sum is wrong by
at most 3 * 2^-8 times the sum of the groups' absolute values, however many groups there are. Losses and counts travel beside
the gradients as fp32 and stay exact.

**Confirmation.** With NCCL, all buckets of a call count together, when every member has confirmed that it saw them complete
(``run.collectives.base``).

Failures it assumes: any operation may fail, end late or never end. A bucket counts when its completion is seen here; a
buffer in which an operation may still write is given up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import torch

from megatron_ft.errors import InvariantBroken
from megatron_ft.run.collectives import device_copies
from megatron_ft.run.collectives.base import Broken, Communicator, Left, Work
from megatron_ft.run.engines.port import Gradients, Ready
from megatron_ft.run.injection_points import InjectionPoints
from megatron_ft.types import Bucket

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_MOST_CHANGED = 3
"""A step in which this many buckets were changed on their way stops the run."""


class Changed(Broken):
    """A bucket was changed on its way: its sum has not the checksum of its parts."""

    def __init__(self, step: int, bucket: Bucket) -> None:
        super().__init__(f"bucket {bucket} of step {step} was changed on its way; it is reduced again")
        self.bucket = bucket


class Reduction:
    """One rank's side of summing the buckets of an engine over the live groups.

    Args:
        engine: the owner of the buckets.
        points: where faults are injected.
        dtype: data type in which gradients are sent, a key of ``DTYPES``.
        overlap: if False, :meth:`ahead` sends nothing.
    """

    def __init__(
        self, engine: Gradients, points: InjectionPoints, *, dtype: str = "fp32", overlap: bool = True
    ) -> None:
        self._engine, self._points, self._overlap = engine, points, overlap
        self._dtype = DTYPES[dtype]
        self._wires: dict[Bucket, torch.Tensor] = {}
        self._started: dict[Bucket, list[Work]] = {}
        self._complete: set[Bucket] = set()  # seen to be complete, but not confirmed
        self._broken: tuple[str, str] | None = None
        self._changed: tuple[int, int] = -1, 0  # step, number of buckets of it that were changed on their way

    def ahead(self, outer: Communicator, step: int, buckets: Sequence[Bucket]) -> Ready | None:
        """Return a function to call with each bucket that is complete in the last backward pass of ``step``; None: no
        overlap.

        ``buckets`` are the arguments of the :meth:`reduce` that follows.
        """
        if not self._overlap or len(outer.members) == 1:
            return None
        turns, complete = list(buckets), set()

        def ready(bucket: Bucket) -> None:
            complete.add(bucket)
            while not self._broken and turns and turns[0] in complete:
                try:
                    self._start(outer, step, turns.pop(0))
                except Broken as error:
                    # reduce raises it in the training thread, if the epoch lasts until then.
                    self._broken = (str(error), error.detail)

        return ready

    def reduce(
        self,
        outer: Communicator,
        step: int,
        buckets: Sequence[Bucket],
        done: Callable[[Bucket], None],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Sum ``buckets`` over the members; ``done`` is called with each, in order, when its completion has been seen, and
        confirmed where ``outer`` confirms.

        ``meanwhile`` is called when all of them have been started.

        Raises ``Broken`` after ``outer`` was aborted or left; the next call has to be :meth:`drop`.
        """
        with self._aborting(outer):
            self._begin(outer, step, buckets, meanwhile)
            outer.confirm()
            for bucket in buckets:
                self._finish(step, bucket)
                self._complete.discard(bucket)
                done(bucket)
                self._points.reach("bucket", step, bucket)
        self._points.reach("gate", step)

    def complete(
        self,
        outer: Communicator,
        step: int,
        buckets: Sequence[Bucket],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Do :meth:`reduce`, which has to follow, up to the confirmation. Raises ``Broken`` as it does."""
        with self._aborting(outer):
            self._begin(outer, step, buckets, meanwhile)

    @contextmanager
    def _aborting(self, outer: Communicator) -> Iterator[None]:
        try:
            yield
        except Left:
            raise
        except Broken:
            outer.abort()
            raise

    def _begin(self, outer: Communicator, step: int, buckets: Sequence[Bucket], meanwhile: Callable[[], None]) -> None:
        """Start what is not started; wait for all of it, if it has to be confirmed."""
        if self._broken:
            raise Broken(*self._broken)
        for bucket in buckets:
            if bucket not in self._started and bucket not in self._complete:
                self._start(outer, step, bucket)
        meanwhile()
        for bucket in buckets if outer.confirms else ():
            self._finish(step, bucket)
            self._complete.add(bucket)

    def drop(self) -> None:
        """Forget everything that was started in an epoch that is over; its communicator is closed."""
        for bucket, works in self._started.items():
            if not all(work.settled() for work in works):
                self._wires.pop(bucket, None)
                self._engine.replace_reduced(bucket)
        self._started.clear()
        self._complete.clear()
        self._broken = None

    def _start(self, outer: Communicator, step: int, bucket: Bucket) -> None:
        device_copies.refuse_capture(self._engine.local(bucket))
        works = self._started[bucket] = []
        if len(outer.members) == 1:
            self._engine.keep_local(bucket)
        else:
            for tensor in self._load(bucket):
                works.append(outer.all_reduce(tensor))
        self._points.reach("reduce", step, bucket)

    def _load(self, bucket: Bucket) -> tuple[torch.Tensor, ...]:
        """Copy this group's gradients to the tensors that will be summed in place."""
        local, reduced = self._engine.local(bucket), self._engine.reduced(bucket)
        assert self._engine.in_place or reduced is not local, (
            f"bucket {bucket} is summed here already, in its local gradients"
        )
        exact = self._engine.exact(bucket)
        if exact is not None:
            exact.load(local, reduced)
            if not exact.as_int32:
                return (reduced,)
            wire = self._wire(bucket, torch.int32)
            exact.pack(reduced, wire)
            return wire, reduced[-self._engine.tail(bucket) :]
        if self._dtype == reduced.dtype:
            return (reduced if reduced is local else reduced.copy_(local),)
        tail = self._engine.tail(bucket)
        reduced[-tail:].copy_(local[-tail:])
        return self._wire(bucket, self._dtype).copy_(local[:-tail]), reduced[-tail:]

    def _wire(self, bucket: Bucket, dtype: torch.dtype) -> torch.Tensor:
        if bucket not in self._wires:
            local = self._engine.local(bucket)
            size = local.numel() - self._engine.tail(bucket)
            self._wires[bucket] = torch.empty(size, dtype=dtype, device=local.device)
        return self._wires[bucket]

    def _finish(self, step: int, bucket: Bucket) -> None:
        if bucket in self._complete:
            return
        for work in self._started[bucket]:
            # no limit: detector.collective_timeout_s between groups; an abort ends it when a rank is lost
            work.wait()
        works, reduced = self._started.pop(bucket), self._engine.reduced(bucket)
        self._points.corrupt_sum(step, bucket, reduced)
        exact = self._engine.exact(bucket) if works else None
        if exact is not None:
            if exact.as_int32:
                exact.unpack(self._wires[bucket], reduced)
            if not exact.intact(reduced):
                self._refuse(step, bucket)
        elif len(works) > 1:
            reduced[: -self._engine.tail(bucket)].copy_(self._wires[bucket])

    def _refuse(self, step: int, bucket: Bucket) -> NoReturn:
        """End the epoch, in which the bucket is not final here. Raises ``InvariantBroken`` when that does not help."""
        before = self._changed[1] if self._changed[0] == step else 0
        self._changed = step, before + 1
        if before + 1 >= _MOST_CHANGED:
            raise InvariantBroken(
                f"{_MOST_CHANGED} buckets of step {step} were changed on their way, the last of them bucket {bucket}; look "
                f"at the network and the memory of this host"
            )
        raise Changed(step, bucket)
