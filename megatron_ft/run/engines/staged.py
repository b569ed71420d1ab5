"""What a pipeline's engine does around each pass of a stage, when another library runs the schedule.

Each microbatch has its own random seed, starts from the buffers of the step, and adds its gradient where it belongs as soon
as a stage has it. A rank may have several stages (an interleaved schedule): a microbatch counts when it has passed all of
them.

Failures it assumes: a stage that vanishes; what waits for it then raises ``RuntimeError``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from megatron_ft.data import generators
from megatron_ft.errors import EngineError
from megatron_ft.run.engines.joint import JointBucketed
from megatron_ft.run.engines.port import Listed, Ready, Work
from megatron_ft.run.engines.tensor_checksum import BITS
from megatron_ft.types import given


class Staged(JointBucketed):
    """The common part. A subclass calls :meth:`_forward` and :meth:`_backward` around the passes of the library, and sets
    ``_of_stage``: for each stage of this rank the numbers of its buckets."""

    _of_stage: Sequence[Sequence[int]]

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, in_flight=True, **settings)
        self._work: Work
        self._awaits_loss, self._pass_seed = False, 0
        # By the index of a microbatch in the run:
        self._passed: dict[int, int]  # number of local stages that it has passed forward
        self._changes: dict[int, torch.Tensor]
        self._returned: dict[int, tuple[int, int]]  # the same backward, and the digest so far
        self._begin_run((), None)
        self._at = (0, 0)  # local stage and microbatch whose gradients are taken

    def _begin_run(self, listed: Sequence[Listed], ready: Ready | None, filling: int = 0) -> None:
        """Begin a run of the schedule. ``ready``: see ``Work.ready``; ``filling``: the number of microbatches at the end
        that are there because the schedule needs so many; they have been computed, and are added to nothing."""
        self._listed, self._ready, self._filling = listed, ready, filling
        self._told = set[int]()
        self._passed, self._changes, self._returned = {}, {}, {}

    @contextmanager
    def _forward(self, index: int, stage: int, last: bool) -> Iterator[None]:
        """Surround the forward pass of a microbatch of the run. ``stage``: its number in the whole pipeline; ``last``: its
        output is the loss function's input, and :meth:`_count_step_loss` follows."""
        listed = self._listed[index]
        with self._work.span("forward", listed):
            self.add_to(listed.part)
            # The slices of a stage drop from the same activations; stages and shards from different ones.
            self._pass_seed = (
                self._work.seed(listed.microbatch) + stage * self.layout.shards + self.layout.shard
            ) % 2**63
            self._seed_pass()
            self._buffers.restore()
            self._awaits_loss = last
            yield
            self._on_forward(index)

    def _seed_pass(self) -> None:
        """Seed the generators for the present forward pass."""
        generators.seed(self._pass_seed)

    def _on_forward(self, index: int) -> None:
        """Collect the changes of buffers, and count a microbatch that has passed all stages of this rank."""
        if index not in self._changes:
            self._changes[index] = torch.zeros_like(self._buckets.riders_to[self._first_change :])
        self._buffers.take(self._changes[index])
        self._passed[index] = self._passed.get(index, 0) + 1
        if self._passed[index] == len(self._of_stage):
            self._add_changes(self._changes.pop(index))
            self._count_loss(None)
            del self._passed[index]

    def _count_step_loss(self, outcome: Any) -> tuple[torch.Tensor, int | torch.Tensor]:
        """Return the loss function's result, loss and tokens, and count it if it is that of a microbatch: libraries also
        call loss functions to learn the shapes of tensors."""
        loss, tokens = self._split_loss(outcome)
        if self._awaits_loss:
            self._awaits_loss = False
            self._count_loss(loss, 0)
            self._count_tokens(tokens)
        return loss, tokens

    @contextmanager
    def _backward(self, number: int, index: int, complete: bool = True) -> Iterator[None]:
        """Surround a backward pass of a stage, the ``number``-th of this rank, with a microbatch of the run.
        ``complete``: it has the whole gradient then, which is added."""
        listed = self._listed[index]
        self.add_to(listed.part)
        with self._work.span("backward", listed):
            yield
        if complete:
            self._on_backward(number, index)

    def _on_backward(self, number: int, index: int) -> None:
        listed = self._listed[index]
        count, digest = self._returned.pop(index, (0, 0))
        self._at = number, index
        if count + 1 < len(self._of_stage) or index >= len(self._listed) - self._filling:
            self._returned[index] = count + 1, self._take_stage(listed.digest, digest)
        else:
            self._returned[index] = count + 1, digest
            self._work.computed(listed)
        if (ready := self._ready_in(index)) is not None:
            for bucket in self._of_stage[number]:
                ready(bucket)

    def _ready_in(self, index: int) -> Ready | None:
        """Return what to call with each bucket that is complete within the backward pass of a microbatch of the run; calls
        after the first one of a bucket have no effect."""
        return self._tell if self._ready is not None and index == len(self._listed) - 1 - self._filling else None

    def _tell(self, bucket: int) -> None:
        if bucket not in self._told:
            self._told.add(bucket)
            given(self._ready)(bucket)

    def collect(self, digest: bool = False) -> int:
        _, before = self._returned.pop(self._at[1])
        return self._take_stage(digest, before)

    def _take_stage(self, asked: bool, before: int) -> int:
        """Add the gradients of the stage that has just made a backward pass. Return the digest of the microbatch so far."""
        if not self.takes_gradients:
            return 0
        numbers = self._of_stage[self._at[0]]
        found = self._collect(numbers, asked)
        for number in numbers:
            self._forget(self._buckets[number])
        return (before + found) % (1 << BITS) or 1 if asked else 0

    def _by_stage(self, stages: int, stage_of: Callable[[Any], int]) -> list[list[int]]:
        """Return the numbers of the buckets of each of this rank's ``stages``; ``stage_of``: parameter -> its stage.

        Raises ``EngineError`` for a stage without parameters."""
        found: dict[int, list[int]] = {}
        for number, bucket in enumerate(self._buckets):
            found.setdefault(stage_of(bucket.parameters[0]), []).append(number)
        if len(found) < stages:
            raise EngineError(
                f"rank {self.layout.position} of the group has {stages} stages, of which {len(found)} have trainable "
                f"parameters; give each stage some"
            )
        return [found[stage] for stage in sorted(found)]
